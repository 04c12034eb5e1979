"""The ledger's days once more, as a Delta or an Iceberg table, if Spark has the jars for it.

    OUT/delta     a Delta table
    OUT/iceberg   the warehouse of an Iceberg catalog of the Hadoop kind; its table is `ledger`

Days are put in place of the old ones in one commit of that table, before the ledger's own manifest
names them. A round that was cut off in between is done again, with the same days.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from escrowmq.errors import PipelineFailed
from escrowmq.pipeline.session import has_class

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARQUET: Final = "parquet"
DELTA: Final = "delta"
ICEBERG: Final = "iceberg"
FORMATS: Final = (PARQUET, DELTA, ICEBERG)
_DELTA_EXTENSION: Final = "io.delta.sql.DeltaSparkSessionExtension"
_CLASSES: Final = {
    DELTA: _DELTA_EXTENSION,
    ICEBERG: "org.apache.iceberg.spark.SparkCatalog",
}
_PACKAGES: Final = {
    DELTA: "io.delta:delta-spark_4.2_2.13:4.4.0",
    ICEBERG: "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",
}
_CATALOG: Final = "escrowmq_ledger"
_TABLE: Final = f"{_CATALOG}.ledger"


def settings_of(kind: str) -> Mapping[str, str]:
    """What a session must have from its start."""
    if kind != DELTA:
        return {}
    return {
        "spark.sql.extensions": _DELTA_EXTENSION,
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }


def check_format(spark: SparkSession, kind: str) -> None:
    """Raises PipelineFailed if Spark does not have what it takes."""
    if kind not in FORMATS:
        raise PipelineFailed(f"there is no format {kind!r}, only {', '.join(FORMATS)}")
    if kind != PARQUET and not has_class(spark, _CLASSES[kind]):
        raise PipelineFailed(
            f"format {kind}: Spark has no jar for it; give it one, "
            f"as --conf spark.jars.packages={_PACKAGES[kind]}, or --conf spark.jars=FILE"
        )
    missing = [name for name in settings_of(kind) if not spark.conf.get(name, None)]
    if missing:
        raise PipelineFailed(f"format {kind}: the session must be started with {missing[0]}")


def copy_days(rows: DataFrame, out: Path, kind: str, days: Sequence[str] | None) -> None:
    """Put these days in place of what the copy has of them; None: of all that it has."""
    if kind == DELTA:
        _to_delta(rows, str((out / DELTA).absolute()), days)
    elif kind == ICEBERG:
        _to_iceberg(rows, str((out / ICEBERG).absolute()), days)


def _to_delta(rows: DataFrame, place: str, days: Sequence[str] | None) -> None:
    writer = rows.write.format("delta").mode("overwrite").partitionBy("day")
    if days is not None and (Path(place) / "_delta_log").is_dir():
        named = ", ".join(f"'{day}'" for day in days)
        writer = writer.option("replaceWhere", f"day IN ({named})")
    writer.save(place)


def _to_iceberg(rows: DataFrame, place: str, days: Sequence[str] | None) -> None:
    from pyspark.sql import functions  # the command line names formats without Spark

    spark = rows.sparkSession
    spark.conf.set(f"spark.sql.catalog.{_CATALOG}", _CLASSES[ICEBERG])
    spark.conf.set(f"spark.sql.catalog.{_CATALOG}.type", "hadoop")
    spark.conf.set(f"spark.sql.catalog.{_CATALOG}.warehouse", place)
    if days is not None and spark.catalog.tableExists(_TABLE):
        # Named, not those that have rows: a day whose last transaction has moved is empty now.
        rows.writeTo(_TABLE).overwrite(functions.col("day").isin(*days))
    else:
        rows.writeTo(_TABLE).using("iceberg").partitionedBy("day").createOrReplace()
