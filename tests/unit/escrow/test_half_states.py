"""The states of all halves, compared with a dictionary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.escrow.half_table import HalfStates
from escrowmq.message.transaction import TransactionState

offsets = st.integers(0, 60)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("park"), offsets, st.just(TransactionState.OPEN)),
        st.tuples(st.just("put"), offsets, st.sampled_from(TransactionState)),
        st.tuples(st.just("forget"), offsets, st.just(TransactionState.OPEN)),
        st.tuples(st.just("save"), st.just(0), st.just(TransactionState.OPEN)),
    ),
    max_size=60,
)


@given(base=st.integers(0, 9), steps=steps)
def test_states_are_those_of_a_dictionary(
    base: int, steps: list[tuple[str, int, TransactionState]]
) -> None:
    settled = HalfStates(base, base)
    known = dict.fromkeys(range(settled.base_offset, base), TransactionState.OPEN)
    end = base
    for what, offset, state in steps:
        if what == "save":
            settled = HalfStates(settled.base_offset, settled.next_offset, settled.dump())
        elif what == "forget":
            before = settled.base_offset
            settled.purge_below(offset)
            known = {at: kept for at, kept in known.items() if at >= settled.base_offset}
            assert before <= settled.base_offset <= max(offset, before)
            assert settled.base_offset > min(offset, end) - 4
        elif what == "park" or offset >= settled.base_offset:
            known |= dict.fromkeys(range(end, offset + 1), TransactionState.OPEN)
            end = max(end, offset + 1)
            settled.extend_to(offset)
            if what == "put":
                known[offset] = state
                settled.put(offset, state)
        else:
            settled.put(offset, state)  # below the base: purged already
        assert settled.next_offset == end
        assert {at: settled.get(at) for at in range(-2, 70)} == {
            at: known.get(at) if at >= settled.base_offset else None for at in range(-2, 70)
        }
        for begin in (0, offset, end):
            left = [at for at in known if at >= begin]
            open_ones = [at for at in left if known[at] is TransactionState.OPEN]
            assert settled.first_open(begin) == min(open_ones, default=end)
            unsettled = [at for at in left if not known[at].is_decided]
            assert settled.first_undecided(begin) == min(unsettled, default=end)


def test_a_hundred_million_halves_are_25_megabytes() -> None:
    settled = HalfStates()
    settled.extend_to(10**6 - 1)
    assert len(settled.dump()) == 250_000


@pytest.mark.parametrize("state", TransactionState)
def test_setting_a_state_does_not_change_its_neighbours(state: TransactionState) -> None:
    settled = HalfStates(0, 4)
    for at, other in enumerate(
        (TransactionState.COMMITTED, state, TransactionState.ROLLED_BACK, TransactionState.STRANDED)
    ):
        settled.put(at, other)
    settled.put(1, TransactionState.OPEN)
    assert [settled.get(at) for at in (0, 2, 3)] == [
        TransactionState.COMMITTED,
        TransactionState.ROLLED_BACK,
        TransactionState.STRANDED,
    ]
