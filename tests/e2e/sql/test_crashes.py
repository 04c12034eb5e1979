"""A process is killed or frozen at every point of a transaction; database and message agree later.

All processes of one case run at the same time, each with its own group and topic. The process of
the test is a member of each group too, so the broker can send checks to it. `pytest -s` shows the
results as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, create_engine, event

from escrowmq.sql import Escrow
from escrowmq.testing import CrashingProcess, CrashPoint, StopSignal
from tests.e2e.sql.conftest import url_of
from tests.support.brokers import LocalServer
from tests.support.databases import DatabaseServer
from tests.support.sql_bank import new_topic, saved_ids, tables
from tests.support.transfers import (
    transfer,
    transfer_in_async_session,
    transfer_in_atomic_block,
    transfer_in_session,
    transfer_on_connection,
    transfer_on_driver_connection,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

POINTS = tuple(CrashPoint)
POINTS_AFTER_COMMIT = (CrashPoint.AFTER_COMMIT, CrashPoint.BEFORE_END, CrashPoint.AFTER_END)
POINTS_AFTER_HALF = (CrashPoint.AFTER_HALF, CrashPoint.BEFORE_COMMIT, *POINTS_AFTER_COMMIT)
MAIN_POINTS = (
    CrashPoint.AFTER_MARKER,
    CrashPoint.AFTER_HALF,
    CrashPoint.BEFORE_COMMIT,
    CrashPoint.BEFORE_END,
)
Transfer = Callable[[str, str, str], Any]
JOINING: tuple[Transfer, ...] = (
    transfer_in_session,
    transfer_in_async_session,
    transfer_on_connection,
    transfer_on_driver_connection,
    transfer_in_atomic_block,
)
KILL, FREEZE = StopSignal.KILL, StopSignal.FREEZE
CHECKS = 2  # that are sent while the owner is frozen


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    """Run a broker that checks when the test says so: no process answers before it is stopped."""
    with LocalServer({"transactionTimeOut": 3_600_000}) as server:
        yield server


@dataclass
class Crash:
    """A process that is killed or frozen; this process is in the same group."""

    database: str
    process: CrashingProcess
    engine: Engine
    escrow: Escrow
    name: str
    checks: int = 0

    @property
    def point(self) -> CrashPoint:
        return self.process.point

    def count_checks(self) -> None:
        """Count the checks that this process answers, by their queries of the marker."""

        def count(*arguments: object) -> None:
            statement = str(arguments[2])
            self.checks += statement.startswith("SELECT escrowmq_marker")

        event.listen(self.engine, "before_cursor_execute", count)


def expected_checks(point: CrashPoint) -> int:
    """Return how many checks to wait for while the process is frozen at this point."""
    if point == CrashPoint.AFTER_END or point not in POINTS_AFTER_HALF:
        return 0
    # After the commit the first check finds the marker and decides.
    return 1 if point in POINTS_AFTER_COMMIT else CHECKS


def resume(server: LocalServer, crash: Crash) -> int:
    """Resume a frozen process after some checks, and return its exit code."""
    count = expected_checks(crash.point)
    server.check_back_now(crash.name)
    wait_until(lambda: crash.checks >= count, f"{count} checks of {crash.name}")
    crash.process.resume()
    return crash.process.wait()


def start(
    stack: ExitStack,
    server: LocalServer,
    make_transfer: Transfer,
    url: str,
    kind: str,
    point: CrashPoint,
    stop_signal: StopSignal,
    *,
    url_options: str = "",
) -> Crash:
    engine = create_engine(url)
    stack.callback(engine.dispose)
    tables.create_all(engine)
    name = new_topic(f"{make_transfer.__name__}-{kind}-{stop_signal.name}-{point.name}")
    escrow = stack.enter_context(Escrow(engine, server.servers, group=name))
    arguments = (url + url_options, server.servers, name)
    process = stack.enter_context(CrashingProcess(point, stop_signal, make_transfer, *arguments))
    crash = Crash(kind, process, engine, escrow, name)
    crash.count_checks()
    return crash


def print_table(server: LocalServer, crashes: list[Crash]) -> None:
    table = Table("database", "stopped", "at", "row", "message", "checks")
    for crash in crashes:
        row = "committed" if crash.name in saved_ids(crash.engine) else "-"
        message = "delivered" if server.messages(crash.name) else "-"
        stopped = crash.process.stop_signal.name
        table.add_row(crash.database, stopped, crash.point, row, message, str(crash.checks))
    Console(width=100).print(table)


def assert_agreement(server: LocalServer, crashes: list[Crash]) -> None:
    """Check that each message was delivered if and only if its row was committed."""
    server.check_back_now()
    server.assert_settled()
    print_table(server, crashes)
    for crash in crashes:
        is_saved = crash.name in saved_ids(crash.engine)
        is_frozen = crash.process.stop_signal is FREEZE
        assert is_saved == (is_frozen or crash.point in POINTS_AFTER_COMMIT), crash
        server.assert_delivered(crash.name, [b"paid"] if is_saved else [])


def urls(kind: str, database_servers: dict[str, DatabaseServer], tmp_path: Path) -> Iterator[str]:
    """Yield a new file for each crash on SQLite, which locks whole files, or always one URL."""
    if kind == "sqlite":
        for number in range(100):
            yield f"sqlite:///{tmp_path / f'{number}.db'}"
    url = url_of(kind, database_servers, tmp_path)
    while True:
        yield url


CASES = [
    pytest.param(transfer, "sqlite", KILL, POINTS),
    pytest.param(transfer, "sqlite", FREEZE, MAIN_POINTS),
    pytest.param(transfer, "postgresql", KILL, MAIN_POINTS),
    pytest.param(transfer, "postgresql", FREEZE, MAIN_POINTS[1::2]),
    *(pytest.param(joining, "postgresql", KILL, MAIN_POINTS) for joining in JOINING),
    *(
        pytest.param(make_transfer, kind, stop_signal, POINTS, marks=pytest.mark.nightly)
        for make_transfer in (transfer, *JOINING)
        for kind in ("sqlite", "postgresql", "mariadb")
        for stop_signal in (KILL, FREEZE)
        if (make_transfer, kind, stop_signal) != (transfer, "sqlite", KILL)
    ),
]


@pytest.mark.parametrize(("make_transfer", "kind", "stop_signal", "points"), CASES)
def test_database_and_message_agree_after_a_kill_or_a_freeze(
    server: LocalServer,
    database_servers: dict[str, DatabaseServer],
    tmp_path: Path,
    make_transfer: Transfer,
    kind: str,
    stop_signal: StopSignal,
    points: tuple[CrashPoint, ...],
) -> None:
    database_urls = urls(kind, database_servers, tmp_path)
    with ExitStack() as stack:
        crashes = [
            start(stack, server, make_transfer, next(database_urls), kind, point, stop_signal)
            for point in points
        ]
        for crash in crashes:
            crash.process.wait_for_point()
        if stop_signal is FREEZE:
            for crash in crashes:
                assert resume(server, crash) == 0, crash.process.errors
        assert_agreement(server, crashes)


@pytest.mark.parametrize(
    "make_transfer", [transfer, transfer_in_session, transfer_on_driver_connection]
)
def test_an_owner_whose_session_ended_while_it_was_frozen_fails(
    server: LocalServer,
    database_servers: dict[str, DatabaseServer],
    tmp_path: Path,
    make_transfer: Transfer,
) -> None:
    """The database gives the lock to the checker, and refuses the owner when it is resumed."""
    url = url_of("postgresql", database_servers, tmp_path)
    timeout = "?options=-c%20idle_in_transaction_session_timeout%3D500"
    with ExitStack() as stack:
        crash = start(
            *(stack, server, make_transfer, url, "postgresql", CrashPoint.AFTER_HALF, FREEZE),
            url_options=timeout,
        )
        crash.process.wait_for_point()
        server.check_back_now(crash.name)
        server.assert_settled()
        crash.process.resume()
        assert crash.process.wait() == 1
        assert "idle-in-transaction timeout" in crash.process.errors
        assert saved_ids(crash.engine) == []
        server.assert_delivered(crash.name, [])
