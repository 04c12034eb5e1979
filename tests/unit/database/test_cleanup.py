"""The clean-up of markers: a thread that survives errors, and a queue of deletable markers."""

from __future__ import annotations

import logging
import threading

import pytest

from escrowmq.clock import ManualClock
from escrowmq.database.marker import HOUR_MS, PURGE_BATCH_ROWS
from escrowmq.database.retention import CleanupQueue, CleanupThread


def test_the_thread_continues_after_an_error_and_ends_when_stopped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    has_failed, second_round = threading.Event(), threading.Event()

    def work() -> None:
        if not has_failed.is_set():
            has_failed.set()
            raise ZeroDivisionError
        second_round.set()

    with caplog.at_level(logging.ERROR):
        cleanup_thread = CleanupThread(work, name="clean-up", interval_s=0.001)
        assert second_round.wait(20)
        cleanup_thread.stop()
    assert "ZeroDivisionError" in caplog.text
    assert "clean-up" not in [thread.name for thread in threading.enumerate()]


def test_clean_up_by_age_is_due_once_an_hour() -> None:
    clock = ManualClock()
    queue = CleanupQueue(clock)
    assert not queue.is_cleanup_due()
    clock.advance(ms=HOUR_MS)
    assert queue.is_cleanup_due()
    assert not queue.is_cleanup_due()


def test_acknowledged_ids_are_taken_in_batches() -> None:
    queue = CleanupQueue(ManualClock())
    for number in range(PURGE_BATCH_ROWS + 1):
        queue.add_acknowledged(str(number))
    assert len(queue.take_acknowledged()) == PURGE_BATCH_ROWS
    assert queue.take_acknowledged() == [str(PURGE_BATCH_ROWS)]
    assert queue.take_acknowledged() == []
