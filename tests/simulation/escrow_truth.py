"""What is true in a simulated world, and what the broker may and may not do.

The producers' database decides: a transaction that it committed must be delivered exactly once,
and one that it rolled back never. What a response has reported never changes. At every step the
truth looks at what a consumer could see, and at every check that the broker sends.

A pull may return messages that are not durable yet, so a power cut can remove messages that were
seen. It may remove only what is behind the last flush; `recount` asserts that.
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
Place = tuple[int, int]  # queue offset and log offset of a half

QUEUES: list[Queue] = [("T", 0), ("T", 1), ("U", 0)]
COMMITTED, ROLLED_BACK = TransactionState.COMMITTED.text, TransactionState.ROLLED_BACK.text


@dataclass(frozen=True)
class Message:
    key: str
    queue: Queue
    transaction: str = ""
    writer: str = ""  # of a batch, which the writer decides
    batch: int = 0
    attempt: str = ""


class Database:
    """The first entry about a transaction decides it."""

    def __init__(self) -> None:
        self._rows: dict[str, bool] = {}
        self.places: dict[str, list[Place]] = {}

    def outcome(self, transaction: str) -> bool | None:
        return self._rows.get(transaction)

    def commit(self, transaction: str, places: Iterable[Place]) -> bool:
        self.places.setdefault(transaction, list(places))
        return self._rows.setdefault(transaction, True)

    def roll_back(self, transaction: str) -> bool:
        return self._rows.setdefault(transaction, False)


@dataclass
class Truth:
    database: Database = field(default_factory=Database)
    messages: dict[str, Message] = field(default_factory=dict)
    members: dict[str, list[str]] = field(default_factory=dict)  # keys of a transaction
    parked: dict[str, Place] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)
    fences: dict[str, int] = field(default_factory=dict)
    batches: dict[str, int] = field(default_factory=dict)
    winners: dict[tuple[str, int], frozenset[tuple[str, int]]] = field(default_factory=dict)
    seen: dict[Queue, dict[int, tuple[str, int]]] = field(default_factory=dict)  # key, log offset
    count: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)
    asked_safely: Counter[str] = field(default_factory=Counter)
    asked_ms: dict[str, int] = field(default_factory=dict)
    just_asked: set[str] = field(default_factory=set)  # in this turn
    unnoted: set[str] = field(
        default_factory=set
    )  # checked, but there was no disk space for the journal
    again: set[str] = field(
        default_factory=set
    )  # resumed by an operator, so a check is due at once
    flushed: int = 0

    def add(self, messages: Iterable[Message]) -> None:
        for message in messages:
            self.messages[message.key] = message
            if message.transaction:
                self.members.setdefault(message.transaction, []).append(message.key)

    # --- what responses have reported ------------------------------------------------------------

    def was_parked(self, key: str, place: Place) -> None:
        self.parked.setdefault(key, place)

    def tell(self, key: str, state: str) -> None:
        if state not in (COMMITTED, ROLLED_BACK):
            return
        before = self.told.setdefault(key, state)
        assert before == state, f"{key} was {before}, and is {state} now"
        message = self.messages[key]
        if message.transaction:
            is_committed = bool(self.database.outcome(message.transaction))
            assert is_committed == (state == COMMITTED), f"{key} is {state}, its database differs"

    def tell_writer(self, state: WriterState) -> None:
        # Responses overtake each other: an older one is outdated.
        self.fences[state.writer] = max(state.fence, self.fences.get(state.writer, 0))
        self.batches[state.writer] = max(state.batch, self.batches.get(state.writer, -1))
        if state.batch >= 0:
            won = frozenset((winner.attempt, winner.count) for winner in state.winners)
            before = self.winners.setdefault((state.writer, state.batch), won)
            assert before == won, f"{state.writer} {state.batch}: {before} won, and now {won}"

    # --- what can be seen ------------------------------------------------------------------------

    def look(self, process: BrokerProcess) -> None:
        """Assert at every step: nothing twice, nothing uncommitted, groups as a whole."""
        store, touched = process.store, set[str]()
        for queue in QUEUES:
            known = self.seen.setdefault(queue, {})
            begin = max(known, default=store.min_offset(*queue) - 1) + 1
            for offset in range(begin, store.max_offset(*queue)):
                message = self._see(process, queue, offset)
                touched.add(message.transaction)
        for transaction in touched - {""}:
            keys = self.members[transaction]
            found = sum(self.count[key] for key in keys)
            assert found in (0, len(keys)), f"{found} of {transaction}'s {len(keys)} can be seen"
        halves = process.broker.transactions.coordinator.halves
        assert halves.stranded_count == sum(half.is_stranded for half in halves)
        for name, fence in self.fences.items():
            writer = process.broker.transactions.coordinator.writers.find(name)
            assert writer is not None, f"writer {name} is forgotten"
            assert writer.fence >= fence, f"the fence of {name} fell: {fence}, {writer.fence}"
            assert writer.batch >= self.batches[name], f"{name} forgot batch {self.batches[name]}"

    def _see(self, process: BrokerProcess, queue: Queue, offset: int) -> Message:
        log_offset = process.store.log_offset_of(*queue, offset)
        assert log_offset is not None, f"{queue} has nothing at {offset}"
        key = bytes(process.store.record_at(log_offset).body).split(b" ")[0].decode()
        self.seen[queue][offset] = key, log_offset
        self.count[key] += 1
        message = self.messages[key]
        assert message.queue == queue, f"{key} came out in {queue}"
        assert self.count[key] == 1, f"{key} was delivered {self.count[key]} times"
        assert self.told.get(key) != ROLLED_BACK, f"{key} was rolled back, and is delivered"
        if message.transaction:
            outcome = self.database.outcome(message.transaction)
            assert outcome, f"{key} was delivered, and its database says {outcome}"
        else:
            won = self.winners.get((message.writer, message.batch))
            names = None if won is None else {attempt for attempt, _ in won}
            assert names is None or message.attempt in names, f"{key} was delivered, and lost"
        return message

    def recount(self, process: BrokerProcess) -> None:
        """Assert after a start that nothing durable is missing; anything else may be."""
        for queue, known in self.seen.items():
            end = process.store.max_offset(*queue)
            for offset in [
                offset for offset in known if offset >= process.store.min_offset(*queue)
            ]:
                key, log_offset = known[offset]
                found = process.store.log_offset_of(*queue, offset) if offset < end else None
                if found == log_offset:
                    body = bytes(process.store.record_at(found).body)
                    if body.split(b" ")[0].decode() == key:
                        continue
                assert log_offset >= self.flushed, f"{key} was durable, and is gone"
                del known[offset]
                self.count[key] -= 1
        self.look(process)

    # --- checks ----------------------------------------------------------------------------------

    def posted(self, process: BrokerProcess, code: int, fields: Header) -> None:
        """Assert that a check is sent only for an open half that is due, and not too often."""
        if code != RequestCode.CHECK_TRANSACTION_STATE:
            return
        assert isinstance(fields, CheckTransactionState)
        key, now_ms = fields.transaction_id or "", process.clock.now_ms()
        half = process.broker.transactions.coordinator.halves.find(fields.tran_state_table_offset)
        assert half is not None, f"asked about {key}, which is not open"
        assert key not in self.told, f"asked about {key}, which is {self.told.get(key)}"
        assert not self.count[key], f"asked about {key}, which is delivered"
        assert not half.is_stranded, f"asked about {key}, which is stranded"
        assert now_ms >= half.due_ms, f"asked about {key} too early"
        if key in self.again and not half.checks:
            del self.asked[key]
            self.asked_ms.pop(key, None)
        elif key not in self.asked:
            assert now_ms >= half.parked_ms + ESCROW.immunity_ms, f"{key} was immune"
        if key in self.asked_ms:
            waited_ms = now_ms - self.asked_ms[key]
            assert waited_ms >= ESCROW.check_interval_ms, f"{key} asked again after {waited_ms} ms"
        self.just_asked.add(key)
        self.unnoted.discard(key)  # every journal entry has the total count
        self.asked_ms[key] = now_ms
        self.asked[key] += 1
        assert self.asked[key] <= ESCROW.checks_max, f"{key} was asked {self.asked[key]} times"

    def was_flushed(self, process: BrokerProcess) -> None:
        if process.store.flushed_offset > self.flushed:
            self.flushed = process.store.flushed_offset
            if self.flushed == process.store.end:
                self.asked_safely = self.asked.copy()

    # --- after a start ---------------------------------------------------------------------------

    def judge_start(self, process: BrokerProcess) -> None:
        self.recount(process)
        self.flushed = process.store.flushed_offset
        escrow = process.broker.transactions.coordinator
        for key, state in self.told.items():
            queue_offset = self.parked[key][0]
            found = escrow.states.get(queue_offset)
            is_gone = queue_offset < process.store.min_offset(HALF_TOPIC, 0)
            now = "gone" if found is None else found.text
            assert is_gone or now == state, f"{key} was told {state}, and is {now} after a start"
        for half in escrow.halves:
            key = half.key.decode()
            is_sure = key not in self.again and key not in self.unnoted
            low, high = self.asked_safely[key] if is_sure else 0, self.asked[key]
            assert half.is_stranded or low <= half.checks <= high, (
                f"{key} was asked {low} to {high} times, and {half.checks} are known"
            )
            if half.checks != high:
                self.asked[key] = half.checks
                self.asked_ms.pop(key, None)

    # --- at rest ---------------------------------------------------------------------------------

    def judge_rest(self, process: BrokerProcess) -> None:
        left = [half.key.decode() for half in process.broker.transactions.coordinator.halves]
        assert not left, f"still open at rest: {left}"
        for key, message in self.messages.items():
            if message.transaction:
                wanted = bool(self.database.outcome(message.transaction))
            else:
                won = self.winners.get((message.writer, message.batch), frozenset())
                wanted = message.attempt in {attempt for attempt, _ in won}
            assert self.count[key] == wanted, f"{key} delivered {self.count[key]}, not {wanted:d}"
            assert self.told.get(key) in (None, COMMITTED if wanted else ROLLED_BACK)


# --- what is on disk -----------------------------------------------------------------------------


def judge_disk(process: BrokerProcess, unnoted: Iterable[str] = ()) -> None:
    """Assert that the store is sound and recovers the same with and without a snapshot."""
    unsure = {f"checks {key}" for key in unnoted}
    copy = process.disk.power_cut(Random(0), "all")
    assert_clean(copy, process.settings)
    with_note = _reopened(copy, process, unsure)
    bare = process.disk.power_cut(Random(0), "all")
    if bare.exists("escrowmq.escrow"):
        bare.remove("escrowmq.escrow")
    without_note = _reopened(bare, process, unsure)
    assert with_note == without_note, _difference(with_note, without_note)
    now = picture(process, unsure)
    now, again = _untimed(now), _untimed(with_note)
    assert now == again, _difference(now, again)


def _untimed(found: dict[str, object]) -> dict[str, object]:
    """Drop the times that recovery takes from the log, whose clock never runs backwards."""
    return {name: value for name, value in found.items() if not name.startswith("time ")}


def _reopened(disk: FaultyDisk, process: BrokerProcess, unsure: set[str]) -> dict[str, object]:
    other = BrokerProcess(disk, process.clock, settings=process.settings)
    found = picture(other, unsure)
    other.kill()
    return found


def picture(process: BrokerProcess, unsure: set[str]) -> dict[str, object]:
    """Return the state of a coordinator, by name."""
    escrow = process.broker.transactions.coordinator
    found: dict[str, object] = {}
    for half in escrow.halves:
        found[f"half {half.key.decode()}"] = (
            *(half.queue_offset, half.log_offset, half.size, half.topic, half.queue_id, half.group),
            *(half.is_stranded, sorted(half.previous_offsets), half.attempt),
        )
        if not half.is_stranded:
            found[f"checks {half.key.decode()}"] = half.checks
            found[f"time {half.key.decode()}"] = half.parked_ms
    for queue_offset in range(process.store.min_offset(HALF_TOPIC, 0), escrow.states.next_offset):
        state = escrow.states.get(queue_offset)
        if state is not None and state.is_decided:
            found[f"state {queue_offset}"] = state
    for writer in escrow.writers:
        found[f"writer {writer.name}"] = writer.fence, writer.batch, writer.winners
    return {name: value for name, value in found.items() if name not in unsure}


def _difference(one: dict[str, object], other: dict[str, object]) -> str:
    names = [name for name in sorted(one | other) if one.get(name) != other.get(name)]
    return "; ".join(f"{name}: {one.get(name)} and {other.get(name)}" for name in names)
