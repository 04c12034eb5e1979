"""Spark's own cluster as real processes on loopback: a master and workers, in their own directory.

    with SparkCluster(tmp_path) as cluster:
        cluster.run([COMMAND, "pipeline", "ledger", ..., "--master", cluster.url])

Each worker has one core and an address of its own, and gives one executor of 512 MiB. PySpark
carries all that is needed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import pyspark

from tests.support.ports import free_ports
from tests.support.spark_session import spark_environment

SPARK_HOME: Final = Path(pyspark.__file__).parent
WAIT_S: Final = 180.0  # a JVM is up in seconds, on a busy machine in a minute
RUN_S: Final = 600.0
_MEMORY: Final = "512m"
_QUICKLY: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_DEFAULTS: Final = {
    "spark.executor.memory": _MEMORY,
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": _QUICKLY,
    "spark.driver.memory": _MEMORY,
    "spark.driver.extraJavaOptions": _QUICKLY,
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",  # both executors, before a task runs
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}


class SparkCluster:
    def __init__(self, directory: Path, *, workers: int = 2) -> None:
        self._directory = directory
        self._workers = workers
        self._processes: list[subprocess.Popen[bytes]] = []
        port, self._page_port = free_ports(2)
        self.url = f"spark://127.0.0.1:{port}"
        conf = directory / "conf"
        conf.mkdir(parents=True)
        lines = "".join(f"{name} {value}\n" for name, value in _DEFAULTS.items())
        (conf / "spark-defaults.conf").write_text(lines)
        (conf / "log4j2.properties").write_text(
            "rootLogger.level = error\nrootLogger.appenderRef.stderr.ref = stderr\n"
            "appender.stderr.type = Console\nappender.stderr.name = stderr\n"
            "appender.stderr.target = SYSTEM_ERR\nappender.stderr.layout.type = PatternLayout\n"
        )
        self._environment = {
            **os.environ,
            **spark_environment(),
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_CONF_DIR": str(conf),
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": _QUICKLY,
            "SPARK_LOCAL_DIRS": str(directory / "scratch"),
        }

    def __enter__(self) -> SparkCluster:
        host, port = self.url.removeprefix("spark://").split(":")
        try:
            self._start(
                "master",
                *("org.apache.spark.deploy.master.Master", "--host", host, "--port", port),
                *("--webui-port", str(self._page_port)),
            )
            for number in range(self._workers):
                self._start(
                    f"worker-{number}",
                    *("org.apache.spark.deploy.worker.Worker", "--cores", "1"),
                    *("--host", f"127.0.0.{number + 1}"),  # or Spark takes them for one machine
                    *("--memory", _MEMORY, "--webui-port", "0"),
                    *("--work-dir", str(self.work_directory(number)), self.url),
                )
            self._wait_for_workers()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def work_directory(self, number: int) -> Path:
        """Where a worker keeps what its executors say, by application."""
        return self._directory / f"work-{number}"

    def run(self, command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
        """A program that finds the cluster's settings, and is given up on after a while."""
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=RUN_S,
            cwd=self._directory,
            env=self._environment,
        )

    def finished_applications(self) -> dict[str, str]:
        """The applications that have ended, id by name; all of them ended well."""
        found = self._told()["completedapps"]
        assert all(app["state"] == "FINISHED" for app in found), found
        return {app["name"]: app["id"] for app in found}

    def executor_counts(self, application: str) -> list[int]:
        """How many executors each worker has started for it."""
        places = [self.work_directory(number) / application for number in range(self._workers)]
        return [len(list(place.glob("*"))) for place in places]

    def _told(self) -> dict[str, Any]:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self._page_port}/json/", timeout=WAIT_S
        ) as page:
            told: dict[str, Any] = json.load(page)
        return told

    def _start(self, name: str, *arguments: str) -> None:
        with (self._directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [SPARK_HOME / "bin" / "spark-class", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                env=self._environment,
                start_new_session=True,  # executors of a worker end with it
            )
        self._processes.append(process)

    def _wait_for_workers(self) -> None:
        deadline_s = time.monotonic() + WAIT_S
        while True:
            try:
                if self._told()["aliveworkers"] == self._workers:
                    return
            except OSError:
                pass  # the master is not up
            if any(process.poll() is not None for process in self._processes):
                raise RuntimeError(f"it ended:\n{self._logs()}")
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not up after {WAIT_S:.0f} s:\n{self._logs()}")
            threading.Event().wait(0.1)

    def _logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self._directory.glob("*.log")))

    def _end(self) -> None:
        """Workers first; each with all it has started."""
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(WAIT_S)
        self._processes.clear()
