"""The examples, run as their documentation says: as processes, with a real broker and SQLite."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import httpx
import pytest

from tests.support.brokers import Server
from tests.support.listener_example import RESULTS, SHORT_CHECKS
from tests.support.ports import free_ports
from tests.support.sql_bank import WAIT_S, delivered_bodies
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Run a broker that checks open transactions after half a second."""
    conf = {"transactionTimeOut": 500, "transactionCheckInterval": 500, "transactionCheckMax": 1000}
    with Server(tmp_path_factory.mktemp("examples"), conf=conf) as server:
        yield server


class ExampleProcess:
    """A running example; `lines` has the output so far."""

    def __init__(self, server: Server, directory: Path, command: list[str], database: str) -> None:
        self.lines: list[str] = []
        root = str(EXAMPLES.parent)
        path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=directory,
            env={
                **os.environ,
                "SERVERS": server.namesrv_address,
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
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, text: str, times: int = 1) -> None:
        """Wait until the output contains a text so many times."""

        def is_printed() -> bool:
            has_ended = self.process.poll() is not None and not self._reader.is_alive()
            assert self.output.count(text) >= times or not has_ended, self.output
            return self.output.count(text) >= times

        wait_until(is_printed, lambda: f"{text!r} is printed; the output is:\n{self.output}")

    def press_enter(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def wait(self, number: signal.Signals | None = None) -> int:
        """Send the signal, if one is given; wait for the end, and return the exit code."""
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
def run_example(
    server: Server, directory: Path, *command: str, database: str = ""
) -> Iterator[ExampleProcess]:
    """Start an example. It is killed at the end of the block if it still runs."""
    database = database or f"sqlite:///{directory / 'x.db'}"
    example = ExampleProcess(server, directory, list(command), database)
    try:
        yield example
    finally:
        if example.process.returncode is None:
            example.process.kill()
        example.wait()


def script(name: str) -> str:
    return str(EXAMPLES / name)


def first_column(directory: Path, query: str) -> list[object]:
    with closing(sqlite3.connect(directory / "x.db")) as connection:
        return [row[0] for row in connection.execute(query)]


def wait_until_open(address: str, server: ExampleProcess) -> None:
    def responds() -> bool:
        assert server.process.poll() is None, server.output
        try:
            httpx.get(f"{address}/orders/none")
        except httpx.TransportError:
            return False
        return True

    wait_until(responds, lambda: f"{address} responds; the output is:\n{server.output}")


# --- the plain script ----------------------------------------------------------------------------


def test_the_script_makes_one_transfer_in_each_run(server: Server, tmp_path: Path) -> None:
    for balances in ("bob 70, smith 30", "bob 40, smith 60"):
        with run_example(server, tmp_path, script("plain_script.py")) as example:
            assert example.wait() == 0, example.output
        assert example.lines[-1] == balances
    server.assert_settled()
    server.assert_delivered("transfers", [b"30", b"30"])


# --- web services --------------------------------------------------------------------------------


def test_the_fastapi_service_saves_an_order_and_sends_its_message_or_neither(
    server: Server, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    command = ["-m", "uvicorn", "examples.fastapi_service:app", "--port", str(port)]
    database = f"sqlite+aiosqlite:///{tmp_path / 'x.db'}"
    with run_example(server, tmp_path, *command, database=database) as service:
        wait_until_open(address, service)
        created = httpx.post(f"{address}/orders", params={"item": "lamp"}, timeout=WAIT_S)
        assert created.status_code == 201, service.output
        refused = httpx.post(
            f"{address}/orders", params={"item": "lamp", "count": 0}, timeout=WAIT_S
        )
        assert refused.status_code == 422
        order_id = created.json()["id"]
        order = httpx.get(f"{address}/orders/{order_id}").json()
        assert service.wait(signal.SIGTERM) in (0, -signal.SIGTERM), service.output
    assert first_column(tmp_path, "SELECT id FROM orders") == [order_id]
    bodies = [json.loads(message.body) for message in server.messages("web-orders")]
    assert bodies == [order] == [{"id": order_id, "item": "lamp", "count": 1}]


def test_the_django_view_saves_an_order_and_sends_its_message_or_neither(
    server: Server, tmp_path: Path
) -> None:
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    site, database = script("django_view.py"), str(tmp_path / "x.db")
    with run_example(server, tmp_path, site, "migrate", database=database) as migration:
        assert migration.wait() == 0, migration.output
    command = [site, "runserver", "--noreload", f"127.0.0.1:{port}"]
    with run_example(server, tmp_path, *command, database=database) as service:
        wait_until_open(address, service)
        created = httpx.post(f"{address}/orders", data={"item": "lamp"}, timeout=WAIT_S)
        assert created.status_code == 201, service.output
        assert httpx.post(f"{address}/orders", timeout=WAIT_S).status_code == 500
        assert httpx.get(f"{address}/orders").json() == {"orders": ["lamp"]}
        service.wait(signal.SIGINT)
    server.assert_delivered("site-orders", [b"lamp"])


# --- web services that join the transaction of their session -------------------------------------


class WebService(NamedTuple):
    """A web service that saves orders, and sends a message for each."""

    command: tuple[str, ...]
    driver: str
    topic: str

    def post(self, address: str, **order: str | int) -> int:
        """Order something, and return the status code."""
        values = {key: str(value) for key, value in order.items()}
        if self.topic == "flask-orders":
            return httpx.post(f"{address}/orders", timeout=WAIT_S, data=values).status_code
        return httpx.post(f"{address}/orders", timeout=WAIT_S, params=values).status_code


JOINING_SERVICES = [
    WebService(
        ("-m", "uvicorn", "examples.fastapi_depends:app", "--port"),
        "sqlite+aiosqlite",
        "depends-orders",
    ),
    WebService(
        ("-m", "flask", "--app", script("flask_service.py"), "run", "--port"),
        "sqlite",
        "flask-orders",
    ),
]


@contextmanager
def run_service(server: Server, directory: Path, service: WebService) -> Iterator[str]:
    """Run a web service and yield its address."""
    (port,) = free_ports(1)
    address = f"http://127.0.0.1:{port}"
    database = f"{service.driver}:///{directory / 'x.db'}"
    command = [*service.command, str(port)]
    with run_example(server, directory, *command, database=database) as example:
        wait_until_open(address, example)
        yield address
        example.wait(signal.SIGTERM)


def assert_orders_have_messages(server: Server, directory: Path, service: WebService) -> None:
    """Check that exactly the orders that are saved have a message, and only one."""
    server.assert_settled()
    bodies = [json.loads(body) for body in delivered_bodies(server, service.topic)]
    saved = first_column(directory, "SELECT id FROM orders ORDER BY id")
    assert sorted(body["id"] for body in bodies) == saved


@pytest.mark.parametrize("service", JOINING_SERVICES, ids=lambda service: service.topic)
def test_a_service_that_joins_saves_an_order_and_sends_its_message_or_neither(
    server: Server, tmp_path: Path, service: WebService
) -> None:
    with run_service(server, tmp_path, service) as address:
        assert service.post(address, item="lamp") == 201
        refused = {"item": ""} if service.topic == "flask-orders" else {"item": "lamp", "count": 0}
        assert service.post(address, **refused) == 422
    assert first_column(tmp_path, "SELECT item FROM orders") == ["lamp"]
    assert_orders_have_messages(server, tmp_path, service)


@pytest.mark.parametrize("service", JOINING_SERVICES, ids=lambda service: service.topic)
def test_a_service_that_joins_survives_its_broker(tmp_path: Path, service: WebService) -> None:
    """The broker is frozen, stopped, and killed while many orders arrive."""
    conf = {"transactionTimeOut": 500, "transactionCheckInterval": 500, "transactionCheckMax": 1000}
    with (
        Server(tmp_path / "broker", conf=conf) as server,
        run_service(server, tmp_path, service) as address,
    ):
        assert service.post(address, item="before") == 201
        with server.frozen():
            assert service.post(address, item="frozen") == 503
        server.stop()
        assert service.post(address, item="stopped") == 503
        server.start()
        wait_until(lambda: service.post(address, item="again") == 201, "orders are taken")
        codes = order_while_the_broker_is_killed(server, address, service)
        wait_until(lambda: service.post(address, item="after") == 201, "orders are taken")
        assert set(codes) <= {201, 503}
        items = first_column(tmp_path, "SELECT item FROM orders")
        assert items.count("during") == codes.count(201)
        assert {"frozen", "stopped"}.isdisjoint(items)
        assert_orders_have_messages(server, tmp_path, service)


def order_while_the_broker_is_killed(
    server: Server, address: str, service: WebService
) -> list[int]:
    """Order until an order fails because the broker was killed; return all status codes."""
    codes: list[int] = []

    def order() -> None:
        while not codes or codes[-1] == 201:
            codes.append(service.post(address, item="during"))

    ordering = threading.Thread(target=order)
    ordering.start()
    wait_until(lambda: len(codes) >= 5, "orders are taken")
    server.kill()
    ordering.join(WAIT_S)
    server.start()
    return codes


# --- the worker ----------------------------------------------------------------------------------


def test_the_worker_performs_each_task_once(server: Server, tmp_path: Path) -> None:
    guests = [f"guest-{number}@example.org" for number in range(8)]
    worker = script("worker.py")
    with run_example(server, tmp_path, worker, "sign-up", *guests) as sign_up:
        assert sign_up.wait() == 0, sign_up.output
    with run_example(server, tmp_path, worker, "sign-up", guests[0]) as repeated:
        assert repeated.wait() != 0  # the address exists: no row is saved, no task is sent
    with run_example(server, tmp_path, worker, "work") as working:
        working.wait_for("welcomed", times=len(guests))
        assert working.wait(signal.SIGTERM) == 0, working.output
    server.assert_settled()
    assert first_column(tmp_path, "SELECT address FROM letter ORDER BY address") == guests


def test_the_worker_prints_its_usage(server: Server, tmp_path: Path) -> None:
    with run_example(server, tmp_path, script("worker.py")) as example:
        assert example.wait() == 1
    assert "sign-up" in example.output


# --- the app -------------------------------------------------------------------------------------


def test_the_app_credits_each_transfer_once_and_keeps_what_is_none(
    server: Server, tmp_path: Path
) -> None:
    command = ["-m", "escrowmq", "worker", "examples.app:app"]
    with run_example(server, tmp_path, script("app.py"), "30", "20", "oops") as sending:
        assert sending.wait() == 0, sending.output
    with run_example(server, tmp_path, *command) as working:
        working.wait_for("smith has 50 cents")
        working.wait_for("message moved to the dead letters group=receiving-bank")
        assert working.wait(signal.SIGINT) == 0, working.output
    server.assert_settled()
    assert first_column(tmp_path, "SELECT cents FROM account") == [50]
    receipts = [json.loads(body)["balance"] for body in delivered_bodies(server, "app-receipts")]
    assert max(receipts) == 50
    assert len(receipts) == 2


# --- the listener --------------------------------------------------------------------------------


def test_the_listener_example_shows_what_became_of_each_message(tmp_path: Path) -> None:
    with (
        Server(tmp_path / "broker", conf=SHORT_CHECKS) as server,
        run_example(server, tmp_path, script("transaction_listener.py")) as example,
    ):
        assert example.wait() == 0, example.output
        assert example.lines[-len(RESULTS) :] == RESULTS, example.output
        bodies = [b"Hello RocketMQ %d" % number for number in (1, 4, 7)]
        server.assert_delivered("TopicTest1234", bodies)


# --- twenty lines --------------------------------------------------------------------------------


def test_database_and_messages_agree_after_a_kill_before_or_after_the_commit(
    server: Server, tmp_path: Path
) -> None:
    example = script("twenty_lines.py")
    with run_example(server, tmp_path, example) as before_commit:
        before_commit.wait_for("KILL ME NOW")
        assert len(server.open_transactions()) == 1
        before_commit.wait(signal.SIGKILL)
    with run_example(server, tmp_path, example) as after_commit:
        after_commit.wait_for("paid [], shipped []: they agree")
        after_commit.wait_for("KILL ME NOW")
        after_commit.press_enter()
        after_commit.wait_for("KILL ME NOW", times=2)
        after_commit.wait(signal.SIGKILL)
    assert first_column(tmp_path, "SELECT id FROM paid") == [1]
    with run_example(server, tmp_path, example) as not_killed:
        not_killed.wait_for("paid [1], shipped [1]: they agree")
        for times in (1, 2):
            not_killed.wait_for("KILL ME NOW", times)
            not_killed.press_enter()
        assert not_killed.wait() == 0, not_killed.output
    assert not_killed.lines[-1] == "paid [1, 2], shipped [1, 2]: they agree"
    server.assert_settled()
    server.assert_delivered("twenty-orders", [b"1", b"2"])


# --- tests of a service --------------------------------------------------------------------------


def test_the_tests_of_a_service_pass(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull]
    finished = subprocess.run(
        [*command, script("test_transfer.py")], cwd=tmp_path, capture_output=True, check=False
    )
    assert finished.returncode == 0, finished.stdout.decode()
    assert b" 11 passed" in finished.stdout
