"""A real broker with its name server for tests, on free ports of loopback.

    with LocalBroker() as broker:
        with Escrow(engine, broker.servers, group="bank") as escrow:
            transfer(escrow)
        broker.assert_delivered("transfers", [b"bob pays smith 10"])

It runs in a thread of the test's process, or in a process of its own. In both it has the same
ports and the same files when it is started again, and the same faults.
"""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from escrowmq.client.sync_connection import SyncConnection
from escrowmq.errors import BrokerStopped
from escrowmq.message.topic_config import PERM_READ_WRITE
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers_admin import CreateTopic
from escrowmq.testing.assertions import TIMEOUT_S, BrokerAssertions
from escrowmq.testing.broker_host import BrokerProcess, BrokerRunner, BrokerThread
from escrowmq.testing.connection_faults import REQUEST_CODES

HOST: Final = "127.0.0.1"
# The kernel uses higher ports for outgoing connections. One of those could take the port of a
# broker that is being restarted.
PORTS: Final = range(20_000, 32_000)
PORT_ATTEMPTS_MAX: Final = 100

# Small files, and checks that are due soon and never too many.
SETTINGS: Final[Mapping[str, object]] = {
    "mappedFileSizeCommitLog": 16 << 20,
    "mappedFileSizeConsumeQueue": 20_000,
    "maxHashSlotNum": 1009,
    "maxIndexNum": 5000,
    "transactionTimeOut": 500,
    "transactionCheckInterval": 500,
    "transactionCheckMax": 1000,
}


class LocalBroker(BrokerAssertions):
    """A broker and a name server. Leaving the `with` block stops them and removes their files.

    `settings`: settings of the broker, by their names in a broker.conf. By default it has small
    files, and checks an open transaction every half second.
    `in_process`: run in a thread of this process, which is ready sooner; False: in its own process.
    `directory`: where the files are, and stay; by default in a temporary directory.
    `timeout_s`: how long the assertions wait.
    """

    def __init__(
        self,
        settings: Mapping[str, object] | None = None,
        *,
        in_process: bool = True,
        directory: Path | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._settings = {**SETTINGS, **(settings or {})}
        self._in_process = in_process
        self._removes_directory = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix="escrowmq-"))
        self.data = self.directory / "data"
        self._conf = self.directory / "broker.conf"
        self._has_ports = False
        self._runner: BrokerRunner | None = None
        super().__init__("", timeout_s=timeout_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- start and stop --------------------------------------------------------------------------

    def start(self) -> None:
        """Start it, and return when clients can connect. Does nothing if it runs.

        Raises ConfigError, StoreError or OSError if it cannot start.
        """
        if self.is_running:
            return
        if not self._has_ports:
            self._start_on_free_ports()
        else:
            self._run()

    def stop(self) -> None:
        """Stop it as an operator does. Does nothing if it does not run."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.stop()

    def kill(self) -> None:
        """End it as `kill -9` does. In a process of its own, it is `kill -9`.

        In a thread, nothing more is answered or saved, and the files are left as they are.
        """
        self._running().kill()
        self._runner = None

    def restart(self) -> None:
        """Stop it if it runs, and start it on the same ports and the same files."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Stop it, and remove its files if they are in a temporary directory."""
        try:
            self.stop()
        finally:
            if self._removes_directory:
                shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def is_running(self) -> bool:
        """Whether it was started, and has neither been stopped nor failed."""
        return self._runner is not None and self._runner.is_alive

    def _start_on_free_ports(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for _ in range(PORT_ATTEMPTS_MAX):
            broker_port, namesrv_port = _free_port(), _free_port()
            settings = {
                **self._settings,
                "storePathRootDir": self.data,
                "listenPort": broker_port,
                "escrowNamesrvPort": namesrv_port,
            }
            self._conf.write_text("".join(f"{key}={text}\n" for key, text in settings.items()))
            try:
                self._run()
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue  # another process was faster
            self._has_ports = True
            self.address = f"{HOST}:{broker_port}"
            self.servers = f"{HOST}:{namesrv_port}"
            return
        raise BrokerStopped(f"no free ports in {PORT_ATTEMPTS_MAX} attempts")

    def _run(self) -> None:
        runner: BrokerRunner
        if self._in_process:
            runner = BrokerThread(self._conf)
        else:
            runner = BrokerProcess(self._conf, self.directory / "broker.log")
        runner.start()
        self._runner = runner

    def _running(self) -> BrokerRunner:
        if self._runner is None:
            raise BrokerStopped("the broker does not run; start() starts it")
        return self._runner

    # --- topics ----------------------------------------------------------------------------------

    def create_topic(self, topic: str, *, queues: int = 4) -> None:
        """Create a topic, so that consumers can subscribe to it before the first message."""
        header = CreateTopic(
            topic=topic, read_queue_nums=queues, write_queue_nums=queues, perm=PERM_READ_WRITE
        )
        with SyncConnection(self.address) as connection:
            connection.call(RequestCode.UPDATE_AND_CREATE_TOPIC, header)

    # --- transactions ----------------------------------------------------------------------------

    def check_back_now(self, group: str = "") -> int:
        """Check all open transactions of a producer group, or of all groups, whenever they are due.

        Return how many. Those of a group without a connected producer are checked as soon as one
        connects.
        """
        count: int = self._running().call("check_back_now", group)
        return count

    # --- faults ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def slow(self, seconds: float) -> Iterator[None]:
        """Send every response so much later during the block."""
        self._running().call("set_delay", seconds)
        try:
            yield
        finally:
            if self.is_running:
                self._running().call("set_delay", 0.0)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Suspend the broker. After the block, all that was sent meanwhile arrives at once."""
        runner = self._running()
        runner.freeze()
        try:
            yield
        finally:
            runner.resume()

    @contextlib.contextmanager
    def lose_responses(self, requests: str | RequestCode, *, count: int = 1) -> Iterator[None]:
        """Lose the next `count` responses during the block: the connection breaks before them.

        The requests take effect. `requests` says which ones: "send", "end", "pull", "send_back",
        "commit_offset", "heartbeat", "route", or a request code. Fails if there were fewer.
        """
        codes = _request_codes(requests)
        runner = self._running()
        number = runner.call("begin_loss", codes, count)
        try:
            yield
        finally:
            lost = runner.call("end_loss", number) if runner.is_alive else count
        assert lost == count, f"{lost} responses to {requests!r} were lost, expected {count}"

    @contextlib.contextmanager
    def refuse_connections(self) -> Iterator[None]:
        """Close all connections, and accept no others until the end of the block."""
        self._running().call("refuse_connections", True)
        try:
            yield
        finally:
            if self.is_running:
                self._running().call("refuse_connections", False)


def _request_codes(requests: str | RequestCode) -> tuple[int, ...]:
    if isinstance(requests, RequestCode):
        return (requests,)
    if requests not in REQUEST_CODES:
        raise ValueError(f"requests={requests!r}: expected one of {', '.join(REQUEST_CODES)}")
    return REQUEST_CODES[requests]


def _free_port() -> int:
    """Return a port that is free at the moment."""
    while True:
        port = random.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
