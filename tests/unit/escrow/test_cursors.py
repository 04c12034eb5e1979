"""RocketMQ's two cursors: they never pass an open half, nor an op that RocketMQ still needs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from escrowmq.escrow.half_table import RocketMQCursors


def test_cursors_are_at_the_first_open_half_and_its_first_op() -> None:
    cursors = RocketMQCursors()
    for op, half in enumerate((2, 0, 4)):  # the halves in the order of their ops; 1 and 3 are open
        cursors.add_op(op, half)
    cursors.advance(1)
    assert (cursors.half_offset, cursors.op_offset) == (1, 0)
    cursors.add_op(3, 1)
    cursors.advance(3)
    assert (cursors.half_offset, cursors.op_offset) == (3, 2)
    cursors.add_op(4, 3)
    cursors.advance(5)
    assert (cursors.half_offset, cursors.op_offset) == (5, 5)


def test_cursors_never_go_back() -> None:
    cursors = RocketMQCursors(half_offset=7, op_offset=3)
    cursors.advance(2)
    assert (cursors.half_offset, cursors.op_offset) == (7, 3)


def test_an_unreadable_op_does_not_move_the_cursor_past_earlier_ops() -> None:
    cursors = RocketMQCursors()
    cursors.add_op(0, 5)  # decides half 5 while half 1 is open; op 1 is unreadable
    cursors.add_op(2, 6)
    cursors.advance(1)
    assert cursors.op_offset == 0
    cursors.advance(9)
    assert cursors.op_offset == 3


def test_the_first_op_may_be_far_into_its_queue() -> None:
    cursors = RocketMQCursors()
    cursors.add_op(1_000_000, 5)
    assert cursors.op_offset == 1_000_000


@given(st.permutations(range(12)), st.integers(1, 4))
def test_reading_from_the_cursors_finds_exactly_the_open_halves(
    order: list[int], pause: int
) -> None:
    cursors = RocketMQCursors()
    for op, half in enumerate(order):
        cursors.add_op(op, half)
        decided = set(order[: op + 1])
        if op % pause == 0:
            cursors.advance(min(set(range(13)) - decided))
            halves_read = range(cursors.half_offset, 12)
            ops_read = set(order[cursors.op_offset : op + 1])
            without_op = [half for half in halves_read if half not in ops_read]
            assert without_op == [half for half in halves_read if half not in decided]
