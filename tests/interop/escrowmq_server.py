"""EscrowMQ on loopback, as a user starts it: `escrowmq serve` in its own process.

    with EscrowMQ(tmp_path) as server, Client(server.address) as client:
        client.send("orders", b"hello")

It has the interface of `ApacheRocketMQ` and shares its process handling, so that one can replace
the other on the same directory and port.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Literal

from tests.interop import apache
from tests.interop.apache import ChildProcess, ProcessFailed
from tests.interop.remoting import Client

_MAIN = "from escrowmq.cli.main import main; main()"
Role = Literal["all", "broker", "namesrv"]


class EscrowMQ:
    """A name server and a broker, or one of them.

    A broker alone registers with the name server at `namesrv_address`.
    """

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
        self._external_namesrv_address = namesrv_address
        self._process: ChildProcess | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def namesrv_address(self) -> str:
        return self._external_namesrv_address or f"127.0.0.1:{self.namesrv_port}"

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
        for attempt in range(apache.PORT_ATTEMPTS):
            if self.port == 0 or attempt > 0:
                self.namesrv_port, self.port = apache.free_server_ports()
            self._process = self._serve()
            try:
                self._process.wait_until_ready(self._is_ready)
                return
            except ProcessFailed as error:
                self._process = None
                if "in use" not in str(error) or attempt == apache.PORT_ATTEMPTS - 1:
                    raise

    def stop(self) -> None:
        """Stop cleanly. Raises ProcessFailed if the store was not closed."""
        if self._process is not None:
            process, self._process = self._process, None
            process.stop()
            if (self.store / "abort").exists():
                raise ProcessFailed(f"the store was not closed; the log ends:\n{self.log_tail()}")

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def create_topic(self, topic: str, *, queues: int = 4) -> None:
        """Create a topic and wait until the name server has its route."""
        with Client(self.address) as client:
            client.create_topic(topic, queues=queues)
        apache.wait_for_route(self.namesrv_address, topic, self.address)

    def log_tail(self, lines: int = 40) -> str:
        """Return the last lines of the log."""
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])

    @property
    def _log(self) -> Path:
        return self.directory / f"{self.role}.out"

    def _serve(self) -> ChildProcess:
        settings = dict(self.settings)
        if self._external_namesrv_address:
            settings["namesrvAddr"] = self._external_namesrv_address
        conf = self.directory / "escrowmq.conf"
        conf.write_text(apache.properties_text(settings))
        options: dict[str, object] = {"-c": conf, "--role": self.role}
        if self.role != "namesrv":
            options |= {"--data": self.store, "--port": self.port}
        if self.role != "broker":
            options |= {"--namesrv-port": self.namesrv_port}
        arguments = [str(part) for option in options.items() for part in option]
        command = [sys.executable, "-c", _MAIN, "serve", *arguments]
        return ChildProcess(command, name=f"escrowmq {self.role}", output=self._log)

    def _is_ready(self) -> bool:
        if self.role == "namesrv":
            return apache.is_listening(self.namesrv_address)
        # TBW102 has a route as soon as the broker is registered.
        return apache.is_listening(self.address) and apache.has_route(
            self.namesrv_address, "TBW102", self.address
        )
