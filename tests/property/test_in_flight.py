"""What is in hand against a plain set: the offset to commit is the lowest that is not done with."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from escrowmq.client.consumer.fetcher import ConsumerLimits, InFlight, InFlightLimiter


class HandMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.room = InFlightLimiter(ConsumerLimits())
        self.hand = InFlight(5)
        self.open: dict[int, int] = {}
        self.seen = 5  # everything before it was taken or passed

    @rule(gap=st.integers(0, 3), size=st.integers(0, 9))
    def take(self, gap: int, size: int) -> None:
        offset = self.seen + gap
        self.room.add(self.hand, offset, size)
        self.open[offset] = size
        self.seen = offset + 1

    @rule(ahead=st.integers(-2, 4))
    def passed(self, ahead: int) -> None:
        self.hand.skip_to(self.seen + ahead)
        self.seen = max(self.seen, self.seen + ahead)

    @rule(data=st.data())
    def done(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.open)) if self.open else st.just(0))
        was_open = self.open.pop(offset, None) is not None
        assert self.room.remove(self.hand, offset) == was_open

    @rule(offset=st.integers(0, 40))
    def done_twice_or_never_taken(self, offset: int) -> None:
        if offset not in self.open:
            assert not self.room.remove(self.hand, offset)

    @invariant()
    def agrees(self) -> None:
        assert self.hand.commit_offset == min(self.open, default=self.seen)
        assert self.hand.span == self.seen - self.hand.commit_offset
        assert len(self.hand) == self.room.message_count == len(self.open)
        assert self.hand.body_bytes == self.room.body_bytes == sum(self.open.values())


TestHand = HandMachine.TestCase
TestHand.settings = settings(max_examples=30, stateful_step_count=30)
