"""Where the ledger and the databases do not agree: one row for each difference.

Everything is joined on the transaction's id, so all sides meet in one shuffle; messages meet the
inbox on their own id. Nothing is collected: how much can be compared is a matter of the cluster.

`grace_ms` is what may still be under way: younger than that, nothing is a difference yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from escrowmq.binding.marker import COMMITTED
from escrowmq.pipeline import reconcile_rules as rules
from escrowmq.pipeline.reconcile_sides import DAY_MS, KINDS, TAKEN_ONCE, Limits, Sides

__all__ = ["KINDS", "Limits", "Sides", "consumers_of", "differences", "groups_of"]

LISTED_MAX: Final = 10_000  # names of groups and topics: a table of them, not of transactions


def groups_of(markers: DataFrame) -> list[str]:
    """The producer groups that have ever left a marker."""
    rows = markers.select("producer_group").distinct().limit(LISTED_MAX).collect()
    return sorted(row[0] for row in rows)


def consumers_of(ledger: DataFrame, inbox: DataFrame) -> dict[str, list[str]]:
    """Which consumer group with an inbox takes which topics: told by the messages it has taken
    from transactions of a single topic."""
    plain = ledger.where(F.size("topics") == 1)
    messages = plain.select(
        F.col("topics")[0].alias("topic"), F.explode("message_ids").alias("message_id")
    )
    pairs = messages.join(_large(inbox), "message_id").select("consumer_group", "topic").distinct()
    found: dict[str, list[str]] = {}
    for group, topic in sorted(map(tuple, pairs.limit(LISTED_MAX).collect())):
        found.setdefault(group, []).append(topic)
    return found


def differences(ledger: DataFrame, sides: Sides, limits: Limits) -> DataFrame:
    """Columns: kind, transaction_id, group, topics (with commas), at, outcome, detail, sent,
    received (amounts)."""
    return findings(ledger, sides, limits).where(F.col("kind") != TAKEN_ONCE)


def findings(ledger: DataFrame, sides: Sides, limits: Limits) -> DataFrame:
    """Differences, and what was delivered again but taken once."""
    both = compared(ledger, sides, limits)
    told = F.filter(F.array(*rules.findings(sides, limits)), lambda one: one.isNotNull())
    return both.select("*", F.explode(told).alias("found")).select(
        "found.kind",
        "transaction_id",
        F.coalesce("group", "marker_group").alias("group"),
        F.array_join("topics", ",").alias("topics"),
        F.timestamp_millis("at_ms").alias("at"),
        "outcome",
        "found.detail",
        "sent",
        "received",
    )


def compared(ledger: DataFrame, sides: Sides, limits: Limits) -> DataFrame:
    """One row per transaction that any side knows, with what each says of it."""
    # A booking without a time can be older than the window: only the whole ledger shows that.
    books = [frame for frame in (sides.sent, sides.received) if frame is not None]
    have_times = all("at_ms" in frame.columns for frame in books)
    both = _life(window(ledger, limits) if have_times else ledger)
    both = _beside(both, _claims(sides.markers), _CLAIMS)
    both = _beside(both, _bookings(sides.sent, "sent"), _booked("sent"))
    both = _beside(both, _bookings(sides.received, "received"), _booked("received"))
    if sides.inbox is not None:
        effects = _effects(ledger, sides.inbox, sides, limits)
        both = both.join(_large(effects), "transaction_id", "left")
    at_ms = F.coalesce("parked_ms", "claimed_ms", "sent_ms", "received_ms")
    in_scope = F.lit(True)
    if sides.groups:
        named = F.coalesce("group", "marker_group")
        in_scope = named.isNull() | named.isin(list(sides.groups))
    is_old = F.coalesce(at_ms < limits.since_ms, F.lit(False))
    return both.withColumn("at_ms", at_ms).where(in_scope & ~is_old)


def window(ledger: DataFrame, limits: Limits) -> DataFrame:
    """The ledger's days that matter, and one before: ids meet that began on both sides of it."""
    if not limits.since_ms:
        return ledger
    first = F.to_date(F.timestamp_millis(F.lit(limits.since_ms - DAY_MS)))
    return ledger.where(F.col("day") >= first)


# --- what each side says -------------------------------------------------------------------------


def _life(ledger: DataFrame) -> DataFrame:
    parked = F.coalesce("parked_at", "first_check", "decided_at")
    return ledger.select(
        "transaction_id",
        F.lit(True).alias("in_ledger"),
        "group",
        "topics",
        "outcome",
        F.size(F.array_distinct("message_ids")).alias("ids"),
        F.array_distinct("finals").alias("finals"),
        F.unix_millis(parked).alias("parked_ms"),
        F.unix_millis(F.coalesce(F.col("decided_at"), parked)).alias("decided_ms"),
    )


def _claims(markers: DataFrame | None) -> DataFrame | None:
    if markers is None:
        return None
    is_committed = F.col("outcome") == COMMITTED
    return markers.groupBy(F.col("id").alias("transaction_id")).agg(
        F.min("producer_group").alias("marker_group"),
        F.bool_or(is_committed).alias("claimed"),
        F.max(F.when(is_committed, F.col("messages"))).alias("claimed_messages"),
        F.min("at_ms").alias("claimed_ms"),
    )


_CLAIMS: Final = {
    "marker_group": "string",
    "claimed": "boolean",
    "claimed_messages": "int",
    "claimed_ms": "bigint",
}


def _bookings(frame: DataFrame | None, name: str) -> DataFrame | None:
    """Sums by transaction."""
    if frame is None:
        return None
    amount = F.col("amount") if "amount" in frame.columns else F.lit(None)
    at_ms = F.col("at_ms") if "at_ms" in frame.columns else F.lit(None)
    return frame.groupBy("transaction_id").agg(
        F.sum(amount.cast("decimal(28,6)")).cast("decimal(38,6)").alias(name),
        F.min(at_ms.cast("bigint")).alias(f"{name}_ms"),
        F.count("*").alias(f"{name}_rows"),
    )


def _booked(name: str) -> dict[str, str]:
    return {name: "decimal(38,6)", f"{name}_ms": "bigint", f"{name}_rows": "bigint"}


def _beside(both: DataFrame, side: DataFrame | None, columns: Mapping[str, str]) -> DataFrame:
    """What one more side says; nulls, and no shuffle, if it is not asked."""
    if side is not None:
        return both.join(side, "transaction_id", "full_outer")
    nulls = [F.lit(None).cast(kind).alias(name) for name, kind in columns.items()]
    return both.select("*", *nulls)


def _large(frame: DataFrame) -> DataFrame:
    """Spark takes what comes from a database for a handful of rows, and would hand all of them to
    everybody: with ten million it has no memory left."""
    return frame.hint("merge")


def _effects(ledger: DataFrame, inbox: DataFrame, sides: Sides, limits: Limits) -> DataFrame:
    """By transaction: how many of its messages had an effect in each consumer group, and in how
    many places at most."""
    ids = F.explode(F.array_distinct("message_ids")).alias("message_id")
    messages = window(ledger, limits).select("transaction_id", ids)
    taken = inbox.groupBy("message_id", "consumer_group").agg(F.count("*").alias("places"))
    counts = [
        F.count_if(F.col("consumer_group") == group).alias(f"effects_{number}")
        for number, group in enumerate(sides.consumers)
    ]
    return (
        messages.join(_large(taken), "message_id")
        .groupBy("transaction_id")
        .agg(
            F.max("places").alias("places"),
            F.min("consumer_group").alias("taken_by"),
            *counts,
        )
    )
