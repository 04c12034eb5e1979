"""The coordinator against a small model: any order of sends, ENDs, checks, decisions and crashes.

The model records the responses. What a response has reported holds for ever. Of the steps without
a response a power cut leaves the first few, and the model finds out how many.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from escrowmq.config import StoreConfig
from escrowmq.message import names
from escrowmq.message.properties import find_property
from tests.interop.remoting import Answer
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
STATE_OF = {COMMIT: COMMITTED, ROLLBACK: ROLLED_BACK}
NO_SUCH, CONTRADICTED, FENCED = 1, 3701, 3702

picks = st.integers(0, 10**6)
verdicts = st.sampled_from([COMMIT, COMMIT, ROLLBACK])
queue_ids = st.integers(0, 1)


@dataclass
class Transaction:
    key: str
    group: str
    queue_id: int
    not_before_ms: int  # no check may be sent before
    state: str = OPEN
    positions: list[HalfPosition] = field(default_factory=list)  # that a response has reported
    batch: int | None = None  # of the writer, followed by its attempt
    attempt: str = ""
    checks: int = 0
    may_also_be: set[str] = field(default_factory=set)  # after a power cut: a tick has changed it
    is_remembered: bool = True  # so that a repeated send is recognised

    @property
    def is_decided(self) -> bool:
        return self.state in (COMMITTED, ROLLED_BACK)


@dataclass
class Step:
    """What one append changes, if it survives."""

    states: dict[str, str] = field(default_factory=dict)
    delivered: list[tuple[int, str]] = field(default_factory=list)
    writer: tuple[int, int] | None = None


class EscrowMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.bench = EscrowBench(settings=SMALL, config=CONFIG, sync=True)
        self.all: dict[str, Transaction] = {}
        self.delivered: dict[int, list[str]] = {0: [], 1: []}
        self.writer = (0, -1)  # fence, last batch
        self.steps: list[Step] = []  # that are not durable yet
        self.before: tuple[dict[str, str], dict[int, list[str]], tuple[int, int]]
        self.expected: list[tuple[FakeChannel, int, Any]] = []  # responses that come with the flush
        self.parked: list[tuple[FakeChannel, str]] = []  # likewise
        self.channels: list[FakeChannel] = []
        self.latest_ms = self.bench.now_ms
        self.count = 0
        self.now_durable()

    # --- the model -------------------------------------------------------------------------------

    def now_durable(self) -> None:
        states = {key: one.state for key, one in self.all.items()}
        self.before = states, {at: list(keys) for at, keys in self.delivered.items()}, self.writer
        self.steps = []
        for one in self.all.values():
            one.may_also_be.clear()

    def settle(self, step: Step, one: Transaction, state: str) -> None:
        one.state = step.states[one.key] = state
        if state == COMMITTED:
            self.delivered[one.queue_id].append(one.key)
            step.delivered.append((one.queue_id, one.key))

    def pick(self, number: int, *states: str) -> Transaction | None:
        some = [one for one in self.all.values() if not states or one.state in states]
        return some[number % len(some)] if some else None

    def living(self, one: Transaction) -> HalfPosition | None:
        half = self.bench.coordinator.halves.find_by_key(one.key.encode(), one.group)
        return None if half is None else HalfPosition(half.queue_offset, half.log_offset)

    def is_in_log(self, one: Transaction, position: HalfPosition) -> bool:
        at = self.bench.store.log_offset_of(names.HALF_TOPIC, 0, position.queue_offset)
        if at is None or at != position.log_offset or at < self.bench.store.begin:
            return False
        record = self.bench.store.record_at(at)
        return find_property(record.properties, b"UNIQ_KEY") == one.key.encode()

    def code_of_end(self, one: Transaction, position: HalfPosition, verdict: int) -> int:
        """Return the response code that an END must get now."""
        if not one.is_decided:
            leads = (
                position == self.living(one)
                or position.queue_offset in self.bench.coordinator.aliases
            )
            return 0 if leads else NO_SUCH  # the log, and all memory of this position, may be gone
        if not self.is_in_log(one, position) and self.bench.state_in_memory(position) != one.state:
            return NO_SUCH  # the half has expired, and perhaps its state too
        return 0 if STATE_OF[verdict] == one.state else CONTRADICTED

    # --- requests to the broker ------------------------------------------------------------------

    def asks(self, request: Any, code: int, check: Any = None) -> None:
        """Send a request on a channel of its own. A success must not come before the flush."""
        channel = FakeChannel(f"asker {len(self.expected)}")
        self.bench.turn(request, channel=channel)
        answers = channel.responses()
        if code == 0:
            if answers:
                assert self.bench.store.flushed_offset == self.bench.store.end, (
                    "not durable, and told"
                )
                assert [answer.code for answer in answers] == [code]
            self.expected += [] if answers else [(channel, code, check)]
        else:
            self.bench.turn()
            answers += channel.responses()
            assert [answer.code for answer in answers] in ([code], []), answers
            if not answers:
                self.expected.append((channel, code, check))

    @rule()
    def flush(self) -> None:
        for _ in range(3):  # a request that was deferred is handled in the next turn
            self.bench.flush()
        for channel, code, check in self.expected:
            [answer] = channel.responses()
            assert answer.code == code, answer.remark
            if check is not None:
                check(answer)
        for channel in {channel for channel, _ in self.parked}:
            positions = [
                self.all[key].positions[0] for sender, key in self.parked if sender is channel
            ]
            assert [position_of(answer) for answer in channel.responses()] == positions
        self.expected, self.parked = [], []
        self.now_durable()

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
        properties = {"ESCROW_WRITER": "w", "ESCROW_BATCH": str(batch), "ESCROW_ATTEMPT": attempt}
        one = self.send(queue_id, "p", 0, properties | {"ESCROW_FENCE": str(self.writer[0])})
        one.batch, one.attempt = batch, attempt

    def send(self, queue_id: int, group: str, channel: int, more: dict[str, Any]) -> Transaction:
        self.count += 1
        due_ms = self.bench.now_ms + CONFIG.immunity_ms
        one = Transaction(f"k{self.count}", group, queue_id, due_ms)
        passing = FakeChannel("sends and goes")
        sender = self.channels[channel % len(self.channels)] if self.channels else passing
        body = one.key.encode() + b":" + more.pop("body", b"")
        self.bench.turn(
            half_request(one.key, group=group, queue_id=queue_id, body=body, **more), channel=sender
        )
        assert sender.responses() == [], "told before it is durable"
        self.parked.append((sender, one.key))
        if sender is passing:
            self.bench.disconnect(sender)
        position = self.living(one)
        assert position is not None
        one.positions.append(position)
        self.all[one.key] = one
        self.steps.append(Step({one.key: OPEN}))
        return one

    @rule(number=picks)
    def repeat_a_send(self, number: int) -> None:
        one = self.pick(number)
        if one is None or not one.is_remembered:
            return
        halves = self.bench.store.max_offset(names.HALF_TOPIC, 0)
        living, known = self.living(one), list(one.positions)

        def check(answer: Answer) -> None:
            assert position_of(answer) in (living, self.living(one), *known)

        request = half_request(one.key, group=one.group, queue_id=one.queue_id, body=b"again")
        self.asks(request, 0, check)
        assert self.bench.store.max_offset(names.HALF_TOPIC, 0) == halves

    @rule(
        number=picks, verdict=verdicts, position=picks, one_way=st.booleans(), check=st.booleans()
    )
    def end(self, number: int, verdict: int, position: int, one_way: bool, check: bool) -> None:
        one = self.pick(number)
        if one is None:
            return
        at = one.positions[position % len(one.positions)]
        code = self.code_of_end(one, at, verdict)
        if code == 0 and not one.is_decided:
            step = Step()
            self.settle(step, one, STATE_OF[verdict])
            self.steps.append(step)
        request = end_request(at, verdict, group=one.group, one_way=one_way, check=check)
        if one_way:
            channel = FakeChannel("one way")
            self.bench.turn(request, channel=channel)
            self.bench.turn()
            assert channel.responses() == []
        else:
            self.asks(request, code)

    @rule(number=picks, tried=st.lists(verdicts, min_size=2, max_size=4))
    def race(self, number: int, tried: list[int]) -> None:
        """Send several ENDs in one turn: the first one counts, for the others too."""
        one = self.pick(number, OPEN, STRANDED)
        at = None if one is None else self.living(one)
        if one is None or at is None:
            return
        channels = [FakeChannel(f"racer {verdict}") for verdict in tried]
        for channel, verdict in zip(channels, tried, strict=True):
            request = end_request(at, verdict, group=one.group)
            self.bench.broker.handle(channel, request, self.bench.now_ms)
        self.bench.turn()
        step = Step()
        self.settle(step, one, STATE_OF[tried[0]])
        self.steps.append(step)
        for channel, verdict in zip(channels, tried, strict=True):
            self.expected.append((channel, 0 if verdict == tried[0] else CONTRADICTED, None))

    @rule(
        number=picks, verdict=verdicts, wrong=st.sampled_from(["group", "log offset", "position"])
    )
    def end_wrongly(self, number: int, verdict: int, wrong: str) -> None:
        one = self.pick(number, OPEN, STRANDED)
        at = None if one is None else self.living(one)
        if one is None or at is None:
            return
        group = one.group
        if wrong == "group":
            group = "somebody else"
        elif wrong == "log offset":
            at = at._replace(log_offset=at.log_offset + 1)
        else:
            at = at._replace(queue_offset=self.bench.store.max_offset(names.HALF_TOPIC, 0))
        self.asks(end_request(at, verdict, group=group), NO_SUCH)

    @rule(number=picks)
    def ask_for_the_state(self, number: int) -> None:
        one = self.pick(number)
        if one is None:
            return
        at, state = self.living(one), one.state
        if at is None:
            kept = [position for position in one.positions if self.is_in_log(one, position)]
            if not kept:
                return
            at = kept[-1]

        def check(answer: Answer) -> None:
            assert answer.ext_fields["state"] == state

        self.asks(end_request(at, UNKNOWN, group=one.group), 0, check)

    @rule(chosen=st.lists(picks, min_size=1, max_size=4), verdict=verdicts)
    def end_many(self, chosen: list[int], verdict: int) -> None:
        some = [self.pick(number) for number in chosen]
        group = list(dict.fromkeys(one.key for one in some if one is not None))
        if not group:
            return
        members = [self.all[key] for key in group]
        positions = [self.living(one) or one.positions[-1] for one in members]
        codes = {
            self.code_of_end(one, at, verdict) for one, at in zip(members, positions, strict=True)
        }
        strangers = [one for one in members if one.group != members[0].group and not one.is_decided]
        if strangers:
            codes.add(NO_SUCH)
        codes.discard(0)
        request = end_many_request([*positions], verdict, group=members[0].group)
        if codes:
            channel = FakeChannel("group")
            self.bench.turn(request, channel=channel)
            assert channel.response().code in codes
            return
        step = Step()
        for one in members:
            if not one.is_decided:
                self.settle(step, one, STATE_OF[verdict])
        self.asks(request, 0)
        self.steps.append(step)

    # --- a writer --------------------------------------------------------------------------------

    @rule()
    def register(self) -> None:
        fence, batch = self.writer[0] + 1, self.writer[1]

        def check(answer: Answer) -> None:
            assert (writer_state(answer).fence, writer_state(answer).batch) == (fence, batch)

        self.asks(register_writer_request(), 0, check)
        self.writer = fence, batch
        self.steps.append(Step(writer=self.writer))

    @rule(
        batch=st.integers(0, 3),
        behind=st.sampled_from([0, 0, 0, 1]),
        winners=st.lists(st.sampled_from("ab"), max_size=2, unique=True),
        missing=st.sampled_from([0, 0, 0, 1]),
    )
    def decide(self, batch: int, behind: int, winners: list[str], missing: int) -> None:
        fence, decided = self.writer
        of_writer = [
            one for one in self.all.values() if one.batch is not None and not one.is_decided
        ]
        won = {
            name: [one for one in of_writer if (one.batch, one.attempt) == (batch, name)]
            for name in winners
        }
        named = [(name, len(halves) + missing) for name, halves in won.items()]
        request = decide_batch_request(batch, fence - behind, named)
        if behind or batch < decided:
            self.asks(request, FENCED)
        elif batch == decided:
            self.asks(request, 0)
        elif missing and winners:
            self.asks(request, CONTRADICTED)
        else:
            step = Step()
            commits = [one for name in winners for one in self.in_order(won[name])]
            for one in of_writer:
                if one.batch is not None and one.batch <= batch and one not in commits:
                    self.settle(step, one, ROLLED_BACK)
            for one in commits:
                self.settle(step, one, COMMITTED)
            self.asks(request, 0)
            step.writer = self.writer = fence, batch
            self.steps.append(step)

    def in_order(self, some: list[Transaction]) -> list[Transaction]:
        return sorted(some, key=lambda one: self.living(one) or (0, 0))

    # --- channels, time and checks ---------------------------------------------------------------

    @rule(groups=st.lists(st.sampled_from(GROUPS), unique=True))
    def connect(self, groups: list[str]) -> None:
        channel = FakeChannel(f"channel {self.count}")
        self.count += 1
        self.channels.append(channel)
        self.bench.turn(heartbeat_request(channel, *groups), channel=channel)
        assert [answer.code for answer in channel.responses()] == [0]
        self.see_questions()

    @precondition(lambda self: self.channels)
    @rule(number=picks)
    def disconnect(self, number: int) -> None:
        self.bench.disconnect(self.channels.pop(number % len(self.channels)))

    @rule(by_ms=st.sampled_from([0, 100, 1_000, 6_000, 30_000, 3_600_000, -3_600_000]))
    def tick(self, by_ms: int) -> None:
        self.bench.tick(by_ms)
        self.latest_ms = max(self.latest_ms, self.bench.now_ms)
        self.see_questions()
        self.see_what_a_tick_decides()

    def see_questions(self) -> list[str]:
        found = []
        for channel in self.channels:
            for key, position in sent_checks(channel):
                one = self.all[key]
                assert one.state == OPEN, "asked about what is decided"
                assert one.batch is None, "asked about what its writer decides"
                assert position == self.living(one)
                assert self.bench.now_ms >= one.not_before_ms, "asked before it is due"
                one.not_before_ms = self.bench.now_ms + CONFIG.check_interval_ms
                one.checks += 1
                assert one.checks <= CONFIG.checks_max
                one.positions.append(position)
                found.append(key)
        return found

    def see_what_a_tick_decides(self) -> None:
        for one in self.all.values():
            if one.state == OPEN:
                half = self.bench.coordinator.halves.find_by_key(one.key.encode(), one.group)
                if half is None:
                    assert one.batch is not None, "decided by nobody"
                    fence, batch = self.writer
                    assert one.batch <= batch or fence > 0
                    one.may_also_be.add(one.state)
                    one.state = ROLLED_BACK
                elif half.is_stranded:
                    assert one.checks >= CONFIG.checks_max, "given up too early"
                    one.may_also_be.add(one.state)
                    one.state = STRANDED

    @rule()
    def everybody_is_asked_in_the_end(self) -> None:
        """Every open half is checked in the end, if a producer is connected."""
        self.connect(list(GROUPS))
        self.bench.now_ms = self.latest_ms + CONFIG.check_interval_ms + 2_000
        open_ones = [one for one in self.all.values() if one.state == OPEN and one.batch is None]
        asked: set[str] = set()
        for _ in range(3):
            self.bench.tick(1_000)
            asked.update(self.see_questions())
        self.latest_ms = self.bench.now_ms
        self.see_what_a_tick_decides()
        for one in open_ones:
            assert one.key in asked or one.state == STRANDED, "forgotten"

    # --- starts ----------------------------------------------------------------------------------

    @rule(with_snapshot=st.booleans())
    def kill(self, with_snapshot: bool) -> None:
        self.bench = self.bench.killed(with_snapshot=with_snapshot)
        self.started()

    @rule()
    def stop(self) -> None:
        self.flush()
        self.bench = self.bench.restarted()
        self.started()

    @rule()
    def save(self) -> None:
        self.bench.broker.save()
        self.bench.broker.transactions.save(force=True)

    @rule(seed=picks, survival=st.sampled_from(["none", "mixed", "mixed", "all"]))
    def cut_the_power(self, seed: int, survival: Any) -> None:
        self.bench = self.bench.power_cut(survival, seed)
        self.see_what_is_left()

    @rule(at=st.floats(0, 1))
    def cut_the_power_while_it_writes(self, at: float) -> None:
        """Cut the power: the log that is not durable survives up to some byte."""
        begin, end = self.bench.store.flushed_offset, self.bench.store.end
        self.bench = self.bench.truncated(begin + int((end - begin) * at))
        self.see_what_is_left()

    def see_what_is_left(self) -> None:
        states, delivered, writer = self.before
        candidates = [(dict(states), {at: list(k) for at, k in delivered.items()}, writer)]
        for step in self.steps:
            states = {**states, **step.states}
            delivered = {at: list(keys) for at, keys in delivered.items()}
            for queue_id, key in step.delivered:
                delivered[queue_id].append(key)
            writer = step.writer or writer
            candidates.append((states, delivered, writer))
        left = [candidate for candidate in candidates if self.is_so(*candidate)]
        assert left, "what was answered is gone, or a part of a step is left"
        states, self.delivered, self.writer = left[-1]
        self.all = {key: one for key, one in self.all.items() if key in states}
        for key, one in self.all.items():
            one.state = self.seen(one) or states[key]
        self.started()

    def is_so(
        self, states: dict[str, str], delivered: dict[int, list[str]], writer: tuple[int, int]
    ) -> bool:
        found = self.bench.coordinator.writers.find("w")
        if ((0, -1) if found is None else (found.fence, found.batch)) != writer:
            return False
        for key, one in self.all.items():
            seen = self.seen(one)
            allowed = {states.get(key)} | one.may_also_be
            if one.state == STRANDED and states.get(key) == OPEN:
                allowed |= {STRANDED}
            if one.batch is not None and one.may_also_be and one.state == ROLLED_BACK:
                allowed |= {ROLLED_BACK}
            # The log may have lost a half only if it was decided, and known to be, before.
            is_forgotten = seen is None and self.before[0].get(key) in (COMMITTED, ROLLED_BACK)
            if seen not in allowed and not is_forgotten:
                return False
        return all(self.bodies(at) == self.bodies_wanted(at, delivered[at]) for at in delivered)

    def seen(self, one: Transaction) -> str | None:
        """Return the state of a half; None if it was never parked or has expired."""
        position = self.living(one)
        if position is None:
            kept = [position for position in one.positions if self.is_in_log(one, position)]
            position = kept[-1] if kept else None
        return None if position is None else self.bench.state_in_memory(position)

    def started(self) -> None:
        self.channels, self.expected, self.parked = [], [], []
        for one in self.all.values():
            one.is_remembered = (
                self.seen(one) is not None
            )  # decided halves too, if the log has them
            # The last checks may be lost: it may be checked again, once more than the limit.
            one.not_before_ms = 0
            half = self.bench.coordinator.halves.find_by_key(one.key.encode(), one.group)
            if half is not None:
                one.checks = min(one.checks, half.checks)
                one.positions.append(HalfPosition(half.queue_offset, half.log_offset))
        self.now_durable()

    @rule()
    def expire(self) -> None:
        self.bench.turn(*(send_request("filler", b"x" * 300) for _ in range(8)))
        self.bench.channel.responses()
        self.flush()
        self.bench.channel.responses()
        self.bench.remove_log_file()
        for one in self.all.values():
            position = self.living(one)
            if position is not None and position not in one.positions:
                one.positions.append(position)  # a repeated send gets this position
        self.now_durable()

    # --- what always holds -----------------------------------------------------------------------

    def bodies(self, queue_id: int) -> list[str]:
        return [body.partition(b":")[0].decode() for body in self.bench.bodies("T", queue_id)]

    def bodies_wanted(self, queue_id: int, keys: list[str]) -> list[str]:
        return keys[self.bench.store.min_offset("T", queue_id) :]

    @invariant()
    def what_is_committed_is_there_once_and_nothing_else(self) -> None:
        for queue_id, keys in self.delivered.items():
            assert self.bodies(queue_id) == self.bodies_wanted(queue_id, keys)
            assert len(set(keys)) == len(keys)

    @invariant()
    def every_transaction_is_as_it_should_be(self) -> None:
        for one in self.all.values():
            seen = self.seen(one)
            assert seen == one.state or (seen is None and one.is_decided)
        open_halves = sorted(half.key.decode() for half in self.bench.coordinator.halves)
        assert open_halves == sorted(key for key, one in self.all.items() if not one.is_decided)
        total = self.bench.coordinator.halves.total
        assert total.count == len(open_halves)
        assert total.size == sum(half.size for half in self.bench.coordinator.halves)

    @invariant()
    def rocketmq_would_find_the_open_ones(self) -> None:
        half_cursor, op_cursor = self.bench.cursors()
        open_places = {
            half.queue_offset for half in self.bench.coordinator.halves if not half.is_stranded
        }
        assert half_cursor <= min(open_places, default=half_cursor)
        store, done = self.bench.store, set()
        for record in stored_records(store, names.OP_TOPIC):
            if record.queue_offset >= op_cursor:
                done.add(int(bytes(record.body)))
        halves = {record.queue_offset for record in stored_records(store, names.HALF_TOPIC)}
        left = {at for at in halves if at >= half_cursor} - done
        stranded = {half.queue_offset for half in self.bench.coordinator.halves if half.is_stranded}
        assert left - stranded == open_places

    @invariant()
    def the_log_is_kept_for_what_is_open(self) -> None:
        for half in self.bench.coordinator.halves:
            assert half.log_offset >= self.bench.store.begin

    def teardown(self) -> None:
        self.bench.store.close()
        assert_clean(self.bench.disk, SMALL)


EscrowMachine.TestCase.settings = settings(stateful_step_count=40)
TestEscrow = pytest.mark.slow(EscrowMachine.TestCase)
