"""PULL_MESSAGE: respond with slices of the log, or hold the pull until a message arrives.

    pull() --> filter of the subscription --> read the store --> found: respond with slices
                                                             --> nothing yet: hold
    messages_arrived(), expire() --> read once more --> respond, whatever the result

A held pull keeps what its response needs, and nothing else of its request.

`consume/pull.py` decides what a pull may read and how its result is named, and
`consume/long_polling.py` keeps the held pulls. Held pulls are responded to in slices: one message
may wake a hundred thousand of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from escrowmq.broker.closed_names import check_offsets_are_open
from escrowmq.broker.dispatch import Channel, Handler, RequestPermissions, respond_failure
from escrowmq.broker.metadata import SubscriptionGroups, TopicTable
from escrowmq.broker.statistics import BrokerCounters
from escrowmq.client_memory import ClientMemory
from escrowmq.config import ConsumeConfig
from escrowmq.consume.long_polling import Arrival, HeldPull, LongPolls
from escrowmq.consume.members import ConsumerGroups
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.consume.pull import (
    FLAG_COMMIT_OFFSET,
    FLAG_SUBSCRIPTION,
    PULL_NOT_FOUND,
    SUCCESS,
    PullRefusal,
    bulk_read_limits,
    check_queue_access,
    group_filter,
    hold_ms,
    pull_result,
    read_limits,
    request_filter,
)
from escrowmq.consume.subscription import (
    SHORT_CHARS_MAX,
    MessageFilter,
    prepare_subscription,
)
from escrowmq.errors import RequestRefused, TableFull
from escrowmq.message.batch import Appendable, RecordRun
from escrowmq.message.keys import has_queue_entry, tags_and_keys
from escrowmq.message.record import QueueOffset, encode_topic
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import PullMessage, PullMessageResponse
from escrowmq.remoting.requests import Request, request_for_response
from escrowmq.sliced_work import SLICE_S, SlicedWork, SliceScheduler
from escrowmq.store.consume_queue import ConsumeQueue
from escrowmq.store.store import MessageStore

# New messages of one queue that are compared with the filters of the pulls that wait for them. If
# there are more, or longer ones, every pull is woken: the read that follows applies its filter.
ARRIVALS_MAX: Final = 256
ARRIVALS_BYTES_MAX: Final = 64 << 10  # of encoded properties
CLOSED_PER_SLICE: Final = 64  # held pulls of a closed channel that are forgotten at once

_HeldRequest = tuple[Channel, Request[PullMessage]]
_Queue = tuple[str, int]  # topic and queue id


@dataclasses.dataclass(frozen=True, slots=True)
class PullPlan:
    """How the native path answers pulls that differ in nothing but their offsets."""

    queue: ConsumeQueue
    tags_codes: frozenset[int] | None
    count_max: int
    bytes_max: int
    scan_max: int
    min_offset: int
    magic: int  # of the records of the queue
    topic_field: bytes  # in these records
    topic_sys_flag: int
    group_sys_flag: int


class ArrivedBatch(Protocol):
    def arrivals(self, queue: int) -> list[Arrival]:
        """Return tags code and properties of the new messages of a queue, by its index."""


class PullProcessor:
    def __init__(
        self,
        store: MessageStore,
        topics: TopicTable,
        groups: SubscriptionGroups,
        consumers: ConsumerGroups[Channel],
        offsets: ConsumerOffsets,
        config: ConsumeConfig,
        counters: BrokerCounters | None = None,
        *,
        broker_permission: int,
        memory: ClientMemory | None = None,
        background_work: SliceScheduler,
        elapsed_s: Callable[[], float],
    ) -> None:
        self._store = store
        self._background_work = background_work
        self._elapsed_s = elapsed_s
        # What arrived in queues whose pulls are not woken yet: the messages, and the queue offset
        # behind them. Without messages, too many arrived.
        self._arrivals: dict[_Queue, tuple[list[Arrival] | None, int]] = {}
        self._waking_queues: set[_Queue] = set()
        self._is_expiring = False
        self._topics = topics
        self._groups = groups
        self._consumers = consumers
        self._offsets = offsets
        self.config = config
        self.broker_permission = broker_permission
        self._counters = BrokerCounters() if counters is None else counters
        self._long_polls: LongPolls[_HeldRequest] = LongPolls(
            pulls_max=config.waiting_pulls_max, memory=memory
        )

    def handlers(self) -> list[Handler]:
        return [
            Handler(RequestCode.PULL_MESSAGE, self.pull, RequestPermissions.pull),
            Handler(RequestCode.LITE_PULL_MESSAGE, self.pull, RequestPermissions.pull),
        ]

    def pull(
        self, channel: Channel, request: Request[PullMessage], now_ms: int
    ) -> SlicedWork | None:
        """Respond to a pull or hold it; return the work that does so if its filter is long."""
        if len(request.head.fields.subscription or "") > SHORT_CHARS_MAX:
            return self._pull_after_parsing(channel, request, now_ms)
        self._pull(channel, request, now_ms)
        return None

    def _pull_after_parsing(
        self, channel: Channel, request: Request[PullMessage], now_ms: int
    ) -> SlicedWork:
        fields = request.head.fields
        yield from prepare_subscription(
            fields.topic,
            fields.subscription,
            expression_type=fields.expression_type,
            version=fields.sub_version,
        )
        self._pull(channel, request, now_ms)

    def _pull(self, channel: Channel, request: Request[PullMessage], now_ms: int) -> None:
        fields = request.head.fields
        if fields.sys_flag & FLAG_COMMIT_OFFSET:
            try:
                check_offsets_are_open(fields.topic, fields.consumer_group)
            except RequestRefused as error:
                self._refuse(channel, request, PullRefusal(error.code, error.remark))
                return
        message_filter = self._find_filter(fields, now_ms)
        if isinstance(message_filter, PullRefusal):
            self._refuse(channel, request, message_filter)
            return
        if fields.sys_flag & FLAG_COMMIT_OFFSET:
            self.commit_offset(
                fields.topic, fields.consumer_group, fields.queue_id, fields.commit_offset
            )
        reset = self._offsets.take_reset(fields.topic, fields.consumer_group, fields.queue_id)
        if reset is not None and reset != fields.queue_offset:
            self._respond_offset_reset(channel, request, reset)
            return
        self._read(channel, request, message_filter, now_ms, is_first_read=True)

    # --- for the native path ---------------------------------------------------------------------

    @property
    def plan_version(self) -> tuple[int, int] | None:
        """Return what changes whenever a plan may be wrong; None while there is none at all.

        A plan depends on topics, groups, subscriptions and on where the log begins. Settings drop
        all plans when they change.
        """
        if self._offsets.has_resets:
            return None
        changes = (
            self._topics.change_count + self._groups.change_count + self._consumers.change_count
        )
        return int(self._store.begin), changes

    def plan(
        self,
        group_name: str,
        topic_name: str,
        queue_id: int,
        max_msg_nums: int,
        sys_flag: int,
        subscription: str | None,
        sub_version: int,
        expression_type: str | None,
        max_msg_bytes: int | None,
    ) -> PullPlan | None:
        """Return the plan for such pulls; None if the Python path has to answer them."""
        topic, group = self._topics.find(topic_name), self._groups.find(group_name)
        queue = self._store.find_queue(topic_name, queue_id)
        if topic is None or group is None or queue is None:
            return None
        fields = PullMessage(
            consumer_group=group_name,
            topic=topic_name,
            queue_id=queue_id,
            queue_offset=0,
            max_msg_nums=max_msg_nums,
            sys_flag=sys_flag,
            subscription=subscription,
            sub_version=sub_version,
            expression_type=expression_type,
        )
        try:
            if sys_flag & FLAG_COMMIT_OFFSET:
                check_offsets_are_open(topic_name, group_name)
        except RequestRefused:
            return None
        message_filter = self._find_filter(fields, now_ms=0)
        if isinstance(message_filter, PullRefusal) or message_filter.matches_properties is not None:
            return None
        limits = read_limits(max_msg_nums, max_msg_bytes, self.config)
        magic, topic_field = encode_topic(topic_name)
        has_tags = message_filter.tags_codes is not None
        return PullPlan(
            queue=queue,
            tags_codes=message_filter.tags_codes,
            count_max=limits.count_max,
            bytes_max=limits.bytes_max,
            scan_max=max(limits.count_max, message_filter.scan_max if has_tags else 0),
            min_offset=self._store.min_offset(topic_name, queue_id),
            magic=magic,
            topic_field=topic_field,
            topic_sys_flag=topic.topic_sys_flag,
            group_sys_flag=group.group_sys_flag,
        )

    def commit_offset(self, topic: str, group: str, queue_id: int, queue_offset: int) -> None:
        """Store the offset that a pull brings along."""
        # As RocketMQ: an offset that is not stored does not cost the messages.
        with contextlib.suppress(TableFull):
            self._offsets.commit(topic, group, queue_id, queue_offset)

    # --- held pulls ------------------------------------------------------------------------------

    def messages_arrived(self, records: Sequence[Appendable]) -> None:
        """Let the held pulls that match new messages be responded to, in slices."""
        if not len(self._long_polls):
            return
        # The tags code is computed only for queues on which a pull is held: every append passes
        # here, and most have no waiting consumer.
        arrivals_by_queue: dict[_Queue, list[Arrival]] = {}
        for record in records:
            queue = record.topic, record.queue_id
            if self._long_polls.has_pulls(*queue) and has_queue_entry(record.sys_flag):
                arrivals = arrivals_by_queue.setdefault(queue, [])
                if type(record) is RecordRun:  # messages of a run have no tag
                    arrivals += [(0, properties) for properties in record.properties()]
                    continue
                tags_code, _ = tags_and_keys(record.topic, record.properties)
                arrivals.append((tags_code, record.properties))
        for queue, arrivals in arrivals_by_queue.items():
            self._add_arrivals(queue, arrivals)

    def batch_arrived(self, queues: Sequence[_Queue], batch: ArrivedBatch) -> None:
        """Do the same for a batch of the native path."""
        if not len(self._long_polls):
            return
        for index, queue in enumerate(queues):
            if self._long_polls.has_pulls(*queue):
                self._add_arrivals(queue, batch.arrivals(index))

    def _add_arrivals(self, queue: _Queue, arrivals: list[Arrival]) -> None:
        known, end = arrivals, int(self._store.max_offset(*queue))
        earlier, earlier_end = self._arrivals.get(queue, ([], end - len(arrivals)))
        is_gapless = earlier is not None and earlier_end + len(arrivals) == end
        if earlier is not None and is_gapless:
            known = earlier + arrivals
        is_too_much = (
            len(known) > ARRIVALS_MAX
            or sum(len(properties) for _, properties in known) > ARRIVALS_BYTES_MAX
        )
        self._arrivals[queue] = None if is_too_much or not is_gapless else known, end
        if queue not in self._waking_queues:
            self._waking_queues.add(queue)
            self._background_work.add(self._wake_pulls(queue))

    def _wake_pulls(self, queue: _Queue) -> SlicedWork:
        """Respond to the pulls of a queue until no new messages have arrived in it meanwhile."""
        try:
            while queue in self._arrivals:
                arrivals, end = self._arrivals.pop(queue)
                for pull in self._long_polls.release_ready(*queue, end, arrivals):
                    if pull is not None:
                        self._read_held(pull)
                    yield
        finally:
            self._waking_queues.discard(queue)

    def expire(self, now_ms: int) -> None:
        """Let the held pulls whose time is over be responded to, in slices."""
        if not self._is_expiring:
            self._is_expiring = True
            self._background_work.add(self._expire_pulls(now_ms))

    def next_due_ms(self) -> int | None:
        """Return when the time of a held pull is over; None if no pull is held."""
        return self._long_polls.next_due_ms()

    def _expire_pulls(self, now_ms: int) -> SlicedWork:
        try:
            for pull in self._long_polls.release_expired(now_ms):
                self._read_held(pull)
                yield
        finally:
            self._is_expiring = False

    def channel_closed(self, channel: Channel) -> bool:
        """Forget some held pulls of a closed channel. Return whether there may be more."""
        closed = self._long_polls.channel_closed(channel, count_max=CLOSED_PER_SLICE)
        return len(closed) == CLOSED_PER_SLICE

    def release_all(self) -> None:
        """Respond to all held pulls, because the broker stops."""
        for pull in self._long_polls.release_all():
            self._read_held(pull)

    @property
    def held_count(self) -> int:
        return len(self._long_polls)

    # --- reading ---------------------------------------------------------------------------------

    def _find_filter(self, fields: PullMessage, now_ms: int) -> MessageFilter | PullRefusal:
        group = self._groups.get_or_create(fields.consumer_group, now_ms=now_ms)
        refusal = check_queue_access(
            fields.consumer_group,
            fields.topic,
            fields.queue_id,
            broker_perm=self.broker_permission,
            group=group,
            topic=self._topics.find(fields.topic),
        )
        if refusal is not None or group is None:
            assert refusal is not None
            if group is None and refusal.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST:
                remark = self._groups.not_found(fields.consumer_group).remark
                return dataclasses.replace(refusal, remark=remark)
            return refusal
        if fields.sys_flag & FLAG_SUBSCRIPTION:
            return request_filter(
                fields.topic,
                fields.subscription,
                expression_type=fields.expression_type,
                version=fields.sub_version,
                sql_enabled=self.config.filters_by_sql,
            )
        return group_filter(
            fields.topic,
            version=fields.sub_version,
            access=group,
            group=self._consumers.find(fields.consumer_group),
            sql_enabled=self.config.filters_by_sql,
        )

    def _read(
        self,
        channel: Channel,
        request: Request[PullMessage],
        message_filter: MessageFilter,
        now_ms: int,
        *,
        is_first_read: bool,
    ) -> None:
        fields = request.head.fields
        if fields.bulk:
            limits = bulk_read_limits(fields.max_msg_nums)
        else:
            limits = read_limits(fields.max_msg_nums, fields.max_msg_bytes, self.config)
        queue_read = self._store.read(
            fields.topic,
            fields.queue_id,
            fields.queue_offset,
            count_max=limits.count_max,
            bytes_max=limits.bytes_max,
            message_filter=message_filter,
            is_over=None
            if message_filter.matches_properties is None
            else self._is_over_after(SLICE_S),
        )
        code, remark = pull_result(queue_read.status, fields.queue_offset)
        if code != SUCCESS and is_first_read:
            wait_ms = hold_ms(code, fields.sys_flag, fields.suspend_timeout_millis, self.config)
            if wait_ms and self._hold(channel, request, message_filter, now_ms + wait_ms):
                return
        if code == SUCCESS:
            self._counters.record_pull(
                fields.topic, fields.consumer_group, queue_read.count, queue_read.size
            )
        else:
            self._counters.refused[request.head.code, code] += 1
        topic, group = self._topics.find(fields.topic), self._groups.find(fields.consumer_group)
        channel.respond_pull(
            request,
            next_offset=queue_read.next_offset,
            min_offset=queue_read.min_offset,
            max_offset=queue_read.max_offset,
            topic_sys_flag=0 if topic is None else topic.topic_sys_flag,
            group_sys_flag=0 if group is None else group.group_sys_flag,
            code=code,
            remark=remark,
            slices=queue_read.slices,
        )

    def _hold(
        self,
        channel: Channel,
        request: Request[PullMessage],
        message_filter: MessageFilter,
        due_ms: int,
    ) -> bool:
        """Hold a pull. Return False if too many are held; it is then responded to at once."""
        evicted = self._long_polls.make_room(channel)
        if evicted is not None:
            self._respond_not_found(*evicted.payload)
        fields = request.head.fields
        return self._long_polls.add(
            HeldPull(
                topic=fields.topic,
                queue_id=fields.queue_id,
                queue_offset=QueueOffset(fields.queue_offset),
                due_ms=due_ms,
                channel=channel,
                payload=(channel, _request_to_keep(request)),
                message_filter=message_filter,
            )
        )

    def _read_held(self, pull: HeldPull[_HeldRequest]) -> None:
        channel, request = pull.payload
        try:
            if channel.can_send:
                self._read(channel, request, pull.message_filter, 0, is_first_read=False)
            else:
                # The client does not read. It can pull again when it has read this.
                self._respond_not_found(channel, request)
        except Exception as error:  # it costs this pull, not the others that wait
            respond_failure(channel, request, error)

    def _respond_not_found(self, channel: Channel, request: Request[PullMessage]) -> None:
        """Respond without messages, as if the time of the pull were over."""
        fields = request.head.fields
        self._counters.refused[request.head.code, PULL_NOT_FOUND] += 1
        channel.respond_pull(
            request,
            next_offset=fields.queue_offset,
            min_offset=self._store.min_offset(fields.topic, fields.queue_id),
            max_offset=self._store.max_offset(fields.topic, fields.queue_id),
            code=PULL_NOT_FOUND,
            remark="OFFSET_OVERFLOW_ONE",
        )

    def _is_over_after(self, seconds: float) -> Callable[[], bool]:
        """Return a function that says whether so much time has passed since now."""
        elapsed_s = self._elapsed_s
        end_s = elapsed_s() + seconds
        return lambda: elapsed_s() >= end_s

    def _refuse(
        self, channel: Channel, request: Request[PullMessage], refusal: PullRefusal
    ) -> None:
        # Clients expect the four offsets in every response to a pull, also in a refusal.
        fields = PullMessageResponse(
            suggest_which_broker_id=0,
            next_begin_offset=request.head.fields.queue_offset,
            min_offset=0,
            max_offset=0,
            forbidden_type=refusal.forbidden_type or None,
        )
        self._counters.refused[request.head.code, refusal.code] += 1
        channel.respond(request, fields, code=refusal.code, remark=refusal.remark)

    def _respond_offset_reset(
        self, channel: Channel, request: Request[PullMessage], queue_offset: QueueOffset
    ) -> None:
        """Send the consumer to an offset that an operator has set."""
        fields = request.head.fields
        channel.respond_pull(
            request,
            next_offset=queue_offset,
            min_offset=self._store.min_offset(fields.topic, fields.queue_id),
            max_offset=self._store.max_offset(fields.topic, fields.queue_id),
            code=ResponseCode.PULL_OFFSET_MOVED,
            remark="OFFSET_RESET",
        )


def _request_to_keep(request: Request[PullMessage]) -> Request[PullMessage]:
    """Return a request with what the response to a held pull needs, and nothing that is long."""
    fields = request.head.fields
    return request_for_response(
        request,
        PullMessage(
            consumer_group=fields.consumer_group,
            topic=fields.topic,
            queue_id=fields.queue_id,
            queue_offset=fields.queue_offset,
            max_msg_nums=fields.max_msg_nums,
            sys_flag=fields.sys_flag,
            max_msg_bytes=fields.max_msg_bytes,
            bulk=fields.bulk,
        ),
    )
