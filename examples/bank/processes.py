"""The processes of the demo: each can be killed with SIGKILL and started again."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from escrowmq.clock import SystemClock
from escrowmq.errors import EscrowError

START_TIMEOUT_S: Final = 180.0  # long, for a busy machine
STOP_TIMEOUT_S: Final = 60.0


class DemoFailed(EscrowError):
    """A process of the demo did not start or failed. Its log says why."""


class ChildProcess:
    """One command whose output and log go to files named after it."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.output_file = directory / f"{name}.out"
        self.log_file = directory / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, module: str, *arguments: object) -> None:
        command = [sys.executable, "-m", module, *map(str, arguments)]
        with self.output_file.open("wb") as out, self.log_file.open("ab") as errors:
            self._process = subprocess.Popen(command, stdout=out, stderr=errors)

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        assert self._process is not None, "the process was never started"
        return self._process.poll()

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, signal_number: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal_number)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class BrokerProcess:
    def __init__(self, directory: Path, settings: dict[str, object]) -> None:
        self._directory = directory
        self.port, self.namesrv_port, self.metrics_port = free_ports(3)
        self.servers = f"127.0.0.1:{self.namesrv_port}"
        self.process = ChildProcess("broker", directory)
        self._config_file = directory / "broker.conf"
        self._config_file.write_text("".join(f"{key}={value}\n" for key, value in settings.items()))

    def start(self) -> None:
        self.process.start(
            "escrowmq.cli.main",
            *("serve", "-c", self._config_file, "--data", self._directory / "data"),
            *("--port", self.port, "--namesrv-port", self.namesrv_port),
            *("--metrics-port", self.metrics_port),
        )
        clock = SystemClock()
        deadline_s = clock.elapsed_s() + START_TIMEOUT_S
        while not (accepts_connections(self.port) and accepts_connections(self.namesrv_port)):
            if self.process.exit_code is not None or clock.elapsed_s() > deadline_s:
                raise DemoFailed(f"the broker did not start: see {self.process.log_file}")
            threading.Event().wait(0.05)


def free_ports(count: int) -> Sequence[int]:
    """Return ports that are free now. All are held until the last is found, so that they differ."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(sock.getsockname()[1]) for sock in sockets]
    for sock in sockets:
        sock.close()
    return ports


def accepts_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def last_line(path: Path) -> str:
    """Return the last complete line of a file that is being written, or "" if there is none."""
    with path.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - 64))
        lines = file.read().decode().split("\n")
    return lines[-2] if len(lines) > 1 else ""
