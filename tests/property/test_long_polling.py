"""Held pulls against a list: every pull is released once, when a condition for it is met."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from escrowmq.consume.long_polling import HeldPull, LongPolls
from escrowmq.consume.subscription import MessageFilter
from escrowmq.message.record import QueueOffset
from tests.support.fake_peers import FakePeer
from tests.support.leftovers import leftovers

PULLS_MAX = 8
PER_CHANNEL_MAX = 3
LONG_TIMEOUT_MS = 1_000
BUSY_PULLS = 100  # enough to make LongPolls rebuild its heap

queue_ids = st.integers(0, 2)
CHANNELS = [FakePeer(name) for name in "abcd"]
channels = st.sampled_from(CHANNELS)
code_lists = st.lists(st.integers(0, 3), min_size=1, max_size=4)

Pull = HeldPull[int]


class LongPollsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.polls = LongPolls[int](pulls_max=PULLS_MAX, per_channel_max=PER_CHANNEL_MAX)
        self.model: list[tuple[Pull, frozenset[int] | None]] = []
        self.max_offsets = [0, 0, 0]
        self.now_ms = 0
        self.pull_count = 0

    def check_released(self, released: list[Pull], expected: list[Pull]) -> None:
        assert released == expected
        self.model = [entry for entry in self.model if entry[0] not in released]

    @rule(
        queue_id=queue_ids,
        channel=channels,
        distance=st.integers(0, 2),
        timeout_ms=st.integers(0, 50),
        tags_codes=st.none() | st.frozensets(st.integers(0, 3)),
    )
    def hold(
        self,
        queue_id: int,
        channel: FakePeer,
        distance: int,
        timeout_ms: int,
        tags_codes: frozenset[int] | None,
    ) -> None:
        self.pull_count += 1
        pull = Pull(
            topic="t",
            queue_id=queue_id,
            queue_offset=QueueOffset(self.max_offsets[queue_id] + distance),
            due_ms=self.now_ms + timeout_ms,
            channel=channel,
            payload=self.pull_count,
            message_filter=MessageFilter(tags_codes),
        )
        held_on_channel = sum(held.channel == channel for held, _ in self.model)
        has_space = len(self.model) < PULLS_MAX and held_on_channel < PER_CHANNEL_MAX
        assert self.polls.add(pull) is has_space
        if has_space:
            self.model.append((pull, tags_codes))

    @rule(
        queue_id=queue_ids,
        codes=code_lists,
        codes_known=st.booleans(),
        slice_size=st.integers(1, 10),
    )
    def append(self, queue_id: int, codes: list[int], codes_known: bool, slice_size: int) -> None:
        first = self.max_offsets[queue_id]
        end = self.max_offsets[queue_id] = first + len(codes)
        arrived_codes = list(enumerate(codes, start=first))
        expected = [
            pull
            for pull, tags_codes in self.model
            if pull.queue_id == queue_id
            and pull.queue_offset < end
            and (
                tags_codes is None
                or not codes_known
                or any(
                    queue_offset >= pull.queue_offset and code in tags_codes
                    for queue_offset, code in arrived_codes
                )
            )
        ]
        arrivals = [(code, b"") for code in codes] if codes_known else None
        self.polls.arrived("t", queue_id, end, arrivals)
        released: list[Pull] = []
        while self.polls.has_wakeups:  # in slices, as a broker does it
            released += self.polls.take_ready(slice_size)
        self.check_released(released, expected)

    @precondition(lambda self: len(self.model) < PULLS_MAX)
    @rule(due_count=st.integers(0, 5))
    def hold_and_release_many(self, due_count: int) -> None:
        """Hold and release so many pulls of a busy queue that the heap of due times is rebuilt.

        Released pulls stay in the heap until then. The first few are due now, so they precede the
        held pulls in the heap; the others are due long after them.
        """
        for number in range(BUSY_PULLS):
            pull = Pull(
                topic="busy",
                queue_id=0,
                queue_offset=QueueOffset(0),
                due_ms=self.now_ms + (0 if number < due_count else LONG_TIMEOUT_MS),
                channel=FakePeer("busy"),
                payload=-1,
            )
            assert self.polls.add(pull)
            self.polls.arrived("busy", 0, 1)
            assert self.polls.take_ready(10) == [pull]

    @rule(elapsed_ms=st.integers(0, 40))
    def wait(self, elapsed_ms: int) -> None:
        self.now_ms += elapsed_ms
        expired = [pull for pull, _ in self.model if pull.due_ms <= self.now_ms]
        expired.sort(key=lambda pull: (pull.due_ms, pull.payload))
        self.check_released(self.polls.expire(self.now_ms), expired)

    @rule(channel=channels)
    def close(self, channel: FakePeer) -> None:
        held_on_channel = [pull for pull, _ in self.model if pull.channel == channel]
        self.check_released(self.polls.channel_closed(channel), held_on_channel)

    @rule()
    def stop(self) -> None:
        released = self.polls.release_all()
        released.sort(key=lambda pull: pull.payload)
        self.check_released(released, [pull for pull, _ in self.model])

    @invariant()
    def held_pulls_equal_the_model(self) -> None:
        assert len(self.polls) == len(self.model)
        for queue_id in range(3):
            expected = any(pull.queue_id == queue_id for pull, _ in self.model)
            assert self.polls.has_pulls("t", queue_id) is expected

    @invariant()
    def next_due_time_equals_the_model(self) -> None:
        due = min((pull.due_ms for pull, _ in self.model), default=None)
        assert self.polls.next_due_ms() == due

    def teardown(self) -> None:
        """Check that the tables are empty when all pulls are released."""
        for channel in CHANNELS:
            self.polls.channel_closed(channel)
        assert len(self.polls) == 0
        assert self.polls.next_due_ms() is None
        assert leftovers(self.polls) == {}


TestLongPolls = pytest.mark.slow(LongPollsMachine.TestCase)
