"""One row for each transaction, from what brokers wrote down: functions over DataFrames.

    told = spark.read.format("escrowmq").option("mode", "transactions")….load()
    kinds = [told.where(col("kind") == kind) for kind in ("half", "op", "check", "decision")]
    finals = spark.read.format("escrowmq").option("subscribe", "orders")….load()
    ledger(*kinds, finals)

Three steps, each a group of the one before:

    place        one half in one broker's log: what was said of it there
    message      its places: a half may be appended again, or sent to two brokers
    transaction  its messages: those that share a TX_ID

The ledger's columns: one row for each transaction. Whoever reads a ledger counts on these.
"""

from __future__ import annotations

from functools import reduce
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
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

OPEN, COMMITTED, ROLLED_BACK, STRANDED = "open", "committed", "rolled_back", "stranded"

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
        StructField("transaction_id", StringType()),  # TX_ID, else the half's UNIQ_KEY
        StructField("marker_id", StringType()),  # TX_ID: the row in the database
        StructField("group", StringType()),
        StructField("topics", ArrayType(StringType())),  # sorted
        StructField("messages", IntegerType()),
        StructField("message_ids", ArrayType(StringType())),  # UNIQ_KEYs, sorted
        StructField("brokers", ArrayType(StringType())),
        StructField("parked_at", TimestampType()),
        StructField("first_check", TimestampType()),
        StructField("last_check", TimestampType()),
        StructField("checks", IntegerType()),
        StructField("answered_by", StringType()),  # whose answer to a check decided it
        StructField("outcome", StringType()),
        StructField("decided_at", TimestampType()),
        StructField("decided_by", StringType()),
        StructField("decision_ms", LongType()),  # parked to decided
        StructField("finals", ArrayType(FINAL_TYPE)),
        StructField("visible_ms", LongType()),  # decided to visible
        StructField("day", DateType()),  # of parked_at
    ]
)


SETTLED: Final = "settled"  # RocketMQ's ops: it is over, and nothing says how
MOVED: Final = "moved"
EVENT_COLUMNS: Final = (
    *("kind", "broker", "half_offset", "log_offset", "at", "message_id", "marker_id"),
    *("group", "topic", "checks", "step", "verdict", "who", "born_host"),
)
FINAL_COLUMNS: Final = (
    *("topic", "broker", "queue_id", "queue_offset", "message_id", "store_time"),
    *("prepared_offset",),
)


def ledger(
    halves: DataFrame,
    ops: DataFrame,
    checks: DataFrame,
    decisions: DataFrame,
    finals: DataFrame,
    stranded: DataFrame | None = None,
) -> DataFrame:
    """The ledger (LEDGER) of these halves. All but `finals` have the columns of mode=transactions;
    `finals` those of messages. `stranded` is what RocketMQ gave up, in its own topic."""
    told = [halves, ops, checks, decisions, *([] if stranded is None else [stranded])]
    return build_ledger(reduce(DataFrame.unionByName, map(to_events, told)), to_finals(finals))


def to_events(records: DataFrame) -> DataFrame:
    """What a ledger needs of mode=transactions; a decision becomes a row for each of its halves."""
    of_decision = f.concat(
        _verdict_structs(f.col("commits"), COMMITTED),
        _verdict_structs(f.col("rolls_back"), ROLLED_BACK),
    )
    itself = f.array(f.struct(f.col("half_offset"), f.col("verdict")))
    settles = f.when(f.col("kind") == "decision", of_decision).otherwise(itself)
    rows = records.withColumn("_settles", f.explode(settles))
    rows = rows.withColumn("half_offset", f.col("_settles.half_offset"))
    rows = rows.withColumn("verdict", f.col("_settles.verdict"))
    return rows.withColumn("broker", f.coalesce("broker", f.lit(""))).select(*EVENT_COLUMNS)


def _verdict_structs(offsets: Column, verdict: str) -> Column:
    rows = f.transform(
        offsets, lambda one: f.struct(one.alias("half_offset"), f.lit(verdict).alias("verdict"))
    )
    return f.coalesce(rows, f.array().cast("array<struct<half_offset:bigint,verdict:string>>"))


def to_finals(messages: DataFrame) -> DataFrame:
    """Of messages, those that were halves before."""
    was_half = f.col("transaction_id").isNotNull()
    rows = messages.where(was_half).withColumn("broker", f.coalesce("broker", f.lit("")))
    return rows.select(*FINAL_COLUMNS)


def build_ledger(events: DataFrame, finals: DataFrame) -> DataFrame:
    """The same from `events_of` and `finals_of`."""
    given_up = events.where("kind = 'stranded'").select("message_id").distinct()
    places = _join_finals(_group_by_half(events.where("kind <> 'stranded'")), finals)
    given_up = given_up.withColumn("given_up", f.lit(True))
    places = places.join(given_up, "message_id", "left").repartition("transaction_id")
    rows = _group_by_transaction(_group_by_message(places))
    return rows.select(
        *(f.col(f"`{x.name}`").cast(x.dataType).alias(x.name) for x in LEDGER_SCHEMA)
    )


# --- places --------------------------------------------------------------------------------------


def _group_by_half(events: DataFrame) -> DataFrame:
    is_half, is_check = f.col("kind") == "half", f.col("kind") == "check"
    was_asked = is_check & (f.col("step") == "asked")
    verdict = (
        f.when(is_check, f.when(f.col("step") == "resumed", OPEN))
        .when(is_half, None)
        .otherwise(f.coalesce("verdict", f.lit(SETTLED)))
    )
    # The log's order is the truth: the last word counts.
    word = f.struct("log_offset", verdict.alias("verdict"), "at", "who", "born_host")
    # RocketMQ keeps no journal: it appends the half again and counts in it.
    counted = is_half & (f.col("checks") > 0)
    asked_at = f.when(was_asked | counted, f.col("at"))
    rows = events.groupBy("broker", "half_offset").agg(
        *(
            f.max(f.when(is_half, f.col(name))).alias(name)
            for name in ("log_offset", "message_id", "marker_id", "group", "topic")
        ),
        f.max(f.when(is_half, f.col("at"))).alias("parked_at"),
        f.min(asked_at).alias("first_check"),
        f.max(asked_at).alias("last_check"),
        f.max(f.when(was_asked | counted, f.col("checks"))).alias("checks"),
        f.max(f.when(verdict.isNotNull(), word)).alias("word"),
    )
    rows = rows.where("parked_at is not null")  # its half is older than what was read
    place = f.concat_ws(":", "broker", "half_offset")
    rows = rows.withColumn("message_id", f.coalesce("message_id", place))
    return rows.withColumn("transaction_id", f.coalesce("marker_id", "message_id"))


def _join_finals(halves: DataFrame, finals: DataFrame) -> DataFrame:
    # A message that was none names 0, and so does the final of the very first record of a log.
    exact = f.when(f.col("prepared_offset") == 0, f.col("message_id"))
    where = f.struct("topic", "broker", "queue_id", "queue_offset")
    found = (
        finals.withColumn("exact_id", exact)
        .groupBy("broker", "prepared_offset", "exact_id")
        .agg(f.collect_set(where).alias("finals"), f.min("store_time").alias("visible_at"))
        .withColumnsRenamed({"broker": "final_broker"})
    )
    is_its = (
        (f.col("broker") == f.col("final_broker"))
        & (f.col("log_offset") == f.col("prepared_offset"))
        & (f.col("exact_id").isNull() | (f.col("exact_id") == f.col("message_id")))
    )
    return halves.join(found, is_its, "left").drop("final_broker", "prepared_offset", "exact_id")


# --- messages ------------------------------------------------------------------------------------


def _group_by_message(halves: DataFrame) -> DataFrame:
    said = f.col("word.verdict")
    is_delivered = f.col("visible_at").isNotNull()
    is_committed = (said == COMMITTED) | is_delivered
    is_decided = is_committed | (said == ROLLED_BACK) | (said == SETTLED)
    # RocketMQ writes its op some time later; that the message is there is the first sign.
    decided_at = f.when(said == SETTLED, f.least("word.at", "visible_at")).otherwise(
        f.coalesce("word.at", "visible_at")
    )
    decision = f.struct(
        decided_at.alias("at"),
        f.when(said != SETTLED, f.col("word.who")).alias("by"),
        f.when(f.col("word.who") == "check", f.col("word.born_host")).alias("answered_by"),
        f.when(said == COMMITTED, f.col("visible_at")).alias("visible_at"),
    )
    newest = f.max_by(f.coalesce(said, f.lit(OPEN)), f.struct("parked_at", "half_offset"))
    rows = halves.groupBy("transaction_id", "message_id").agg(
        *(f.max(name).alias(name) for name in ("marker_id", "group", "topic", "given_up")),
        *(f.max(name).alias(name) for name in ("last_check", "checks")),
        *(f.min(name).alias(name) for name in ("parked_at", "first_check")),
        f.collect_set("broker").alias("brokers"),
        f.flatten(f.collect_set("finals")).alias("finals"),
        f.bool_or(f.coalesce(is_committed, f.lit(False))).alias("is_committed"),
        f.bool_or(f.coalesce(said == ROLLED_BACK, f.lit(False))).alias("is_rolled_back"),
        newest.alias("newest"),
        f.min(f.when(is_committed, decision)).alias("commit"),
        f.max(f.when(is_decided & ~f.coalesce(is_committed, f.lit(False)), decision)).alias("end"),
    )
    outcome = (
        f.when(f.col("is_committed"), COMMITTED)
        .when(f.col("is_rolled_back"), ROLLED_BACK)
        .when(f.col("given_up") & (f.col("newest") != OPEN), STRANDED)
        .when(f.col("newest") == SETTLED, ROLLED_BACK)
        .when(f.col("newest") == STRANDED, STRANDED)
        .otherwise(OPEN)
    )
    decided = f.when(f.col("is_committed"), f.col("commit")).when(
        f.col("outcome") == ROLLED_BACK, f.col("end")
    )
    return rows.withColumn("outcome", outcome).withColumn("decision", decided)


# --- transactions --------------------------------------------------------------------------------


def _group_by_transaction(messages: DataFrame) -> DataFrame:
    later_ms = f.unix_millis("decision.visible_at") - f.unix_millis("decision.at")
    delay_ms = f.when(later_ms.isNotNull(), f.greatest(f.lit(0), later_ms))
    rows = messages.groupBy("transaction_id").agg(
        *(f.max(name).alias(name) for name in ("marker_id", "group", "last_check")),
        *(f.min(name).alias(name) for name in ("parked_at", "first_check")),
        f.sort_array(f.collect_set("topic")).alias("topics"),
        f.count("*").alias("messages"),
        f.sort_array(f.collect_set("message_id")).alias("message_ids"),
        f.array_sort(f.array_distinct(f.flatten(f.collect_list("brokers")))).alias("brokers"),
        f.coalesce(f.max("checks"), f.lit(0)).alias("checks"),
        f.array_sort(f.flatten(f.collect_list("finals"))).alias("finals"),
        f.collect_set("outcome").alias("outcomes"),
        f.max("decision").alias("decision"),
        f.max(delay_ms).alias("visible_ms"),
    )
    outcome: Column = f.lit(ROLLED_BACK)
    for one in (COMMITTED, OPEN, STRANDED):  # the last that applies is what needs a look most
        outcome = f.when(f.array_contains("outcomes", one), one).otherwise(outcome)
    rows = rows.withColumn("outcome", outcome)
    is_decided = f.col("outcome").isin(COMMITTED, ROLLED_BACK)
    taken_ms = f.unix_millis("decision.at") - f.unix_millis("parked_at")
    return rows.withColumns(
        {
            "brokers": f.filter("brokers", lambda name: name != ""),
            "answered_by": f.when(is_decided, f.col("decision.answered_by")),
            "decided_at": f.when(is_decided, f.col("decision.at")),
            "decided_by": f.when(is_decided, f.col("decision.by")),
            "decision_ms": f.when(is_decided, taken_ms),
            "day": f.to_date("parked_at"),
        }
    )
