"""Build a ledger with a copy in another table format, and compare the two.

    python -m tests.interop.ledger_copies delta DATA OUT JAR[,JAR]

It runs in its own process, because a Spark session cannot add jars later. Prints a JSON object: the
number of rows of the ledger, the number of rows that differ in the copy, and this number after one
day was rebuilt and another became empty.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from escrowmq.pipeline.ledger.job import read_ledger, run_ledger
from escrowmq.pipeline.ledger.table_formats import DELTA, copy_days, format_settings
from tests.support.spark_session import session


def copy_of(spark: SparkSession, kind: str, out: Path) -> DataFrame:
    """Read the copy with Spark alone, as another program does."""
    if kind == DELTA:
        return spark.read.format("delta").load(str(out / "delta"))
    spark.conf.set("spark.sql.catalog.lake", "org.apache.iceberg.spark.SparkCatalog")
    spark.conf.set("spark.sql.catalog.lake.type", "hadoop")
    spark.conf.set("spark.sql.catalog.lake.warehouse", str(out / "iceberg"))
    # Otherwise a second read returns the cached table, which another catalog has changed since.
    spark.conf.set("spark.sql.catalog.lake.cache-enabled", "false")
    return spark.table("lake.ledger")


def differing_rows(left: DataFrame, right: DataFrame) -> int:
    """Return the number of rows that only one of the two has."""
    right = right.select(left.columns)
    return left.exceptAll(right).count() + right.exceptAll(left).count()


def main(kind: str, data: Path, out: Path, jars: str) -> None:
    spark = session("local[2]", **{"spark.jars": jars, **format_settings(kind)})
    for _ in range(2):  # the second run replaces the rows of the first
        run_ledger(spark, out, paths=[data], table_format=kind)
    ledger = read_ledger(spark, out)
    report = {"rows": ledger.count()}
    report["differing"] = differing_rows(ledger, copy_of(spark, kind, out))
    days = sorted(row[0] for row in ledger.select(f.col("day").cast("string")).distinct().collect())
    # Replace the last day, and the first day by nothing.
    rebuilt_day = ledger.where(f.col("day") == days[-1]).withColumn("group", f.lit("new"))
    other_days = ledger.where(~f.col("day").isin(days[0], days[-1]))
    copy_days(rebuilt_day, out, kind, [days[0], days[-1]])
    report["days"] = len(days)
    report["differing_after_rebuild"] = differing_rows(
        other_days.unionByName(rebuilt_day), copy_of(spark, kind, out)
    )
    sys.stdout.write(json.dumps(report) + "\n")
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
