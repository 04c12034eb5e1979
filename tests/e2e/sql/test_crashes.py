"""A process is killed or frozen at every point of a transaction; database and message agree later.

All processes of one case run at the same time, each with its own group and topic. The process of
the test is a member of each group too, so the broker can send checks to it. `pytest -s` shows the
results as a table.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table
from sqlalchemy import Engine, create_engine, event

from escrowmq.sql import Escrow
from tests.e2e.sql.conftest import url_of
from tests.support import sql_crashes as crashing
from tests.support.brokers import Server
from tests.support.databases import DatabaseServer
from tests.support.sql_bank import (
    WAIT_S,
    delivered_bodies,
    new_topic,
    open_halves,
    saved_ids,
    tables,
    wait_until_settled,
)
from tests.support.sql_crashes import BINDINGS, POINTS, REFUSED
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

POINTS_AFTER_COMMIT = (crashing.AFTER_COMMIT, crashing.BEFORE_END, crashing.AFTER_END)
POINTS_AFTER_HALF = (crashing.AFTER_HALF, crashing.BEFORE_COMMIT, *POINTS_AFTER_COMMIT)
MAIN_POINTS = (
    crashing.AFTER_MARKER,
    crashing.AFTER_HALF,
    crashing.BEFORE_COMMIT,
    crashing.BEFORE_END,
)
JOINS = [binding for binding in BINDINGS if binding != "transaction"]
CHECKS = 2  # that are sent while the owner is frozen


@dataclass
class Crash:
    """A process that is killed or frozen at `point`; this process is in the same group."""

    database: str
    point: str
    how: str
    engine: Engine
    escrow: Escrow
    name: str
    child: subprocess.Popen[bytes]
    checks: int = 0

    def count_checks(self) -> None:
        """Count the checks that this process answers, by their queries of the marker."""

        def count(*arguments: object) -> None:
            statement = str(arguments[2])
            self.checks += statement.startswith("SELECT escrowmq_marker")

        event.listen(self.engine, "before_cursor_execute", count)


def wait_for_point(crash: Crash) -> None:
    """Wait until the process is killed or frozen at its point."""
    _, status = os.waitpid(crash.child.pid, os.WUNTRACED)
    if crash.how == "kill":
        crash.child.returncode = -os.WTERMSIG(status)
        assert os.WTERMSIG(status) == signal.SIGKILL, crash
    else:
        assert os.WIFSTOPPED(status), (crash, status)


def expected_checks(point: str) -> int:
    """Return how many checks to wait for while the process is frozen at this point."""
    if point == crashing.AFTER_END or point not in POINTS_AFTER_HALF:
        return 0
    # After the commit the first check finds the marker and decides.
    return 1 if point in POINTS_AFTER_COMMIT else CHECKS


def resume(crash: Crash) -> int:
    """Resume a frozen process after some checks, and return its exit code."""
    count = expected_checks(crash.point)
    wait_until(lambda: crash.checks >= count, f"{count} checks of {crash.name}")
    crash.child.send_signal(signal.SIGCONT)
    return crash.child.wait(WAIT_S)


@pytest.fixture
def crashes() -> Iterator[list[Crash]]:
    """Yield a list for the processes of a test; those that still run at its end are killed."""
    running: list[Crash] = []
    yield running
    for crash in running:
        if crash.child.returncode is None and crash.child.poll() is None:
            crash.child.kill()
            crash.child.wait()


def start(
    stack: ExitStack,
    server: Server,
    url: str,
    kind: str,
    point: str,
    how: str,
    binding: str,
    *,
    url_options: str = "",
) -> Crash:
    engine = create_engine(url)
    stack.callback(engine.dispose)
    tables.create_all(engine)
    name = new_topic(f"{binding}-{kind}-{how}-{point}".replace(" ", "-"))
    escrow = stack.enter_context(Escrow(engine, server.namesrv_address, group=name))
    module = "tests.support.sql_crashes"
    arguments = [url + url_options, server.namesrv_address, name, point, how, binding]
    child = subprocess.Popen([sys.executable, "-m", module, *arguments])
    crash = Crash(kind, point, how, engine, escrow, name, child)
    crash.count_checks()
    return crash


def print_table(server: Server, crashes: list[Crash]) -> None:
    table = Table("database", "stopped", "at", "row", "message", "checks")
    for crash in crashes:
        row = "committed" if crash.name in saved_ids(crash.engine) else "-"
        message = "delivered_bodies" if delivered_bodies(server, crash.name) else "-"
        table.add_row(crash.database, crash.how, crash.point, row, message, str(crash.checks))
    Console(width=100).print(table)


def assert_agreement(server: Server, crashes: list[Crash]) -> None:
    """Check that each message was delivered if and only if its row was committed."""
    wait_until_settled(server)
    print_table(server, crashes)
    for crash in crashes:
        is_saved = crash.name in saved_ids(crash.engine)
        assert is_saved == (crash.how == "freeze" or crash.point in POINTS_AFTER_COMMIT), crash
        assert delivered_bodies(server, crash.name) == ([b"paid"] if is_saved else []), crash


def urls(kind: str, database_servers: dict[str, DatabaseServer], tmp_path: Path) -> Iterator[str]:
    """Yield a new file for each crash on SQLite, which locks whole files, or always one URL."""
    if kind == "sqlite":
        for number in range(100):
            yield f"sqlite:///{tmp_path / f'{number}.db'}"
    url = url_of(kind, database_servers, tmp_path)
    while True:
        yield url


CASES = [
    pytest.param("transaction", "sqlite", "kill", POINTS),
    pytest.param("transaction", "sqlite", "freeze", MAIN_POINTS),
    pytest.param("transaction", "postgresql", "kill", MAIN_POINTS),
    pytest.param("transaction", "postgresql", "freeze", MAIN_POINTS[1::2]),
    *(pytest.param(binding, "postgresql", "kill", MAIN_POINTS) for binding in JOINS),
    *(
        pytest.param(binding, kind, how, POINTS, marks=pytest.mark.nightly)
        for binding in BINDINGS
        for kind in ("sqlite", "postgresql", "mariadb")
        for how in ("kill", "freeze")
        if (binding, kind, how) != ("transaction", "sqlite", "kill")
    ),
]


@pytest.mark.parametrize(("binding", "kind", "how", "points"), CASES)
def test_database_and_message_agree_after_a_kill_or_a_freeze(
    server: Server,
    database_servers: dict[str, DatabaseServer],
    tmp_path: Path,
    crashes: list[Crash],
    binding: str,
    kind: str,
    how: str,
    points: tuple[str, ...],
) -> None:
    database_urls = urls(kind, database_servers, tmp_path)
    with ExitStack() as stack:
        for point in points:
            crashes.append(start(stack, server, next(database_urls), kind, point, how, binding))
        for crash in crashes:
            wait_for_point(crash)
        if how == "freeze":
            for crash in crashes:
                assert resume(crash) == 0, crash
        assert_agreement(server, crashes)


@pytest.mark.parametrize("binding", ["transaction", "session", "driver"])
def test_an_owner_whose_session_ended_while_it_was_frozen_fails(
    server: Server,
    database_servers: dict[str, DatabaseServer],
    tmp_path: Path,
    crashes: list[Crash],
    binding: str,
) -> None:
    """The database gives the lock to the checker, and refuses the owner when it is resumed."""
    url = url_of("postgresql", database_servers, tmp_path)
    timeout = "?options=-c%20idle_in_transaction_session_timeout%3D500"
    with ExitStack() as stack:
        crash = start(
            *(stack, server, url, "postgresql", crashing.AFTER_HALF, "freeze", binding),
            url_options=timeout,
        )
        crashes.append(crash)
        wait_for_point(crash)
        wait_until(lambda: open_halves(server) == 0, "the transaction is rolled back")
        crash.child.send_signal(signal.SIGCONT)
        assert crash.child.wait(WAIT_S) == REFUSED
        assert saved_ids(crash.engine) == []
        assert delivered_bodies(server, crash.name) == []
