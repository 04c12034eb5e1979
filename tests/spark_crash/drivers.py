"""Start and end Spark drivers. A spare driver is started in advance if one will be killed."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pyspark

from tests.spark_crash.cases import LOCAL
from tests.spark_crash.points import DIRECTORY
from tests.support.spark_session import environment

START_TIMEOUT_S: Final = 600.0  # a start takes ten seconds, on a busy machine minutes


class Driver:
    """A driver process, which runs `job.py`. `run` waits until it has started."""

    def __init__(self, master: str, directory: Path) -> None:
        self.master = master
        self._errors = directory / "job.err"
        self._jvm_pid = 0  # known once the driver has started
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark_crash.job", master],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **_environment(master, directory)},
                cwd=directory,
            )
        self._buffer = b""

    def run(self, query: dict[str, object]) -> None:
        """Start a query; `read_line` returns its result."""
        if not self._jvm_pid:
            line = self.read_line(START_TIMEOUT_S)
            assert line, f"{line}\n{self._errors.read_text()[-3000:]}"
            self._jvm_pid = json.loads(line)["jvm"]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(query).encode() + b"\n")
        self._process.stdin.flush()

    def read_line(self, timeout_s: float) -> str | None:
        """Return the next line of output: "" if the process has ended, None after a timeout."""
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._buffer:
            remaining_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([self._process.stdout], [], [], remaining_s)[0]:
                return None
            chunk = os.read(self._process.stdout.fileno(), 4096)
            if not chunk:
                return ""
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def kill(self) -> None:
        """Kill JVM and Python. A JVM that outlives its Python would keep starting executors."""
        if self._jvm_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._jvm_pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _environment(master: str, directory: Path) -> dict[str, str]:
    variables = {**environment(), DIRECTORY: str(directory)}
    variables["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parent / 'preload'}"
    if master != LOCAL:
        variables["SPARK_HOME"] = str(_spark_home(directory))
    return variables


def _spark_home(directory: Path) -> Path:
    """Return a copy of PySpark by links, but with its own `work`, where executors write files."""
    home = directory / "spark"
    if not home.exists():
        home.mkdir()
        for entry in Path(pyspark.__file__).parent.iterdir():
            if entry.name != "work":
                (home / entry.name).symlink_to(entry)
    return home


class Drivers:
    """The current driver, and a spare one that can replace it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._current: Driver | None = None
        self._spare: Driver | None = None
        self.start_count = 0

    def current(self, master: str, *, needs_spare: bool) -> Driver:
        """Return the current driver of this master, and start a spare one if it is needed."""
        if self._current is not None and self._current.master != master:
            self.kill_all()
        if self._current is None:
            self._current, self._spare = self._spare or self._start(master), None
        if self._spare is None and needs_spare:
            self._spare = self._start(master)
        return self._current

    def second(self) -> Driver:
        """Return a driver besides the current one, which remains the spare driver."""
        if self._spare is None:
            self._spare = self._start(LOCAL)
        return self._spare

    def discard_current(self) -> None:
        """Clean up after the current driver, which was killed."""
        if self._current is not None:
            self._current.kill()
            self._current = None

    def kill_all(self) -> None:
        for driver in (self._current, self._spare):
            if driver is not None:
                driver.kill()
        self._current = self._spare = None

    def _start(self, master: str) -> Driver:
        self.start_count += 1
        return Driver(master, self._directory)
