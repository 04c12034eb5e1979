"""The backlog of checks: the capacity of a channel, and the order of halves that wait."""

from __future__ import annotations

from escrowmq.escrow.checks import CHECK_TIMEOUT_MS, CheckBacklog
from escrowmq.escrow.half_table import Half
from tests.support.broker_requests import FakeChannel

CHANNEL, OTHER = FakeChannel("channel"), FakeChannel("other")


def a_half(queue_offset: int, group: str = "p") -> Half:
    return Half(queue_offset, 0, 100, "T", 0, group, b"", 0, 0)


def test_a_channel_has_a_limit_of_unanswered_checks() -> None:
    backlog = CheckBacklog(unanswered_max=2)
    for offset in range(2):
        assert backlog.has_capacity(CHANNEL, 0)
        backlog.check_sent(CHANNEL, a_half(offset), 0)
    assert not backlog.has_capacity(CHANNEL, 0)
    assert backlog.has_capacity(OTHER, 0)
    backlog.check_answered(0)
    assert backlog.has_capacity(CHANNEL, 0)


def test_an_unanswered_check_does_not_count_after_the_timeout() -> None:
    backlog = CheckBacklog(unanswered_max=1)
    backlog.check_sent(CHANNEL, a_half(0), 0)
    assert not backlog.has_capacity(CHANNEL, CHECK_TIMEOUT_MS - 1)
    assert backlog.has_capacity(CHANNEL, CHECK_TIMEOUT_MS)
    backlog.check_sent(CHANNEL, a_half(1), CHECK_TIMEOUT_MS)
    backlog.check_answered(0)  # a late answer makes no room for another check
    assert not backlog.has_capacity(CHANNEL, CHECK_TIMEOUT_MS)


def test_a_half_that_is_checked_elsewhere_counts_for_the_last_channel_only() -> None:
    backlog = CheckBacklog(unanswered_max=1)
    backlog.check_sent(CHANNEL, a_half(0), 0)
    backlog.check_sent(OTHER, a_half(0), 0)
    assert backlog.has_capacity(CHANNEL, 0)
    assert not backlog.has_capacity(OTHER, 0)


def test_a_closed_channel_leaves_nothing_behind() -> None:
    backlog = CheckBacklog(unanswered_max=1)
    backlog.check_sent(CHANNEL, a_half(0), 0)
    backlog.channel_closed(CHANNEL)
    backlog.channel_closed(CHANNEL)
    assert backlog.has_capacity(CHANNEL, 0)
    backlog.check_answered(0)


def test_halves_are_taken_in_order_and_the_others_stay() -> None:
    backlog = CheckBacklog()
    for offset in range(4):
        backlog.add(a_half(offset))
    backlog.add(a_half(9, "q"))
    for offset in backlog.take("p"):
        if offset == 2:
            backlog.put_back(a_half(2))
            break
    assert (backlog.size("p"), backlog.size("q")) == (2, 1)
    assert list(backlog.take("p")) == [2, 3]
    assert backlog.groups() == ["q"]
    assert list(backlog.take("unknown group")) == []
