"""The examples, run as their pages say: real broker, real HTTP, SQLite, a process for each."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx
import pytest

from tests.support.brokers import Server
from tests.support.ports import free_ports
from tests.support.sql_bank import WAIT_S, delivered_bodies, open_halves, wait_until_settled
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A broker that asks soon."""
    conf = {"transactionTimeOut": 500, "transactionCheckInterval": 500, "transactionCheckMax": 1000}
    with Server(tmp_path_factory.mktemp("examples"), conf=conf) as served:
        yield served


class Started:
    """One of them, and every line that it has said."""

    def __init__(self, served: Server, directory: Path, command: list[str], database: str) -> None:
        self.lines: list[str] = []
        root = str(EXAMPLES.parent)
        path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=directory,
            env={
                **os.environ,
                "SERVERS": served.namesrv_address,
                "DATABASE": database,
                "PYTHONPATH": path,
                "PYTHONUNBUFFERED": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,))
        self._reader.start()

    def _read(self, output: IO[str]) -> None:
        for line in output:
            self.lines.append(line.rstrip("\n"))

    @property
    def said(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, words: str, times: int = 1) -> None:
        def is_said() -> bool:
            gone = self.process.poll() is not None and not self._reader.is_alive()
            assert self.said.count(words) >= times or not gone, self.said
            return self.said.count(words) >= times

        wait_until(is_said, f"it says {words!r}; it said:\n{self.said}")

    def press_enter(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def ended(self, number: signal.Signals | None = None) -> int:
        """Its exit code; with a signal, it is sent first."""
        if number is not None:
            self.process.send_signal(number)
        try:
            return self.process.wait(WAIT_S)
        finally:
            self.process.kill()
            self._reader.join()
            for pipe in (self.process.stdin, self.process.stdout):
                if pipe is not None:
                    pipe.close()


@contextmanager
def started(
    served: Server, directory: Path, *command: str, database: str = ""
) -> Iterator[Started]:
    found = Started(served, directory, list(command), database or f"sqlite:///{directory / 'x.db'}")
    try:
        yield found
    finally:
        if found.process.returncode is None:
            found.process.kill()
        found.ended()


def script(name: str) -> str:
    return str(EXAMPLES / name)


def rows(directory: Path, query: str) -> list[object]:
    with sqlite3.connect(directory / "x.db") as connection:
        found = [row[0] for row in connection.execute(query)]
    connection.close()
    return found


def wait_until_open(address: str, server: Started) -> None:
    def answers() -> bool:
        assert server.process.poll() is None, server.said
        try:
            httpx.get(f"{address}/orders/none")
        except httpx.TransportError:
            return False
        return True

    wait_until(answers, f"{address} answers; it said:\n{server.said}")


# --- the plain script ----------------------------------------------------------------------------


def test_the_script_pays_what_it_can_and_nothing_else(served: Server, tmp_path: Path) -> None:
    for left in ("bob 70, smith 30", "bob 40, smith 60"):
        with started(served, tmp_path, script("plain_script.py")) as run:
            assert run.ended() == 0, run.said
        assert run.lines[-1] == left
    wait_until_settled(served)
    assert delivered_bodies(served, "transfers") == [b"30", b"30"]


# --- web services --------------------------------------------------------------------------------


def test_the_fastapi_service_saves_and_announces_or_neither(served: Server, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    command = ["-m", "uvicorn", "examples.fastapi_service:app", "--port", str(port)]
    database = f"sqlite+aiosqlite:///{tmp_path / 'x.db'}"
    with started(served, tmp_path, *command, database=database) as service:
        wait_until_open(address, service)
        answer = httpx.post(f"{address}/orders", params={"item": "lamp"}, timeout=WAIT_S)
        assert answer.status_code == 201, service.said
        refused = httpx.post(
            f"{address}/orders", params={"item": "lamp", "count": 0}, timeout=WAIT_S
        )
        assert refused.status_code == 422
        order_id = answer.json()["id"]
        found = httpx.get(f"{address}/orders/{order_id}").json()
        assert service.ended(signal.SIGTERM) in (0, -signal.SIGTERM), service.said
    assert rows(tmp_path, "SELECT id FROM orders") == [order_id]
    bodies = [json.loads(body) for body in delivered_bodies(served, "web-orders")]
    assert bodies == [found] == [{"id": order_id, "item": "lamp", "count": 1}]


def test_the_django_view_saves_and_announces_or_neither(served: Server, tmp_path: Path) -> None:
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    site, database = script("django_view.py"), str(tmp_path / "x.db")
    with started(served, tmp_path, site, "migrate", database=database) as migration:
        assert migration.ended() == 0, migration.said
    command = [site, "runserver", "--noreload", f"127.0.0.1:{port}"]
    with started(served, tmp_path, *command, database=database) as service:
        wait_until_open(address, service)
        answer = httpx.post(f"{address}/orders", data={"item": "lamp"}, timeout=WAIT_S)
        assert answer.status_code == 201, service.said
        assert httpx.post(f"{address}/orders", timeout=WAIT_S).status_code == 500
        assert httpx.get(f"{address}/orders").json() == {"orders": ["lamp"]}
        service.ended(signal.SIGINT)
    assert delivered_bodies(served, "site-orders") == [b"lamp"]


# --- the worker ----------------------------------------------------------------------------------


def test_workers_perform_what_was_put_off_once(served: Server, tmp_path: Path) -> None:
    guests = [f"guest-{number}@example.org" for number in range(8)]
    worker = script("worker.py")
    with started(served, tmp_path, worker, "sign-up", *guests) as run:
        assert run.ended() == 0, run.said
    with started(served, tmp_path, worker, "sign-up", guests[0]) as again:
        assert again.ended() != 0  # there is one of that name: neither saved nor welcomed
    with started(served, tmp_path, worker, "work") as work:
        work.wait_for("welcomed", times=len(guests))
        assert work.ended(signal.SIGTERM) == 0, work.said
    wait_until_settled(served)
    assert rows(tmp_path, "SELECT address FROM letter ORDER BY address") == guests


def test_the_worker_says_how_it_is_called(served: Server, tmp_path: Path) -> None:
    with started(served, tmp_path, script("worker.py")) as run:
        assert run.ended() == 1
    assert "sign-up" in run.said


# --- twenty lines --------------------------------------------------------------------------------


def test_it_comes_out_right_wherever_it_is_killed(served: Server, tmp_path: Path) -> None:
    example = script("twenty_lines.py")
    with started(served, tmp_path, example) as before_commit:
        before_commit.wait_for("KILL ME NOW")
        assert open_halves(served) == 1
        before_commit.ended(signal.SIGKILL)
    with started(served, tmp_path, example) as after_commit:
        after_commit.wait_for("paid [], shipped []: they agree")
        after_commit.wait_for("KILL ME NOW")
        after_commit.press_enter()
        after_commit.wait_for("KILL ME NOW", times=2)
        after_commit.ended(signal.SIGKILL)
    assert rows(tmp_path, "SELECT id FROM paid") == [1]
    with started(served, tmp_path, example) as unharmed:
        unharmed.wait_for("paid [1], shipped [1]: they agree")
        for times in (1, 2):
            unharmed.wait_for("KILL ME NOW", times)
            unharmed.press_enter()
        assert unharmed.ended() == 0, unharmed.said
    assert unharmed.lines[-1] == "paid [1, 2], shipped [1, 2]: they agree"
    wait_until_settled(served)
    assert delivered_bodies(served, "twenty-orders") == [b"1", b"2"]
