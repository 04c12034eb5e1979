"""The table of delivered timers against a set."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from escrowmq.broker.delivery_progress import DeliveredTimers

offsets = st.integers(0, 40) | st.integers(65_530, 65_545) | st.integers(131_068, 131_080)


@given(st.lists(offsets), st.integers(0, 131_100), st.integers(0, 131_100))
def test_it_contains_what_was_added_and_what_is_below_the_first(
    added: list[int], advance_to: int, cut_to: int
) -> None:
    timers, model = DeliveredTimers(), set[int]()
    for offset in added:
        timers.add(offset)
        model.add(offset)
    near = {max(0, offset + step) for offset in added for step in (-1, 0, 1)}
    assert all((offset in timers) == (offset in model) for offset in near)
    for offset in sorted({0, advance_to, cut_to, *added}):
        expected = next(n for n in range(offset, 131_102) if n not in model)
        assert timers.next_waiting(offset) == expected
    timers.advance_to(advance_to)
    model |= set(range(advance_to))
    timers.cut_to(cut_to)
    model = {offset for offset in model if offset < cut_to}
    assert all((offset in timers) == (offset in model) for offset in sorted({*added, cut_to}))
    loaded = DeliveredTimers.load(timers.dump())
    assert all((offset in loaded) == (offset in model) for offset in sorted({*added, cut_to}))
