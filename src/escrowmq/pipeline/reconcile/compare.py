"""Find where the ledger and the databases disagree: one row per difference.

    ledger ────────────┐
    markers ───────────┤
    sent, received ────┼─ join_inputs() ─ one row per transaction ─ rules ─ findings()
    inbox, by message ─┘

The ledger and the inputs are joined on the id of the transaction, which takes one shuffle of each;
the inbox is joined on the id of the message first. Nothing that grows with the number of
transactions is collected to the driver.

A transaction that is younger than `grace_ms` may still be in progress, so it is not a difference
yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812

from escrowmq.database.marker import COMMITTED

DAY_MS: Final = 86_400_000
DIFFERENCE_KINDS: Final = {
    "row_without_message": "committed in the database, but a message is missing",
    "message_without_row": "a message was delivered, but the database has no row for it",
    "delivered_twice": "a message was delivered twice, and no inbox prevents a second effect",
    "consumed_without_effect": "delivered, but without effect at the consumer",
    "stranded": "checked too often or too old; an operator has to decide",
    "still_open": "undecided for longer than the limit",
    "amount_differs": "sender and receiver booked different amounts",
}
# Delivered again, but every consumer has an inbox, so the effect happened once. It is counted, but
# it is not a difference.
TAKEN_ONCE: Final = "taken_once"
MAX_LISTED_NAMES: Final = 10_000  # bounds the lists of groups and topics that are collected


@dataclass(frozen=True, slots=True)
class ReconcileLimits:
    """Times that decide what is compared.

    Databases delete old markers, so transactions from before `since_ms` are not compared (0: all
    are compared).
    """

    now_ms: int
    grace_ms: int = 10 * 60_000
    open_ms: int = 60 * 60_000
    since_ms: int = 0


@dataclass(frozen=True, slots=True)
class ReconcileInputs:
    """What the ledger is compared with. A frame that is None is not compared.

    markers   id, outcome, at_ms, producer_group, messages: the table of the database binding
    inbox     consumer_group, message_id, at_ms: likewise
    sent      transaction_id, optionally amount and at_ms: the sender's own books
    received  the same for the receiver

    If there are both markers and books of the sender, both must have every committed transaction.
    """

    markers: DataFrame | None = None
    inbox: DataFrame | None = None
    sent: DataFrame | None = None
    received: DataFrame | None = None
    groups: Sequence[str] = ()  # producer groups of these databases; empty: all
    consumers: Mapping[str, Sequence[str]] = field(default_factory=dict)  # group: its topics


def differences(ledger: DataFrame, inputs: ReconcileInputs, limits: ReconcileLimits) -> DataFrame:
    """Return one row per difference.

    Columns: kind, transaction_id, group, topics (comma-separated), at, outcome, detail, sent and
    received (amounts).
    """
    return findings(ledger, inputs, limits).where(F.col("kind") != TAKEN_ONCE)


def findings(ledger: DataFrame, inputs: ReconcileInputs, limits: ReconcileLimits) -> DataFrame:
    """Return the differences, and rows of kind TAKEN_ONCE. Shuffles as `join_inputs()`."""
    joined = join_inputs(ledger, inputs, limits)
    found = F.filter(F.array(*rule_columns(inputs, limits)), lambda finding: finding.isNotNull())
    return joined.select("*", F.explode(found).alias("finding")).select(
        "finding.kind",
        "transaction_id",
        F.coalesce("group", "marker_group").alias("group"),
        F.array_join("topics", ",").alias("topics"),
        F.timestamp_millis("at_ms").alias("at"),
        "outcome",
        "finding.detail",
        "sent",
        "received",
    )


def booking_totals(
    ledger: DataFrame, inputs: ReconcileInputs, limits: ReconcileLimits
) -> dict[str, Decimal]:
    """Return the sum of the amounts of each side, `sent` and `received`, that has amounts.

    They are those of the transactions that are compared: a booking counts if its transaction is in
    the window. Shuffles as `join_inputs()` without an inbox.
    """
    books = {"sent": inputs.sent, "received": inputs.received}
    sides = [
        name for name, frame in books.items() if frame is not None and "amount" in frame.columns
    ]
    if not sides:
        return {}
    joined = join_inputs(ledger, replace(inputs, inbox=None), limits)
    totals = joined.agg(*(F.sum(side).alias(side) for side in sides)).collect()[0]
    return {side: totals[side] or Decimal(0) for side in sides}


def producer_groups(markers: DataFrame) -> list[str]:
    """Return the producer groups that have markers."""
    rows = markers.select("producer_group").distinct().limit(MAX_LISTED_NAMES).collect()
    return sorted(row[0] for row in rows)


def consumer_topics(ledger: DataFrame, inbox: DataFrame) -> dict[str, list[str]]:
    """Return the topics that each consumer group with an inbox consumes.

    Only transactions with a single topic tell which topic a message had. One shuffle of the ledger
    and one of the inbox.
    """
    single_topic = ledger.where(F.size("topics") == 1)
    messages = single_topic.select(
        F.col("topics")[0].alias("topic"), F.explode("message_ids").alias("message_id")
    )
    pairs = (
        messages.join(_hint_merge_join(inbox), "message_id")
        .select("consumer_group", "topic")
        .distinct()
    )
    topics_by_group: dict[str, list[str]] = {}
    for group, topic in sorted(map(tuple, pairs.limit(MAX_LISTED_NAMES).collect())):
        topics_by_group.setdefault(group, []).append(topic)
    return topics_by_group


# --- join ----------------------------------------------------------------------------------------


def join_inputs(ledger: DataFrame, inputs: ReconcileInputs, limits: ReconcileLimits) -> DataFrame:
    """Return one row per transaction that the ledger or an input has, with the columns of all.

    One shuffle of the ledger and of each input by transaction. With an inbox, two more: ledger and
    inbox by message.
    """
    # A booking without a time can be older than the window. Only the whole ledger tells whether it
    # has a transaction.
    books = [frame for frame in (inputs.sent, inputs.received) if frame is not None]
    have_times = all("at_ms" in frame.columns for frame in books)
    rows = _ledger_columns(ledger_window(ledger, limits) if have_times else ledger)
    rows = _join_or_nulls(rows, _marker_columns(inputs.markers), _MARKER_TYPES)
    rows = _join_or_nulls(rows, _booking_sums(inputs.sent, "sent"), _booking_types("sent"))
    rows = _join_or_nulls(
        rows, _booking_sums(inputs.received, "received"), _booking_types("received")
    )
    if inputs.inbox is not None:
        effects = _effect_counts(ledger, inputs.inbox, inputs, limits)
        rows = rows.join(_hint_merge_join(effects), "transaction_id", "left")
    at_ms = F.coalesce("parked_ms", "marker_ms", "sent_ms", "received_ms")
    is_in_scope = F.lit(True)
    if inputs.groups:
        group = F.coalesce("group", "marker_group")
        is_in_scope = group.isNull() | group.isin(list(inputs.groups))
    is_old = F.coalesce(at_ms < limits.since_ms, F.lit(False))
    return rows.withColumn("at_ms", at_ms).where(is_in_scope & ~is_old)


def ledger_window(ledger: DataFrame, limits: ReconcileLimits) -> DataFrame:
    """Return the days of the ledger from `since_ms` on, and the day before.

    A transaction can have its row in the database after the limit and its half before it.
    """
    if not limits.since_ms:
        return ledger
    first_day = F.to_date(F.timestamp_millis(F.lit(limits.since_ms - DAY_MS)))
    return ledger.where(F.col("day") >= first_day)


def _ledger_columns(ledger: DataFrame) -> DataFrame:
    parked_at = F.coalesce("parked_at", "first_check", "decided_at")
    return ledger.select(
        "transaction_id",
        F.lit(True).alias("in_ledger"),
        "group",
        "topics",
        "outcome",
        F.size(F.array_distinct("message_ids")).alias("message_count"),
        F.array_distinct("finals").alias("finals"),
        F.unix_millis(parked_at).alias("parked_ms"),
        F.unix_millis(F.coalesce(F.col("decided_at"), parked_at)).alias("decided_ms"),
    )


def _marker_columns(markers: DataFrame | None) -> DataFrame | None:
    if markers is None:
        return None
    is_committed = F.col("outcome") == COMMITTED
    return markers.groupBy(F.col("id").alias("transaction_id")).agg(
        F.min("producer_group").alias("marker_group"),
        F.bool_or(is_committed).alias("marker_committed"),
        F.max(F.when(is_committed, F.col("messages"))).alias("marker_messages"),
        F.min("at_ms").alias("marker_ms"),
    )


_MARKER_TYPES: Final = {
    "marker_group": "string",
    "marker_committed": "boolean",
    "marker_messages": "int",
    "marker_ms": "bigint",
}


def _booking_sums(bookings: DataFrame | None, name: str) -> DataFrame | None:
    """Aggregate bookings by transaction: the sum `name`, the first time, the number of rows."""
    if bookings is None:
        return None
    amount = F.col("amount") if "amount" in bookings.columns else F.lit(None)
    at_ms = F.col("at_ms") if "at_ms" in bookings.columns else F.lit(None)
    return bookings.groupBy("transaction_id").agg(
        F.sum(amount.cast("decimal(28,6)")).cast("decimal(38,6)").alias(name),
        F.min(at_ms.cast("bigint")).alias(f"{name}_ms"),
        F.count("*").alias(f"{name}_rows"),
    )


def _booking_types(name: str) -> dict[str, str]:
    return {name: "decimal(38,6)", f"{name}_ms": "bigint", f"{name}_rows": "bigint"}


def _join_or_nulls(
    rows: DataFrame, columns: DataFrame | None, types: Mapping[str, str]
) -> DataFrame:
    """Join the columns of an input. If it is None, add nulls, which takes no shuffle."""
    if columns is not None:
        return rows.join(columns, "transaction_id", "full_outer")
    nulls = [F.lit(None).cast(kind).alias(name) for name, kind in types.items()]
    return rows.select("*", *nulls)


def _hint_merge_join(frame: DataFrame) -> DataFrame:
    """Ask for a sort-merge join.

    Spark does not know the size of a frame that comes from a database, assumes that it is small and
    broadcasts it. With ten million rows the executors ran out of memory.
    """
    return frame.hint("merge")


def _effect_counts(
    ledger: DataFrame, inbox: DataFrame, inputs: ReconcileInputs, limits: ReconcileLimits
) -> DataFrame:
    """Count the effects of each transaction, by consumer group.

    `effects_N` is the number of its messages that group N of `inputs.consumers` has consumed.
    `effect_places` is the number of databases in which one message had an effect, at most.
    """
    message_id = F.explode(F.array_distinct("message_ids")).alias("message_id")
    messages = ledger_window(ledger, limits).select("transaction_id", message_id)
    effects = inbox.groupBy("message_id", "consumer_group").agg(F.count("*").alias("places"))
    counts = [
        F.count_if(F.col("consumer_group") == group).alias(f"effects_{number}")
        for number, group in enumerate(inputs.consumers)
    ]
    return (
        messages.join(_hint_merge_join(effects), "message_id")
        .groupBy("transaction_id")
        .agg(
            F.max("places").alias("effect_places"),
            F.min("consumer_group").alias("effect_group"),
            *counts,
        )
    )


# --- rules ---------------------------------------------------------------------------------------
#
# A rule is a column: the detail of the finding, or null if the rule does not apply. The columns it
# reads are those of `join_inputs()`.


def rule_columns(inputs: ReconcileInputs, limits: ReconcileLimits) -> list[Column]:
    """Return a struct (kind, detail) per kind, null where there is no finding.

    Where several rules of one kind apply, the first one gives the detail.
    """
    grace_end_ms = limits.now_ms - limits.grace_ms
    details: dict[str, list[Column]] = {
        "stranded": [_detail_if(_has_outcome("stranded"), "waits for an operator")],
        "still_open": [_still_open(limits)],
        "delivered_twice": [_delivered_twice(inputs, grace_end_ms)],
        "row_without_message": [],
        "message_without_row": [],
        "consumed_without_effect": [],
        "amount_differs": [],
        TAKEN_ONCE: [
            _detail_if(_is_repeated() & _has_inbox_for_repeats(inputs), "an inbox took it once")
        ],
    }
    if inputs.markers is not None or inputs.sent is not None:
        details["row_without_message"].append(_row_without_message(grace_end_ms))
        details["message_without_row"].append(_message_without_row(inputs, grace_end_ms))
    if inputs.inbox is not None:
        details["consumed_without_effect"].append(_consumed_without_effect(inputs, grace_end_ms))
        details["message_without_row"].append(_rolled_back_effect())
    if inputs.received is not None:
        details["consumed_without_effect"].append(_not_received(grace_end_ms))
        details["message_without_row"].append(_received_without_commit(grace_end_ms))
    if inputs.sent is not None and inputs.received is not None:
        details["amount_differs"].append(_amount_differs(grace_end_ms))
    return [_finding(kind, F.coalesce(*columns)) for kind, columns in details.items() if columns]


def _finding(kind: str, detail: Column) -> Column:
    return F.when(detail.isNotNull(), F.struct(F.lit(kind).alias("kind"), detail.alias("detail")))


def _detail_if(condition: Column, detail: Column | str) -> Column:
    return F.when(condition, F.lit(detail) if isinstance(detail, str) else detail)


def _has_outcome(name: str) -> Column:
    return F.coalesce(F.col("outcome") == name, F.lit(False))


def _is_past_grace(column: str, grace_end_ms: int) -> Column:
    """Test a time. Without a time nothing can be in progress, so null counts as past."""
    return F.coalesce(F.col(column) < grace_end_ms, F.lit(True))


def _final_count() -> Column:
    return F.size("finals")


def _marker_is_committed() -> Column:
    return F.coalesce(F.col("marker_committed"), F.lit(False))


def _still_open(limits: ReconcileLimits) -> Column:
    open_s = ((F.lit(limits.now_ms) - F.col("parked_ms")) / 1000).cast("bigint")
    is_too_long = F.col("parked_ms") < limits.now_ms - limits.open_ms
    return _detail_if(_has_outcome("open") & is_too_long, F.format_string("open for %d s", open_s))


def _row_without_message(grace_end_ms: int) -> Column:
    has_row = _marker_is_committed() | F.col("sent_rows").isNotNull()
    row_is_past_grace = _is_past_grace("marker_ms", grace_end_ms) & _is_past_grace(
        "sent_ms", grace_end_ms
    )
    is_unknown = F.col("in_ledger").isNull() & row_is_past_grace
    is_past_grace = _is_past_grace("decided_ms", grace_end_ms)
    expected = F.greatest("message_count", "marker_messages")  # greatest() ignores nulls
    has_too_few = _has_outcome("committed") & F.coalesce(_final_count() < expected, F.lit(False))
    detail = (
        F.when(is_unknown, F.lit("not in the ledger"))
        .when(_has_outcome("rolled_back"), F.lit("its messages were rolled back"))
        .otherwise(F.format_string("%d of %d messages were delivered", _final_count(), expected))
    )
    is_missing = is_unknown | (is_past_grace & (_has_outcome("rolled_back") | has_too_few))
    return _detail_if(has_row & is_missing, detail)


def _message_without_row(inputs: ReconcileInputs, grace_end_ms: int) -> Column:
    is_committed = _has_outcome("committed") & _is_past_grace("decided_ms", grace_end_ms)
    has_more_messages = (
        _marker_is_committed()
        & F.coalesce(F.col("message_count") > F.col("marker_messages"), F.lit(False))
        & F.coalesce(_final_count() > F.col("marker_messages"), F.lit(False))
    )
    has_tombstone = F.coalesce(~F.col("marker_committed"), F.lit(False))
    detail = (
        F.when(
            has_more_messages,
            F.format_string(
                "%d messages, the database counted %d", "message_count", "marker_messages"
            ),
        )
        .when(has_tombstone, F.lit("the database says that it was rolled back"))
        .otherwise(F.lit("no row in the database"))
    )
    lacks_row = has_more_messages
    if inputs.markers is not None:
        lacks_row |= ~_marker_is_committed()
    if inputs.sent is not None:
        lacks_row |= F.col("sent_rows").isNull()
    return _detail_if(is_committed & lacks_row, detail)


def _is_repeated() -> Column:
    has_more_finals = F.coalesce(_final_count() > F.col("message_count"), F.lit(False))
    return _has_outcome("committed") & has_more_finals


def _has_inbox_for_repeats(inputs: ReconcileInputs) -> Column:
    """Test that all topics with a repeated message have a consumer with an inbox.

    The ledger does not say which message went to which topic. Only if each topic has one message is
    it clear which topic has the repeated one; otherwise all topics need such a consumer.
    """
    if inputs.inbox is None or not inputs.consumers:
        return F.lit(False)
    inbox_topics = sorted({topic for topics in inputs.consumers.values() for topic in topics})
    other_topics = F.filter("topics", lambda topic: ~topic.isin(inbox_topics))
    has_one_per_topic = F.col("message_count") == F.size("topics")
    finals_elsewhere = F.size(F.filter("finals", lambda final: ~final["topic"].isin(inbox_topics)))
    return (F.size(other_topics) == 0) | (
        has_one_per_topic & (finals_elsewhere == F.size(other_topics))
    )


def _delivered_twice(inputs: ReconcileInputs, grace_end_ms: int) -> Column:
    is_repeated = (
        _is_repeated()
        & ~_has_inbox_for_repeats(inputs)
        & _is_past_grace("decided_ms", grace_end_ms)
    )
    deliveries = F.format_string(
        "%d messages were delivered %d times", F.col("message_count"), _final_count()
    )
    if inputs.inbox is None:
        return _detail_if(is_repeated, deliveries)
    has_effects = F.coalesce(F.col("effect_places") > 1, F.lit(False))
    detail = F.when(
        has_effects, F.format_string("it had its effect in %d databases", "effect_places")
    ).otherwise(deliveries)
    return _detail_if(is_repeated | has_effects, detail)


def _consumed_without_effect(inputs: ReconcileInputs, grace_end_ms: int) -> Column:
    details = []
    for number, (group, topics) in enumerate(inputs.consumers.items()):
        expected = _expected_effects(topics)
        effects = F.coalesce(F.col(f"effects_{number}"), F.lit(0))
        text = f"%d of %d messages had no effect in group {_escape_percent(group)}"
        details.append(
            F.when(effects < expected, F.format_string(text, expected - effects, expected))
        )
    detail = F.concat_ws("; ", *details) if details else F.lit("")
    is_committed = _has_outcome("committed") & _is_past_grace("decided_ms", grace_end_ms)
    return _detail_if(is_committed & (detail != ""), detail)


def _escape_percent(group: str) -> str:
    return group.replace("%", "%%")


def _expected_effects(topics: Sequence[str]) -> Column:
    """Return how many messages of a transaction went to these topics, at least.

    The ledger does not say which message went to which topic. If a message was delivered again and
    the transaction has other topics as well, only one message is certain.
    """
    finals_here = F.size(F.filter("finals", lambda final: final["topic"].isin(list(topics))))
    is_only_here = F.size(F.filter("topics", lambda topic: ~topic.isin(list(topics)))) == 0
    certain = F.when(is_only_here, F.least(finals_here, F.col("message_count"))).otherwise(
        finals_here
    )
    is_ambiguous = _is_repeated() & ~is_only_here
    expected = F.when(is_ambiguous, F.least(finals_here, F.lit(1))).otherwise(certain)
    return F.coalesce(expected, F.lit(0))


def _rolled_back_effect() -> Column:
    detail = F.format_string("rolled back, but it had an effect in group %s", "effect_group")
    has_effect = _has_outcome("rolled_back") & F.col("effect_places").isNotNull()
    return _detail_if(has_effect, detail)


def _not_received(grace_end_ms: int) -> Column:
    is_committed = _has_outcome("committed") & _is_past_grace("decided_ms", grace_end_ms)
    is_missing = is_committed & (_final_count() > 0) & F.col("received_rows").isNull()
    return _detail_if(is_missing, "the receiver has no row")


def _received_without_commit(grace_end_ms: int) -> Column:
    is_booked = F.col("received_rows").isNotNull() & _is_past_grace("received_ms", grace_end_ms)
    is_not_committed = F.col("in_ledger").isNull() | _has_outcome("rolled_back")
    detail = F.concat(
        F.lit("the receiver booked it; the ledger: "), F.coalesce("outcome", F.lit("no such id"))
    )
    return _detail_if(is_booked & is_not_committed, detail)


def _amount_differs(grace_end_ms: int) -> Column:
    differs = F.coalesce(F.col("sent") != F.col("received"), F.lit(False))
    is_past_grace = _is_past_grace("sent_ms", grace_end_ms) & _is_past_grace(
        "received_ms", grace_end_ms
    )
    detail = F.concat_ws(" ", F.lit("sent"), "sent", F.lit("received"), "received")
    return _detail_if(differs & is_past_grace, detail)
