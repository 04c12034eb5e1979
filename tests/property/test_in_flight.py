"""InFlight against a plain dictionary: the commit offset is the lowest one that is not done."""

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
        self.open: dict[int, int] = {}
        self.next_offset = 5  # every message before it was added or skipped

    @rule(gap=st.integers(0, 3), size=st.integers(0, 9))
    def add(self, gap: int, size: int) -> None:
        offset = self.next_offset + gap
        self.limiter.add(self.in_flight, offset, size)
        self.open[offset] = size
        self.next_offset = offset + 1

    @rule(ahead=st.integers(-2, 4))
    def skip(self, ahead: int) -> None:
        self.in_flight.skip_to(self.next_offset + ahead)
        self.next_offset = max(self.next_offset, self.next_offset + ahead)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.open)) if self.open else st.just(0))
        was_open = self.open.pop(offset, None) is not None
        assert self.limiter.remove(self.in_flight, offset) == was_open

    @rule(offset=st.integers(0, 40))
    def remove_unknown(self, offset: int) -> None:
        if offset not in self.open:
            assert not self.limiter.remove(self.in_flight, offset)

    @invariant()
    def equals_the_model(self) -> None:
        assert self.in_flight.commit_offset == min(self.open, default=self.next_offset)
        assert self.in_flight.span == self.next_offset - self.in_flight.commit_offset
        assert len(self.in_flight) == self.limiter.message_count == len(self.open)
        assert self.in_flight.body_bytes == self.limiter.body_bytes == sum(self.open.values())


TestInFlight = InFlightMachine.TestCase
TestInFlight.settings = settings(max_examples=30, stateful_step_count=30)
