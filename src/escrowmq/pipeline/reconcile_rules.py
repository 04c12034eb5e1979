"""What is a difference: for each kind, when it is there and what is said of it.

The columns are those of `reconcile.compared`: what each side says of one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from escrowmq.pipeline.reconcile_sides import TAKEN_ONCE, Limits, Sides


def _finding(when: Column, detail: Column | str) -> Column:
    return F.when(when, F.lit(detail) if isinstance(detail, str) else detail)


def findings(sides: Sides, limits: Limits) -> list[Column]:
    """A struct for each kind, null where there is nothing to say. Of two reasons the first."""
    ripe_ms = limits.now_ms - limits.grace_ms
    open_for = F.format_string("open for %d s", _seconds_since(limits.now_ms, "parked_ms"))
    too_long = F.col("parked_ms") < limits.now_ms - limits.open_ms
    found = {
        "stranded": [_finding(_outcome("stranded"), "it waits for an operator")],
        "still_open": [_finding(_outcome("open") & too_long, open_for)],
        "delivered_twice": [_twice(sides, ripe_ms)],
        "row_without_message": [],
        "message_without_row": [],
        "consumed_without_effect": [],
        "amount_differs": [],
        TAKEN_ONCE: [_finding(_is_repeated() & _is_guarded(sides), "an inbox took it once")],
    }
    if sides.markers is not None or sides.sent is not None:
        found["row_without_message"].append(_row_alone(ripe_ms))
        found["message_without_row"].append(_message_alone(sides, ripe_ms))
    if sides.inbox is not None:
        found["consumed_without_effect"].append(_no_effect(sides, ripe_ms))
        found["message_without_row"].append(_rolled_back_effect())
    if sides.received is not None:
        found["consumed_without_effect"].append(_not_received(ripe_ms))
        found["message_without_row"].append(_received_alone(ripe_ms))
    if sides.sent is not None and sides.received is not None:
        found["amount_differs"].append(_amounts(ripe_ms))
    return [_told(kind, F.coalesce(*said)) for kind, said in found.items() if said]


def _told(kind: str, detail: Column) -> Column:
    found = F.struct(F.lit(kind).alias("kind"), detail.alias("detail"))
    return F.when(detail.isNotNull(), found)


def _outcome(name: str) -> Column:
    return F.coalesce(F.col("outcome") == name, F.lit(False))


def _seconds_since(now_ms: int, column: str) -> Column:
    return ((F.lit(now_ms) - F.col(column)) / 1000).cast("bigint")


def _ripe(column: str, ripe_ms: int) -> Column:
    """Without a time nobody can say that it is under way."""
    return F.coalesce(F.col(column) < ripe_ms, F.lit(True))


def _delivered() -> Column:
    return F.size("finals")


def _claimed() -> Column:
    return F.coalesce(F.col("claimed"), F.lit(False))


def _row_alone(ripe_ms: int) -> Column:
    is_there = _claimed() | F.col("sent_rows").isNotNull()
    since = _ripe("claimed_ms", ripe_ms) & _ripe("sent_ms", ripe_ms)
    unknown = F.col("in_ledger").isNull() & since
    decided = _ripe("decided_ms", ripe_ms)
    expected = F.greatest("ids", "claimed_messages")  # of those that are not null
    few = _outcome("committed") & F.coalesce(_delivered() < expected, F.lit(False))
    detail = (
        F.when(unknown, F.lit("the ledger does not know it"))
        .when(_outcome("rolled_back"), F.lit("its messages were rolled back"))
        .otherwise(F.format_string("%d of %d messages are there", _delivered(), expected))
    )
    return _finding(is_there & (unknown | (decided & (_outcome("rolled_back") | few))), detail)


def _message_alone(sides: Sides, ripe_ms: int) -> Column:
    went_out = _outcome("committed") & _ripe("decided_ms", ripe_ms)
    more = (
        _claimed()
        & F.coalesce(F.col("ids") > F.col("claimed_messages"), F.lit(False))
        & F.coalesce(_delivered() > F.col("claimed_messages"), F.lit(False))
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
    if sides.markers is not None:
        is_alone |= ~_claimed()
    if sides.sent is not None:
        is_alone |= F.col("sent_rows").isNull()
    return _finding(went_out & is_alone, detail)


def _is_repeated() -> Column:
    return _outcome("committed") & F.coalesce(_delivered() > F.col("ids"), F.lit(False))


def _is_guarded(sides: Sides) -> Column:
    """The topics with a repeated message all have a consumer with an inbox, which takes it once.
    Which topic that is can be told if each has one message; else all of them must be guarded."""
    if sides.inbox is None or not sides.consumers:
        return F.lit(False)
    guarded = sorted({topic for topics in sides.consumers.values() for topic in topics})
    open_topics = F.filter("topics", lambda topic: ~topic.isin(guarded))
    one_each = F.col("ids") == F.size("topics")
    in_open = F.size(F.filter("finals", lambda final: ~final["topic"].isin(guarded)))
    return (F.size(open_topics) == 0) | (one_each & (in_open == F.size(open_topics)))


def _twice(sides: Sides, ripe_ms: int) -> Column:
    repeated = _is_repeated() & ~_is_guarded(sides) & _ripe("decided_ms", ripe_ms)
    times = F.format_string("%d messages were delivered %d times", F.col("ids"), _delivered())
    if sides.inbox is None:
        return _finding(repeated, times)
    effects = F.coalesce(F.col("places") > 1, F.lit(False))
    said = F.when(
        effects, F.format_string("it had its effect in %d databases", "places")
    ).otherwise(times)
    return _finding(repeated | effects, said)


def _no_effect(sides: Sides, ripe_ms: int) -> Column:
    lacking = [
        F.when(
            F.coalesce(F.col(f"effects_{number}"), F.lit(0)) < _expected(topics),
            F.format_string(
                f"%d of %d messages had no effect in group {_plain(group)}",
                _expected(topics) - F.coalesce(F.col(f"effects_{number}"), F.lit(0)),
                _expected(topics),
            ),
        )
        for number, (group, topics) in enumerate(sides.consumers.items())
    ]
    said = F.concat_ws("; ", *lacking) if lacking else F.lit("")
    settled = _outcome("committed") & _ripe("decided_ms", ripe_ms)
    return _finding(settled & (said != ""), said)


def _plain(group: str) -> str:
    return group.replace("%", "%%")


def _expected(topics: Sequence[str]) -> Column:
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
    happened = _outcome("rolled_back") & F.col("places").isNotNull()
    return _finding(happened, said)


def _not_received(ripe_ms: int) -> Column:
    settled = _outcome("committed") & _ripe("decided_ms", ripe_ms)
    alone = settled & (_delivered() > 0) & F.col("received_rows").isNull()
    return _finding(alone, "the receiver has no row")


def _received_alone(ripe_ms: int) -> Column:
    alone = F.col("received_rows").isNotNull() & _ripe("received_ms", ripe_ms)
    sure = F.col("in_ledger").isNull() | _outcome("rolled_back")
    said = F.concat(
        F.lit("the receiver booked it; the ledger: "), F.coalesce("outcome", F.lit("no such id"))
    )
    return _finding(alone & sure, said)


def _amounts(ripe_ms: int) -> Column:
    differ = F.coalesce(F.col("sent") != F.col("received"), F.lit(False))
    settled = _ripe("sent_ms", ripe_ms) & _ripe("received_ms", ripe_ms)
    said = F.concat_ws(" ", F.lit("sent"), "sent", F.lit("received"), "received")
    return _finding(differ & settled, said)
