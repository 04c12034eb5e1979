"""One Spark session per test process, because starting one takes longer than most tests.

    from tests.support.spark_session import spark  # noqa: F401

    def test_…(spark: SparkSession) -> None: ...

Its settings favour a fast start over speed, and a task is tried up to three times. Tests are
skipped on a machine without Java.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from escrowmq.errors import PipelineFailed, SparkNotAvailable
from escrowmq.spark import local_session
from escrowmq.spark.session import check_java

ROOT: Final = Path(__file__).parents[2]
SLOW_START: Final = "failed to connect back"  # Spark's message if a Python worker starts too late
SETTINGS: Final = {
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.log.level": "ERROR",
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing."
        "FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.pollingDelay": "50",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}

# Options of a pipeline's command that runs in the shared session. Without them it would set its own
# number of partitions, for itself and for all later tests.
COMMAND_OPTIONS: Final = (
    "--conf",
    f"spark.sql.shuffle.partitions={SETTINGS['spark.sql.shuffle.partitions']}",
)

# PySpark warns that it does not support pandas 3 fully, and closes its sockets late.
IGNORED_WARNINGS: Final = (
    "ignore:.*pandas.*:FutureWarning",
    "ignore:unclosed:ResourceWarning",
    "ignore:Exception ignored in.*socket:pytest.PytestUnraisableExceptionWarning",
)


T = TypeVar("T")


def spark_environment() -> dict[str, str]:
    """Return variables for Spark and its workers: this interpreter, these sources, loopback."""
    return {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
    }


def start_session(master: str = "local[2,3]", **settings: str) -> SparkSession:
    """Start a session in a program that is not a test and needs its own."""
    os.environ.update(spark_environment())
    return local_session("tests", master=master, settings={**SETTINGS, **settings})


def retry_slow_start(run: Callable[[], T]) -> T:
    """Run a streaming query, and repeat it if its Python worker did not start in time.

    Spark waits ten seconds, which is too short on a busy machine. A query that fails so has done
    nothing yet.
    """
    for _ in range(4):
        try:
            return run()
        except (PySparkException, PipelineFailed) as error:
            if SLOW_START not in str(error):
                raise
    return run()


def skip_without_java() -> None:
    """Skip the test if there is no Java."""
    try:
        check_java()
    except SparkNotAvailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    skip_without_java()
    directory = str(tmp_path_factory.mktemp("spark"))
    # Workers import our sources, and functions of tests.
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    original_environment = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {**SETTINGS, "spark.sql.warehouse.dir": directory, "spark.local.dir": directory}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = local_session("tests", master="local[2,3]", settings=settings)
    try:
        yield session
    finally:
        session.stop()
        os.environ.clear()
        os.environ.update(original_environment)
