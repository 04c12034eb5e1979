"""Processes of an application are killed or frozen at points of a transaction.

tests/e2e/sql/test_crashes.py does so at every point.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from escrowmq.sql import Escrow
from escrowmq.testing import (
    CrashingProcess,
    CrashPoint,
    LocalBroker,
    StopSignal,
    freeze_at,
    kill_at,
)
from tests.support.transfers import (
    do_nothing,
    fail,
    send_in_transaction,
    transfer,
    transfer_async,
    transfer_in_django,
)

pytestmark = pytest.mark.slow

COMMITTED_POINTS = (CrashPoint.AFTER_COMMIT, CrashPoint.BEFORE_END, CrashPoint.AFTER_END)


def rows(database: Path) -> list[str]:
    with closing(sqlite3.connect(database)) as connection:
        return [row[0] for row in connection.execute("SELECT id FROM transfer")]


def assert_agreement(broker: LocalBroker, database: Path, name: str, *, is_saved: bool) -> None:
    """Let another process of the group answer the checks, and compare database and topic."""
    engine = create_engine(f"sqlite:///{database}")
    with Escrow(engine, broker.servers, group=name):
        broker.check_back_now(name)
        broker.assert_settled(name)
    engine.dispose()
    assert rows(database) == ([name] if is_saved else [])
    broker.assert_delivered(name, [b"paid"] if is_saved else [])


@pytest.mark.parametrize(
    ("function", "prefix"), [(transfer_async, "sqlite:///"), (transfer_in_django, "")]
)
@pytest.mark.parametrize("point", [CrashPoint.AFTER_MARKER, CrashPoint.AFTER_COMMIT])
def test_the_points_are_those_of_all_bindings(
    broker: LocalBroker,
    tmp_path: Path,
    point: CrashPoint,
    function: Callable[[str, str, str], object],
    prefix: str,
) -> None:
    name, database = f"{function.__name__}-{point.name}", tmp_path / "x.db"
    kill_at(point, function, f"{prefix}{database}", broker.servers, name)
    # Nothing has ended it yet.
    assert len(broker.open_transactions(name)) == (point is CrashPoint.AFTER_COMMIT)
    assert_agreement(broker, database, name, is_saved=point in COMMITTED_POINTS)


@pytest.mark.parametrize("point", [CrashPoint.BEFORE_HALF, CrashPoint.BEFORE_END])
def test_a_producer_without_a_database_has_halves_and_an_end(
    broker: LocalBroker, point: CrashPoint
) -> None:
    name = f"plain-{point.name}"
    kill_at(point, send_in_transaction, broker.servers, name)
    assert broker.messages(name) == []
    assert len(broker.transactions(name)) == (point is CrashPoint.BEFORE_END)


def test_a_frozen_process_continues_after_the_block(broker: LocalBroker, tmp_path: Path) -> None:
    name, database = "frozen", tmp_path / "x.db"
    with freeze_at(
        CrashPoint.BEFORE_COMMIT, transfer, f"sqlite:///{database}", broker.servers, name
    ) as process:
        assert broker.messages(name) == []
        assert len(broker.transactions(name)) == 1
        assert process.pid != os.getpid()
    assert process.wait() == 0
    broker.assert_delivered(name, [b"paid"])
    assert rows(database) == [name]


def test_a_process_that_does_not_reach_its_point_fails_the_test() -> None:
    with pytest.raises(AssertionError, match="exit code 0, before it reached 'after half'"):
        kill_at(CrashPoint.AFTER_HALF, do_nothing)


def test_the_error_of_the_function_is_shown() -> None:
    with pytest.raises(AssertionError, match=r"(?s)exit code 1.*this function fails"):
        kill_at(CrashPoint.AFTER_HALF, fail)


def test_a_process_is_killed_at_the_end_of_its_block(broker: LocalBroker) -> None:
    with CrashingProcess(
        CrashPoint.BEFORE_END, StopSignal.FREEZE, send_in_transaction, broker.servers, "left"
    ) as process:
        process.wait_for_point()
        assert len(broker.open_transactions("left")) == 1  # no thread went on to the end
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)
