"""The model of the simulation: what the broker must do and must not do.

The producers' database decides: a transaction that it has committed must be delivered exactly
once, and one that it has rolled back never. What a response has reported never changes. The model
verifies every step what a consumer could read, and every check that the broker sends.

A pull may return messages that are not durable yet, so a power cut can remove messages that were
visible. It may remove only what was not flushed; `check_durable` asserts that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from escrowmq.message.names import HALF_TOPIC
from escrowmq.message.transaction import TransactionState
from escrowmq.remoting.bodies import WriterState
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import CheckTransactionState, Header
from escrowmq.testing.disks import FaultyDisk
from tests.simulation.escrow_broker import ESCROW, BrokerProcess
from tests.support.stores import assert_clean

Queue = tuple[str, int]
HalfPosition = tuple[int, int]  # queue offset and log offset of a half

QUEUES: list[Queue] = [("T", 0), ("T", 1), ("U", 0)]
COMMITTED, ROLLED_BACK = TransactionState.COMMITTED.text, TransactionState.ROLLED_BACK.text


CLOCK_JUMP_MS = 100


@dataclass(frozen=True)
class Message:
    """A message of a transaction, or of an attempt of a writer's batch."""

    key: str
    queue: Queue
    transaction: str = ""
    writer: str = ""
    batch: int = 0
    attempt: str = ""


class Database:
    """The producers' database. The first row about a transaction decides it."""

    def __init__(self) -> None:
        self._rows: dict[str, bool] = {}
        self.positions: dict[str, list[HalfPosition]] = {}

    def is_committed(self, transaction: str) -> bool | None:
        """Return whether a transaction is committed; None if it is not decided."""
        return self._rows.get(transaction)

    def commit(self, transaction: str, positions: Iterable[HalfPosition]) -> bool:
        """Commit unless the transaction is rolled back. Return whether it is committed."""
        self.positions.setdefault(transaction, list(positions))
        return self._rows.setdefault(transaction, True)

    def roll_back(self, transaction: str) -> bool:
        """Roll back unless the transaction is committed. Return whether it is committed."""
        return self._rows.setdefault(transaction, False)


@dataclass
class EscrowModel:
    """What the clients did and what the broker has reported. Keys are those of messages."""

    database: Database = field(default_factory=Database)
    messages: dict[str, Message] = field(default_factory=dict)
    members: dict[str, list[str]] = field(default_factory=dict)  # keys of each transaction
    # Reported by responses:
    parked: dict[str, HalfPosition] = field(default_factory=dict)
    reported_states: dict[str, str] = field(default_factory=dict)
    fences: dict[str, int] = field(default_factory=dict)  # by writer
    batches: dict[str, int] = field(default_factory=dict)  # by writer, the last decided one
    # By writer and batch: the names and message counts of the winning attempts.
    winners: dict[tuple[str, int], frozenset[tuple[str, int]]] = field(default_factory=dict)
    # By queue and queue offset: key and log offset of the messages that consumers can read.
    visible: dict[Queue, dict[int, tuple[str, int]]] = field(default_factory=dict)
    visible_counts: Counter[str] = field(default_factory=Counter)
    check_counts: Counter[str] = field(default_factory=Counter)
    durable_check_counts: Counter[str] = field(default_factory=Counter)
    last_check_s: dict[str, float] = field(default_factory=dict)
    start_ms: float = 0.0  # when the simulation began, by the clock of the last start
    checked_in_turn: set[str] = field(default_factory=set)
    unjournaled: set[str] = field(default_factory=set)  # checked, but the journal write failed
    resumed: set[str] = field(default_factory=set)  # by an operator, so a check is due at once
    flushed_offset: int = 0

    def add(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.messages[message.key] = message
            if message.transaction:
                self.members.setdefault(message.transaction, []).append(message.key)

    # --- what responses report -------------------------------------------------------------------

    def record_parked(self, key: str, position: HalfPosition) -> None:
        self.parked.setdefault(key, position)

    def record_state(self, key: str, state: str) -> None:
        """Record a state that a response has reported, and assert that it is right and final."""
        if state not in (COMMITTED, ROLLED_BACK):
            return
        previous = self.reported_states.setdefault(key, state)
        assert previous == state, f"{key} was {previous} and is {state} now"
        message = self.messages[key]
        if message.transaction:
            is_committed = bool(self.database.is_committed(message.transaction))
            assert is_committed == (state == COMMITTED), f"{key} is {state}, unlike its database"

    def record_writer(self, state: WriterState) -> None:
        # Responses may overtake each other, so an older fence or batch is ignored.
        self.fences[state.writer] = max(state.fence, self.fences.get(state.writer, 0))
        self.batches[state.writer] = max(state.batch, self.batches.get(state.writer, -1))
        if state.batch >= 0:
            winners = frozenset((winner.attempt, winner.count) for winner in state.winners)
            previous = self.winners.setdefault((state.writer, state.batch), winners)
            assert previous == winners, (
                f"{state.writer} {state.batch}: the winners were {previous} and are {winners} now"
            )

    def winning_attempts(self, message: Message) -> set[str] | None:
        """Return the winning attempts of a message's batch; None if it is not decided."""
        winners = self.winners.get((message.writer, message.batch))
        return None if winners is None else {attempt for attempt, _ in winners}

    # --- what consumers can read -----------------------------------------------------------------

    def check_visible(self, process: BrokerProcess) -> None:
        """Assert that no message is visible twice, uncommitted or without its whole transaction.

        The simulation calls this after every step.
        """
        store, changed_transactions = process.store, set[str]()
        for queue in QUEUES:
            visible = self.visible.setdefault(queue, {})
            begin = max(visible, default=store.min_offset(*queue) - 1) + 1
            for offset in range(begin, store.max_offset(*queue)):
                message = self._check_new_message(process, queue, offset)
                changed_transactions.add(message.transaction)
        for transaction in changed_transactions - {""}:
            keys = self.members[transaction]
            count = sum(self.visible_counts[key] for key in keys)
            assert count in (0, len(keys)), (
                f"{count} of {len(keys)} messages of {transaction} are visible"
            )
        coordinator = process.broker.transactions.coordinator
        halves = coordinator.halves
        assert halves.stranded_count == sum(half.is_stranded for half in halves)
        for name, fence in self.fences.items():
            writer = coordinator.writers.find(name)
            assert writer is not None, f"writer {name} is lost"
            assert writer.fence >= fence, f"the fence of {name} fell from {fence} to {writer.fence}"
            assert writer.batch >= self.batches[name], f"{name} lost batch {self.batches[name]}"

    def _check_new_message(self, process: BrokerProcess, queue: Queue, offset: int) -> Message:
        log_offset = process.store.log_offset_of(*queue, offset)
        assert log_offset is not None, f"{queue} has no message at {offset}"
        key = key_at(process, log_offset)
        self.visible[queue][offset] = key, log_offset
        self.visible_counts[key] += 1
        message = self.messages[key]
        assert message.queue == queue, f"{key} was delivered to {queue}"
        count = self.visible_counts[key]
        assert count == 1, f"{key} was delivered {count} times"
        is_rolled_back = self.reported_states.get(key) == ROLLED_BACK
        assert not is_rolled_back, f"{key} was delivered although it was rolled back"
        if message.transaction:
            is_committed = self.database.is_committed(message.transaction)
            assert is_committed, f"{key} was delivered, but in its database: {is_committed=}"
        else:
            attempts = self.winning_attempts(message)
            is_winner = attempts is None or message.attempt in attempts
            assert is_winner, f"{key} was delivered although its attempt lost"
        return message

    def check_durable(self, process: BrokerProcess) -> None:
        """Assert after a start that no durable message is missing. Forget those that are."""
        store = process.store
        for queue, visible in self.visible.items():
            begin, end = store.min_offset(*queue), store.max_offset(*queue)
            for offset in [offset for offset in visible if offset >= begin]:
                key, log_offset = visible[offset]
                actual = store.log_offset_of(*queue, offset) if offset < end else None
                if actual == log_offset and key_at(process, log_offset) == key:
                    continue
                assert log_offset >= self.flushed_offset, f"{key} was durable and is missing"
                del visible[offset]
                self.visible_counts[key] -= 1
        self.check_visible(process)

    # --- checks ----------------------------------------------------------------------------------

    def check_oneway(self, process: BrokerProcess, code: int, fields: Header) -> None:
        """Assert that a check is sent only for an open half that is due, and not too often."""
        if code != RequestCode.CHECK_TRANSACTION_STATE:
            return
        assert isinstance(fields, CheckTransactionState)
        key, now_ms = fields.transaction_id or "", process.now_ms()
        half = process.broker.transactions.coordinator.halves.find(fields.tran_state_table_offset)
        assert half is not None, f"{key} was checked although it is not open"
        assert key not in self.reported_states, (
            f"{key} was checked although it is {self.reported_states.get(key)}"
        )
        assert not self.visible_counts[key], f"{key} was checked although it is delivered"
        assert not half.is_stranded, f"{key} was checked although it is stranded"
        assert now_ms >= half.due_ms, f"{key} was checked too early"
        if key in self.resumed and not half.checks:
            del self.check_counts[key]
            self.last_check_s.pop(key, None)
        elif key not in self.check_counts:
            assert now_ms >= half.parked_ms + ESCROW.immunity_ms, f"{key} was immune"
        if key in self.last_check_s:
            elapsed_ms = (process.clock.elapsed_s() - self.last_check_s[key]) * 1000
            # The clock of the broker follows a jump by a tenth of the time that passes.
            assert elapsed_ms >= ESCROW.check_interval_ms * 0.9 - 1, (
                f"{key} was checked again after {elapsed_ms} ms"
            )
        self.checked_in_turn.add(key)
        self.unjournaled.discard(key)  # every journal entry has the total count
        self.last_check_s[key] = process.clock.elapsed_s()
        self.check_counts[key] += 1
        count = self.check_counts[key]
        assert count <= ESCROW.checks_max, f"{key} was checked {count} times"

    def record_flush(self, process: BrokerProcess) -> None:
        if process.store.flushed_offset > self.flushed_offset:
            self.flushed_offset = process.store.flushed_offset
            if self.flushed_offset == process.store.end:
                self.durable_check_counts = self.check_counts.copy()

    # --- after a start ---------------------------------------------------------------------------

    def check_start(self, process: BrokerProcess) -> None:
        """Assert that a broker that has just started has all that was reported or durable."""
        self.check_durable(process)
        self.flushed_offset = process.store.flushed_offset
        coordinator = process.broker.transactions.coordinator
        start_ms = process.now_ms() - process.clock.elapsed_s() * 1000
        if abs(start_ms - self.start_ms) > CLOCK_JUMP_MS:
            # How long the broker was down is not known then, so a check may come early.
            self.last_check_s.clear()
        self.start_ms = start_ms
        for key, reported in self.reported_states.items():
            queue_offset = self.parked[key][0]
            state = coordinator.states.get(queue_offset)
            has_expired = queue_offset < process.store.min_offset(HALF_TOPIC, 0)
            actual = "missing" if state is None else state.text
            assert has_expired or actual == reported, (
                f"{key} was reported as {reported} and is {actual} after a start"
            )
        for half in coordinator.halves:
            key = half.key.decode()
            is_count_known = key not in self.resumed and key not in self.unjournaled
            low = self.durable_check_counts[key] if is_count_known else 0
            high = self.check_counts[key]
            assert half.is_stranded or low <= half.checks <= high, (
                f"{key} was checked {low} to {high} times, but {half.checks} are recorded"
            )
            if half.checks != high:
                self.check_counts[key] = half.checks
                self.last_check_s.pop(key, None)

    # --- at the end ------------------------------------------------------------------------------

    def check_final_state(self, process: BrokerProcess) -> None:
        """Assert that every half is decided, and every committed message delivered once."""
        open_keys = [half.key.decode() for half in process.broker.transactions.coordinator.halves]
        assert not open_keys, f"still open at the end: {open_keys}"
        for key, message in self.messages.items():
            if message.transaction:
                is_expected = bool(self.database.is_committed(message.transaction))
            else:
                is_expected = message.attempt in (self.winning_attempts(message) or ())
            count = self.visible_counts[key]
            assert count == is_expected, f"{key} was delivered {count} times, not {is_expected:d}"
            final_state = COMMITTED if is_expected else ROLLED_BACK
            assert self.reported_states.get(key) in (None, final_state)


def key_at(process: BrokerProcess, log_offset: int) -> str:
    """Return the key of a message, which is the first word of its body."""
    return bytes(process.store.record_at(log_offset).body).split(b" ")[0].decode()


# --- what is on disk -----------------------------------------------------------------------------


def check_disk(process: BrokerProcess, unjournaled: Iterable[str] = ()) -> None:
    """Assert that the store has no damage and recovers the same with and without a snapshot.

    The check counts of halves in `unjournaled` are ignored.
    """
    ignored = {f"checks {key}" for key in unjournaled}
    copy = process.disk.power_cut(Random(0), "all")
    assert_clean(copy, process.settings)
    recovered = _recovered_state(copy, process, ignored)
    copy_without_snapshot = process.disk.power_cut(Random(0), "all")
    if copy_without_snapshot.exists("escrowmq.escrow"):
        copy_without_snapshot.remove("escrowmq.escrow")
    recovered_without_snapshot = _recovered_state(copy_without_snapshot, process, ignored)
    assert recovered == recovered_without_snapshot, _difference(
        recovered, recovered_without_snapshot
    )
    current = _without_times(_coordinator_state(process, ignored))
    recovered = _without_times(recovered)
    assert current == recovered, _difference(current, recovered)


def _without_times(state: dict[str, object]) -> dict[str, object]:
    """Drop the times. Recovery takes them from the log, where times never decrease."""
    return {name: value for name, value in state.items() if not name.startswith("time ")}


def _recovered_state(
    disk: FaultyDisk, process: BrokerProcess, ignored: set[str]
) -> dict[str, object]:
    other = BrokerProcess(disk, process.clock, settings=process.settings)
    state = _coordinator_state(other, ignored)
    other.kill()
    return state


def _coordinator_state(process: BrokerProcess, ignored: set[str]) -> dict[str, object]:
    """Return the state of a coordinator as a table of names and values."""
    coordinator = process.broker.transactions.coordinator
    state: dict[str, object] = {}
    for half in coordinator.halves:
        key = half.key.decode()
        state[f"half {key}"] = (
            *(half.queue_offset, half.log_offset, half.size, half.topic, half.queue_id, half.group),
            *(half.is_stranded, sorted(half.previous_offsets), half.attempt),
        )
        if not half.is_stranded:
            state[f"checks {key}"] = half.checks
            state[f"time {key}"] = half.parked_ms
    half_states = coordinator.states
    for queue_offset in range(process.store.min_offset(HALF_TOPIC, 0), half_states.next_offset):
        half_state = half_states.get(queue_offset)
        if half_state is not None and half_state.is_decided:
            state[f"state {queue_offset}"] = half_state
    for writer in coordinator.writers:
        state[f"writer {writer.name}"] = writer.fence, writer.batch, writer.winners
    return {name: value for name, value in state.items() if name not in ignored}


def _difference(first: dict[str, object], second: dict[str, object]) -> str:
    names = [name for name in sorted(first | second) if first.get(name) != second.get(name)]
    return "; ".join(f"{name}: {first.get(name)} and {second.get(name)}" for name in names)
