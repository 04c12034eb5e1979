"""The coordinator against a small model: sends, ends, checks, decisions and crashes in any order.

The model records the responses. What a response has reported holds from then on. A power cut
keeps the first few steps that no response has reported yet, and the model finds out how many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from escrowmq.config import StoreConfig
from escrowmq.escrow.half_table import Half
from escrowmq.message import names
from escrowmq.message.properties import find_property
from tests.interop.remoting import Response
from tests.support.broker_requests import FakeChannel, send_request, stored_records
from tests.support.escrows import (
    COMMIT,
    ESCROW,
    ROLLBACK,
    UNKNOWN,
    EscrowBench,
    HalfPosition,
    decide_batch_request,
    end_many_request,
    end_request,
    half_request,
    heartbeat_request,
    position_of,
    register_writer_request,
    sent_checks,
    writer_state,
)
from tests.support.stores import assert_clean

SMALL = StoreConfig(
    segment_bytes=4096,
    queue_file_bytes=200,
    index_slots=5,
    index_entries=40,
    message_bytes_max=2048,
)
CONFIG = replace(ESCROW, checks_max=2)
GROUPS = ("p", "q")
OPEN, STRANDED, COMMITTED, ROLLED_BACK = "open", "stranded", "committed", "rolled_back"
STATE_OF_VERDICT = {COMMIT: COMMITTED, ROLLBACK: ROLLED_BACK}
SUCCESS, NOT_FOUND, CONTRADICTED, FENCED = 0, 1, 3701, 3702

picks = st.integers(0, 10**6)
verdicts = st.sampled_from([COMMIT, COMMIT, ROLLBACK])
queue_ids = st.integers(0, 1)

ResponseCheck = Callable[[Response], None]


@dataclass
class Transaction:
    key: str
    group: str
    queue_id: int
    not_before_ms: int  # no check may be sent earlier
    state: str = OPEN
    positions: list[HalfPosition] = field(default_factory=list)  # reported by responses and checks
    batch: int | None = None  # of the writer
    attempt: str = ""  # of the batch
    checks: int = 0
    states_before_ticks: set[str] = field(default_factory=set)  # a power cut may restore them
    is_remembered: bool = True  # the broker recognises a repeated send

    @property
    def is_decided(self) -> bool:
        return self.state in (COMMITTED, ROLLED_BACK)


@dataclass
class Step:
    """The changes of one append. A power cut keeps all of them or none."""

    states: dict[str, str] = field(default_factory=dict)
    delivered: list[tuple[int, str]] = field(default_factory=list)  # queue id, key
    writer: tuple[int, int] | None = None


class Snapshot(NamedTuple):
    """What the broker must contain after a power cut that keeps certain steps."""

    states: dict[str, str]  # by key
    delivered: dict[int, list[str]]  # keys by queue id
    writer: tuple[int, int]  # fence, last batch

    def after(self, step: Step) -> Snapshot:
        delivered = copy_delivered(self.delivered)
        for queue_id, key in step.delivered:
            delivered[queue_id].append(key)
        return Snapshot({**self.states, **step.states}, delivered, step.writer or self.writer)


def copy_delivered(delivered: dict[int, list[str]]) -> dict[int, list[str]]:
    return {queue_id: list(keys) for queue_id, keys in delivered.items()}


class EscrowMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bench = EscrowBench(settings=SMALL, config=CONFIG, sync=True)
        self.transactions: dict[str, Transaction] = {}  # by key
        self.delivered: dict[int, list[str]] = {0: [], 1: []}  # keys by queue id
        self.writer = (0, -1)  # fence, last batch
        self.durable: Snapshot
        self.steps: list[Step] = []  # since `durable`
        # The responses to these requests are sent after the next flush.
        self.pending: list[tuple[FakeChannel, int, ResponseCheck | None]] = []
        self.pending_sends: list[tuple[FakeChannel, str]] = []
        self.channels: list[FakeChannel] = []
        self.latest_ms = self.bench.now_ms
        self.count = 0
        self.mark_durable()

    # --- the model -------------------------------------------------------------------------------

    def mark_durable(self) -> None:
        """Note that the current state of the model is durable."""
        states = {key: transaction.state for key, transaction in self.transactions.items()}
        self.durable = Snapshot(states, copy_delivered(self.delivered), self.writer)
        self.steps = []
        for transaction in self.transactions.values():
            transaction.states_before_ticks.clear()

    def decide_in_model(self, step: Step, transaction: Transaction, state: str) -> None:
        """Set the final state of a transaction as a part of a step."""
        transaction.state = step.states[transaction.key] = state
        if state == COMMITTED:
            self.delivered[transaction.queue_id].append(transaction.key)
            step.delivered.append((transaction.queue_id, transaction.key))

    def pick(self, number: int, *states: str) -> Transaction | None:
        """Return the transaction that a drawn number selects, among those with these states."""
        candidates = [
            transaction
            for transaction in self.transactions.values()
            if not states or transaction.state in states
        ]
        return candidates[number % len(candidates)] if candidates else None

    def find_half(self, transaction: Transaction) -> Half | None:
        return self.bench.coordinator.halves.find_by_key(
            transaction.group, "T", transaction.key.encode()
        )

    def open_position(self, transaction: Transaction) -> HalfPosition | None:
        half = self.find_half(transaction)
        return None if half is None else HalfPosition(half.queue_offset, half.log_offset)

    def newest_position(self, transaction: Transaction) -> HalfPosition | None:
        """Return the position of the open half, or else the newest that is still in the log."""
        position = self.open_position(transaction)
        if position is not None:
            return position
        stored_positions = [
            position for position in transaction.positions if self.is_in_log(transaction, position)
        ]
        return stored_positions[-1] if stored_positions else None

    def is_in_log(self, transaction: Transaction, position: HalfPosition) -> bool:
        store = self.bench.store
        log_offset = store.log_offset_of(names.HALF_TOPIC, 0, position.queue_offset)
        if log_offset is None or log_offset != position.log_offset or log_offset < store.begin:
            return False
        record = store.record_at(log_offset)
        return find_property(record.properties, b"UNIQ_KEY") == transaction.key.encode()

    def state_in_broker(self, transaction: Transaction) -> str | None:
        """Return the state of a half; None if it was never parked or has expired."""
        position = self.newest_position(transaction)
        return None if position is None else self.bench.state_in_memory(position)

    def expected_end_code(
        self, transaction: Transaction, position: HalfPosition, verdict: int
    ) -> int:
        """Return the response code that an end must get now."""
        if not transaction.is_decided:
            is_current = position == self.open_position(transaction)
            is_alias = position.queue_offset in self.bench.coordinator.aliases
            # The log and the aliases may have lost an older position.
            return SUCCESS if is_current or is_alias else NOT_FOUND
        stored_offset = self.bench.store.log_offset_of(names.HALF_TOPIC, 0, position.queue_offset)
        if stored_offset != position.log_offset or (
            not self.is_in_log(transaction, position)
            and self.bench.state_in_memory(position) != transaction.state
        ):
            return NOT_FOUND  # the half has expired, and perhaps its queue entry or its state too
        return SUCCESS if STATE_OF_VERDICT[verdict] == transaction.state else CONTRADICTED

    # --- requests to the broker ------------------------------------------------------------------

    def request(self, request: Any, code: int, check: ResponseCheck | None = None) -> None:
        """Send a request on a new channel and expect this response code, now or after the flush.

        A success must not be reported before the flush. `check` is called with the response.
        """
        channel = FakeChannel(f"client {len(self.pending)}")
        self.bench.turn(request, channel=channel)
        responses = channel.responses()
        if code == SUCCESS:
            if responses:
                is_durable = self.bench.store.flushed_offset == self.bench.store.end
                assert is_durable, "a success was reported before the flush"
        else:
            self.bench.turn()
            responses += channel.responses()
        assert [response.code for response in responses] in ([code], []), responses
        if not responses:
            self.pending.append((channel, code, check))

    @rule()
    def flush(self) -> None:
        for _ in range(3):  # a request that was deferred is handled in the next turn
            self.bench.flush()
        for channel, code, check in self.pending:
            [response] = channel.responses()
            assert response.code == code, response.remark
            if check is not None:
                check(response)
        for channel in {channel for channel, _ in self.pending_sends}:
            positions = [
                self.transactions[key].positions[0]
                for sender, key in self.pending_sends
                if sender is channel
            ]
            assert [position_of(response) for response in channel.responses()] == positions
        self.pending, self.pending_sends = [], []
        self.mark_durable()

    # --- producers -------------------------------------------------------------------------------

    @rule(
        queue_id=queue_ids,
        group=st.sampled_from(GROUPS),
        channel=picks,
        size=st.sampled_from([1, 300]),
    )
    def park(self, queue_id: int, group: str, channel: int, size: int) -> None:
        self.send(queue_id, group, channel, {"body": b"x" * size})

    @rule(queue_id=queue_ids, batch=st.integers(0, 3), attempt=st.sampled_from("ab"))
    def park_for_a_writer(self, queue_id: int, batch: int, attempt: str) -> None:
        properties = {
            "ESCROW_WRITER": "w",
            "ESCROW_BATCH": str(batch),
            "ESCROW_ATTEMPT": attempt,
            "ESCROW_FENCE": str(self.writer[0]),
        }
        transaction = self.send(queue_id, "p", 0, properties)
        transaction.batch, transaction.attempt = batch, attempt

    def send(
        self, queue_id: int, group: str, channel_number: int, changes: dict[str, Any]
    ) -> Transaction:
        self.count += 1
        due_ms = self.bench.now_ms + CONFIG.immunity_ms
        transaction = Transaction(f"k{self.count}", group, queue_id, due_ms)
        if self.channels:
            sender = self.channels[channel_number % len(self.channels)]
        else:
            sender = FakeChannel("closed after the send")
        body = transaction.key.encode() + b":" + changes.pop("body", b"")
        self.bench.turn(
            half_request(transaction.key, group=group, queue_id=queue_id, body=body, **changes),
            channel=sender,
        )
        assert sender.responses() == [], "the send was acknowledged before the flush"
        self.pending_sends.append((sender, transaction.key))
        if not self.channels:
            self.bench.disconnect(sender)
        position = self.open_position(transaction)
        assert position is not None
        transaction.positions.append(position)
        self.transactions[transaction.key] = transaction
        self.steps.append(Step({transaction.key: OPEN}))
        return transaction

    @rule(number=picks)
    def repeat_a_send(self, number: int) -> None:
        transaction = self.pick(number)
        if transaction is None or not transaction.is_remembered:
            return
        half_count = self.bench.store.max_offset(names.HALF_TOPIC, 0)
        positions = [self.open_position(transaction), *transaction.positions]

        def check(response: Response) -> None:
            assert position_of(response) in (self.open_position(transaction), *positions)

        request = half_request(
            transaction.key, group=transaction.group, queue_id=transaction.queue_id, body=b"again"
        )
        self.request(request, SUCCESS, check)
        assert self.bench.store.max_offset(names.HALF_TOPIC, 0) == half_count

    @rule(
        number=picks,
        verdict=verdicts,
        position_number=picks,
        one_way=st.booleans(),
        from_check=st.booleans(),
    )
    def end(
        self, number: int, verdict: int, position_number: int, one_way: bool, from_check: bool
    ) -> None:
        transaction = self.pick(number)
        if transaction is None:
            return
        position = transaction.positions[position_number % len(transaction.positions)]
        code = self.expected_end_code(transaction, position, verdict)
        if code == SUCCESS and not transaction.is_decided:
            step = Step()
            self.decide_in_model(step, transaction, STATE_OF_VERDICT[verdict])
            self.steps.append(step)
        request = end_request(
            position, verdict, group=transaction.group, one_way=one_way, check=from_check
        )
        if one_way:
            channel = FakeChannel("one way")
            self.bench.turn(request, channel=channel)
            self.bench.turn()
            assert channel.responses() == []
        else:
            self.request(request, code)

    @rule(number=picks, race_verdicts=st.lists(verdicts, min_size=2, max_size=4))
    def race(self, number: int, race_verdicts: list[int]) -> None:
        """Send several ends of one half in one turn: the first one decides."""
        transaction = self.pick(number, OPEN, STRANDED)
        position = None if transaction is None else self.open_position(transaction)
        if transaction is None or position is None:
            return
        channels = [FakeChannel(f"racer {verdict}") for verdict in race_verdicts]
        for channel, verdict in zip(channels, race_verdicts, strict=True):
            request = end_request(position, verdict, group=transaction.group)
            self.bench.broker.handle(channel, request, self.bench.now_ms)
        self.bench.turn()
        step = Step()
        self.decide_in_model(step, transaction, STATE_OF_VERDICT[race_verdicts[0]])
        self.steps.append(step)
        for channel, verdict in zip(channels, race_verdicts, strict=True):
            code = SUCCESS if verdict == race_verdicts[0] else CONTRADICTED
            self.pending.append((channel, code, None))

    @rule(
        number=picks,
        verdict=verdicts,
        wrong_field=st.sampled_from(["group", "log offset", "queue offset"]),
    )
    def end_with_a_wrong_field(self, number: int, verdict: int, wrong_field: str) -> None:
        transaction = self.pick(number, OPEN, STRANDED)
        position = None if transaction is None else self.open_position(transaction)
        if transaction is None or position is None:
            return
        group = transaction.group
        if wrong_field == "group":
            group = "another group"
        elif wrong_field == "log offset":
            position = position._replace(log_offset=position.log_offset + 1)
        else:
            next_offset = self.bench.store.max_offset(names.HALF_TOPIC, 0)
            position = position._replace(queue_offset=next_offset)
        self.request(end_request(position, verdict, group=group), NOT_FOUND)

    @rule(number=picks)
    def query_state(self, number: int) -> None:
        """Send an end with verdict UNKNOWN, which returns the state."""
        transaction = self.pick(number)
        position = None if transaction is None else self.newest_position(transaction)
        if transaction is None or position is None:
            return
        state = transaction.state

        def check(response: Response) -> None:
            assert response.ext_fields["state"] == state

        self.request(end_request(position, UNKNOWN, group=transaction.group), SUCCESS, check)

    @rule(numbers=st.lists(picks, min_size=1, max_size=4), verdict=verdicts)
    def end_many(self, numbers: list[int], verdict: int) -> None:
        picked = {t.key: t for t in map(self.pick, numbers) if t is not None}
        if not picked:
            return
        members = list(picked.values())
        group = members[0].group
        positions = [self.open_position(member) or member.positions[-1] for member in members]
        error_codes = {
            self.expected_end_code(member, position, verdict)
            for member, position in zip(members, positions, strict=True)
        } - {SUCCESS}
        # The broker reads the group of a decided half from the log, as long as the log has it.
        if any(
            member.group != group and (not member.is_decided or self.is_in_log(member, position))
            for member, position in zip(members, positions, strict=True)
        ):
            error_codes.add(NOT_FOUND)
        request = end_many_request([*positions], verdict, group=group)
        if error_codes:
            channel = FakeChannel("ends many")
            self.bench.turn(request, channel=channel)
            assert channel.response().code in error_codes
            return
        step = Step()
        for member in members:
            if not member.is_decided:
                self.decide_in_model(step, member, STATE_OF_VERDICT[verdict])
        self.request(request, SUCCESS)
        self.steps.append(step)

    # --- a writer --------------------------------------------------------------------------------

    @rule()
    def register(self) -> None:
        fence, batch = self.writer[0] + 1, self.writer[1]

        def check(response: Response) -> None:
            state = writer_state(response)
            assert (state.fence, state.batch) == (fence, batch)

        self.request(register_writer_request(), SUCCESS, check)
        self.writer = fence, batch
        self.steps.append(Step(writer=self.writer))

    @rule(
        batch=st.integers(0, 3),
        fence_lag=st.sampled_from([0, 0, 0, 1]),
        winners=st.lists(st.sampled_from("ab"), max_size=2, unique=True),
        missing_halves=st.sampled_from([0, 0, 0, 1]),
    )
    def decide_batch(
        self, batch: int, fence_lag: int, winners: list[str], missing_halves: int
    ) -> None:
        fence, last_batch = self.writer
        open_halves = [
            transaction
            for transaction in self.transactions.values()
            if transaction.batch is not None and not transaction.is_decided
        ]
        winning_halves = {
            attempt: [
                half for half in open_halves if (half.batch, half.attempt) == (batch, attempt)
            ]
            for attempt in winners
        }
        counts = [
            (attempt, len(halves) + missing_halves) for attempt, halves in winning_halves.items()
        ]
        request = decide_batch_request(batch, fence - fence_lag, counts)
        if fence_lag or batch < last_batch:
            self.request(request, FENCED)
        elif batch == last_batch:
            self.request(request, SUCCESS)
        elif missing_halves and winners:
            self.request(request, CONTRADICTED)
        else:
            step = Step()
            committed = [
                half for attempt in winners for half in self.in_log_order(winning_halves[attempt])
            ]
            for half in open_halves:
                if half.batch is not None and half.batch <= batch and half not in committed:
                    self.decide_in_model(step, half, ROLLED_BACK)
            for half in committed:
                self.decide_in_model(step, half, COMMITTED)
            self.request(request, SUCCESS)
            step.writer = self.writer = fence, batch
            self.steps.append(step)

    def in_log_order(self, halves: list[Transaction]) -> list[Transaction]:
        return sorted(halves, key=lambda half: self.open_position(half) or (0, 0))

    # --- channels, time and checks ---------------------------------------------------------------

    @rule(groups=st.lists(st.sampled_from(GROUPS), unique=True))
    def connect(self, groups: list[str]) -> None:
        channel = FakeChannel(f"channel {self.count}")
        self.count += 1
        self.channels.append(channel)
        self.bench.turn(heartbeat_request(channel, *groups), channel=channel)
        assert [response.code for response in channel.responses()] == [SUCCESS]
        self.receive_checks()

    @precondition(lambda self: self.channels)
    @rule(number=picks)
    def disconnect(self, number: int) -> None:
        self.bench.disconnect(self.channels.pop(number % len(self.channels)))

    @rule(by_ms=st.sampled_from([0, 100, 1_000, 6_000, 30_000, 3_600_000, -3_600_000]))
    def tick(self, by_ms: int) -> None:
        self.bench.tick(by_ms)
        self.latest_ms = max(self.latest_ms, self.bench.now_ms)
        self.receive_checks()
        self.apply_tick()

    def receive_checks(self) -> list[str]:
        """Verify the checks that the broker has sent. Return the keys of the checked halves."""
        checked_keys = []
        for channel in self.channels:
            for key, position in sent_checks(channel):
                transaction = self.transactions[key]
                assert transaction.state == OPEN, "checked although it is decided"
                assert transaction.batch is None, "checked although its writer decides it"
                assert position == self.open_position(transaction)
                assert self.bench.now_ms >= transaction.not_before_ms, "checked before it is due"
                transaction.not_before_ms = self.bench.now_ms + CONFIG.check_interval_ms
                transaction.checks += 1
                assert transaction.checks <= CONFIG.checks_max
                transaction.positions.append(position)
                checked_keys.append(key)
        return checked_keys

    def apply_tick(self) -> None:
        """Take over what a tick has changed: stranded halves and rolled back halves of a writer."""
        for transaction in self.transactions.values():
            if transaction.state != OPEN:
                continue
            half = self.find_half(transaction)
            if half is None:
                assert transaction.batch is not None, "rolled back without a request or a writer"
                fence, batch = self.writer
                assert transaction.batch <= batch or fence > 0
                transaction.states_before_ticks.add(OPEN)
                transaction.state = ROLLED_BACK
            elif half.is_stranded:
                assert transaction.checks >= CONFIG.checks_max, "stranded too early"
                transaction.states_before_ticks.add(OPEN)
                transaction.state = STRANDED

    @rule()
    def check_every_open_half(self) -> None:
        """Advance the time: every open half is checked if a producer of its group is connected."""
        self.connect(list(GROUPS))
        self.bench.now_ms = self.latest_ms + CONFIG.check_interval_ms + 2_000
        open_transactions = [
            transaction
            for transaction in self.transactions.values()
            if transaction.state == OPEN and transaction.batch is None
        ]
        checked_keys: set[str] = set()
        for _ in range(3):
            self.bench.tick(1_000)
            checked_keys.update(self.receive_checks())
        self.latest_ms = self.bench.now_ms
        self.apply_tick()
        for transaction in open_transactions:
            was_checked = transaction.key in checked_keys
            assert was_checked or transaction.state == STRANDED, "never checked"

    # --- stops and crashes -----------------------------------------------------------------------

    @rule(with_snapshot=st.booleans())
    def kill(self, with_snapshot: bool) -> None:
        self.bench = self.bench.killed(with_snapshot=with_snapshot)
        self.apply_start()

    @rule()
    def stop(self) -> None:
        self.flush()
        self.bench = self.bench.restarted()
        self.apply_start()

    @rule()
    def save(self) -> None:
        self.bench.broker.save()
        self.bench.broker.transactions.save(force=True)

    @rule(seed=picks, survival=st.sampled_from(["none", "mixed", "mixed", "all"]))
    def cut_power(self, seed: int, survival: Any) -> None:
        self.bench = self.bench.power_cut(survival, seed)
        self.apply_power_cut()

    @rule(fraction=st.floats(0, 1))
    def cut_power_during_a_write(self, fraction: float) -> None:
        """Cut the power so that a part of the log that was not durable survives."""
        begin, end = self.bench.store.flushed_offset, self.bench.store.end
        self.bench = self.bench.truncated(begin + int((end - begin) * fraction))
        self.apply_power_cut()

    def apply_power_cut(self) -> None:
        """Find out how many steps have survived, and set the model back to them."""
        snapshots = [self.durable]
        for step in self.steps:
            snapshots.append(snapshots[-1].after(step))
        matching = [snapshot for snapshot in snapshots if self.matches(snapshot)]
        assert matching, "an acknowledged change is lost, or a step has survived in part"
        survived = matching[-1]
        self.delivered, self.writer = copy_delivered(survived.delivered), survived.writer
        self.transactions = {
            key: transaction
            for key, transaction in self.transactions.items()
            if key in survived.states
        }
        for key, transaction in self.transactions.items():
            transaction.state = self.state_in_broker(transaction) or survived.states[key]
        self.apply_start()

    def matches(self, snapshot: Snapshot) -> bool:
        writer = self.bench.coordinator.writers.find("w")
        if ((0, -1) if writer is None else (writer.fence, writer.batch)) != snapshot.writer:
            return False
        for key, transaction in self.transactions.items():
            state = snapshot.states.get(key)
            allowed = {state} | transaction.states_before_ticks
            if transaction.state == STRANDED and state == OPEN:
                allowed.add(STRANDED)
            if (
                transaction.batch is not None
                and transaction.states_before_ticks
                and transaction.state == ROLLED_BACK
            ):
                allowed.add(ROLLED_BACK)
            actual = self.state_in_broker(transaction)
            # The log may have lost a half only if its decision was durable before.
            has_expired = actual is None and self.durable.states.get(key) in (
                COMMITTED,
                ROLLED_BACK,
            )
            if actual not in allowed and not has_expired:
                return False
        return all(
            self.delivered_keys(queue_id) == self.unexpired_keys(queue_id, keys)
            for queue_id, keys in snapshot.delivered.items()
        )

    def apply_start(self) -> None:
        """Adapt the model to a broker that has just started."""
        self.channels, self.pending, self.pending_sends = [], [], []
        for transaction in self.transactions.values():
            # A start remembers decided halves too, if the log still has them.
            transaction.is_remembered = self.state_in_broker(transaction) is not None
            # The last checks may be lost, so a half may be checked at once and once more than
            # the limit.
            transaction.not_before_ms = 0
            half = self.find_half(transaction)
            if half is not None:
                transaction.checks = min(transaction.checks, half.checks)
                transaction.positions.append(HalfPosition(half.queue_offset, half.log_offset))
        self.mark_durable()

    @rule()
    def expire(self) -> None:
        self.bench.turn(*(send_request("filler", b"x" * 300) for _ in range(8)))
        self.bench.channel.responses()
        self.flush()
        self.bench.channel.responses()
        self.bench.remove_log_file()
        for transaction in self.transactions.values():
            position = self.open_position(transaction)
            if position is not None and position not in transaction.positions:
                transaction.positions.append(position)  # the response to a repeated send has it
        self.mark_durable()

    # --- invariants ------------------------------------------------------------------------------

    def delivered_keys(self, queue_id: int) -> list[str]:
        """Return the keys of the messages that consumers of a queue get."""
        return [body.partition(b":")[0].decode() for body in self.bench.bodies("T", queue_id)]

    def unexpired_keys(self, queue_id: int, keys: list[str]) -> list[str]:
        return keys[self.bench.store.min_offset("T", queue_id) :]

    @invariant()
    def committed_messages_are_delivered_once_and_nothing_else_is(self) -> None:
        for queue_id, keys in self.delivered.items():
            assert self.delivered_keys(queue_id) == self.unexpired_keys(queue_id, keys)
            assert len(set(keys)) == len(keys)

    @invariant()
    def transaction_states_equal_the_model(self) -> None:
        for transaction in self.transactions.values():
            state = self.state_in_broker(transaction)
            assert state == transaction.state or (state is None and transaction.is_decided)
        halves = self.bench.coordinator.halves
        open_keys = sorted(half.key.decode() for half in halves)
        assert open_keys == sorted(
            key for key, transaction in self.transactions.items() if not transaction.is_decided
        )
        assert halves.total.count == len(open_keys)
        assert halves.total.size == sum(half.size for half in halves)

    @invariant()
    def rocketmq_would_find_the_open_halves(self) -> None:
        """Compare the half table with what RocketMQ reads: halves and ops from its cursors on."""
        half_cursor, op_cursor = self.bench.cursors()
        halves = self.bench.coordinator.halves
        stranded_offsets = {half.queue_offset for half in halves if half.is_stranded}
        open_offsets = {half.queue_offset for half in halves if not half.is_stranded}
        assert half_cursor <= min(open_offsets, default=half_cursor)
        decided_offsets = {
            int(bytes(record.body))
            for record in stored_records(self.bench.store, names.OP_TOPIC)
            if record.queue_offset >= op_cursor
        }
        undecided_offsets = {
            record.queue_offset
            for record in stored_records(self.bench.store, names.HALF_TOPIC)
            if record.queue_offset >= half_cursor
        } - decided_offsets
        assert undecided_offsets - stranded_offsets == open_offsets

    @invariant()
    def open_halves_are_in_the_log(self) -> None:
        for half in self.bench.coordinator.halves:
            assert half.log_offset >= self.bench.store.begin

    def teardown(self) -> None:
        self.bench.store.close()
        assert_clean(self.bench.disk, SMALL)


EscrowMachine.TestCase.settings = settings(stateful_step_count=40)
# Hypothesis may shrink a failing run for five minutes; a shorter timeout would hide the failure.
TestEscrow = pytest.mark.timeout(900)(pytest.mark.slow(EscrowMachine.TestCase))


def test_the_group_of_a_half_is_unknown_once_the_log_has_lost_it() -> None:
    machine = EscrowMachine()
    machine.park(queue_id=0, group="p", channel=0, size=1)
    machine.end_many([0], COMMIT)
    for _ in range(4):
        machine.expire()
    machine.park(queue_id=0, group="q", channel=0, size=1)
    first, second = machine.transactions.values()
    assert not machine.is_in_log(first, first.positions[-1])
    machine.end_many([1, 0], COMMIT)  # in the name of the second one's group
    machine.flush()
    assert machine.state_in_broker(second) == COMMITTED
    machine.committed_messages_are_delivered_once_and_nothing_else_is()
    machine.teardown()
