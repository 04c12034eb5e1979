"""One Spark session for all tests of a run: to start one takes longer than most of them.

    from tests.support.spark_session import spark  # noqa: F401

    def test_…(spark: SparkSession) -> None: ...

It starts quickly rather than runs quickly; a task is tried three times. A machine without Java
skips the tests.
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
SLOW_START: Final = "failed to connect back"  # what Spark says of a Python process
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

# PySpark says of pandas 3 that it does not know it well yet; and its sockets are closed late.
QUIET: Final = (
    "ignore:.*pandas.*:FutureWarning",
    "ignore:unclosed:ResourceWarning",
    "ignore:Exception ignored in.*socket:pytest.PytestUnraisableExceptionWarning",
)


T = TypeVar("T")


def environment() -> dict[str, str]:
    """For Spark and its workers: this interpreter, these sources, loopback only."""
    return {
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT))),
    }


def session(master: str = "local[2,3]", **settings: str) -> SparkSession:
    """For a process that needs no other."""
    os.environ.update(environment())
    return local_session("tests", master=master, settings={**SETTINGS, **settings})


def patiently(run: Callable[[], T]) -> T:
    """Run a streaming query, again if its Python process did not get up in time: Spark gives it ten
    seconds, which a busy machine may not have. Nothing of the query has happened then."""
    for _ in range(4):
        try:
            return run()
        except (PySparkException, PipelineFailed) as error:
            if SLOW_START not in str(error):
                raise
    return run()


def need_java() -> None:
    """Or skip the test."""
    try:
        check_java()
    except SparkNotAvailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    need_java()
    here = tmp_path_factory.mktemp("spark")
    # Workers import our sources, and what tests hand over to them.
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {**SETTINGS, "spark.sql.warehouse.dir": str(here), "spark.local.dir": str(here)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        session = local_session("tests", master="local[2,3]", settings=settings)
    try:
        yield session
    finally:
        session.stop()
        os.environ.clear()
        os.environ.update(before)
