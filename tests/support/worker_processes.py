"""Run `escrowmq worker` as a real process: signals, output, health."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from tests.support.brokers import COMMAND
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


class WorkerCommand:
    """A running `escrowmq worker`, or the command of another program that behaves like it.

    `output` is what it has written so far, logs included. Leaving the `with` block kills it and
    its worker processes.
    """

    def __init__(
        self,
        *arguments: str,
        environment: Mapping[str, str],
        directory: Path = ROOT,
        command: tuple[str, ...] = (str(COMMAND), "worker"),
    ) -> None:
        (self.port,) = free_ports(1)
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [*command, *arguments, "--health-port", str(self.port)],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> WorkerCommand:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(WAIT_S)  # the workers hold the pipe open until they have ended
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    @property
    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health/ready", timeout=WAIT_S) as page:
                return bool(page.status == 200)
        except (urllib.error.URLError, ConnectionError):
            return False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_ready(self) -> None:
        self.wait_for(lambda: self.is_ready, "the worker is ready")

    def wait_output(self, text: str, times: int = 1) -> None:
        self.wait_for(lambda: self.output.count(text) >= times, repr(text))

    def wait_for(self, condition: object, description: str) -> None:
        """Wait until a condition is true; fail at once if the process has ended."""
        assert callable(condition)

        def is_true() -> bool:
            ended = self.process.poll() is not None and not self._reader.is_alive()
            result = bool(condition())
            assert result or not ended, f"{description}:\n{self.output}"
            return result

        wait_until(is_true, lambda: f"{description}; the output is:\n{self.output}")

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send a signal, wait for the end, and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)
