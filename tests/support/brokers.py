"""Brokers for tests: `escrowmq serve` as a real process, and the broker of `escrowmq.testing`.

    with Server(tmp_path) as server:
        with server.client() as client:
            client.send("orders", b"1")

Server is for tests of the process itself: its command line, its exit code, its log. LocalServer
starts ten times as fast, so everything else uses it.

Its files are small (SETTINGS), so that `assert_clean` can check all of them after each test.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from escrowmq.config import StoreConfig, load_config
from escrowmq.native import SWITCH
from escrowmq.store.check import CheckReport
from escrowmq.testing import BrokerAssertions, LocalBroker
from tests.interop.remoting import RESPONSE, Client, Response
from tests.support.ports import free_ports
from tests.support.stores import assert_clean
from tests.support.waiting import TIMEOUT_S

COMMAND: Final = Path(sys.executable).with_name("escrowmq")
WAIT_S: Final = 20.0  # a healthy process responds, starts and stops within this time

SETTINGS: Final = StoreConfig(
    segment_bytes=16 << 20, queue_file_bytes=2000, index_slots=1009, index_entries=5000
)
_CONF: Final = {
    "mappedFileSizeCommitLog": SETTINGS.segment_bytes,
    "mappedFileSizeConsumeQueue": SETTINGS.queue_file_bytes,
    "maxHashSlotNum": SETTINGS.index_slots,
    "maxIndexNum": SETTINGS.index_entries,
}


class StartFailed(Exception):
    """The process ended before it was ready."""

    def __init__(self, exit_code: int, errors: str) -> None:
        super().__init__(f"exit code {exit_code}:\n{errors}")
        self.exit_code = exit_code
        self.errors = errors


def start_pull(
    client: Client,
    topic: str,
    queue_offset: int,
    *,
    queue_id: int = 0,
    group: str = "waiting",
    subscription: str = "*",
    wait_ms: int = 60_000,
    kind: str = "TAG",
) -> None:
    """Send a pull request without waiting for the response; `next_response` returns it.

    The broker has read the request when this returns.
    """
    fields = {
        "consumerGroup": group,
        "topic": topic,
        "queueId": queue_id,
        "queueOffset": queue_offset,
        "maxMsgNums": 32,
        "sysFlag": 6,  # hold the request if there is no message; it contains the subscription
        "commitOffset": 0,
        "suspendTimeoutMillis": wait_ms,
        "subscription": subscription,
        "subVersion": 0,
        "expressionType": kind,
    }
    client.send_request(11, fields, b"", flag=0)
    client.max_offset(topic, queue_id)  # the requests of one connection are read in order


def next_response(client: Client) -> Response:
    """Wait for the next response on this connection, for example to `start_pull`."""
    while True:
        header, body = client.next_frame()
        if header["flag"] & RESPONSE:
            return Response(
                header["code"], header.get("remark") or "", header.get("extFields") or {}, body
            )


class LocalServer(LocalBroker):
    """A LocalBroker for tests that use the client of tests/interop, or run with RocketMQ too."""

    def __init__(self, settings: Mapping[str, object] | None = None, **options: Any) -> None:
        super().__init__(settings, timeout_s=TIMEOUT_S, **options)

    @property
    def namesrv_address(self) -> str:
        return self.servers

    def client(self, *, timeout_s: float = WAIT_S) -> Client:
        return Client(self.address, timeout_s=timeout_s)

    def assert_clean(self) -> CheckReport:
        """Assert that the stopped broker left no damage and no lock on its directory."""
        assert not self.is_running, "the broker is still running"
        return assert_clean(self.data, load_config(self.directory / "broker.conf").config.store)


@contextmanager
def no_logged_tracebacks() -> Iterator[None]:
    """Assert that a broker in this process logs no exception with its traceback."""
    tracebacks: list[str] = []
    handler = logging.Handler(logging.WARNING)

    def emit(record: logging.LogRecord) -> None:
        if record.exc_info:
            tracebacks.append(handler.format(record))

    handler.emit = emit  # type: ignore[method-assign]
    logger = logging.getLogger("escrowmq")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not tracebacks, "\n".join(tracebacks)


class Server(BrokerAssertions):
    """A server process and its directory. `conf` has settings of broker.conf by RocketMQ's names.

    Leaving the `with` block stops the process; after an exception it is killed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        role: str = "all",
        conf: Mapping[str, object] | None = None,
        wait_s: float = WAIT_S,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._wait_s = wait_s  # limit for a start or a stop
        self._environment = dict(environment or {})
        self.directory = directory
        self.data = directory / "data"
        self._role = role
        self._process: subprocess.Popen[bytes] | None = None
        self._startup_output = b""
        broker_port, namesrv_port = free_ports(2)
        self.namesrv_address = f"127.0.0.1:{namesrv_port}"
        address = f"127.0.0.1:{broker_port}"
        super().__init__(self.namesrv_address, address=address, timeout_s=TIMEOUT_S)
        directory.mkdir(parents=True, exist_ok=True)
        settings = {**_CONF, **(conf or {})}
        self.conf = directory / "broker.conf"
        self.conf.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        self.arguments = [
            *("-c", str(self.conf), "--data", str(self.data), "--role", role),
            *("--port", str(broker_port), "--namesrv-port", str(namesrv_port)),
        ]

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process is None:
            return
        if kind is None:
            self.stop()
        else:
            self.kill()

    def client(self, *, timeout_s: float = WAIT_S) -> Client:
        return Client(self.address, timeout_s=timeout_s)

    def namesrv_client(self) -> Client:
        return Client(self.namesrv_address, timeout_s=WAIT_S)

    @property
    def errors(self) -> str:
        """The log: what the process wrote to standard error since its last start."""
        return (self.directory / "serve.err").read_text()

    @property
    def startup_output(self) -> str:
        """What the process wrote to standard output until it was ready."""
        return self._startup_output.decode()

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def wait_exit(self) -> int:
        """Wait until the process ends by itself, and return its exit code."""
        process, self._process = self._process, None
        assert process is not None
        assert process.stdout is not None
        with process.stdout:
            return process.wait(self._wait_s)

    def forget_exited(self) -> None:
        """Allow another start after the process ended by itself or failed to start."""
        self._process = None

    def reap_killed(self) -> None:
        """Allow another start after a fault injection killed the process."""
        self._reap(signal.SIGKILL)

    def start(self) -> None:
        """Start the process and wait until it is ready. Raises StartFailed."""
        assert self._process is None, "the server is already running"
        environment = {
            name: value
            for name, value in os.environ.items()
            if name == SWITCH or not name.startswith("ESCROWMQ_")
        }
        with (self.directory / "serve.err").open("wb") as errors:
            self._process = subprocess.Popen(
                [COMMAND, "serve", *self.arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=self.directory,
                env={**environment, "HOME": str(self.directory), **self._environment},
            )
        self._startup_output = b""
        deadline_s = time.monotonic() + self._wait_s
        try:
            while b"Try it" not in self._startup_output or not self._startup_output.endswith(b"\n"):
                self._read_output(deadline_s)
        except BaseException:
            self._reap(signal.SIGKILL)
            raise

    def stop(self) -> None:
        """Stop the process as an operator does, and assert that it exits with code 0."""
        code = self._reap(signal.SIGTERM)
        assert code == 0, f"exit code {code}:\n{self.errors}"

    def kill(self) -> None:
        self._reap(signal.SIGKILL)

    def restart(self) -> None:
        self.stop()
        self.start()

    def reload(self) -> None:
        """Tell the process to read its configuration again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    def terminate(self) -> None:
        """Tell the process to stop, without waiting; `stop` waits."""
        assert self._process is not None
        self._process.terminate()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Suspend the process. When it resumes, everything sent meanwhile arrives at once."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def assert_clean(self) -> CheckReport:
        """Assert that the stopped server left no damage and no lock on its directory."""
        assert self._process is None, "the server is still running"
        return assert_clean(self.data, SETTINGS)

    def _read_output(self, deadline_s: float) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        remaining_s = deadline_s - time.monotonic()
        readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, remaining_s))
        if not readable:
            raise TimeoutError(f"not ready after {self._wait_s} s:\n{self.errors}")
        chunk = os.read(self._process.stdout.fileno(), 4096)
        if not chunk:
            raise StartFailed(self._process.wait(WAIT_S), self.errors)
        self._startup_output += chunk

    def _reap(self, ending: signal.Signals) -> int:
        """Send a signal that ends the process, wait for it, and return its exit code."""
        process, self._process = self._process, None
        assert process is not None
        process.send_signal(ending)
        try:
            return process.wait(self._wait_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            if process.stdout is not None:
                process.stdout.close()
