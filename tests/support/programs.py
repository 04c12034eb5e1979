"""Run a small Python program as a user would, and look at what it prints and how it ends.

    with Program(source, server.namesrv_address) as program:
        program.wait_for("ready")
        program.send_signal(signal.SIGTERM)
        result = program.wait()

Its arguments are in `sys.argv[1:]`.
"""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
from types import TracebackType
from typing import NamedTuple

from tests.support.waiting import TIMEOUT_S


class ProgramResult(NamedTuple):
    code: int  # negative: the number of the signal that ended it
    out: str
    err: str

    @property
    def last_error(self) -> str:
        """The last line of standard error: the sentence of a traceback."""
        return self.err.strip().rpartition("\n")[2]


class Program:
    """A running program. Leaving the block kills it if it has not ended."""

    def __init__(self, source: str, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(source), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._output: list[str] = []
        self._errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._read_output, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._finish()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for(self, text: str, count: int = 1) -> None:
        """Return when so many further lines with this text were printed."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while count:
            try:
                line = self._lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                raise AssertionError(f"no {text!r} in {self._output}:\n{''.join(self._errors)}")
            count -= text in line

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self) -> ProgramResult:
        """Return when the program has ended by itself."""
        self._process.wait(TIMEOUT_S)
        self._finish()
        return ProgramResult(self._process.returncode, "".join(self._output), "".join(self._errors))

    def _finish(self) -> None:
        self._process.wait(TIMEOUT_S)
        for thread in self._threads:
            thread.join(TIMEOUT_S)
        for stream in (self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()

    def _read_output(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._output.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self._errors.extend(self._process.stderr)


def run_program(source: str, *arguments: str) -> ProgramResult:
    """Run a program to its end."""
    with Program(source, *arguments) as program:
        return program.wait()
