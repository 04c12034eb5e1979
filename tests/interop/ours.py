"""EscrowMQ on loopback, as a user starts it: `escrowmq serve` in a process of its own.

    with EscrowMQ(tmp_path) as ours, Client(ours.address) as client:
        client.send("orders", b"hello")

It shares the leash, the ports and the way of waiting with the harness for Apache RocketMQ, so
that the one can stand where the other stood.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal

from tests.interop import apache
from tests.interop.apache import ChildProcess, ProcessFailed
from tests.interop.remoting import Client, ResponseError

_MAIN = "from escrowmq.cli.main import main; main()"
_ATTEMPTS = 3
_ROUTE_S = 20
_POLL_S = 0.05

Role = Literal["all", "broker", "namesrv"]


class EscrowMQ:
    """Name server and broker, or one of them; `namesrv_address` says where the other is."""

    def __init__(
        self,
        directory: Path,
        settings: Mapping[str, object] | None = None,
        *,
        role: Role = "all",
        namesrv_address: str = "",
    ) -> None:
        self.directory = directory.resolve()
        self.store = self.directory / "store"
        self.settings = dict(settings or {})
        self.role = role
        self.port = self.namesrv_port = 0
        self._elsewhere = namesrv_address
        self._process: ChildProcess | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def namesrv_address(self) -> str:
        return self._elsewhere or f"127.0.0.1:{self.namesrv_port}"

    def __enter__(self) -> EscrowMQ:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for attempt in range(_ATTEMPTS):
            if self.port == 0 or attempt > 0:
                self.namesrv_port, self.port = apache.free_server_ports()
            self._process = self._serve()
            try:
                self._process.wait_until_ready(self._is_ready)
                return
            except ProcessFailed as error:
                self._process = None
                if "in use" not in str(error) or attempt == _ATTEMPTS - 1:
                    raise

    def stop(self) -> None:
        """In order: whoever stops a broker may rely on its store being closed."""
        if self._process is not None:
            process, self._process = self._process, None
            process.stop()
            if (self.store / "abort").exists():
                raise ProcessFailed(f"not stopped in order; the log ends:\n{self.log_tail()}")

    def kill(self) -> None:
        """As kill -9 does it."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def create_topic(self, topic: str, *, queues: int = 4) -> None:
        """And wait until the name server tells clients about it."""
        with Client(self.address) as client:
            client.create_topic(topic, queues=queues)
        await_route(self.namesrv_address, topic, self.address)

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    @property
    def _log(self) -> Path:
        return self.directory / f"{self.role}.out"

    def _serve(self) -> ChildProcess:
        settings = dict(self.settings)
        if self._elsewhere:
            settings["namesrvAddr"] = self._elsewhere
        conf = self.directory / "escrowmq.conf"
        conf.write_text(apache.properties_text(settings))
        flags: dict[str, object] = {"-c": conf, "--role": self.role}
        if self.role != "namesrv":
            flags |= {"--data": self.store, "--port": self.port}
        if self.role != "broker":
            flags |= {"--namesrv-port": self.namesrv_port}
        arguments = [str(part) for flag in flags.items() for part in flag]
        command = [sys.executable, "-c", _MAIN, "serve", *arguments]
        return ChildProcess(command, name=f"escrowmq {self.role}", output=self._log)

    def _is_ready(self) -> bool:
        if self.role == "namesrv":
            return apache.is_listening(self.namesrv_address)
        # A broker answers for its template topic as soon as the name server knows it.
        return apache.is_listening(self.address) and has_route(
            self.namesrv_address, "TBW102", self.address
        )


def has_route(namesrv: str, topic: str, broker: str) -> bool:
    """Does this name server send a topic's clients to this broker?"""
    with contextlib.suppress(OSError, ResponseError), Client(namesrv) as client:
        route = client.route(topic)
        brokers = route["brokerDatas"] if route else []
        return any(broker in each["brokerAddrs"].values() for each in brokers)
    return False


def await_route(namesrv: str, topic: str, broker: str) -> None:
    deadline = time.monotonic() + _ROUTE_S
    while not has_route(namesrv, topic, broker):
        if time.monotonic() > deadline:
            raise ProcessFailed(f"{namesrv} does not know that {topic} is at {broker}")
        time.sleep(_POLL_S)
