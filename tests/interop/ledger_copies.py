"""In a process of its own, since jars belong to a session: a ledger with a copy in another format.

    python -m tests.interop.ledger_copies delta DATA OUT JAR[,JAR]

Prints as JSON how many rows ledger and copy have, how many differ, and the same after one day was
built anew and another became empty.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from escrowmq.pipeline.ledger.job import read_ledger, run_ledger
from escrowmq.pipeline.ledger.table_formats import DELTA, copy_days, format_settings
from tests.support.spark_session import start_session


def copy_of(spark: SparkSession, kind: str, out: Path) -> DataFrame:
    """As somebody would read it who knows nothing of us."""
    if kind == DELTA:
        return spark.read.format("delta").load(str(out / "delta"))
    spark.conf.set("spark.sql.catalog.lake", "org.apache.iceberg.spark.SparkCatalog")
    spark.conf.set("spark.sql.catalog.lake.type", "hadoop")
    spark.conf.set("spark.sql.catalog.lake.warehouse", str(out / "iceberg"))
    # Or a second look sees the first one's table: another catalog has changed it since.
    spark.conf.set("spark.sql.catalog.lake.cache-enabled", "false")
    return spark.table("lake.ledger")


def differing(one: DataFrame, other: DataFrame) -> int:
    columns = one.columns
    return one.exceptAll(other.select(columns)).count() + (
        other.select(columns).exceptAll(one).count()
    )


def main(kind: str, data: Path, out: Path, jars: str) -> None:
    spark = start_session("local[2]", **{"spark.jars": jars, **format_settings(kind)})
    for _ in range(2):  # again: what is there is replaced
        run_ledger(spark, out, paths=[data], table_format=kind)
    ledger = read_ledger(spark, out)
    told = {"rows": ledger.count(), "differ": differing(ledger, copy_of(spark, kind, out))}
    days = sorted(row[0] for row in ledger.select(f.col("day").cast("string")).distinct().collect())
    one_day = ledger.where(f.col("day") == days[-1]).withColumn("group", f.lit("new"))
    others = ledger.where(~f.col("day").isin(days[0], days[-1]))
    copy_days(one_day, out, kind, [days[0], days[-1]])
    after = copy_of(spark, kind, out)
    told |= {"days": len(days), "differ_after": differing(others.unionByName(one_day), after)}
    sys.stdout.write(json.dumps(told) + "\n")
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
