"""Killed or frozen at every point of a transaction: database and message agree in the end.

All processes of one case run at the same time, each with its own group and topic; beside each is
another process of its group (this one), which the broker can ask. `pytest -s` shows the table.
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
from tests.support.sql_crashes import POINTS, REFUSED
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

AFTER_THE_COMMIT = (crashing.AFTER_COMMIT, crashing.BEFORE_END, crashing.AFTER_END)
HAS_HALF = (crashing.AFTER_HALF, crashing.BEFORE_COMMIT, *AFTER_THE_COMMIT)
SOME = (crashing.AFTER_MARKER, crashing.AFTER_HALF, crashing.BEFORE_COMMIT, crashing.BEFORE_END)
CHECKS = 2  # while the owner is frozen


@dataclass
class Crash:
    """A process that stops at `point`, while this process of the same group keeps running."""

    database: str
    point: str
    how: str
    engine: Engine
    escrow: Escrow
    name: str
    child: subprocess.Popen[bytes]
    checks: int = 0

    def watch(self) -> None:
        def count(*given: object) -> None:
            self.checks += str(given[2]).startswith("SELECT escrowmq_marker")

        event.listen(self.engine, "before_cursor_execute", count)


def stopped(crash: Crash) -> None:
    """Wait until the process has reached its point."""
    _, status = os.waitpid(crash.child.pid, os.WUNTRACED)
    if crash.how == "kill":
        crash.child.returncode = -os.WTERMSIG(status)
        assert os.WTERMSIG(status) == signal.SIGKILL, crash
    else:
        assert os.WIFSTOPPED(status), (crash, status)


def resumed(crash: Crash) -> int:
    if crash.point in HAS_HALF:
        decided = crash.point in AFTER_THE_COMMIT  # one check is enough, or none is needed
        wanted = 0 if crash.point == crashing.AFTER_END else 1 if decided else CHECKS
        wait_until(lambda: crash.checks >= wanted, f"asked about {crash.name}")
    crash.child.send_signal(signal.SIGCONT)
    return crash.child.wait(WAIT_S)


@pytest.fixture
def crashes() -> Iterator[list[Crash]]:
    """Processes of the test, which are killed at its end."""
    running: list[Crash] = []
    yield running
    for crash in running:
        if crash.child.returncode is None and crash.child.poll() is None:
            crash.child.kill()
            crash.child.wait()


def begin(
    stack: ExitStack, served: Server, url: str, kind: str, point: str, how: str, *, more: str = ""
) -> Crash:
    engine = create_engine(url)
    stack.callback(engine.dispose)
    tables.create_all(engine)
    name = new_topic(f"{kind}-{how}-{point}".replace(" ", "-"))
    escrow = stack.enter_context(Escrow(engine, served.namesrv_address, group=name))
    module = "tests.support.sql_crashes"
    command = [sys.executable, "-m", module, url + more, served.namesrv_address, name, point, how]
    child = subprocess.Popen(command)
    crash = Crash(kind, point, how, engine, escrow, name, child)
    crash.watch()
    return crash


def show(served: Server, crashes: list[Crash]) -> None:
    table = Table("database", "stopped", "at", "row", "message", "checks")
    for crash in crashes:
        row = "committed" if crash.name in saved_ids(crash.engine) else "-"
        message = "delivered" if delivered_bodies(served, crash.name) else "-"
        table.add_row(crash.database, crash.how, crash.point, row, message, str(crash.checks))
    Console(width=100).print(table)


def agree(served: Server, crashes: list[Crash]) -> None:
    wait_until_settled(served)
    show(served, crashes)
    for crash in crashes:
        is_saved = crash.name in saved_ids(crash.engine)
        assert is_saved == (crash.how == "freeze" or crash.point in AFTER_THE_COMMIT), crash
        assert delivered_bodies(served, crash.name) == ([b"paid"] if is_saved else []), crash


def urls(kind: str, servers: dict[str, DatabaseServer], tmp_path: Path) -> Iterator[str]:
    """A file for each crash on SQLite, which locks whole files; otherwise one database for all."""
    if kind == "sqlite":
        for number in range(100):
            yield f"sqlite:///{tmp_path / f'{number}.db'}"
    url = url_of(kind, servers, tmp_path)
    while True:
        yield url


CASES = [
    pytest.param("sqlite", "kill", POINTS),
    pytest.param("sqlite", "freeze", SOME),
    pytest.param("postgresql", "kill", SOME),
    pytest.param("postgresql", "freeze", SOME[1::2]),
    pytest.param("sqlite", "freeze", POINTS, marks=pytest.mark.nightly),
    *(
        pytest.param(kind, how, POINTS, marks=pytest.mark.nightly)
        for kind in ("postgresql", "mariadb")
        for how in ("kill", "freeze")
    ),
]


@pytest.mark.parametrize(("kind", "how", "points"), CASES)
def test_database_and_message_agree(
    served: Server,
    servers: dict[str, DatabaseServer],
    tmp_path: Path,
    crashes: list[Crash],
    kind: str,
    how: str,
    points: tuple[str, ...],
) -> None:
    places = urls(kind, servers, tmp_path)
    with ExitStack() as stack:
        for point in points:
            crashes.append(begin(stack, served, next(places), kind, point, how))
        for crash in crashes:
            stopped(crash)
        if how == "freeze":
            for crash in crashes:
                assert resumed(crash) == 0, crash
        agree(served, crashes)


def test_an_owner_whose_session_ended_while_it_was_frozen_fails(
    served: Server, servers: dict[str, DatabaseServer], tmp_path: Path, crashes: list[Crash]
) -> None:
    """The database gives the lock to the checker, and refuses the owner when it wakes up."""
    url = url_of("postgresql", servers, tmp_path)
    more = "?options=-c%20idle_in_transaction_session_timeout%3D500"
    with ExitStack() as stack:
        crash = begin(stack, served, url, "postgresql", crashing.AFTER_HALF, "freeze", more=more)
        crashes.append(crash)
        stopped(crash)
        wait_until(lambda: open_halves(served) == 0, "rolled back while it is frozen")
        crash.child.send_signal(signal.SIGCONT)
        assert crash.child.wait(WAIT_S) == REFUSED
        assert saved_ids(crash.engine) == []
        assert delivered_bodies(served, crash.name) == []
