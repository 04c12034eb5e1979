"""Pulls: answer with slices of the log, or hold the line until there is something to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from escrowmq.broker.dispatch import Line
from escrowmq.broker.metadata import READ, Groups, Topics
from escrowmq.broker.statistics import Counts
from escrowmq.consume.long_polling import HeldPull, WaitingPulls
from escrowmq.consume.members import ConsumerGroups
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.consume.pull import (
    BYTES_MAX,
    COUNT_MAX,
    HAS_COMMIT_OFFSET,
    HAS_SUBSCRIPTION,
    SHORT_HOLD_MS,
    SUCCESS,
    ReadLimits,
    Refusal,
    bulk_limits,
    hold_ms,
    limits,
    refuse_place,
    result_of,
    subscription_known,
    subscription_sent,
)
from escrowmq.consume.subscription import Subscription, tag_filter
from escrowmq.message.batch import NewRun, ToAppend
from escrowmq.message.keys import derive, has_queue_entry
from escrowmq.message.record import QueueOffset
from escrowmq.remoting.headers import PullMessage, PullMessageAnswer
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import answer, pulled
from escrowmq.store.queue_reader import SCANNED_MAX
from escrowmq.store.store import MessageStore

# Comparisons that one pull by SQL92 may make before others get their turn: some milliseconds.
TESTS_MAX: Final = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PullRules:
    perm: int = READ | 2
    long_polling: bool = True
    short_hold_ms: int = SHORT_HOLD_MS
    count_max: int = COUNT_MAX
    bytes_max: int = BYTES_MAX
    waiting_max: int = 100_000
    allows_sql: bool = False


# Beside the subscription: who asked what.
_Payload = tuple[Line, Request[PullMessage], Subscription]


class Pulls:
    def __init__(
        self,
        store: MessageStore,
        topics: Topics,
        groups: Groups,
        connected: ConsumerGroups,
        offsets: ConsumerOffsets,
        rules: PullRules,
        counts: Counts | None = None,
    ) -> None:
        self._store = store
        self._topics = topics
        self._groups = groups
        self._connected = connected
        self._offsets = offsets
        self.rules = rules
        self._counts = Counts() if counts is None else counts
        self._waiting: WaitingPulls[_Payload] = WaitingPulls(waiting_max=rules.waiting_max)

    def handle(self, line: Line, request: Request[PullMessage], now_ms: int) -> None:
        fields = request.head.fields
        wanted = self._wanted(fields, now_ms)
        if isinstance(wanted, Refusal):
            self._refuse(line, request, wanted)
            return
        if fields.sys_flag & HAS_COMMIT_OFFSET:
            self._offsets.commit(
                fields.topic, fields.consumer_group, fields.queue_id, fields.commit_offset
            )
        reset = self._offsets.take_reset(fields.topic, fields.consumer_group, fields.queue_id)
        if reset is not None and reset != fields.queue_offset:
            self._send_elsewhere(line, request, reset)
            return
        self._read(line, request, wanted, now_ms, is_first_look=True)

    def arrived(self, records: Sequence[ToAppend], now_ms: int) -> None:
        """New messages can be read: wake those who waited for them."""
        if not len(self._waiting):
            return
        codes: dict[tuple[str, int], tuple[list[int], list[bytes]]] = {}
        for record in records:
            place = record.topic, record.queue_id
            if self._waiting.has(*place) and has_queue_entry(record.sys_flag):
                tags_codes, properties = codes.setdefault(place, ([], []))
                if type(record) is NewRun:
                    tags_codes += [0] * len(record.bodies)
                    properties += record.properties()
                    continue
                code, _ = derive(record.topic, record.properties, now_ms)
                tags_codes.append(code)
                properties.append(record.properties)
        for (topic, queue_id), (tags_codes, properties) in codes.items():
            end = self._store.max_offset(topic, queue_id)
            for pull in self._waiting.arrived(topic, queue_id, end, tags_codes, properties):
                self._answer_held(pull, now_ms)

    def expire(self, now_ms: int) -> None:
        for pull in self._waiting.expire(now_ms):
            self._answer_held(pull, now_ms)

    def next_due_ms(self) -> int | None:
        return self._waiting.next_due_ms()

    def line_closed(self, line: Line) -> None:
        self._waiting.line_closed(line)

    def release_all(self, now_ms: int) -> None:
        for pull in self._waiting.release_all():
            self._answer_held(pull, now_ms)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def _wanted(self, fields: PullMessage, now_ms: int) -> Subscription | Refusal:
        group = self._groups.find_or_make(fields.consumer_group, now_ms=now_ms)
        refusal = refuse_place(
            fields.consumer_group,
            fields.topic,
            fields.queue_id,
            broker_perm=self.rules.perm,
            group=group,
            topic=self._topics.find(fields.topic),
        )
        if refusal is not None or group is None:
            assert refusal is not None
            return refusal
        if fields.sys_flag & HAS_SUBSCRIPTION:
            return subscription_sent(
                fields.topic,
                fields.subscription,
                kind=fields.expression_type,
                version=fields.sub_version,
                allows_sql=self.rules.allows_sql,
            )
        return subscription_known(
            fields.topic,
            version=fields.sub_version,
            rules=group,
            connected=self._connected.find(fields.consumer_group),
            allows_sql=self.rules.allows_sql,
        )

    def _read(
        self,
        line: Line,
        request: Request[PullMessage],
        wanted: Subscription,
        now_ms: int,
        *,
        is_first_look: bool,
    ) -> None:
        fields = request.head.fields
        sql = wanted.sql
        bounds = self._bounds(fields)
        found = self._store.read(
            fields.topic,
            fields.queue_id,
            fields.queue_offset,
            count_max=bounds.count_max,
            bytes_max=bounds.bytes_max,
            accepts=tag_filter(wanted),
            wants=None if sql is None else sql.wants,
            scanned_max=SCANNED_MAX if sql is None else max(1, TESTS_MAX // sql.cost),
        )
        code, remark = result_of(found.status, fields.queue_offset)
        if code != SUCCESS and is_first_look:
            wait_ms = hold_ms(
                code,
                fields.sys_flag,
                fields.suspend_timeout_millis,
                is_first_look=True,
                long_polling=self.rules.long_polling,
            )
            if wait_ms and not self.rules.long_polling:
                wait_ms = self.rules.short_hold_ms
            if wait_ms and self._hold(line, request, wanted, now_ms + wait_ms):
                return
        if code == SUCCESS:
            self._counts.pulled(fields.topic, fields.consumer_group, found.count, found.size)
        else:
            self._counts.refused[request.head.code, code] += 1
        line.write_pieces(
            pulled(
                request,
                next_offset=found.next,
                min_offset=found.min,
                max_offset=found.max,
                code=code,
                remark=remark,
                body=found.slices,
            )
        )

    def _bounds(self, fields: PullMessage) -> ReadLimits:
        if fields.bulk:
            return bulk_limits(fields.max_msg_nums)
        asked = limits(fields.max_msg_nums, fields.max_msg_bytes)
        return ReadLimits(
            min(asked.count_max, self.rules.count_max), min(asked.bytes_max, self.rules.bytes_max)
        )

    def _hold(
        self, line: Line, request: Request[PullMessage], wanted: Subscription, due_ms: int
    ) -> bool:
        fields = request.head.fields
        return self._waiting.add(
            HeldPull(
                topic=fields.topic,
                queue_id=fields.queue_id,
                wanted=QueueOffset(fields.queue_offset),
                due_ms=due_ms,
                line=line,
                payload=(line, request, wanted),
                accepts=tag_filter(wanted),
                wants=None if wanted.sql is None else wanted.sql.wants,
            )
        )

    def _answer_held(self, pull: HeldPull[_Payload], now_ms: int) -> None:
        line, request, wanted = pull.payload
        self._read(line, request, wanted, now_ms, is_first_look=False)

    def _refuse(self, line: Line, request: Request[PullMessage], refusal: Refusal) -> None:
        # Clients read the four offsets off every pull answer, also a refusal.
        fields = PullMessageAnswer(
            suggest_which_broker_id=0,
            next_begin_offset=request.head.fields.queue_offset,
            min_offset=0,
            max_offset=0,
            forbidden_type=refusal.forbidden or None,
        )
        self._counts.refused[request.head.code, refusal.code] += 1
        line.write(answer(request, fields, code=refusal.code, remark=refusal.remark))

    def _send_elsewhere(
        self, line: Line, request: Request[PullMessage], target: QueueOffset
    ) -> None:
        fields = request.head.fields
        line.write_pieces(
            pulled(
                request,
                next_offset=target,
                min_offset=self._store.min_offset(fields.topic, fields.queue_id),
                max_offset=self._store.max_offset(fields.topic, fields.queue_id),
                code=21,
                remark="OFFSET_RESET",
            )
        )
