"""Check-back: halves that are due become questions to their producers, or are set aside."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Protocol

from escrowmq.broker.dispatch import Channel
from escrowmq.broker.turn import Turn
from escrowmq.consume.members import ProducerGroups
from escrowmq.escrow.checks import CheckBacklog
from escrowmq.escrow.coordinator import Decision, TransactionCoordinator
from escrowmq.escrow.half_table import Half
from escrowmq.escrow.records import JournalEntry, make_check_body, make_journal_record
from escrowmq.message import names
from escrowmq.message.keys import encode_offset_id
from escrowmq.message.record import StoredRecord
from escrowmq.message.transaction import TransactionState
from escrowmq.metrics import LATENCY_BOUNDS_S, Distribution
from escrowmq.peer import Peer
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import CheckTransactionState

log = logging.getLogger(__name__)

DUE_PER_TICK_MAX: Final = 1_000  # halves that one tick takes up, so that it is over soon
GROUP_CHECKS_PER_TICK_MAX: Final = (
    100  # questions to one group in a tick; every answer makes room for the next
)
CHECKS_PER_TICK_MAX: Final = 400
CHECKS_PER_TURN_MAX: Final = 32  # after answers, in one turn: others wait for it to end
RETRY_DELAY_MS: Final = 1_000  # until something that did not work is tried again


@dataclass(slots=True)
class TransactionCheckCounters:
    sent: int = 0
    unsent: int = 0  # due, and nobody there to ask
    answered: int = 0
    unknown: int = 0
    lateness_seconds: Distribution = field(default_factory=lambda: Distribution(LATENCY_BOUNDS_S))


class AppendDecision(Protocol):
    def __call__(self, decision: Decision, *, now_ms: int) -> None: ...


class TransactionChecker:
    def __init__(
        self,
        coordinator: TransactionCoordinator,
        turn: Turn,
        producers: ProducerGroups[Channel],
        append_decision: AppendDecision,
        *,
        store_host: bytes,
        backlog: CheckBacklog | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._turn = turn
        self._producers = producers
        self._append_decision = append_decision
        self._store_host = store_host
        self._backlog = backlog or CheckBacklog()
        self.counters = TransactionCheckCounters()
        self._groups_with_capacity: set[str] = (
            set()
        )  # groups that have answered since they were asked
        # Who names a group becomes a member of it: whether he may see its messages, is asked here.
        self.can_read_half: Callable[[Peer, str], bool] | None = None

    def tick(self, now_ms: int) -> None:
        for half in self._coordinator.take_due(now_ms, DUE_PER_TICK_MAX):
            if half.is_being_decided:
                continue  # it was due twice
            why = self._coordinator.strand_reason(half, now_ms)
            if why:
                self._strand(half, why, now_ms)
                continue
            if half.attempt is not None:
                self._follow_writer(half, now_ms)
                continue
            self._backlog.add(half)
            if not _is_open(half.producer) and not self._producers.members(half.group):
                self.counters.unsent += 1
        left = CHECKS_PER_TICK_MAX
        for group in self._backlog.groups():  # each its share: one with many is not all there is
            left -= self._check_group(group, min(left, GROUP_CHECKS_PER_TICK_MAX), now_ms)

    def _check_group(self, group: str, count_max: int, now_ms: int) -> int:
        """How many questions left."""
        asked = 0
        for queue_offset in self._backlog.take(group):
            half = self._coordinator.halves.find(queue_offset)
            if half is None or half.is_stranded:
                continue
            if half.is_being_decided or half.due_ms > now_ms:
                # Being decided, which may fail; or put off, or the clock went back: later.
                self._coordinator.reschedule(half, max(half.due_ms, now_ms + RETRY_DELAY_MS))
                continue
            line = self._pick_channel(half, now_ms) if asked < count_max else None
            if line is None and asked < count_max and self._has_no_reader(half):
                self._coordinator.reschedule(half, now_ms + RETRY_DELAY_MS)
                continue  # others of the group may be of topics that somebody may see
            if line is None:
                self._backlog.put_back(half)
                break
            if self._send_check(half, line, now_ms):
                asked += 1
        return asked

    def _pick_channel(self, half: Half, now_ms: int) -> Channel | None:
        """The one that it came by, or that answered last; else another one that has room."""
        if _is_open(half.producer) and self._backlog.has_capacity(half.producer, now_ms):
            return half.producer  # type: ignore[return-value]  # the escrow does not know lines
        for _ in range(len(self._producers.members(half.group))):
            line = self._producers.next_channel(half.group)
            if line is None or not self._backlog.has_capacity(line, now_ms):
                continue
            if self.can_read_half is None or self.can_read_half(line, half.topic):
                return line
        return None

    def _has_no_reader(self, half: Half) -> bool:
        members = self._producers.members(half.group)
        if self.can_read_half is None or _is_open(half.producer) or not members:
            return False
        return not any(self.can_read_half(member.client.channel, half.topic) for member in members)

    def _send_check(self, half: Half, channel: Channel, now_ms: int) -> bool:
        record = self._coordinator.read_half(half)
        if record is None:
            return False
        number = half.checks + 1
        fields = CheckTransactionState(
            topic=names.HALF_TOPIC,
            tran_state_table_offset=half.queue_offset,
            commit_log_offset=half.log_offset,
            msg_id=half.key.decode("utf-8", "replace"),
            transaction_id=half.key.decode("utf-8", "replace"),
            offset_msg_id=encode_offset_id(self._store_host, half.log_offset),
        )
        body = make_check_body(record, half.topic, half.queue_id, number)
        if not channel.send_oneway(RequestCode.CHECK_TRANSACTION_STATE, fields, body):
            # Not counted: it never left. Somebody else, or the same one, a little later.
            half.producer = None if half.producer is channel else half.producer
            self._coordinator.reschedule(half, now_ms + RETRY_DELAY_MS)
            return False
        if half.producer is channel and len(self._producers.members(half.group)) > 1:
            half.producer = None  # until it answers: a process that hangs must not be all there is
        self.counters.sent += 1
        self.counters.lateness_seconds.observe((now_ms - half.due_ms) / 1000)
        self._backlog.check_sent(channel, half, now_ms)
        self._coordinator.check_sent(half, now_ms)
        self._write_journal(half, "asked", channel, now_ms)
        return True

    def _follow_writer(self, half: Half, now_ms: int) -> None:
        """A batch is decided by its writer, not by asking: it has lost, or is still to come."""
        assert half.attempt is not None
        writer, batch, _, fence = half.attempt
        if self._coordinator.writers.has_lost(writer, batch, fence):
            self._coordinator.reschedule(
                half, now_ms + RETRY_DELAY_MS
            )  # if there is no room for it now
            change = self._coordinator.make_decision(
                half, TransactionState.ROLLED_BACK, by=f"writer {writer}", now_ms=now_ms
            )
            self._append_decision(change, now_ms=now_ms)
        else:
            self._coordinator.reschedule(half, now_ms + self._coordinator.check_interval_ms(half))

    def _strand(self, half: Half, reason: str, now_ms: int) -> None:
        record: StoredRecord | None = self._coordinator.read_half(half)
        if record is None:
            return
        log.warning("transaction stranded id=%s: %s", half.key.decode("utf-8", "replace"), reason)
        self._coordinator.reschedule(
            half, now_ms + RETRY_DELAY_MS
        )  # if there is no room for it now
        change = self._coordinator.strand(half, reason, record, now_ms=now_ms)
        self._append_decision(change, now_ms=now_ms)

    def check_answered(
        self, half: Half, channel: Channel, *, is_unknown: bool, now_ms: int
    ) -> None:
        self._backlog.check_answered(half.queue_offset)
        half.producer = channel
        self.counters.answered += 1
        if is_unknown:
            self.counters.unknown += 1
            self._write_journal(half, "unknown", channel, now_ms)
        self._groups_with_capacity.add(half.group)

    def end_turn(self, now_ms: int) -> None:
        """Answers have made room: go on asking, but not for long."""
        left = CHECKS_PER_TURN_MAX
        while self._groups_with_capacity and left > 0:
            group = self._groups_with_capacity.pop()
            asked = self._check_group(group, left, now_ms)
            left -= asked
            if left <= 0 and self._backlog.size(group):
                self._groups_with_capacity.add(group)

    def producer_joined(self, group: str, now_ms: int) -> None:
        """Whoever comes is asked at once for what is overdue."""
        self._check_group(group, GROUP_CHECKS_PER_TICK_MAX, now_ms)

    def channel_closed(self, channel: Channel) -> None:
        self._backlog.channel_closed(channel)

    def backlog_size(self) -> int:
        return sum(self._backlog.size(group) for group in self._backlog.groups())

    def _write_journal(self, half: Half, event: str, channel: Channel, now_ms: int) -> None:
        step = JournalEntry(half.queue_offset, event, half.checks, channel.address)
        self._turn.add_records([make_journal_record(step, now_ms=now_ms)], waits_for_flush=False)


def _is_open(channel: Hashable | None) -> bool:
    return channel is not None and channel.is_open  # type: ignore[attr-defined]
