"""The backlog of checks: the capacity of a channel, and the order of waiting halves."""

from __future__ import annotations

from escrowmq.escrow.checks import CHECK_TIMEOUT_MS, CheckBacklog
from escrowmq.escrow.half_table import Half, PythonHalf
from tests.support.broker_requests import FakeChannel

CHANNEL, OTHER = FakeChannel("channel"), FakeChannel("other")


def new_half(queue_offset: int, group: str = "p") -> Half:
    return PythonHalf(queue_offset, 0, 100, "T", 0, group, b"", 0, 0)


def test_a_channel_has_a_limit_of_unanswered_checks() -> None:
    backlog = CheckBacklog(unanswered_max=2)
    for offset in range(2):
        assert backlog.has_capacity(CHANNEL, 0)
        backlog.check_sent(CHANNEL, new_half(offset), 0)
    assert not backlog.has_capacity(CHANNEL, 0)
    assert backlog.has_capacity(OTHER, 0)
    backlog.check_answered(0)
    assert backlog.has_capacity(CHANNEL, 0)


def test_an_unanswered_check_does_not_count_after_the_timeout() -> None:
    backlog = CheckBacklog(unanswered_max=1)
    backlog.check_sent(CHANNEL, new_half(0), 0)
    assert not backlog.has_capacity(CHANNEL, CHECK_TIMEOUT_MS - 1)
    assert backlog.has_capacity(CHANNEL, CHECK_TIMEOUT_MS)
    backlog.check_sent(CHANNEL, new_half(1), CHECK_TIMEOUT_MS)
    backlog.check_answered(0)  # a late answer does not free capacity for another check
    assert not backlog.has_capacity(CHANNEL, CHECK_TIMEOUT_MS)


def test_a_half_checked_on_two_channels_counts_only_for_the_last_one() -> None:
    backlog = CheckBacklog(unanswered_max=1)
    backlog.check_sent(CHANNEL, new_half(0), 0)
    backlog.check_sent(OTHER, new_half(0), 0)
    assert backlog.has_capacity(CHANNEL, 0)
    assert not backlog.has_capacity(OTHER, 0)


def test_the_checks_of_a_closed_channel_are_forgotten() -> None:
    backlog = CheckBacklog(unanswered_max=1)
    backlog.check_sent(CHANNEL, new_half(0), 0)
    backlog.channel_closed(CHANNEL)
    backlog.channel_closed(CHANNEL)  # a second call is harmless
    assert backlog.has_capacity(CHANNEL, 0)
    backlog.check_answered(0)  # and so is a late answer


def test_halves_are_taken_in_order_and_those_not_taken_stay() -> None:
    backlog = CheckBacklog()
    for offset in range(4):
        backlog.add(new_half(offset))
    backlog.add(new_half(9, "q"))
    for offset in backlog.take("p"):
        if offset == 2:
            backlog.put_back(new_half(2))
            break
    assert (backlog.size("p"), backlog.size("q")) == (2, 1)
    assert list(backlog.take("p")) == [2, 3]
    assert backlog.groups() == ["q"]
    assert list(backlog.take("unknown group")) == []
