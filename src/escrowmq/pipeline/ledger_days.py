"""Which days new records are about, and all that is known of these days.

Offsets grow with time, so the records of a day lie between two offsets of each broker. Parquet
knows the smallest and largest of every block of rows, and reads no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from escrowmq.pipeline.ledger import ledger_of


def touched_days(events: DataFrame, new_events: DataFrame, new_finals: DataFrame) -> list[str]:
    """The days that the transactions of these new records are in, or were in before: each day that
    one of their halves came on."""
    halves = events.where("kind = 'half'")
    # A half that is new, and halves that something new was said of.
    found = [new_events.where("kind = 'half'")]
    said = new_events.where("kind not in ('half', 'stranded')").select("broker", "half_offset")
    found.append(_named(halves, said, "half_offset"))
    delivered = new_finals.selectExpr("broker", "prepared_offset AS log_offset")
    found.append(_named(halves, delivered, "log_offset"))
    given_up = new_events.where("kind = 'stranded'").select("message_id").distinct()
    if not given_up.isEmpty():  # rare, and named by the message alone
        found.append(halves.join(given_up, "message_id", "left_semi"))
    touched = reduce(DataFrame.unionByName, [rows.select(_id(), "at") for rows in found])
    [span] = touched.agg(_day(f.min("at")), _day(f.max("at"))).collect()
    if span[0] is None:
        return []
    # Its day is that of its first half, which may be the day before; and if that one is read
    # late, the transaction stood where its other halves are.
    near = halves.where(_between_days(span[0], span[1])).select(_id(), "at")
    whole = near.join(touched.select("id").distinct(), "id", "left_semi")
    days = whole.select(_day(f.col("at")).alias("day")).distinct()
    return sorted(row["day"] for row in days.collect())


def of_days(events: DataFrame, finals: DataFrame, days: Sequence[str]) -> DataFrame:
    """The ledger of some days. A transaction whose halves are more than a day apart is cut."""
    window = reduce(Column.__or__, [_between_days(day, day) for day in days], f.lit(False))
    is_half = f.col("kind") == "half"
    halves = events.where(is_half & window)
    about = _range(halves, "half_offset", "half_offset")
    others = (f.col("kind") == "stranded") | (~is_half & about)
    scoped = events.where((is_half & window) | others)
    rows = ledger_of(scoped, finals.where(_range(halves, "log_offset", "prepared_offset")))
    return rows.where(f.col("day").cast("string").isin(list(days)))


def _id() -> Column:
    place = f.concat_ws(":", "broker", "half_offset")
    return f.coalesce("marker_id", "message_id", place).alias("id")


def _named(halves: DataFrame, named: DataFrame, by: str) -> DataFrame:
    some = halves.where(_range(named, by, by))
    return some.join(named.distinct(), ["broker", by], "left_semi")


def _range(rows: DataFrame, of: str, by: str) -> Column:
    """That `by` lies between the least and the greatest `of`; a broker each."""
    ends = rows.groupBy("broker").agg(f.min(of).alias("low"), f.max(of).alias("high")).collect()
    within = [
        (f.col("broker") == end["broker"]) & f.col(by).between(end["low"], end["high"])
        for end in ends
        if end["low"] is not None
    ]
    return reduce(Column.__or__, within, f.lit(False))


def _day(at: Column) -> Column:
    return f.to_date(at).cast("string")


def _between_days(first: str, last: str) -> Column:
    """At most a day before the first and a day after the last."""
    low = f.date_sub(f.lit(first).cast("date"), 1).cast("timestamp")
    end = f.date_add(f.lit(last).cast("date"), 2).cast("timestamp")
    return (f.col("at") >= low) & (f.col("at") < end)
