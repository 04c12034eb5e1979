"""Spark sessions: start a local one, make the data source known to any other.

This module can be imported without PySpark, so that a missing or old PySpark or Java is reported in
one sentence instead of a traceback.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from escrowmq.errors import SparkNotAvailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MIN_JAVA: Final = 17
MIN_PYSPARK: Final = (4, 2)


def register(spark: SparkSession) -> None:
    """Make the formats `escrowmq` and `rocketmq` known to a session. Raises SparkNotAvailable."""
    check_pyspark()
    from escrowmq.spark.data_source import EscrowSource, RocketMQSource

    try:
        core_count = spark.sparkContext.defaultParallelism
    except Exception:  # Spark Connect has no context, and raises different errors
        core_count = 0

    # Spark pickles a class that is defined in a function by value, with its attributes. A class of
    # a module is pickled by name, and would lose the number of cores.
    class Escrow(EscrowSource):
        cores = core_count

    class Rocket(RocketMQSource):
        cores = core_count

    spark.dataSource.register(Escrow)
    spark.dataSource.register(Rocket)


def local_session(
    app_name: str = "escrowmq",
    *,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return a session with our formats. It runs on this machine unless `master` says otherwise.

    Raises SparkNotAvailable.
    """
    check_pyspark()
    check_java()
    from pyspark.sql import SparkSession

    # Workers must run this interpreter: the `python3` of the PATH may have no pyarrow.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app_name).master(master or "local[*]")
    if master is None or master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        builder = builder.config("spark.driver.bindAddress", "127.0.0.1")
        builder = builder.config("spark.ui.enabled", "false")
    for name, value in (settings or {}).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


def check_pyspark() -> None:
    """Raise SparkNotAvailable if PySpark or pyarrow is missing or too old."""
    hint = 'pip install "escrowmq[spark]"'
    try:
        import pyarrow  # noqa: F401
        import pyspark
    except ImportError as error:
        raise SparkNotAvailable(f"{error.name} is not installed: {hint}") from error
    version = tuple(int(part) for part in re.findall(r"\d+", pyspark.__version__)[:2])
    if version < MIN_PYSPARK:
        required = ".".join(map(str, MIN_PYSPARK))
        raise SparkNotAvailable(
            f"PySpark {pyspark.__version__} is too old, {required} is needed: {hint}"
        )


def check_java(environment: Mapping[str, str] | None = None) -> int:
    """Return the release of the Java that Spark would start. Raises SparkNotAvailable."""
    environment = os.environ if environment is None else environment
    home = environment.get("JAVA_HOME")
    java = shutil.which("java", path=environment.get("PATH", ""))
    if home:
        java = str(Path(home) / "bin" / "java")
    hint = f"Spark needs Java {MIN_JAVA} or newer: install it, or point JAVA_HOME to it"
    if java is None or not os.access(java, os.X_OK):
        raise SparkNotAvailable(
            f"no Java at {java}; {hint}" if java else f"no Java on the PATH; {hint}"
        )
    result = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    version = re.search(r'version "(\d+)(?:\.(\d+))?', result.stderr + result.stdout)
    if version is None:
        raise SparkNotAvailable(f"{java} -version does not say which release it is; {hint}")
    # Java 8 calls itself 1.8.
    release = int(version[2] or 0) if version[1] == "1" else int(version[1])
    if release < MIN_JAVA:
        raise SparkNotAvailable(f"{java} is Java {release}; {hint}")
    return release
