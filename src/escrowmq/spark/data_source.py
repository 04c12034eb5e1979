"""The data source as Spark sees it: `format("escrowmq")`.

Sessions: a local one that works at once, and our formats made known to any other.

PySpark is imported when a session is asked for and not before, so that what is missing can be said
in words: Java, PySpark, or a version of them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from escrowmq.errors import SparkNotAvailable
from escrowmq.spark import options
from escrowmq.spark.options import parse_options
from escrowmq.spark.schema import MESSAGE_COLUMNS, TRANSACTION_COLUMNS, Columns

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class EscrowSource(DataSource):
    cores: ClassVar[int] = 0  # of the cluster, if `register` could ask; 0: of this machine

    @classmethod
    def name(cls) -> str:
        return "escrowmq"

    def schema(self) -> StructType:
        return self._columns().spark_schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        chosen = options.parse_read_options(self.options, is_stream=False)
        columns = self._columns().select_schema(schema)
        if chosen.is_set(options.PATH):
            from escrowmq.spark.log_reader import LogReader

            return LogReader(chosen, columns, self.cores)
        from escrowmq.spark.readers import BatchReader

        return BatchReader(chosen, columns, self.cores)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        from escrowmq.spark.readers import StreamReader

        chosen = options.parse_read_options(self.options, is_stream=True)
        return StreamReader(chosen, self._columns().select_schema(schema), self.cores)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from escrowmq.spark.writers import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        from escrowmq.spark.writers import stream_writer

        return stream_writer(self.options, schema, overwrite)

    def _columns(self) -> Columns:
        chosen = parse_options(self.options, options.READ_OPTIONS)
        known = (
            TRANSACTION_COLUMNS if chosen[options.MODE] == options.TRANSACTIONS else MESSAGE_COLUMNS
        )
        names = chosen[options.COLUMNS]
        return known.select(names) if names else known


class RocketMQSource(EscrowSource):
    """The same under the name that users of rocketmq-spark know."""

    @classmethod
    def name(cls) -> str:
        return "rocketmq"


MIN_JAVA: Final = 17
MIN_PYSPARK: Final = (4, 2)


def register(spark: SparkSession) -> None:
    """Make the formats `escrowmq` and `rocketmq` known to a session."""
    check_pyspark()

    try:
        cores_there = spark.sparkContext.defaultParallelism
    except Exception:  # Spark Connect has no context, and says so in several ways
        cores_there = 0

    # Made here, these are pickled with what they hold: a class of a module is not.
    class Escrow(EscrowSource):
        cores = cores_there

    class Rocket(RocketMQSource):
        cores = cores_there

    spark.dataSource.register(Escrow)
    spark.dataSource.register(Rocket)


def local_session(
    app_name: str = "escrowmq",
    *,
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> SparkSession:
    """A session with our formats; on this machine alone unless `master` says otherwise.

    Raises SparkMissing.
    """
    check_pyspark()
    check_java()
    from pyspark.sql import SparkSession

    # Workers must be this interpreter: the `python3` of the PATH may have no pyarrow.
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
    """Raises SparkMissing."""
    how = 'pip install "escrowmq[spark]"'
    try:
        import pyarrow  # noqa: F401
        import pyspark
    except ImportError as error:
        raise SparkNotAvailable(f"{error.name} is not installed: {how}") from error
    found = tuple(int(part) for part in re.findall(r"\d+", pyspark.__version__)[:2])
    if found < MIN_PYSPARK:
        least = ".".join(map(str, MIN_PYSPARK))
        raise SparkNotAvailable(
            f"PySpark {pyspark.__version__} is too old, {least} is needed: {how}"
        )


def check_java(environment: Mapping[str, str] | None = None) -> int:
    """The release of the Java that Spark would start. Raises SparkMissing."""
    environment = os.environ if environment is None else environment
    home = environment.get("JAVA_HOME")
    java = shutil.which("java", path=environment.get("PATH", ""))
    if home:
        java = str(Path(home) / "bin" / "java")
    how = f"Spark needs Java {MIN_JAVA} or newer: install it, or point JAVA_HOME to it"
    if java is None or not os.access(java, os.X_OK):
        raise SparkNotAvailable(
            f"no Java at {java}; {how}" if java else f"no Java on the PATH; {how}"
        )
    told = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    found = re.search(r'version "(\d+)(?:\.(\d+))?', told.stderr + told.stdout)
    if found is None:
        raise SparkNotAvailable(f"{java} -version does not say which it is; {how}")
    release = int(found[2] or 0) if found[1] == "1" else int(found[1])  # 1.8 is 8
    if release < MIN_JAVA:
        raise SparkNotAvailable(f"{java} is Java {release}; {how}")
    return release
