"""RocketMQ's two cursors: never past an open half, nor past an op that it still needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from escrowmq.escrow.half_table import Cursors


def test_they_stand_at_the_first_open_half_and_the_first_op_that_matters() -> None:
    cursors = Cursors()
    for op, half in enumerate((2, 0, 4)):  # in the order of the op queue; 1 and 3 are open
        cursors.op_written(op, half)
    cursors.advance(1)
    assert (cursors.half, cursors.op) == (1, 0)
    cursors.op_written(3, 1)
    cursors.advance(3)
    assert (cursors.half, cursors.op) == (3, 2)
    cursors.op_written(4, 3)
    cursors.advance(5)
    assert (cursors.half, cursors.op) == (5, 5)


def test_they_never_go_back() -> None:
    cursors = Cursors(half=7, op=3)
    cursors.advance(2)
    assert (cursors.half, cursors.op) == (7, 3)


def test_an_op_that_nobody_could_read_does_not_take_those_before_it_along() -> None:
    cursors = Cursors()
    cursors.op_written(0, 5)  # settles 5, while 1 is open
    cursors.op_written(2, 6)
    cursors.advance(1)
    assert cursors.op == 0
    cursors.advance(9)
    assert cursors.op == 3


def test_the_first_op_may_be_far_into_its_queue() -> None:
    cursors = Cursors()
    cursors.op_written(1_000_000, 5)
    assert cursors.op == 1_000_000


@given(st.permutations(range(12)), st.integers(1, 4))
def test_from_the_cursors_on_everything_is_found(order: list[int], pause: int) -> None:
    """Whoever begins there takes the open ones for open, and no others."""
    cursors = Cursors()
    for op, half in enumerate(order):
        cursors.op_written(op, half)
        settled = set(order[: op + 1])
        if op % pause == 0:
            cursors.advance(min(set(range(13)) - settled))
            seen = set(order[cursors.op : op + 1])
            open_ones = [at for at in range(cursors.half, 12) if at not in settled]
            assert [at for at in range(cursors.half, 12) if at not in seen] == open_ones
