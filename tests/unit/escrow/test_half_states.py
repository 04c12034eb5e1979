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
        st.tuples(st.just("purge"), offsets, st.just(TransactionState.OPEN)),
        st.tuples(st.just("save"), st.just(0), st.just(TransactionState.OPEN)),
    ),
    max_size=60,
)


@given(base=st.integers(0, 9), steps=steps)
def test_states_are_those_of_a_dictionary(
    base: int, steps: list[tuple[str, int, TransactionState]]
) -> None:
    states = HalfStates(base, base)
    model = dict.fromkeys(range(states.base_offset, base), TransactionState.OPEN)
    end = base
    for step, offset, state in steps:
        if step == "save":
            states = HalfStates(states.base_offset, states.next_offset, states.dump())
        elif step == "purge":
            old_base = states.base_offset
            states.purge_below(offset)
            model = {key: value for key, value in model.items() if key >= states.base_offset}
            assert old_base <= states.base_offset <= max(offset, old_base)
            assert states.base_offset > min(offset, end) - 4
        elif step == "park" or offset >= states.base_offset:
            model |= dict.fromkeys(range(end, offset + 1), TransactionState.OPEN)
            end = max(end, offset + 1)
            states.extend_to(offset)
            if step == "put":
                model[offset] = state
                states.put(offset, state)
        else:
            states.put(offset, state)  # no effect: it was purged
        assert states.next_offset == end
        for key in range(-2, 70):
            assert states.get(key) == (model.get(key) if key >= states.base_offset else None)
        for begin in (0, offset, end):
            later = {key: value for key, value in model.items() if key >= begin}
            open_offsets = [key for key in later if later[key] is TransactionState.OPEN]
            assert states.first_open(begin) == min(open_offsets, default=end)
            undecided = [key for key in later if not later[key].is_decided]
            assert states.first_undecided(begin) == min(undecided, default=end)


def test_four_halves_need_one_byte() -> None:
    states = HalfStates()
    states.extend_to(10**6 - 1)
    assert len(states.dump()) == 250_000


@pytest.mark.parametrize("state", TransactionState)
def test_setting_a_state_does_not_change_its_neighbours(state: TransactionState) -> None:
    states = HalfStates(0, 4)
    for offset, initial in enumerate(
        (TransactionState.COMMITTED, state, TransactionState.ROLLED_BACK, TransactionState.STRANDED)
    ):
        states.put(offset, initial)
    states.put(1, TransactionState.OPEN)
    assert [states.get(offset) for offset in (0, 2, 3)] == [
        TransactionState.COMMITTED,
        TransactionState.ROLLED_BACK,
        TransactionState.STRANDED,
    ]
