"""Check-back: send CHECK_TRANSACTION_STATE for halves that are due, or strand them.

    tick ─▶ schedule.take_due ─▶ next_step ─┬▶ Strand, FollowWriter: a decision
                                            ├▶ Wait: rescheduled
                                            └▶ Check ─▶ backlog of the group
    backlog ─▶ a producer with capacity ─▶ check sent, journal record
    the answer is an END_TRANSACTION ─▶ check_answered ─▶ capacity for the next one

The rules are in `escrow/checks.py`. What happens here is bounded per tick and per turn, so that
other requests do not wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeGuard

from escrowmq.broker.dispatch import Channel
from escrowmq.broker.turn import DoneCallback, Turn
from escrowmq.consume.members import ProducerGroups
from escrowmq.escrow.checks import (
    RETRY_DELAY_MS,
    Check,
    CheckBacklog,
    CheckPace,
    FollowWriter,
    Strand,
    Wait,
    is_check_due,
    next_step,
)
from escrowmq.escrow.coordinator import TransactionCoordinator
from escrowmq.escrow.decisions import Decision
from escrowmq.escrow.half_table import Half
from escrowmq.escrow.records import (
    DecidedBy,
    JournalEntry,
    make_check_body,
    make_journal_record,
)
from escrowmq.limited_log import LimitedLog
from escrowmq.message import names
from escrowmq.message.keys import encode_offset_id
from escrowmq.message.transaction import Verdict
from escrowmq.metrics import LATENCY_BOUNDS_S, Distribution
from escrowmq.peer import Peer
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import CheckTransactionState
from escrowmq.store.commit_log import AppendResult

log = logging.getLogger(__name__)

DUE_PER_TICK_MAX: Final = 200  # 0.3 ms, and more than checks are sent meanwhile
CHECKS_PER_TURN_MAX: Final = 32  # after answers


@dataclass(slots=True)
class TransactionCheckCounters:
    sent: int = 0
    unsent: int = 0  # due while no producer of the group was connected
    answered: int = 0
    unknown: int = 0
    lateness_seconds: Distribution = field(default_factory=lambda: Distribution(LATENCY_BOUNDS_S))


class AppendDecision(Protocol):
    def __call__(
        self, decision: Decision, on_done: DoneCallback | None = None, *, now_ms: int
    ) -> None: ...


class TransactionChecker:
    def __init__(
        self,
        coordinator: TransactionCoordinator,
        turn: Turn,
        producers: ProducerGroups[Channel],
        append_decision: AppendDecision,
        count_other_requests: Callable[[], int],
        *,
        store_host: bytes,
        broker_name: str | None = None,
        backlog: CheckBacklog | None = None,
    ) -> None:
        """`count_other_requests` returns the number of all requests that are no ends."""
        self._count_other_requests = count_other_requests
        self._broker_name = broker_name
        self._coordinator = coordinator
        self._turn = turn
        self._producers = producers
        self._append_decision = append_decision
        self._store_host = store_host
        self._backlog = backlog or CheckBacklog()
        self.counters = TransactionCheckCounters()
        self._limited_log = LimitedLog(log)
        # Groups whose producers may have capacity for more checks. The first one is the next.
        self._groups_with_capacity: dict[str, None] = {}
        self._pace = CheckPace()
        # Any client can claim any producer group. The ACL decides whether it may read the half
        # before a check is sent to it. None: every client may.
        self.can_read_half: Callable[[Peer, str], bool] | None = None

    # --- due halves ------------------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        coordinator = self._coordinator
        halves = coordinator.halves
        for queue_offset in coordinator.schedule.take_due(now_ms, DUE_PER_TICK_MAX, halves):
            half = halves.find(queue_offset)
            if half is None:
                continue  # decided by the step of another half
            try:
                self._take_next_step(half, now_ms)
            except Exception as error:  # one half must not stop the checks of all others
                self._set_aside(half, error)
        for group in self._backlog.groups():
            self._groups_with_capacity.setdefault(group)
        self._check_groups(self._pace.allowed(now_ms), now_ms)

    def next_due_ms(self, retry_ms: int) -> int | None:
        """Return when `tick` has something to do; `retry_ms` if a producer may have capacity then.

        Halves for which no producer is connected wait for one, and not for a time.
        """
        slot_ms = self._coordinator.schedule.next_slot_ms
        if self._groups_with_capacity:
            return 0  # more checks would have been too many at once
        if not self._backlog.waits_for_answers:
            return slot_ms
        return retry_ms if slot_ms is None else min(slot_ms, retry_ms)

    def _take_next_step(self, half: Half, now_ms: int) -> None:
        coordinator = self._coordinator
        match next_step(
            half,
            now_ms,
            coordinator.config,
            coordinator.writers,
            age_max_ms=coordinator.age_max_ms,
        ):
            case Strand(reason):
                self._strand(half, reason, now_ms)
            case FollowWriter(writer):
                self._roll_back_lost_attempt(half, writer, now_ms)
            case Wait(until_ms):
                # A half that is due later was rescheduled and is in the schedule already.
                if until_ms is not None and until_ms != half.due_ms:
                    coordinator.reschedule(half, until_ms)
            case Check():
                self._backlog.add(half)
                if not _is_open(half.producer) and not self._producers.members(half.group):
                    self.counters.unsent += 1

    def _set_aside(self, half: Half, error: Exception) -> None:
        transaction_id = half.key.decode("utf-8", "replace")
        log.error("transaction set aside id=%s: %s", transaction_id, error, exc_info=error)
        self._coordinator.set_aside(half, f"its check failed: {error}")

    def _strand(self, half: Half, reason: str, now_ms: int) -> None:
        record = self._coordinator.read_half(half)
        if record is None:
            return
        transaction_id = half.key.decode("utf-8", "replace")

        def on_done(code: int, results: Sequence[AppendResult]) -> None:
            if results:
                log.warning("transaction stranded id=%s: %s", transaction_id, reason)
            elif code == ResponseCode.MESSAGE_ILLEGAL:
                # It will be refused every time, unlike an append for which the disk has no space.
                log.error("transaction set aside id=%s: cannot be stranded", transaction_id)
                self._coordinator.set_aside(half, f"cannot be stranded ({reason})")

        # Tried again later if there is no disk space for the records now.
        self._coordinator.reschedule(half, now_ms + RETRY_DELAY_MS)
        decision = self._coordinator.strand(half, reason, record, now_ms=now_ms)
        self._append_decision(decision, on_done, now_ms=now_ms)

    def _roll_back_lost_attempt(self, half: Half, writer: str, now_ms: int) -> None:
        self._coordinator.reschedule(half, now_ms + RETRY_DELAY_MS)
        decision = self._coordinator.decide(
            half.queue_offset,
            half.log_offset,
            Verdict.ROLLBACK,
            group=None,
            by=DecidedBy.WRITER,
            by_name=writer,
            now_ms=now_ms,
        )
        assert isinstance(decision, Decision), "next_step() returned a half that is open"
        self._append_decision(decision, now_ms=now_ms)

    # --- checks ----------------------------------------------------------------------------------

    def producer_joined(self, group: str, now_ms: int) -> None:
        """Send the overdue checks of a group as soon as a producer connects."""
        self._check_group(group, self._pace.allowed(now_ms), now_ms)

    def check_answered(
        self, half: Half, channel: Channel, *, is_unknown: bool, remark: str = "", now_ms: int
    ) -> None:
        """Note that a producer answered a check, with UNKNOWN or with a verdict."""
        self._backlog.check_answered(half.queue_offset)
        half.producer = channel
        self.counters.answered += 1
        if is_unknown:
            self.counters.unknown += 1
            self._record_unknown(half, "unknown", channel, remark, now_ms)
        self._groups_with_capacity.setdefault(half.group)

    def undecided_at_send(self, half: Half, channel: Channel, remark: str, now_ms: int) -> None:
        """Note that a producer ended its send with UNKNOWN: a check will ask for the verdict."""
        self._record_unknown(half, "unknown_at_send", channel, remark, now_ms)

    def _record_unknown(
        self, half: Half, event: str, channel: Channel, remark: str, now_ms: int
    ) -> None:
        is_answer = event == "unknown"
        self._coordinator.unknown_received(half, remark, is_answer=is_answer)
        self._write_journal(half, event, channel, now_ms, remark)
        self._limited_log.warning(
            now_ms,
            "verdict UNKNOWN %s id=%s group=%s peer=%s: %s",
            f"at check {half.checks}" if is_answer else "after the send",
            half.key.decode("utf-8", "replace"),
            half.group,
            channel.address,
            remark or "no remark",
        )

    def end_turn(self, now_ms: int) -> None:
        """Send more checks to groups that have answered in this turn, or had too many at once."""
        self._pace.turn_ended(now_ms, self._count_other_requests())
        if self._groups_with_capacity:
            self._check_groups(min(CHECKS_PER_TURN_MAX, self._pace.allowed(now_ms)), now_ms)

    def channel_closed(self, channel: Channel) -> None:
        self._backlog.channel_closed(channel)

    def backlog_size(self) -> int:
        return sum(self._backlog.size(group) for group in self._backlog.groups())

    def _check_groups(self, count_max: int, now_ms: int) -> None:
        """Send up to `count_max` checks. Every group gets a share, or is one of the next."""
        groups = self._groups_with_capacity
        for group_count in range(len(groups), 0, -1):
            if count_max <= 0:
                break
            group = next(iter(groups))
            del groups[group]
            count_max -= self._check_group(group, max(1, count_max // group_count), now_ms)

    def _check_group(self, group: str, count_max: int, now_ms: int) -> int:
        """Send up to `count_max` checks of the group's backlog, and return how many were sent.

        If that was the limit, and not the capacity of producers, the group waits for its next turn.
        """
        sent = 0
        for queue_offset in self._backlog.take(group):
            half = self._coordinator.halves.find(queue_offset)
            if half is None or half.is_stranded:
                continue
            if not is_check_due(half, now_ms):
                # It is being decided, which may fail; or it was rescheduled; or the clock was set
                # back. Its age does not matter here: a half that waited for a producer to connect
                # is checked, however old it is.
                self._coordinator.reschedule(half, max(half.due_ms, now_ms + RETRY_DELAY_MS))
                continue
            channel = self._pick_channel(half, now_ms) if sent < count_max else None
            if channel is None and sent < count_max and self._has_no_reader(half):
                # Other halves of the group may have topics that a connected producer may read.
                self._coordinator.reschedule(half, now_ms + RETRY_DELAY_MS)
                continue
            if channel is None:
                self._backlog.put_back(half)
                if sent >= count_max:
                    self._groups_with_capacity.setdefault(group)
                break
            try:
                sent += self._send_check(half, channel, now_ms)
            except Exception as error:  # one half must not stop the checks of all others
                self._set_aside(half, error)
        return sent

    def _pick_channel(self, half: Half, now_ms: int) -> Channel | None:
        """Return the channel that parked the half or answered last, else another with capacity."""
        if _is_open(half.producer) and self._backlog.has_capacity(half.producer, now_ms):
            return half.producer
        for _ in range(len(self._producers.members(half.group))):
            channel = self._producers.next_channel(half.group)
            if channel is None or not self._backlog.has_capacity(channel, now_ms):
                continue
            if self.can_read_half is None or self.can_read_half(channel, half.topic):
                return channel
        return None

    def _has_no_reader(self, half: Half) -> bool:
        """Whether producers of the group are connected, but none of them may read the half."""
        members = self._producers.members(half.group)
        if self.can_read_half is None or _is_open(half.producer) or not members:
            return False
        return not any(self.can_read_half(member.client.channel, half.topic) for member in members)

    def _send_check(self, half: Half, channel: Channel, now_ms: int) -> bool:
        """Return False if the check was not sent. Then it does not count either."""
        record = self._coordinator.read_half(half)
        if record is None:
            return False
        key = half.key.decode("utf-8", "replace")
        fields = CheckTransactionState(
            topic=names.HALF_TOPIC,
            tran_state_table_offset=half.queue_offset,
            commit_log_offset=half.log_offset,
            msg_id=key,
            transaction_id=key,
            offset_msg_id=encode_offset_id(self._store_host, half.log_offset),
            broker_name=self._broker_name,
        )
        body = make_check_body(record, half.topic, half.queue_id, half.checks + 1)
        if not channel.send_oneway(RequestCode.CHECK_TRANSACTION_STATE, fields, body):
            half.producer = None if half.producer is channel else half.producer
            self._coordinator.reschedule(half, now_ms + RETRY_DELAY_MS)
            return False
        if half.producer is channel and len(self._producers.members(half.group)) > 1:
            # Until it answers, the next check goes to another process: this one may hang.
            half.producer = None
        self.counters.sent += 1
        self.counters.lateness_seconds.observe((now_ms - half.due_ms) / 1000)
        self._pace.check_sent()
        self._backlog.check_sent(channel, half, now_ms)
        self._coordinator.check_sent(half, now_ms)
        self._write_journal(half, "asked", channel, now_ms)
        return True

    def _write_journal(
        self, half: Half, event: str, channel: Channel, now_ms: int, remark: str = ""
    ) -> None:
        entry = JournalEntry(half.queue_offset, event, half.checks, channel.address, remark)
        self._turn.add_records([make_journal_record(entry, now_ms=now_ms)], waits_for_flush=False)


def _is_open(producer: Peer | None) -> TypeGuard[Channel]:
    # The broker parks halves with the channel they came by, so a producer is always a Channel.
    return producer is not None and producer.is_open
