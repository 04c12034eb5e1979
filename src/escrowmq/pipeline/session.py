"""What every pipeline needs before it can begin: a cluster that answers, Spark, and its errors in
one line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from escrowmq.errors import PipelineFailed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_TIME_ZONE: Final = "spark.sql.session.timeZone"
_SETTINGS: Final = {
    "spark.ui.showConsoleProgress": "false",
    _TIME_ZONE: "UTC",
    "spark.log.level": "ERROR",
}
_OURS: Final = re.compile(r"escrowmq\.errors\.\w+: ([^\n]+)")
_IN_A_TASK: Final = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*\n)+(\S.*)")


def pipeline_session(
    name: str, master: str | None, more: Mapping[str, str] | None = None
) -> SparkSession:
    """`more`: settings of Spark. Raises SparkMissing, PipelineFailed."""
    from escrowmq.spark import local_session

    settings = dict(_SETTINGS)
    if master is None or master.startswith("local"):
        settings["spark.sql.shuffle.partitions"] = "8"  # a handful of cores; AQE joins them
    settings |= more or {}
    try:
        return local_session(f"escrowmq {name}", master=master, settings=settings)
    except Exception as error:  # what a JVM throws has no common class here
        if type(error).__module__.startswith("escrowmq."):
            raise
        said = str(error).strip() or type(error).__name__
        raise PipelineFailed(
            f"Spark did not start with master {master or 'local[*]'}: {said.splitlines()[0]}"
        ) from error


def check_time_zone(spark: SparkSession) -> None:
    """A table's days are UTC's, whoever writes it. Raises PipelineFailed."""
    found = spark.conf.get(_TIME_ZONE)
    if found not in ("UTC", "Etc/UTC"):
        raise PipelineFailed(
            f"days would be those of {found}: spark.conf.set('{_TIME_ZONE}', 'UTC') before this"
        )


def has_class(spark: SparkSession, name: str) -> bool:
    """Whether a jar of Spark's has it."""
    try:
        jvm: Any = spark.sparkContext._jvm
        jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass(name)
    except Exception:  # no such class, or Spark Connect, which shows no classes
        return False
    return True


def check_cluster(servers: str, options: Mapping[str, str]) -> list[str]:
    """The topics of a cluster: a wrong address is known before Spark is started.

    Raises BadOption, TransportError.
    """
    from escrowmq.spark.session import check_java, check_pyspark

    check_pyspark()
    check_java()
    from escrowmq.spark.access import access_of
    from escrowmq.spark.cluster import Cluster
    from escrowmq.spark.options import choose
    from escrowmq.spark.read_options import READ

    cluster = Cluster(servers, access_of(choose(options, READ)))
    try:
        return cluster.topics()
    finally:
        cluster.close()


@contextmanager
def plain_errors() -> Iterator[None]:
    """Spark's errors are pages; ours are somewhere in them. Raises PipelineFailed."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:  # a job that fails in its tasks is the latter
        raise PipelineFailed(reason_of(error)) from error


def reason_of(error: BaseException) -> str:
    """In one line: what we said, else Python in a task, else Spark."""
    text = str(error)
    for pattern in (_OURS, _IN_A_TASK):
        if found := pattern.findall(text):
            return str(found[-1])
    said = str(getattr(error, "java_exception", error)).strip()
    return said.splitlines()[0] if said else type(error).__name__
