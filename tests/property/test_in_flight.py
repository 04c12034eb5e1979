"""InFlight against a dictionary: the commit offset is the lowest offset that is still in flight."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from escrowmq.client.consumer.fetcher import ConsumerLimits, InFlight, InFlightLimiter


class InFlightMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.limiter = InFlightLimiter(ConsumerLimits())
        self.in_flight = InFlight(5)
        self.sizes: dict[int, int] = {}  # of the messages in flight, by offset
        self.next_offset = 5  # all messages below were added or skipped

    @rule(skipped=st.integers(0, 3), size=st.integers(0, 9))
    def add(self, skipped: int, size: int) -> None:
        offset = self.next_offset + skipped
        self.limiter.add(self.in_flight, offset, size)
        self.sizes[offset] = size
        self.next_offset = offset + 1

    @rule(distance=st.integers(-2, 4))
    def skip(self, distance: int) -> None:
        self.in_flight.skip_to(self.next_offset + distance)
        self.next_offset = max(self.next_offset, self.next_offset + distance)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.sizes)) if self.sizes else st.just(0))
        was_in_flight = self.sizes.pop(offset, None) is not None
        assert self.limiter.remove(self.in_flight, offset) == was_in_flight

    @rule(offset=st.integers(0, 40))
    def remove_unknown(self, offset: int) -> None:
        if offset not in self.sizes:
            assert not self.limiter.remove(self.in_flight, offset)

    @invariant()
    def equals_the_model(self) -> None:
        assert self.in_flight.commit_offset == min(self.sizes, default=self.next_offset)
        assert self.in_flight.span == self.next_offset - self.in_flight.commit_offset
        assert len(self.in_flight) == self.limiter.message_count == len(self.sizes)
        assert (
            self.in_flight.message_bytes == self.limiter.message_bytes == sum(self.sizes.values())
        )


TestInFlight = InFlightMachine.TestCase
TestInFlight.settings = settings(max_examples=30, stateful_step_count=30)
