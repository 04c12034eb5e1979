"""Copies of the ledger as a Delta or an Iceberg table, if Spark has the jars for it.

    OUT/delta     a Delta table
    OUT/iceberg   the warehouse of an Iceberg catalog of type hadoop; its table is `ledger`

The days of a round replace the old ones in one commit of the copy, before the ledger's own manifest
lists them. A round that was interrupted in between is repeated, and copies the same days again.

This module can be imported without PySpark: the command line lists the formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from escrowmq.errors import PipelineFailed
from escrowmq.pipeline.job import has_java_class

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PARQUET: Final = "parquet"
DELTA: Final = "delta"
ICEBERG: Final = "iceberg"
FORMATS: Final = (PARQUET, DELTA, ICEBERG)

_DELTA_EXTENSION: Final = "io.delta.sql.DeltaSparkSessionExtension"
_FORMAT_CLASSES: Final = {
    DELTA: _DELTA_EXTENSION,
    ICEBERG: "org.apache.iceberg.spark.SparkCatalog",
}
_FORMAT_PACKAGES: Final = {
    DELTA: "io.delta:delta-spark_4.2_2.13:4.4.0",
    ICEBERG: "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",
}
_ICEBERG_CATALOG: Final = "escrowmq_ledger"
_ICEBERG_TABLE: Final = f"{_ICEBERG_CATALOG}.ledger"


def format_settings(table_format: str) -> Mapping[str, str]:
    """Return the settings that a Spark session for this format must be started with."""
    if table_format != DELTA:
        return {}
    return {
        "spark.sql.extensions": _DELTA_EXTENSION,
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    }


def check_format(spark: SparkSession, table_format: str) -> None:
    """Raise PipelineFailed if this session cannot write the format."""
    if table_format not in FORMATS:
        raise PipelineFailed(f"unknown format {table_format!r}; use one of {', '.join(FORMATS)}")
    if table_format != PARQUET and not has_java_class(spark, _FORMAT_CLASSES[table_format]):
        raise PipelineFailed(
            f"format {table_format}: Spark has no jar for it; add "
            f"--conf spark.jars.packages={_FORMAT_PACKAGES[table_format]} or --conf spark.jars=FILE"
        )
    missing = [name for name in format_settings(table_format) if not spark.conf.get(name, None)]
    if missing:
        raise PipelineFailed(
            f"format {table_format}: the Spark session must be started with {missing[0]}"
        )


def copy_days(rows: DataFrame, out: Path, table_format: str, days: Sequence[str] | None) -> None:
    """Replace these days of the copy by the rows. With None, replace the whole copy."""
    if table_format == DELTA:
        _copy_to_delta(rows, str((out / DELTA).absolute()), days)
    elif table_format == ICEBERG:
        _copy_to_iceberg(rows, str((out / ICEBERG).absolute()), days)


def _copy_to_delta(rows: DataFrame, path: str, days: Sequence[str] | None) -> None:
    writer = rows.write.format("delta").mode("overwrite").partitionBy("day")
    if days is not None and (Path(path) / "_delta_log").is_dir():
        day_list = ", ".join(f"'{day}'" for day in days)
        writer = writer.option("replaceWhere", f"day IN ({day_list})")
    writer.save(path)


def _copy_to_iceberg(rows: DataFrame, warehouse: str, days: Sequence[str] | None) -> None:
    from pyspark.sql import functions

    spark = rows.sparkSession
    spark.conf.set(f"spark.sql.catalog.{_ICEBERG_CATALOG}", _FORMAT_CLASSES[ICEBERG])
    spark.conf.set(f"spark.sql.catalog.{_ICEBERG_CATALOG}.type", "hadoop")
    spark.conf.set(f"spark.sql.catalog.{_ICEBERG_CATALOG}.warehouse", warehouse)
    if days is not None and spark.catalog.tableExists(_ICEBERG_TABLE):
        # The days are named instead of taken from the rows: a day whose last transaction has moved
        # to another day has no rows any more, and must become empty.
        rows.writeTo(_ICEBERG_TABLE).overwrite(functions.col("day").isin(*days))
    else:
        rows.writeTo(_ICEBERG_TABLE).using("iceberg").partitionedBy("day").createOrReplace()
