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

from escrowmq.errors import SparkMissing
from escrowmq.spark import options
from escrowmq.spark.options import choose
from escrowmq.spark.schema import MESSAGE, TRANSACTION, Columns

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class EscrowSource(DataSource):
    cores: ClassVar[int] = 0  # of the cluster, if `register` could ask; 0: of this machine

    @classmethod
    def name(cls) -> str:
        return "escrowmq"

    def schema(self) -> StructType:
        return self._columns().spark()

    def reader(self, schema: StructType) -> DataSourceReader:
        chosen = options.read_options(self.options, is_stream=False)
        columns = self._columns().chosen_by(schema)
        if chosen.has(options.PATH):
            from escrowmq.spark.log_reader import LogReader

            return LogReader(chosen, columns, self.cores)
        from escrowmq.spark.readers import BatchReader

        return BatchReader(chosen, columns, self.cores)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        from escrowmq.spark.readers import StreamReader

        chosen = options.read_options(self.options, is_stream=True)
        return StreamReader(chosen, self._columns().chosen_by(schema), self.cores)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from escrowmq.spark.writers import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        from escrowmq.spark.writers import stream_writer

        return stream_writer(self.options, schema, overwrite)

    def _columns(self) -> Columns:
        chosen = choose(self.options, options.READ)
        known = TRANSACTION if chosen[options.MODE] == options.TRANSACTIONS else MESSAGE
        names = chosen[options.COLUMNS]
        return known.only(names) if names else known


class RocketSource(EscrowSource):
    """The same under the name that users of rocketmq-spark know."""

    @classmethod
    def name(cls) -> str:
        return "rocketmq"


JAVA_MIN: Final = 17
PYSPARK_MIN: Final = (4, 2)


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

    class Rocket(RocketSource):
        cores = cores_there

    spark.dataSource.register(Escrow)
    spark.dataSource.register(Rocket)


def local_session(
    app: str = "escrowmq",
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
    builder = SparkSession.builder.appName(app).master(master or "local[*]")
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
        raise SparkMissing(f"{error.name} is not installed: {how}") from error
    found = tuple(int(part) for part in re.findall(r"\d+", pyspark.__version__)[:2])
    if found < PYSPARK_MIN:
        least = ".".join(map(str, PYSPARK_MIN))
        raise SparkMissing(f"PySpark {pyspark.__version__} is too old, {least} is needed: {how}")


def check_java(environment: Mapping[str, str] | None = None) -> int:
    """The release of the Java that Spark would start. Raises SparkMissing."""
    environment = os.environ if environment is None else environment
    home = environment.get("JAVA_HOME")
    java = shutil.which("java", path=environment.get("PATH", ""))
    if home:
        java = str(Path(home) / "bin" / "java")
    how = f"Spark needs Java {JAVA_MIN} or newer: install it, or point JAVA_HOME to it"
    if java is None or not os.access(java, os.X_OK):
        raise SparkMissing(f"no Java at {java}; {how}" if java else f"no Java on the PATH; {how}")
    told = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    found = re.search(r'version "(\d+)(?:\.(\d+))?', told.stderr + told.stdout)
    if found is None:
        raise SparkMissing(f"{java} -version does not say which it is; {how}")
    release = int(found[2] or 0) if found[1] == "1" else int(found[1])  # 1.8 is 8
    if release < JAVA_MIN:
        raise SparkMissing(f"{java} is Java {release}; {how}")
    return release
