"""Work that nobody waits for: it goes on after an error, and stops when it is told to."""

from __future__ import annotations

import logging
import threading

import pytest

from escrowmq.clock import ManualClock
from escrowmq.database.marker import HOUR_MS, PURGE_BATCH_ROWS
from escrowmq.database.transaction import CleanupQueue, CleanupThread


def test_a_round_that_fails_is_not_the_last(caplog: pytest.LogCaptureFixture) -> None:
    rounds, enough = [0], threading.Event()

    def work() -> None:
        rounds[0] += 1
        if rounds[0] == 1:
            raise ZeroDivisionError
        enough.set()

    with caplog.at_level(logging.ERROR):
        caretaker = CleanupThread(work, name="care", interval_s=0.001)
        assert enough.wait(20)
        caretaker.stop()
    assert "ZeroDivisionError" in caplog.text
    after = rounds[0]
    assert "care" not in [thread.name for thread in threading.enumerate()]
    assert rounds[0] == after


def test_old_rows_are_looked_for_once_an_hour() -> None:
    clock = ManualClock()
    chores = CleanupQueue(clock)
    assert not chores.is_cleanup_due()
    clock.advance(ms=HOUR_MS)
    assert chores.is_cleanup_due()
    assert not chores.is_cleanup_due()


def test_what_is_acknowledged_goes_a_part_at_a_time() -> None:
    chores = CleanupQueue(ManualClock())
    for number in range(PURGE_BATCH_ROWS + 1):
        chores.add_acknowledged(str(number))
    assert len(chores.take_acknowledged()) == PURGE_BATCH_ROWS
    assert chores.take_acknowledged() == [str(PURGE_BATCH_ROWS)]
    assert chores.take_acknowledged() == []
