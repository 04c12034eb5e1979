"""Whom to ask: room on a line, and the order of what waits."""

from __future__ import annotations

from escrowmq.escrow.checks import CHECK_TIMEOUT_MS, CheckBacklog
from escrowmq.escrow.half_table import Half


def a_half(queue_offset: int, group: str = "p") -> Half:
    return Half(queue_offset, 0, 100, "T", 0, group, b"", 0, 0)


def test_a_line_has_room_for_so_many_unanswered_questions() -> None:
    asking = CheckBacklog(unanswered_max=2)
    for offset in range(2):
        assert asking.has_capacity("line", 0)
        asking.check_sent("line", a_half(offset), 0)
    assert not asking.has_capacity("line", 0)
    assert asking.has_capacity("other", 0)
    asking.check_answered(0)
    assert asking.has_capacity("line", 0)


def test_after_a_while_an_unanswered_question_takes_no_room() -> None:
    asking = CheckBacklog(unanswered_max=1)
    asking.check_sent("line", a_half(0), 0)
    assert not asking.has_capacity("line", CHECK_TIMEOUT_MS - 1)
    assert asking.has_capacity("line", CHECK_TIMEOUT_MS)
    asking.check_sent("line", a_half(1), CHECK_TIMEOUT_MS)
    asking.check_answered(0)  # late; it makes no room for another
    assert not asking.has_capacity("line", CHECK_TIMEOUT_MS)


def test_asked_again_elsewhere_a_half_takes_room_once() -> None:
    asking = CheckBacklog(unanswered_max=1)
    asking.check_sent("line", a_half(0), 0)
    asking.check_sent("other", a_half(0), 0)
    assert asking.has_capacity("line", 0)
    assert not asking.has_capacity("other", 0)


def test_a_line_that_closes_leaves_nothing_behind() -> None:
    asking = CheckBacklog(unanswered_max=1)
    asking.check_sent("line", a_half(0), 0)
    asking.channel_closed("line")
    asking.channel_closed("line")
    assert asking.has_capacity("line", 0)
    asking.check_answered(0)


def test_what_waits_is_taken_in_order_and_the_rest_stays() -> None:
    asking = CheckBacklog()
    for offset in range(4):
        asking.add(a_half(offset))
    asking.add(a_half(9, "q"))
    for offset in asking.take("p"):
        if offset == 2:
            asking.put_back(a_half(2))
            break
    assert (asking.size("p"), asking.size("q")) == (2, 1)
    assert list(asking.take("p")) == [2, 3]
    assert asking.groups() == ["q"]
    assert list(asking.take("nobody")) == []
