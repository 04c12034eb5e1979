"""`escrowmq serve` as a real process: started on free ports, waited for, stopped, killed, reaped.

    with Served(tmp_path) as served:
        with served.client() as client:
            client.send("orders", b"1")

Its files are small (SETTINGS), so that a test may look through all of them with `assert_clean`.
"""

from __future__ import annotations

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
from typing import Final

from escrowmq.config import StoreConfig
from escrowmq.store.check import CheckReport
from tests.interop.remoting import RESPONSE, Client, Response
from tests.support.ports import free_ports
from tests.support.stores import assert_clean

COMMAND: Final = Path(sys.executable).with_name("escrowmq")
WAIT_S: Final = 20.0  # for anything that a healthy process does at once

SETTINGS: Final = StoreConfig(
    segment_bytes=16 << 20, queue_file_bytes=2000, index_slots=1009, index_entries=5000
)
_CONF: Final = {
    "mappedFileSizeCommitLog": SETTINGS.segment_bytes,
    "mappedFileSizeConsumeQueue": SETTINGS.queue_file_bytes,
    "maxHashSlotNum": SETTINGS.index_slots,
    "maxIndexNum": SETTINGS.index_entries,
}


class NotStarted(Exception):
    """It ended before it was ready."""

    def __init__(self, exit_code: int, errors: str) -> None:
        super().__init__(f"exit code {exit_code}:\n{errors}")
        self.exit_code = exit_code
        self.errors = errors


def begin_pull(
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
    """Ask for messages and do not wait; when this returns, the broker has read the request."""
    fields = {
        "consumerGroup": group,
        "topic": topic,
        "queueId": queue_id,
        "queueOffset": queue_offset,
        "maxMsgNums": 32,
        "sysFlag": 6,  # wait if there is nothing; the subscription travels with it
        "commitOffset": 0,
        "suspendTimeoutMillis": wait_ms,
        "subscription": subscription,
        "subVersion": 0,
        "expressionType": kind,
    }
    client.send_request(11, fields, b"", flag=0)
    client.max_offset(topic, queue_id)  # lines are read in order


def next_answer(client: Client) -> Response:
    """The next answer to something that was begun."""
    while True:
        header, body = client.next_frame()
        if header["flag"] & RESPONSE:
            return Response(
                header["code"], header.get("remark") or "", header.get("extFields") or {}, body
            )


class Served:
    """One server and its directory. `conf` are lines of its broker.conf, by RocketMQ's names."""

    def __init__(
        self,
        directory: Path,
        *,
        role: str = "all",
        conf: Mapping[str, object] | None = None,
        wait_s: float = WAIT_S,
    ) -> None:
        self._wait_s = wait_s  # for a start or a stop
        self.directory = directory
        self.data = directory / "data"
        self._role = role
        self._process: subprocess.Popen[bytes] | None = None
        self._said = b""
        broker_port, namesrv_port = free_ports(2)
        self.address = f"127.0.0.1:{broker_port}"
        self.namesrv_address = f"127.0.0.1:{namesrv_port}"
        directory.mkdir(parents=True, exist_ok=True)
        lines = {**_CONF, **(conf or {})}
        self.conf = directory / "broker.conf"
        self.conf.write_text("".join(f"{name}={value}\n" for name, value in lines.items()))
        self.arguments = [
            *("-c", str(self.conf), "--data", str(self.data), "--role", role),
            *("--port", str(broker_port), "--namesrv-port", str(namesrv_port)),
        ]

    def __enter__(self) -> Served:
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

    def name_client(self) -> Client:
        return Client(self.namesrv_address, timeout_s=WAIT_S)

    @property
    def errors(self) -> str:
        """What it wrote to standard error since its last start: the log."""
        return (self.directory / "serve.err").read_text()

    @property
    def said(self) -> str:
        """What it wrote to standard output until it was ready."""
        return self._said.decode()

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def forget(self) -> None:
        """It ended by itself, or never began: it can be started again."""
        self._process = None

    def bury(self) -> None:
        """It was killed by somebody else: it can be started again."""
        self._reap(signal.SIGKILL)

    def start(self) -> None:
        """Return when it is ready. Raises NotStarted."""
        assert self._process is None, "it runs already"
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("ESCROWMQ_")
        }
        with (self.directory / "serve.err").open("wb") as errors:
            self._process = subprocess.Popen(
                [COMMAND, "serve", *self.arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=self.directory,
                env={**environment, "HOME": str(self.directory)},
            )
        self._said = b""
        deadline_s = time.monotonic() + self._wait_s
        try:
            while b"Try it" not in self._said or not self._said.endswith(b"\n"):
                self._read_more(deadline_s)
        except BaseException:
            self._reap(signal.SIGKILL)
            raise

    def stop(self) -> None:
        """As an operator stops it; it must have ended well."""
        code = self._reap(signal.SIGTERM)
        assert code == 0, f"exit code {code}:\n{self.errors}"

    def kill(self) -> None:
        self._reap(signal.SIGKILL)

    def restart(self) -> None:
        self.stop()
        self.start()

    def hang_up(self) -> None:
        """Ask it to read its configuration again."""
        assert self._process is not None
        self._process.send_signal(signal.SIGHUP)

    def terminate(self) -> None:
        """Ask it to stop, and do not wait; `stop` does that."""
        assert self._process is not None
        self._process.terminate()

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """It does nothing meanwhile; what is sent to it then, it finds all at once."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def assert_clean(self) -> CheckReport:
        """Once it is stopped: nothing is damaged, and nobody holds the directory."""
        assert self._process is None, "it still runs"
        return assert_clean(self.data, SETTINGS)

    def _read_more(self, deadline_s: float) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        left_s = deadline_s - time.monotonic()
        readable, _, _ = select.select([self._process.stdout], [], [], max(0.0, left_s))
        if not readable:
            raise TimeoutError(f"not ready after {self._wait_s} s:\n{self.errors}")
        chunk = os.read(self._process.stdout.fileno(), 4096)
        if not chunk:
            raise NotStarted(self._process.wait(WAIT_S), self.errors)
        self._said += chunk

    def _reap(self, number: signal.Signals) -> int:
        process, self._process = self._process, None
        assert process is not None
        process.send_signal(number)
        try:
            return process.wait(self._wait_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        finally:
            if process.stdout is not None:
                process.stdout.close()
