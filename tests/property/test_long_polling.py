"""Held pulls against a list: every pull is released once, and for the right reason."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from escrowmq.consume.long_polling import HeldPull, LongPolls
from escrowmq.consume.subscription import MessageFilter
from escrowmq.message.record import QueueOffset
from tests.support.fake_peers import FakePeer
from tests.support.leftovers import leftovers

WAITING_MAX = 8
PER_CHANNEL_MAX = 3
PATIENCE_MS = 1_000
WOKEN_AT_ONCE = 100  # enough for those that have left to be cleared out

queue_ids = st.integers(0, 2)
CHANNELS = [FakePeer(name) for name in "abcd"]
channels = st.sampled_from(CHANNELS)
code_lists = st.lists(st.integers(0, 3), min_size=1, max_size=4)

Pull = HeldPull[int]


class WaitingMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.waiting = LongPolls[int](pulls_max=WAITING_MAX, per_channel_max=PER_CHANNEL_MAX)
        self.model: list[tuple[Pull, frozenset[int] | None]] = []
        self.max_offsets = [0, 0, 0]
        self.now_ms = 0
        self.number = 0

    def leave(self, left: list[Pull], expected: list[Pull]) -> None:
        assert left == expected
        self.model = [entry for entry in self.model if entry[0] not in left]

    @rule(
        queue_id=queue_ids,
        channel=channels,
        ahead=st.integers(0, 2),
        patience_ms=st.integers(0, 50),
        wanted=st.none() | st.frozensets(st.integers(0, 3)),
    )
    def hold(
        self,
        queue_id: int,
        channel: FakePeer,
        ahead: int,
        patience_ms: int,
        wanted: frozenset[int] | None,
    ) -> None:
        self.number += 1
        pull = Pull(
            topic="t",
            queue_id=queue_id,
            queue_offset=QueueOffset(self.max_offsets[queue_id] + ahead),
            due_ms=self.now_ms + patience_ms,
            channel=channel,
            payload=self.number,
            message_filter=MessageFilter(wanted),
        )
        on_channel = sum(held.channel == channel for held, _ in self.model)
        has_room = len(self.model) < WAITING_MAX and on_channel < PER_CHANNEL_MAX
        assert self.waiting.add(pull) is has_room
        if has_room:
            self.model.append((pull, wanted))

    @rule(queue_id=queue_ids, codes=code_lists, known=st.booleans())
    def append(self, queue_id: int, codes: list[int], known: bool) -> None:
        first = self.max_offsets[queue_id]
        last = self.max_offsets[queue_id] = first + len(codes)
        arrived = list(enumerate(codes, start=first))
        expected = [
            pull
            for pull, wanted in self.model
            if pull.queue_id == queue_id
            and pull.queue_offset < last
            and (
                wanted is None
                or not known
                or any(at >= pull.queue_offset and code in wanted for at, code in arrived)
            )
        ]
        left = self.waiting.take_ready(
            "t", queue_id, last, [(code, b"") for code in codes] if known else None
        )
        self.leave(left, expected)

    @precondition(lambda self: len(self.model) < WAITING_MAX)
    @rule(impatient=st.integers(0, 5))
    def wake_at_once(self, impatient: int) -> None:
        """On a busy queue pulls leave as soon as they have come, most of them long before they
        are due; the impatient ones stood before the others that wait."""
        for number in range(WOKEN_AT_ONCE):
            pull = Pull(
                topic="busy",
                queue_id=0,
                queue_offset=QueueOffset(0),
                due_ms=self.now_ms + (0 if number < impatient else PATIENCE_MS),
                channel=FakePeer("busy"),
                payload=-1,
            )
            assert self.waiting.add(pull)
            assert self.waiting.take_ready("busy", 0, 1) == [pull]

    @rule(passes_ms=st.integers(0, 40))
    def wait(self, passes_ms: int) -> None:
        self.now_ms += passes_ms
        over = [pull for pull, _ in self.model if pull.due_ms <= self.now_ms]
        over.sort(key=lambda pull: (pull.due_ms, pull.payload))
        self.leave(self.waiting.expire(self.now_ms), over)

    @rule(channel=channels)
    def close(self, channel: FakePeer) -> None:
        on_channel = [pull for pull, _ in self.model if pull.channel == channel]
        self.leave(self.waiting.channel_closed(channel), on_channel)

    @rule()
    def stop(self) -> None:
        left = self.waiting.release_all()
        left.sort(key=lambda pull: pull.payload)
        self.leave(left, [pull for pull, _ in self.model])

    @invariant()
    def as_many_wait_as_should(self) -> None:
        assert len(self.waiting) == len(self.model)
        for queue_id in range(3):
            expected = any(pull.queue_id == queue_id for pull, _ in self.model)
            assert self.waiting.has_pulls("t", queue_id) is expected

    @invariant()
    def the_next_due_time_is_known(self) -> None:
        due = min((pull.due_ms for pull, _ in self.model), default=None)
        assert self.waiting.next_due_ms() == due

    def teardown(self) -> None:
        """Check that nothing is left when all pulls are released."""
        for channel in CHANNELS:
            self.waiting.channel_closed(channel)
        assert len(self.waiting) == 0
        assert self.waiting.next_due_ms() is None
        assert leftovers(self.waiting) == {}


TestWaitingPulls = pytest.mark.slow(WaitingMachine.TestCase)
