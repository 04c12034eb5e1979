"""Where the ledger and the databases do not agree: one row for each difference.

Everything is joined on the transaction's id, so all sides meet in one shuffle; messages meet the
inbox on their own id. Nothing is collected: how much can be compared is a matter of the cluster.

`grace_ms` is what may still be under way: younger than that, nothing is a difference yet.

What is compared with the ledger, within which limits, and how the differences are called.

What is a difference: for each kind, when it is there and what is said of it.

The columns are those of `reconcile.compared`: what each side says of one transaction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from escrowmq.database.marker import COMMITTED

DAY_MS: Final = 86_400_000
DIFFERENCE_KINDS: Final = {
    "row_without_message": "committed in the database, but a message is missing",
    "message_without_row": "a message went out, but the database knows nothing of it",
    "delivered_twice": "a message is there twice, and nothing keeps its effect from being doubled",
    "consumed_without_effect": "delivered, but without effect at the consumer",
    "stranded": "asked about too often; an operator has to decide",
    "still_open": "undecided for longer than it may be",
    "amount_differs": "sender and receiver booked different amounts",
}
TAKEN_ONCE: Final = "taken_once"  # delivered again, but every consumer has an inbox: no difference


@dataclass(frozen=True, slots=True)
class ReconcileLimits:
    """`since_ms`: what is older is not compared, since databases forget (0: everything)."""

    now_ms: int
    grace_ms: int = 10 * 60_000
    open_ms: int = 60 * 60_000
    since_ms: int = 0


@dataclass(frozen=True, slots=True)
class ReconcileInputs:
    """What the ledger is compared with. Frames that are None are not compared.

    markers   id, outcome, at_ms, producer_group, messages: the table of the database binding
    inbox     consumer_group, message_id, at_ms: likewise
    sent      transaction_id, perhaps amount and at_ms: the sender's own books
    received  the same of the receiver

    Given markers and books of the sender, both must know what was committed.
    """

    markers: DataFrame | None = None
    inbox: DataFrame | None = None
    sent: DataFrame | None = None
    received: DataFrame | None = None
    groups: Sequence[str] = ()  # of producers whose databases these are; empty: all
    consumers: Mapping[str, Sequence[str]] = field(default_factory=dict)  # group: its topics


def _finding(condition: Column, detail: Column | str) -> Column:
    return F.when(condition, F.lit(detail) if isinstance(detail, str) else detail)


def rule_columns(inputs: ReconcileInputs, limits: ReconcileLimits) -> list[Column]:
    """A struct for each kind, null where there is nothing to say. Of two reasons the first."""
    ripe_ms = limits.now_ms - limits.grace_ms
    open_for = F.format_string("open for %d s", _seconds_since(limits.now_ms, "parked_ms"))
    too_long = F.col("parked_ms") < limits.now_ms - limits.open_ms
    found = {
        "stranded": [_finding(_has_outcome("stranded"), "it waits for an operator")],
        "still_open": [_finding(_has_outcome("open") & too_long, open_for)],
        "delivered_twice": [_delivered_twice(inputs, ripe_ms)],
        "row_without_message": [],
        "message_without_row": [],
        "consumed_without_effect": [],
        "amount_differs": [],
        TAKEN_ONCE: [
            _finding(_is_repeated() & _has_inbox_for_repeats(inputs), "an inbox took it once")
        ],
    }
    if inputs.markers is not None or inputs.sent is not None:
        found["row_without_message"].append(_row_without_message(ripe_ms))
        found["message_without_row"].append(_message_without_row(inputs, ripe_ms))
    if inputs.inbox is not None:
        found["consumed_without_effect"].append(_consumed_without_effect(inputs, ripe_ms))
        found["message_without_row"].append(_rolled_back_effect())
    if inputs.received is not None:
        found["consumed_without_effect"].append(_not_received(ripe_ms))
        found["message_without_row"].append(_received_without_commit(ripe_ms))
    if inputs.sent is not None and inputs.received is not None:
        found["amount_differs"].append(_amount_differs(ripe_ms))
    return [_finding_struct(kind, F.coalesce(*said)) for kind, said in found.items() if said]


def _finding_struct(kind: str, detail: Column) -> Column:
    found = F.struct(F.lit(kind).alias("kind"), detail.alias("detail"))
    return F.when(detail.isNotNull(), found)


def _has_outcome(name: str) -> Column:
    return F.coalesce(F.col("outcome") == name, F.lit(False))


def _seconds_since(now_ms: int, column: str) -> Column:
    return ((F.lit(now_ms) - F.col(column)) / 1000).cast("bigint")


def _is_past_grace(column: str, grace_end_ms: int) -> Column:
    """Without a time nobody can say that it is under way."""
    return F.coalesce(F.col(column) < grace_end_ms, F.lit(True))


def _delivered_count() -> Column:
    return F.size("finals")


def _is_claimed() -> Column:
    return F.coalesce(F.col("claimed"), F.lit(False))


def _row_without_message(grace_end_ms: int) -> Column:
    is_there = _is_claimed() | F.col("sent_rows").isNotNull()
    since = _is_past_grace("claimed_ms", grace_end_ms) & _is_past_grace("sent_ms", grace_end_ms)
    unknown = F.col("in_ledger").isNull() & since
    decided = _is_past_grace("decided_ms", grace_end_ms)
    expected = F.greatest("ids", "claimed_messages")  # of those that are not null
    few = _has_outcome("committed") & F.coalesce(_delivered_count() < expected, F.lit(False))
    detail = (
        F.when(unknown, F.lit("the ledger does not know it"))
        .when(_has_outcome("rolled_back"), F.lit("its messages were rolled back"))
        .otherwise(F.format_string("%d of %d messages are there", _delivered_count(), expected))
    )
    return _finding(is_there & (unknown | (decided & (_has_outcome("rolled_back") | few))), detail)


def _message_without_row(inputs: ReconcileInputs, grace_end_ms: int) -> Column:
    went_out = _has_outcome("committed") & _is_past_grace("decided_ms", grace_end_ms)
    more = (
        _is_claimed()
        & F.coalesce(F.col("ids") > F.col("claimed_messages"), F.lit(False))
        & F.coalesce(_delivered_count() > F.col("claimed_messages"), F.lit(False))
    )
    tombstone = F.coalesce(~F.col("claimed"), F.lit(False))
    detail = (
        F.when(
            more,
            F.format_string("%d messages, the database counted %d", "ids", "claimed_messages"),
        )
        .when(tombstone, F.lit("the database says that it was rolled back"))
        .otherwise(F.lit("no row in the database"))
    )
    is_alone = more
    if inputs.markers is not None:
        is_alone |= ~_is_claimed()
    if inputs.sent is not None:
        is_alone |= F.col("sent_rows").isNull()
    return _finding(went_out & is_alone, detail)


def _is_repeated() -> Column:
    return _has_outcome("committed") & F.coalesce(_delivered_count() > F.col("ids"), F.lit(False))


def _has_inbox_for_repeats(inputs: ReconcileInputs) -> Column:
    """The topics with a repeated message all have a consumer with an inbox, which takes it once.
    Which topic that is can be told if each has one message; else all of them must be guarded."""
    if inputs.inbox is None or not inputs.consumers:
        return F.lit(False)
    guarded = sorted({topic for topics in inputs.consumers.values() for topic in topics})
    open_topics = F.filter("topics", lambda topic: ~topic.isin(guarded))
    one_each = F.col("ids") == F.size("topics")
    in_open = F.size(F.filter("finals", lambda final: ~final["topic"].isin(guarded)))
    return (F.size(open_topics) == 0) | (one_each & (in_open == F.size(open_topics)))


def _delivered_twice(inputs: ReconcileInputs, grace_end_ms: int) -> Column:
    repeated = (
        _is_repeated()
        & ~_has_inbox_for_repeats(inputs)
        & _is_past_grace("decided_ms", grace_end_ms)
    )
    times = F.format_string("%d messages were delivered %d times", F.col("ids"), _delivered_count())
    if inputs.inbox is None:
        return _finding(repeated, times)
    effects = F.coalesce(F.col("places") > 1, F.lit(False))
    said = F.when(
        effects, F.format_string("it had its effect in %d databases", "places")
    ).otherwise(times)
    return _finding(repeated | effects, said)


def _consumed_without_effect(inputs: ReconcileInputs, grace_end_ms: int) -> Column:
    lacking = [
        F.when(
            F.coalesce(F.col(f"effects_{number}"), F.lit(0)) < _expected_count(topics),
            F.format_string(
                f"%d of %d messages had no effect in group {_escape_percent(group)}",
                _expected_count(topics) - F.coalesce(F.col(f"effects_{number}"), F.lit(0)),
                _expected_count(topics),
            ),
        )
        for number, (group, topics) in enumerate(inputs.consumers.items())
    ]
    said = F.concat_ws("; ", *lacking) if lacking else F.lit("")
    settled = _has_outcome("committed") & _is_past_grace("decided_ms", grace_end_ms)
    return _finding(settled & (said != ""), said)


def _escape_percent(group: str) -> str:
    return group.replace("%", "%%")


def _expected_count(topics: Sequence[str]) -> Column:
    """How many messages of a transaction went to these topics. The ledger does not say which
    message went where, so one that was delivered again beside others counts as one at least."""
    wanted = list(topics)
    here = F.size(F.filter("finals", lambda final: final["topic"].isin(wanted)))
    all_here = F.size(F.filter("topics", lambda topic: ~topic.isin(wanted))) == 0
    clear = F.when(all_here, F.least(here, F.col("ids"))).otherwise(here)
    mixed = _is_repeated() & ~all_here
    return F.coalesce(F.when(mixed, F.least(here, F.lit(1))).otherwise(clear), F.lit(0))


def _rolled_back_effect() -> Column:
    said = F.format_string("rolled back, yet it had an effect in group %s", "taken_by")
    happened = _has_outcome("rolled_back") & F.col("places").isNotNull()
    return _finding(happened, said)


def _not_received(grace_end_ms: int) -> Column:
    settled = _has_outcome("committed") & _is_past_grace("decided_ms", grace_end_ms)
    alone = settled & (_delivered_count() > 0) & F.col("received_rows").isNull()
    return _finding(alone, "the receiver has no row")


def _received_without_commit(grace_end_ms: int) -> Column:
    alone = F.col("received_rows").isNotNull() & _is_past_grace("received_ms", grace_end_ms)
    sure = F.col("in_ledger").isNull() | _has_outcome("rolled_back")
    said = F.concat(
        F.lit("the receiver booked it; the ledger: "), F.coalesce("outcome", F.lit("no such id"))
    )
    return _finding(alone & sure, said)


def _amount_differs(grace_end_ms: int) -> Column:
    differ = F.coalesce(F.col("sent") != F.col("received"), F.lit(False))
    settled = _is_past_grace("sent_ms", grace_end_ms) & _is_past_grace("received_ms", grace_end_ms)
    said = F.concat_ws(" ", F.lit("sent"), "sent", F.lit("received"), "received")
    return _finding(differ & settled, said)


__all__ = [
    "DIFFERENCE_KINDS",
    "ReconcileInputs",
    "ReconcileLimits",
    "consumer_topics",
    "differences",
    "producer_groups",
]

MAX_LISTED_NAMES: Final = 10_000  # names of groups and topics: a table of them, not of transactions


def producer_groups(markers: DataFrame) -> list[str]:
    """The producer groups that have ever left a marker."""
    rows = markers.select("producer_group").distinct().limit(MAX_LISTED_NAMES).collect()
    return sorted(row[0] for row in rows)


def consumer_topics(ledger: DataFrame, inbox: DataFrame) -> dict[str, list[str]]:
    """Which consumer group with an inbox takes which topics: told by the messages it has taken
    from transactions of a single topic."""
    plain = ledger.where(F.size("topics") == 1)
    messages = plain.select(
        F.col("topics")[0].alias("topic"), F.explode("message_ids").alias("message_id")
    )
    pairs = (
        messages.join(_hint_merge_join(inbox), "message_id")
        .select("consumer_group", "topic")
        .distinct()
    )
    found: dict[str, list[str]] = {}
    for group, topic in sorted(map(tuple, pairs.limit(MAX_LISTED_NAMES).collect())):
        found.setdefault(group, []).append(topic)
    return found


def differences(ledger: DataFrame, inputs: ReconcileInputs, limits: ReconcileLimits) -> DataFrame:
    """Columns: kind, transaction_id, group, topics (with commas), at, outcome, detail, sent,
    received (amounts)."""
    return findings(ledger, inputs, limits).where(F.col("kind") != TAKEN_ONCE)


def findings(ledger: DataFrame, inputs: ReconcileInputs, limits: ReconcileLimits) -> DataFrame:
    """Differences, and what was delivered again but taken once."""
    both = join_inputs(ledger, inputs, limits)
    told = F.filter(F.array(*rule_columns(inputs, limits)), lambda one: one.isNotNull())
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


def join_inputs(ledger: DataFrame, inputs: ReconcileInputs, limits: ReconcileLimits) -> DataFrame:
    """One row per transaction that any side knows, with what each says of it."""
    # A booking without a time can be older than the window: only the whole ledger shows that.
    books = [frame for frame in (inputs.sent, inputs.received) if frame is not None]
    have_times = all("at_ms" in frame.columns for frame in books)
    both = _ledger_columns(ledger_window(ledger, limits) if have_times else ledger)
    both = _join_or_nulls(both, _marker_claims(inputs.markers), _CLAIM_TYPES)
    both = _join_or_nulls(both, _booking_sums(inputs.sent, "sent"), _booking_types("sent"))
    both = _join_or_nulls(
        both, _booking_sums(inputs.received, "received"), _booking_types("received")
    )
    if inputs.inbox is not None:
        effects = _effect_counts(ledger, inputs.inbox, inputs, limits)
        both = both.join(_hint_merge_join(effects), "transaction_id", "left")
    at_ms = F.coalesce("parked_ms", "claimed_ms", "sent_ms", "received_ms")
    in_scope = F.lit(True)
    if inputs.groups:
        named = F.coalesce("group", "marker_group")
        in_scope = named.isNull() | named.isin(list(inputs.groups))
    is_old = F.coalesce(at_ms < limits.since_ms, F.lit(False))
    return both.withColumn("at_ms", at_ms).where(in_scope & ~is_old)


def ledger_window(ledger: DataFrame, limits: ReconcileLimits) -> DataFrame:
    """The ledger's days that matter, and one before: ids meet that began on both sides of it."""
    if not limits.since_ms:
        return ledger
    first = F.to_date(F.timestamp_millis(F.lit(limits.since_ms - DAY_MS)))
    return ledger.where(F.col("day") >= first)


# --- what each side says -------------------------------------------------------------------------


def _ledger_columns(ledger: DataFrame) -> DataFrame:
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


def _marker_claims(markers: DataFrame | None) -> DataFrame | None:
    if markers is None:
        return None
    is_committed = F.col("outcome") == COMMITTED
    return markers.groupBy(F.col("id").alias("transaction_id")).agg(
        F.min("producer_group").alias("marker_group"),
        F.bool_or(is_committed).alias("claimed"),
        F.max(F.when(is_committed, F.col("messages"))).alias("claimed_messages"),
        F.min("at_ms").alias("claimed_ms"),
    )


_CLAIM_TYPES: Final = {
    "marker_group": "string",
    "claimed": "boolean",
    "claimed_messages": "int",
    "claimed_ms": "bigint",
}


def _booking_sums(frame: DataFrame | None, name: str) -> DataFrame | None:
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


def _booking_types(name: str) -> dict[str, str]:
    return {name: "decimal(38,6)", f"{name}_ms": "bigint", f"{name}_rows": "bigint"}


def _join_or_nulls(rows: DataFrame, side: DataFrame | None, types: Mapping[str, str]) -> DataFrame:
    """What one more side says; nulls, and no shuffle, if it is not asked."""
    if side is not None:
        return rows.join(side, "transaction_id", "full_outer")
    nulls = [F.lit(None).cast(kind).alias(name) for name, kind in types.items()]
    return rows.select("*", *nulls)


def _hint_merge_join(frame: DataFrame) -> DataFrame:
    """Spark takes what comes from a database for a handful of rows, and would hand all of them to
    everybody: with ten million it has no memory left."""
    return frame.hint("merge")


def _effect_counts(
    ledger: DataFrame, inbox: DataFrame, inputs: ReconcileInputs, limits: ReconcileLimits
) -> DataFrame:
    """By transaction: how many of its messages had an effect in each consumer group, and in how
    many places at most."""
    ids = F.explode(F.array_distinct("message_ids")).alias("message_id")
    messages = ledger_window(ledger, limits).select("transaction_id", ids)
    taken = inbox.groupBy("message_id", "consumer_group").agg(F.count("*").alias("places"))
    counts = [
        F.count_if(F.col("consumer_group") == group).alias(f"effects_{number}")
        for number, group in enumerate(inputs.consumers)
    ]
    return (
        messages.join(_hint_merge_join(taken), "message_id")
        .groupBy("transaction_id")
        .agg(
            F.max("places").alias("places"),
            F.min("consumer_group").alias("taken_by"),
            *counts,
        )
    )
