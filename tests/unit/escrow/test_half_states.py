"""Two bits for every half, against a dictionary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.escrow.half_table import SettledHalves
from escrowmq.message.transaction import State

offsets = st.integers(0, 60)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("park"), offsets, st.just(State.OPEN)),
        st.tuples(st.just("put"), offsets, st.sampled_from(State)),
        st.tuples(st.just("forget"), offsets, st.just(State.OPEN)),
        st.tuples(st.just("save"), st.just(0), st.just(State.OPEN)),
    ),
    max_size=60,
)


@given(base=st.integers(0, 9), steps=steps)
def test_it_knows_what_a_dictionary_knows(base: int, steps: list[tuple[str, int, State]]) -> None:
    settled = SettledHalves(base, base)
    known = dict.fromkeys(range(settled.base, base), State.OPEN)
    end = base
    for what, offset, state in steps:
        if what == "save":
            settled = SettledHalves(settled.base, settled.next, settled.dump())
        elif what == "forget":
            before = settled.base
            settled.forget_below(offset)
            known = {at: kept for at, kept in known.items() if at >= settled.base}
            assert before <= settled.base <= max(offset, before)
            assert settled.base > min(offset, end) - 4
        elif what == "park" or offset >= settled.base:
            known |= dict.fromkeys(range(end, offset + 1), State.OPEN)
            end = max(end, offset + 1)
            settled.park(offset)
            if what == "put":
                known[offset] = state
                settled.put(offset, state)
        else:
            settled.put(offset, state)  # below: forgotten already
        assert settled.next == end
        assert {at: settled.state(at) for at in range(-2, 70)} == {
            at: known.get(at) if at >= settled.base else None for at in range(-2, 70)
        }
        for begin in (0, offset, end):
            left = [at for at in known if at >= begin]
            open_ones = [at for at in left if known[at] is State.OPEN]
            assert settled.first_open(begin) == min(open_ones, default=end)
            unsettled = [at for at in left if not known[at].is_settled]
            assert settled.first_unsettled(begin) == min(unsettled, default=end)


def test_a_hundred_million_halves_are_25_megabytes() -> None:
    settled = SettledHalves()
    settled.park(10**6 - 1)
    assert len(settled.dump()) == 250_000


@pytest.mark.parametrize("state", State)
def test_a_neighbour_is_not_touched(state: State) -> None:
    settled = SettledHalves(0, 4)
    for at, other in enumerate((State.COMMITTED, state, State.ROLLED_BACK, State.STRANDED)):
        settled.put(at, other)
    settled.put(1, State.OPEN)
    assert [settled.state(at) for at in (0, 2, 3)] == [
        State.COMMITTED,
        State.ROLLED_BACK,
        State.STRANDED,
    ]
