"""Check-back: halves that are due become questions to their producers, or are set aside."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Final, Protocol

from escrowmq.broker.dispatch import Line
from escrowmq.broker.turn import Turn
from escrowmq.consume.members import ProducerGroups
from escrowmq.escrow.checks import Asking
from escrowmq.escrow.coordinator import Change, Escrow
from escrowmq.escrow.half_table import Half
from escrowmq.escrow.records import Step, check_body, journal_of
from escrowmq.message import names
from escrowmq.message.keys import encode_offset_id
from escrowmq.message.record import StoredRecord
from escrowmq.message.transaction import State
from escrowmq.metrics import SECONDS, Distribution
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import CheckTransactionState

log = logging.getLogger(__name__)

LOOKED_AT_MAX: Final = 1_000  # halves that one tick takes up, so that it is over soon
ASKED_MAX: Final = 100  # questions to one group in a tick; every answer makes room for the next
ASKED_IN_TICK_MAX: Final = 400
ASKED_IN_TURN_MAX: Final = 32  # after answers, in one turn: others wait for it to end
LATER_MS: Final = 1_000  # until something that did not work is tried again


@dataclass(slots=True)
class CheckCounts:
    sent: int = 0
    unsent: int = 0  # due, and nobody there to ask
    answered: int = 0
    unknown: int = 0
    late_seconds: Distribution = field(default_factory=lambda: Distribution(SECONDS))


class Settle(Protocol):
    def __call__(self, change: Change, *, now_ms: int) -> None: ...


class Checks:
    def __init__(
        self,
        escrow: Escrow,
        turn: Turn,
        producers: ProducerGroups,
        settle: Settle,
        *,
        store_host: bytes,
        asking: Asking | None = None,
    ) -> None:
        self._escrow = escrow
        self._turn = turn
        self._producers = producers
        self._settle = settle
        self._store_host = store_host
        self._asking = asking or Asking()
        self.counts = CheckCounts()
        self._have_room: set[str] = set()  # groups that have answered since they were asked
        # Who names a group becomes a member of it: whether he may see its messages, is asked here.
        self.may_see: Callable[[Hashable, str], bool] | None = None

    def tick(self, now_ms: int) -> None:
        for half in self._escrow.take_due(now_ms, LOOKED_AT_MAX):
            if half.is_deciding:
                continue  # it was due twice
            why = self._escrow.is_spent(half, now_ms)
            if why:
                self._strand(half, why, now_ms)
                continue
            if half.attempt is not None:
                self._look_at_writer(half, now_ms)
                continue
            self._asking.add(half)
            if not _is_open(half.sender) and not self._producers.members(half.group):
                self.counts.unsent += 1
        left = ASKED_IN_TICK_MAX
        for group in self._asking.groups():  # each its share: one with many is not all there is
            left -= self._ask_group(group, min(left, ASKED_MAX), now_ms)

    def _ask_group(self, group: str, count_max: int, now_ms: int) -> int:
        """How many questions left."""
        asked = 0
        for queue_offset in self._asking.take(group):
            half = self._escrow.open.find(queue_offset)
            if half is None or half.is_stranded:
                continue
            if half.is_deciding or half.due_ms > now_ms:
                # Being decided, which may fail; or put off, or the clock went back: later.
                self._escrow.put_off(half, max(half.due_ms, now_ms + LATER_MS))
                continue
            line = self._line_for(half, now_ms) if asked < count_max else None
            if line is None and asked < count_max and self._nobody_may_see(half):
                self._escrow.put_off(half, now_ms + LATER_MS)
                continue  # others of the group may be of topics that somebody may see
            if line is None:
                self._asking.put_back(half)
                break
            if self._ask(half, line, now_ms):
                asked += 1
        return asked

    def _line_for(self, half: Half, now_ms: int) -> Line | None:
        """The one that it came by, or that answered last; else another one that has room."""
        if _is_open(half.sender) and self._asking.has_room(half.sender, now_ms):
            return half.sender  # type: ignore[return-value]  # the escrow does not know lines
        for _ in range(len(self._producers.members(half.group))):
            line = self._producers.pick_line(half.group)
            if line is None or not self._asking.has_room(line, now_ms):
                continue
            if self.may_see is None or self.may_see(line, half.topic):
                return line  # type: ignore[return-value]
        return None

    def _nobody_may_see(self, half: Half) -> bool:
        members = self._producers.members(half.group)
        if self.may_see is None or _is_open(half.sender) or not members:
            return False
        return not any(self.may_see(member.client.line, half.topic) for member in members)

    def _ask(self, half: Half, line: Line, now_ms: int) -> bool:
        record = self._escrow.read(half)
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
        body = check_body(record, half.topic, half.queue_id, number)
        if not line.post(RequestCode.CHECK_TRANSACTION_STATE, fields, body):
            # Not counted: it never left. Somebody else, or the same one, a little later.
            half.sender = None if half.sender is line else half.sender
            self._escrow.put_off(half, now_ms + LATER_MS)
            return False
        if half.sender is line and len(self._producers.members(half.group)) > 1:
            half.sender = None  # until it answers: a process that hangs must not be all there is
        self.counts.sent += 1
        self.counts.late_seconds.observe((now_ms - half.due_ms) / 1000)
        self._asking.asked(line, half, now_ms)
        self._escrow.asked(half, now_ms)
        self._note(half, "asked", line, now_ms)
        return True

    def _look_at_writer(self, half: Half, now_ms: int) -> None:
        """A batch is decided by its writer, not by asking: it has lost, or is still to come."""
        assert half.attempt is not None
        writer, batch, _, fence = half.attempt
        if self._escrow.writers.verdict_is_rollback(writer, batch, fence):
            self._escrow.put_off(half, now_ms + LATER_MS)  # if there is no room for it now
            change = self._escrow.change(
                half, State.ROLLED_BACK, by=f"writer {writer}", now_ms=now_ms
            )
            self._settle(change, now_ms=now_ms)
        else:
            self._escrow.put_off(half, now_ms + self._escrow.interval_ms(half))

    def _strand(self, half: Half, why: str, now_ms: int) -> None:
        record: StoredRecord | None = self._escrow.read(half)
        if record is None:
            return
        log.warning("transaction stranded id=%s: %s", half.key.decode("utf-8", "replace"), why)
        self._escrow.put_off(half, now_ms + LATER_MS)  # if there is no room for it now
        change = self._escrow.strand(half, why, record, now_ms=now_ms)
        self._settle(change, now_ms=now_ms)

    def answered(self, half: Half, line: Line, *, unknown: bool, now_ms: int) -> None:
        self._asking.answered(half.queue_offset)
        half.sender = line
        self.counts.answered += 1
        if unknown:
            self.counts.unknown += 1
            self._note(half, "unknown", line, now_ms)
        self._have_room.add(half.group)

    def end_turn(self, now_ms: int) -> None:
        """Answers have made room: go on asking, but not for long."""
        left = ASKED_IN_TURN_MAX
        while self._have_room and left > 0:
            group = self._have_room.pop()
            asked = self._ask_group(group, left, now_ms)
            left -= asked
            if left <= 0 and self._asking.waiting(group):
                self._have_room.add(group)

    def producer_joined(self, group: str, now_ms: int) -> None:
        """Whoever comes is asked at once for what is overdue."""
        self._ask_group(group, ASKED_MAX, now_ms)

    def line_closed(self, line: Line) -> None:
        self._asking.line_closed(line)

    def waiting(self) -> int:
        return sum(self._asking.waiting(group) for group in self._asking.groups())

    def _note(self, half: Half, what: str, line: Line, now_ms: int) -> None:
        step = Step(half.queue_offset, what, half.checks, line.peer)
        self._turn.put([journal_of(step, now_ms=now_ms)], waits=False)


def _is_open(line: Hashable | None) -> bool:
    return line is not None and line.is_open  # type: ignore[attr-defined]
