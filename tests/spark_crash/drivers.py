"""Drivers as processes. Where one is going to be killed, the next is started in time."""

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
from tests.support.spark_session import spark_environment

WAIT_S: Final = 600.0  # a driver needs ten seconds, on a busy machine minutes


class Job:
    """One driver, which takes its time to get up: `tell` waits for that."""

    def __init__(self, master: str, directory: Path) -> None:
        self.master = master
        self._errors = directory / "job.err"
        self._jvm = 0  # until it has said that it is up
        with self._errors.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark_crash.job", master],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **_environment(master, directory)},
                cwd=directory,
            )
        self._said = b""

    def tell(self, wanted: dict[str, object]) -> None:
        if not self._jvm:
            said = self.hear(WAIT_S)
            assert said, f"{said}\n{self._errors.read_text()[-3000:]}"
            self._jvm = json.loads(said)["jvm"]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(wanted).encode() + b"\n")
        self._process.stdin.flush()

    def hear(self, wait_s: float) -> str | None:
        """Its next line; "" if it has died, None if it said nothing in this time."""
        assert self._process.stdout is not None
        deadline_s = time.monotonic() + wait_s
        while b"\n" not in self._said:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([self._process.stdout], [], [], left_s)[0]:
                return None
            chunk = os.read(self._process.stdout.fileno(), 4096)
            if not chunk:
                return ""
            self._said += chunk
        line, _, self._said = self._said.partition(b"\n")
        return line.decode()

    def end(self) -> None:
        """It is not asked nicely: a JVM that outlives its Python would go on starting executors."""
        if self._jvm:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._jvm, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _environment(master: str, directory: Path) -> dict[str, str]:
    made = {**spark_environment(), DIRECTORY: str(directory)}
    made["PYTHONPATH"] += f"{os.pathsep}{Path(__file__).parent / 'preload'}"
    return made if master == LOCAL else {**made, "SPARK_HOME": str(_home(directory))}


def _home(directory: Path) -> Path:
    """PySpark as it is, but for `work`: there a local cluster keeps the files of its executors."""
    home = directory / "spark"
    if not home.exists():
        home.mkdir()
        for entry in Path(pyspark.__file__).parent.iterdir():
            if entry.name != "work":
                (home / entry.name).symlink_to(entry)
    return home


class Drivers:
    """The one at work, and perhaps one to take its place."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._job: Job | None = None
        self._spare: Job | None = None
        self.started = 0

    def take(self, master: str, others_to_come: int) -> Job:
        """The one at work, for this master. With others to come a spare is started meanwhile."""
        if self._job is not None and self._job.master != master:
            self.end()
        if self._job is None:
            self._job, self._spare = self._spare or self._start(master), None
        if self._spare is None and others_to_come:
            self._spare = self._start(master)
        return self._job

    def second(self) -> Job:
        """One beside the one at work; he stays as the spare."""
        if self._spare is None:
            self._spare = self._start(LOCAL)
        return self._spare

    def bury(self) -> None:
        """The one at work was killed."""
        if self._job is not None:
            self._job.end()
            self._job = None

    def end(self) -> None:
        for job in (self._job, self._spare):
            if job is not None:
                job.end()
        self._job = self._spare = None

    def _start(self, master: str) -> Job:
        self.started += 1
        return Job(master, self._directory)
