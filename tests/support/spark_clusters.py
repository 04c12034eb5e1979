"""Run a standalone Spark cluster as processes on loopback: a master and workers.

    with SparkCluster(tmp_path) as cluster:
        cluster.run([COMMAND, "pipeline", "ledger", ..., "--master", cluster.url])

Each worker has one core and its own address, and offers one executor of 512 MiB. The programs are
those of the PySpark package.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import pyspark

from tests.support.ports import free_ports
from tests.support.spark_session import spark_environment
from tests.support.waiting import wait_until

SPARK_HOME: Final = Path(pyspark.__file__).parent
WAIT_S: Final = 180.0  # a JVM starts in seconds, on a busy machine in a minute
RUN_S: Final = 600.0
_MEMORY: Final = "512m"
_FAST_START: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_DEFAULTS: Final = {
    "spark.executor.memory": _MEMORY,
    "spark.executor.cores": "1",
    "spark.executor.extraJavaOptions": _FAST_START,
    "spark.driver.memory": _MEMORY,
    "spark.driver.extraJavaOptions": _FAST_START,
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",  # no task runs before both executors
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
}


class SparkCluster:
    """A master and workers that run inside a `with` block."""

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
            "SPARK_DAEMON_JAVA_OPTS": _FAST_START,
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
                    # Spark treats workers with the same address as one machine.
                    *("--host", f"127.0.0.{number + 1}"),
                    *("--memory", _MEMORY, "--webui-port", "0"),
                    *("--work-dir", str(self.work_directory(number)), self.url),
                )
            wait_until(self._has_all_workers, self._logs, timeout_s=WAIT_S)
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
        """Return the directory of a worker, with the output of its executors by application."""
        return self._directory / f"work-{number}"

    def run(self, command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
        """Run a program with the settings of the cluster, for at most RUN_S."""
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
        """Return the ids of the finished applications by name. Asserts that none has failed."""
        applications = self._status()["completedapps"]
        assert all(app["state"] == "FINISHED" for app in applications), applications
        return {app["name"]: app["id"] for app in applications}

    def executor_counts(self, application: str) -> list[int]:
        """Return how many executors each worker has started for an application."""
        folders = [self.work_directory(number) / application for number in range(self._workers)]
        return [len(list(folder.glob("*"))) for folder in folders]

    def _status(self) -> dict[str, Any]:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self._page_port}/json/", timeout=WAIT_S
        ) as page:
            status: dict[str, Any] = json.load(page)
        return status

    def _start(self, name: str, *arguments: str) -> None:
        with (self._directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [SPARK_HOME / "bin" / "spark-class", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                env=self._environment,
                start_new_session=True,  # so that the executors of a worker end with it
            )
        self._processes.append(process)

    def _has_all_workers(self) -> bool:
        if any(process.poll() is not None for process in self._processes):
            raise RuntimeError(f"a process of the cluster ended:\n{self._logs()}")
        try:
            return bool(self._status()["aliveworkers"] == self._workers)
        except OSError:
            return False  # the master is not ready

    def _logs(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self._directory.glob("*.log")))

    def _end(self) -> None:
        """Kill the workers and then the master, each with the processes that it started."""
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(WAIT_S)
        self._processes.clear()
