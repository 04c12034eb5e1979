"""The ledger: one row per transaction, computed from the records that brokers wrote.

    records of mode=transactions ── to_events() ──┐
                                                  ├── build_ledger() ── rows of LEDGER_SCHEMA
    committed messages ──────────── to_finals() ──┘

All functions here map DataFrames to DataFrames and keep no state, except the two at the end, which
select days. `build_ledger()` aggregates in three steps, each on the result of the one before:

    half         one half message in one broker's log, with everything recorded about it
    message      its halves: a half is appended again when its segment expires or (in RocketMQ)
                 when it is checked, and a client may send it to a second broker
    transaction  its messages: those with the same TX_ID

    records = spark.read.format("escrowmq").option("mode", "transactions")….load()
    messages = spark.read.format("escrowmq").option("subscribe", "orders")….load()
    build_ledger(to_events(records), to_finals(messages))
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import (
    ArrayType,
    DateType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from escrowmq.spark.schema import MESSAGE_COLUMNS, TRANSACTION_COLUMNS

# Outcomes of a transaction, and verdicts of a record about a half.
OPEN, COMMITTED, ROLLED_BACK, STRANDED = "open", "committed", "rolled_back", "stranded"
SETTLED: Final = "settled"  # RocketMQ's op: the half is decided, but the op does not say how

# A place where a committed message can be read.
FINAL_TYPE: Final = StructType(
    [
        StructField("topic", StringType()),
        StructField("broker", StringType()),
        StructField("queue_id", IntegerType()),
        StructField("queue_offset", LongType()),
    ]
)
LEDGER_SCHEMA: Final = StructType(
    [
        StructField("transaction_id", StringType()),  # TX_ID, or the UNIQ_KEY if there is none
        StructField("marker_id", StringType()),  # TX_ID: the id of the marker row in the database
        StructField("group", StringType()),
        StructField("topics", ArrayType(StringType())),  # sorted
        StructField("messages", IntegerType()),
        StructField("message_ids", ArrayType(StringType())),  # UNIQ_KEYs, sorted
        StructField("brokers", ArrayType(StringType())),
        StructField("parked_at", TimestampType()),
        StructField("first_check", TimestampType()),
        StructField("last_check", TimestampType()),
        StructField("checks", IntegerType()),
        StructField("answered_by", StringType()),  # client whose answer to a check decided it
        StructField("outcome", StringType()),
        StructField("decided_at", TimestampType()),
        StructField("decided_by", StringType()),
        StructField("decision_ms", LongType()),  # from parked to decided
        # What its producer, an operator or the broker said: why it is rolled back or stranded, or
        # why its producer does not know yet.
        StructField("reason", StringType()),
        StructField("finals", ArrayType(FINAL_TYPE)),
        StructField("visible_ms", LongType()),  # from decided to visible to consumers
        StructField("day", DateType()),  # of parked_at
    ]
)
EVENT_COLUMNS: Final = (
    *("kind", "broker", "half_offset", "log_offset", "at", "message_id", "marker_id"),
    *("group", "topic", "checks", "step", "verdict", "who", "reason", "born_host"),
)
FINAL_COLUMNS: Final = (
    *("topic", "broker", "queue_id", "queue_offset", "message_id", "store_time"),
    *("prepared_offset",),
)
EVENT_SCHEMA: Final[StructType] = TRANSACTION_COLUMNS.select(EVENT_COLUMNS).spark_schema()
FINAL_SCHEMA: Final[StructType] = MESSAGE_COLUMNS.select(FINAL_COLUMNS).spark_schema()


def to_events(records: DataFrame) -> DataFrame:
    """Map records of mode=transactions to rows of EVENT_SCHEMA. No shuffle.

    A decision record about many halves becomes one row per half.
    """
    decided_halves = F.concat(
        _verdict_structs(F.col("commits"), COMMITTED),
        _verdict_structs(F.col("rolls_back"), ROLLED_BACK),
    )
    own_half = F.array(F.struct(F.col("half_offset"), F.col("verdict")))
    verdicts = F.when(F.col("kind") == "decision", decided_halves).otherwise(own_half)
    rows = records.withColumn("_verdict", F.explode(verdicts))
    rows = rows.withColumn("half_offset", F.col("_verdict.half_offset"))
    rows = rows.withColumn("verdict", F.col("_verdict.verdict"))
    return _with_broker(rows).select(*EVENT_COLUMNS)


def _verdict_structs(offsets: Column, verdict: str) -> Column:
    structs = F.transform(
        offsets,
        lambda offset: F.struct(offset.alias("half_offset"), F.lit(verdict).alias("verdict")),
    )
    return F.coalesce(structs, F.array().cast("array<struct<half_offset:bigint,verdict:string>>"))


def to_finals(messages: DataFrame) -> DataFrame:
    """Select the messages that were half messages before, as rows of FINAL_SCHEMA. No shuffle."""
    was_half = F.col("transaction_id").isNotNull()
    return _with_broker(messages.where(was_half)).select(*FINAL_COLUMNS)


def _with_broker(rows: DataFrame) -> DataFrame:
    """Replace a missing broker name by "": null would match nothing in a join."""
    return rows.withColumn("broker", F.coalesce("broker", F.lit("")))


def build_ledger(events: DataFrame, finals: DataFrame) -> DataFrame:
    """Return the ledger (LEDGER_SCHEMA) of these events and finals.

    Six shuffles of data that grows: events by half, halves and finals to their join (the finals
    twice: grouped first), halves to the join with the stranded ones, then by transaction. The last
    two aggregations share that shuffle, since all messages of a transaction are in one partition.
    The stranded messages, which are few, are shuffled once more.
    """
    stranded = events.where("kind = 'stranded'").select("message_id").distinct()
    stranded = stranded.withColumn("is_stranded", F.lit(True))
    halves = _join_finals(_group_by_half(events.where("kind <> 'stranded'")), finals)
    halves = halves.join(stranded, "message_id", "left").repartition("transaction_id")
    rows = _group_by_transaction(_group_by_message(halves))
    return rows.select(
        *(
            F.col(f"`{field.name}`").cast(field.dataType).alias(field.name)
            for field in LEDGER_SCHEMA
        )
    )


# --- halves --------------------------------------------------------------------------------------


def _group_by_half(events: DataFrame) -> DataFrame:
    """Aggregate by broker and offset of the half."""
    is_half, is_check = F.col("kind") == "half", F.col("kind") == "check"
    was_checked = is_check & (F.col("step") == "asked")
    verdict = (
        F.when(is_check, F.when(F.col("step") == "resumed", OPEN))
        .when(is_half, None)
        .otherwise(F.coalesce("verdict", F.lit(SETTLED)))
    )
    # Several records can decide the same half. The last one in the log is valid. The log offset is
    # the first field, so max() of the structs finds it.
    last_decision = F.struct(
        "log_offset", verdict.alias("verdict"), "at", "who", "reason", "born_host"
    )
    said_unknown = is_check & F.col("step").isin("unknown", "unknown_at_send")
    # RocketMQ keeps no journal of checks. It appends the half again and counts in its properties.
    was_counted = is_half & (F.col("checks") > 0)
    checked_at = F.when(was_checked | was_counted, F.col("at"))
    rows = events.groupBy("broker", "half_offset").agg(
        *(
            F.max(F.when(is_half, F.col(name))).alias(name)
            for name in ("log_offset", "message_id", "marker_id", "group", "topic")
        ),
        F.max(F.when(is_half, F.col("at"))).alias("parked_at"),
        F.min(checked_at).alias("first_check"),
        F.max(checked_at).alias("last_check"),
        F.max(F.when(was_checked | was_counted, F.col("checks"))).alias("checks"),
        F.max(F.when(verdict.isNotNull(), last_decision)).alias("last_decision"),
        F.max_by("reason", F.when(said_unknown, F.col("log_offset"))).alias("last_remark"),
    )
    # Without a time of parking, the half itself is older than the records that were read.
    rows = rows.where("parked_at is not null")
    rows = rows.withColumn("message_id", F.coalesce("message_id", _half_position()))
    return rows.withColumn("transaction_id", F.coalesce("marker_id", "message_id"))


def _half_position() -> Column:
    """Name a half message that has no id."""
    return F.concat_ws(":", "broker", "half_offset")


def _join_finals(halves: DataFrame, finals: DataFrame) -> DataFrame:
    """Add the finals of each half and the time when the first one was visible."""
    # A message that never was a half has prepared_offset 0. So has the final of the very first
    # record of a log. For offset 0, the message id must match as well.
    required_id = F.when(F.col("prepared_offset") == 0, F.col("message_id"))
    position = F.struct("topic", "broker", "queue_id", "queue_offset")
    by_half = (
        finals.withColumn("required_id", required_id)
        .groupBy("broker", "prepared_offset", "required_id")
        .agg(F.collect_set(position).alias("finals"), F.min("store_time").alias("visible_at"))
        .withColumnsRenamed({"broker": "final_broker"})
    )
    is_final_of_half = (
        (F.col("broker") == F.col("final_broker"))
        & (F.col("log_offset") == F.col("prepared_offset"))
        & (F.col("required_id").isNull() | (F.col("required_id") == F.col("message_id")))
    )
    joined = halves.join(by_half, is_final_of_half, "left")
    return joined.drop("final_broker", "prepared_offset", "required_id")


# --- messages ------------------------------------------------------------------------------------


def _group_by_message(halves: DataFrame) -> DataFrame:
    """Aggregate by transaction and message, with the outcome and the decision of each message."""
    verdict = F.col("last_decision.verdict")
    is_delivered = F.col("visible_at").isNotNull()
    is_committed = (verdict == COMMITTED) | is_delivered
    is_decided = is_committed | (verdict == ROLLED_BACK) | (verdict == SETTLED)
    # RocketMQ writes its op some time after the decision. If the final is older, it tells the time.
    decided_at = F.when(verdict == SETTLED, F.least("last_decision.at", "visible_at")).otherwise(
        F.coalesce("last_decision.at", "visible_at")
    )
    decision = F.struct(
        decided_at.alias("at"),
        F.when(verdict != SETTLED, F.col("last_decision.who")).alias("by"),
        F.when(F.col("last_decision.who") == "check", F.col("last_decision.born_host")).alias(
            "answered_by"
        ),
        F.when(verdict == COMMITTED, F.col("visible_at")).alias("visible_at"),
        F.col("last_decision.reason").alias("reason"),
    )
    newest_verdict = F.max_by(
        F.coalesce(verdict, F.lit(OPEN)), F.struct("parked_at", "half_offset")
    )
    not_committed = ~F.coalesce(is_committed, F.lit(False))
    rows = halves.groupBy("transaction_id", "message_id").agg(
        *(F.max(name).alias(name) for name in ("marker_id", "group", "topic", "is_stranded")),
        *(F.max(name).alias(name) for name in ("last_check", "checks")),
        *(F.min(name).alias(name) for name in ("parked_at", "first_check")),
        F.collect_set("broker").alias("brokers"),
        F.flatten(F.collect_set("finals")).alias("finals"),
        F.bool_or(F.coalesce(is_committed, F.lit(False))).alias("is_committed"),
        F.bool_or(F.coalesce(verdict == ROLLED_BACK, F.lit(False))).alias("is_rolled_back"),
        newest_verdict.alias("newest_verdict"),
        F.max_by(
            F.when(verdict == STRANDED, F.col("last_decision.reason")).otherwise(
                F.col("last_remark")
            ),
            F.struct("parked_at", "half_offset"),
        ).alias("open_reason"),
        F.min(F.when(is_committed, decision)).alias("commit"),
        F.max(F.when(is_decided & not_committed, decision)).alias("rollback"),
    )
    outcome = (
        F.when(F.col("is_committed"), COMMITTED)
        .when(F.col("is_rolled_back"), ROLLED_BACK)
        .when(F.col("is_stranded") & (F.col("newest_verdict") != OPEN), STRANDED)
        .when(F.col("newest_verdict") == SETTLED, ROLLED_BACK)  # decided, and there is no final
        .when(F.col("newest_verdict") == STRANDED, STRANDED)
        .otherwise(OPEN)
    )
    message_decision = F.when(F.col("is_committed"), F.col("commit")).when(
        F.col("outcome") == ROLLED_BACK, F.col("rollback")
    )
    rows = rows.withColumn("outcome", outcome).withColumn("decision", message_decision)
    is_undecided = F.col("outcome").isin(OPEN, STRANDED)
    reason = F.when(is_undecided, F.col("open_reason")).otherwise(F.col("decision.reason"))
    return rows.withColumn("reason", reason)


# --- transactions --------------------------------------------------------------------------------


def _group_by_transaction(messages: DataFrame) -> DataFrame:
    """Aggregate by transaction."""
    visible_after_ms = F.unix_millis("decision.visible_at") - F.unix_millis("decision.at")
    # Clocks of brokers differ, so the difference can be negative.
    visible_ms = F.when(visible_after_ms.isNotNull(), F.greatest(F.lit(0), visible_after_ms))
    rows = messages.groupBy("transaction_id").agg(
        *(F.max(name).alias(name) for name in ("marker_id", "group", "last_check", "reason")),
        *(F.min(name).alias(name) for name in ("parked_at", "first_check")),
        F.sort_array(F.collect_set("topic")).alias("topics"),
        F.count("*").alias("messages"),
        F.sort_array(F.collect_set("message_id")).alias("message_ids"),
        F.array_sort(F.array_distinct(F.flatten(F.collect_list("brokers")))).alias("brokers"),
        F.coalesce(F.max("checks"), F.lit(0)).alias("checks"),
        F.array_sort(F.flatten(F.collect_list("finals"))).alias("finals"),
        F.collect_set("outcome").alias("outcomes"),
        F.max("decision").alias("decision"),
        F.max(visible_ms).alias("visible_ms"),
    )
    # Messages of a transaction can differ. Show the outcome that most needs attention: it is the
    # outermost condition, which is added last.
    outcome: Column = F.lit(ROLLED_BACK)
    for name in (COMMITTED, OPEN, STRANDED):
        outcome = F.when(F.array_contains("outcomes", name), name).otherwise(outcome)
    rows = rows.withColumn("outcome", outcome)
    is_decided = F.col("outcome").isin(COMMITTED, ROLLED_BACK)
    decision_ms = F.unix_millis("decision.at") - F.unix_millis("parked_at")
    return rows.withColumns(
        {
            "brokers": F.filter("brokers", lambda name: name != ""),
            "answered_by": F.when(is_decided, F.col("decision.answered_by")),
            "decided_at": F.when(is_decided, F.col("decision.at")),
            "decided_by": F.when(is_decided, F.col("decision.by")),
            "decision_ms": F.when(is_decided, decision_ms),
            "day": F.to_date("parked_at"),
        }
    )


# --- days ----------------------------------------------------------------------------------------
#
# A round of the ledger builds only the days that new records affect. Offsets grow with time, so the
# records of a day lie between two offsets of each broker. Parquet stores the smallest and largest
# offset of each row group, so a condition on these bounds skips almost everything else.


def affected_days(events: DataFrame, new_events: DataFrame, new_finals: DataFrame) -> list[str]:
    """Return the days that must be built again because of new records, as ISO dates.

    These are all days on which a half of an affected transaction was stored. Runs Spark jobs, and
    collects one row per broker and one per day.
    """
    halves = events.where("kind = 'half'")
    new_halves = new_events.where("kind = 'half'")
    decided = new_events.where("kind not in ('half', 'stranded')").select("broker", "half_offset")
    delivered = new_finals.selectExpr("broker", "prepared_offset AS log_offset")
    affected_halves = [
        new_halves,
        _halves_matching(halves, decided, "half_offset"),
        _halves_matching(halves, delivered, "log_offset"),
    ]
    stranded = new_events.where("kind = 'stranded'").select("message_id").distinct()
    if not stranded.isEmpty():
        # Such records are rare. They name only the message, so this join reads all halves.
        affected_halves.append(halves.join(stranded, "message_id", "left_semi"))
    affected = reduce(
        DataFrame.unionByName, [rows.select(_transaction_id(), "at") for rows in affected_halves]
    )
    [bounds] = affected.agg(_utc_day(F.min("at")), _utc_day(F.max("at"))).collect()
    if bounds[0] is None:
        return []
    # The day of a transaction is the day of its first half, which can be the day before. If that
    # half is read late, the transaction is currently in the ledger on the day of another half.
    nearby = halves.where(_is_near_days(bounds[0], bounds[1])).select(_transaction_id(), "at")
    all_halves = nearby.join(affected.select("id").distinct(), "id", "left_semi")
    days = all_halves.select(_utc_day(F.col("at")).alias("day")).distinct()
    return sorted(row["day"] for row in days.collect())


def ledger_of_days(events: DataFrame, finals: DataFrame, days: Sequence[str]) -> DataFrame:
    """Return the ledger of some days; shuffles as `build_ledger()`.

    If the halves of a transaction are more than a day apart, only those near the day are counted.
    Collects one row per broker.
    """
    is_near = reduce(Column.__or__, [_is_near_days(day, day) for day in days], F.lit(False))
    is_half = F.col("kind") == "half"
    halves = events.where(is_half & is_near)
    is_about_halves = _is_in_range(halves, "half_offset", "half_offset")
    # Records of stranded messages have no offset of a half. They are few, so all are taken.
    is_relevant = (F.col("kind") == "stranded") | (~is_half & is_about_halves)
    rows = build_ledger(
        events.where((is_half & is_near) | is_relevant),
        finals.where(_is_in_range(halves, "log_offset", "prepared_offset")),
    )
    return rows.where(F.col("day").cast("string").isin(list(days)))


def _transaction_id() -> Column:
    return F.coalesce("marker_id", "message_id", _half_position()).alias("id")


def _halves_matching(halves: DataFrame, keys: DataFrame, column: str) -> DataFrame:
    in_range = halves.where(_is_in_range(keys, column, column))
    return in_range.join(keys.distinct(), ["broker", column], "left_semi")


def _is_in_range(rows: DataFrame, bounds_column: str, column: str) -> Column:
    """Test, per broker, that `column` is between the bounds of `bounds_column` in `rows`."""
    bounds = (
        rows.groupBy("broker")
        .agg(F.min(bounds_column).alias("low"), F.max(bounds_column).alias("high"))
        .collect()
    )
    conditions = [
        (F.col("broker") == row["broker"]) & F.col(column).between(row["low"], row["high"])
        for row in bounds
        if row["low"] is not None
    ]
    return reduce(Column.__or__, conditions, F.lit(False))


def _utc_day(time: Column) -> Column:
    return F.to_date(time).cast("string")


def _is_near_days(first: str, last: str) -> Column:
    """Test that `at` is at most a day before the first day or a day after the last."""
    low = F.date_sub(F.lit(first).cast("date"), 1).cast("timestamp")
    end = F.date_add(F.lit(last).cast("date"), 2).cast("timestamp")
    return (F.col("at") >= low) & (F.col("at") < end)
