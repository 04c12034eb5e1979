"""The limited log: a client that repeats a mistake a thousand times causes a few lines."""

from __future__ import annotations

import logging

import pytest

from escrowmq.limited_log import LINES_MAX, PERIOD_MS, REPEAT_S, LimitedLog, RepeatedLog

NOW_MS = 1_700_000_000_000


@pytest.fixture
def limited_log() -> LimitedLog:
    return LimitedLog(logging.getLogger("tests.limited"))


def test_only_the_first_warnings_of_a_period_are_logged(
    limited_log: LimitedLog, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(1_000):
        limited_log.warning(NOW_MS + number, "refused number=%d", number)
    expected = [f"refused number={number}" for number in range(LINES_MAX)]
    assert caplog.messages == expected


def test_the_next_period_says_how_many_were_not_logged(
    limited_log: LimitedLog, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(LINES_MAX + 5):
        limited_log.warning(NOW_MS, "refused number=%d", number)
    caplog.clear()
    limited_log.warning(NOW_MS + PERIOD_MS, "refused again")
    assert caplog.messages == ["5 similar warnings were not logged", "refused again"]
    limited_log.warning(NOW_MS + PERIOD_MS, "and again")
    assert caplog.messages[2:] == ["and again"]


def test_a_clock_that_is_set_back_does_not_silence_the_log(
    limited_log: LimitedLog, caplog: pytest.LogCaptureFixture
) -> None:
    limited_log.warning(NOW_MS, "before")
    limited_log.warning(NOW_MS - 3_600_000, "after")
    assert caplog.messages == ["before", "after"]


def test_a_state_is_logged_at_first_and_then_once_in_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    repeated_log = RepeatedLog(logging.getLogger("tests.repeated"))
    for second in range(int(2 * REPEAT_S) + 1):
        repeated_log.warning(float(second), "down", "down since=%d", second)
        repeated_log.warning(float(second), "full", "full since=%d", second)
    expected = [f"{state} since={second}" for second in (0, 60, 120) for state in ("down", "full")]
    assert caplog.messages == expected


def test_a_state_that_comes_back_is_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    repeated_log = RepeatedLog(logging.getLogger("tests.repeated"))
    assert not repeated_log.ended("down")
    repeated_log.warning(0.0, "down", "first")
    assert repeated_log.ended("down")
    repeated_log.warning(1.0, "down", "second")
    repeated_log.warning(2.0, "down", "third")
    assert caplog.messages == ["first", "second"]
