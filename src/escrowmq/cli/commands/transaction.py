"""`escrowmq transaction …`: what is pending and why, and decisions by hand.

Transactions as people and programs read them: rows of a table, fields, a story, JSON.
"""

from __future__ import annotations

import getpass
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

import click

from escrowmq.cli.brokers import end
from escrowmq.cli.cluster import Cluster, Listed, Outcome, Told
from escrowmq.cli.options import duration_ms, together, topic_names, where
from escrowmq.cli.output import Column, reader_may_leave, table_lines, width_of
from escrowmq.cli.rendering import printable, utc
from escrowmq.clock import SystemClock
from escrowmq.errors import NoSuchTransaction, OutcomeUnknown
from escrowmq.remoting.bodies import TransactionEntry, TransactionStep
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import Header, ListTransactions, ResumeTransaction, SettleTransaction

_COLUMNS: Final = (
    Column("TRANSACTION"),  # never cut, or nobody could copy it
    Column("STATE"),
    Column("GROUP", gives_way=True),
    Column("TOPIC", gives_way=True),
    Column("AGE"),
    Column("CHECKS"),
    Column("NEXT DUE"),
)
_SETTLED: Final = ("committed", "rolled_back")
_WHATS: Final = {"unknown": "answered", "appended_again": "appended again"}


# --- for programs --------------------------------------------------------------------------------


def entry_json(listed: Listed) -> dict[str, Any]:
    entry = listed.entry
    return {
        "transaction_id": entry.transaction_id,
        "group": entry.group,
        "topic": entry.topic,
        "state": entry.state,
        "parked_at": utc(entry.parked_at),
        "checks": entry.checks,
        "next_due": None if entry.next_due is None else utc(entry.next_due),
        "broker": listed.broker.name,
        "queue_id": entry.queue_id,
        "queue_offset": entry.queue_offset,
        "log_offset": entry.log_offset,
        "size": entry.size,
        "why": entry.why,
    }


def story_json(told: Told) -> dict[str, Any]:
    story = told.story
    return {
        **entry_json(Listed(told.broker, story.transaction)),
        "pending_because": story.pending_because,
        "steps": [
            {
                "at": utc(step.at) if step.at else None,
                "what": step.what,
                "who": step.who,
                "reason": step.reason,
                "detail": step.detail,
            }
            for step in story.steps
        ],
    }


# --- a table -------------------------------------------------------------------------------------


def pending_lines(rows: Iterable[Listed], now_ms: int, width: int | None) -> Iterator[str]:
    return table_lines(_COLUMNS, (_cells(listed.entry, now_ms) for listed in rows), width)


def _cells(entry: TransactionEntry, now_ms: int) -> tuple[str, ...]:
    return (
        printable(entry.transaction_id),
        entry.state,
        printable(entry.group),
        printable(entry.topic),
        duration_text(now_ms - entry.parked_at),
        str(entry.checks),
        _due_text(entry, now_ms),
    )


def _due_text(entry: TransactionEntry, now_ms: int) -> str:
    if entry.next_due is None:
        return "-"
    left_ms = entry.next_due - now_ms
    return f"in {duration_text(left_ms)}" if left_ms > 0 else f"since {duration_text(-left_ms)}"


def duration_text(ms: int) -> str:
    seconds = max(0, ms) // 1000
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


# --- one of them ---------------------------------------------------------------------------------


def field_lines(told: Told) -> Iterator[str]:
    fields = story_json(told)
    steps = fields.pop("steps")
    for name, value in fields.items():
        yield f"{name:<16} {'-' if value in (None, '') else printable(str(value))}"
    yield f"{'steps':<16} {', '.join(step['what'] for step in steps)}"


def story_lines(told: Told) -> Iterator[str]:
    entry = told.story.transaction
    name = printable(entry.transaction_id)
    yield (
        f"transaction {name} of group {printable(entry.group)} for topic "
        f"{printable(entry.topic)}, on {told.broker.name}: {entry.state}"
    )
    for step in told.story.steps:
        at = utc(step.at) if step.at else f"{'(time not noted)':<24}"
        yield f"  {at}  {_WHATS.get(step.what, step.what):<14}  {printable(_step_text(step))}"
    if told.story.pending_because:
        yield f"why:   {printable(told.story.pending_because)}"
    yield f"next:  {_next(entry, name)}"


def _step_text(step: TransactionStep) -> str:
    reason = f': "{step.reason}"' if step.reason else ""
    match step.what:
        case "parked":
            return f"{step.detail}; sent from {step.who}"
        case "asked":
            return f"{step.who} ({step.detail})"
        case "unknown":
            return f"unknown, says {step.who} ({step.detail})"
    detail = f"; {step.detail}" if step.detail else ""
    return f"by {step.who or 'somebody who left no name'}{reason}{detail}"


def _next(entry: TransactionEntry, name: str) -> str:
    if entry.state in _SETTLED:
        return "nothing: it is settled for good"
    if entry.next_due is None:
        return f"nothing by itself: escrowmq transaction resume|commit|rollback {name}"
    return f"if nobody decides, its producer is asked when due: {utc(entry.next_due)}"


_SHOWN_MAX: Final = 20  # of those that a confirmation asks about
_SETTLED_MAX: Final = 1_000  # listed, if nobody says how many: the log may hold millions
_STATES: Final = ("open", "stranded", "committed", "rolled_back")
_COMMIT, _ROLLBACK = 8, 12


_filters = together(
    click.option(
        "--older-than",
        callback=duration_ms,
        metavar="TIME",
        help="Parked so long ago: 90s, 10m, 2h.",
    ),
    click.option("--topic", help="Only for this topic.", shell_complete=topic_names),
    click.option("--group", help="Only of this producer group."),
    click.option("--checks", type=click.IntRange(min=0), help="Asked about so often, or more."),
    click.option(
        "--state",
        "states",
        type=click.Choice(_STATES),
        multiple=True,
        help="Only these; may be given again.  [open and stranded]",
    ),
)
_targets = together(
    click.argument("ids", nargs=-1, metavar="[ID]..."),
    click.option("--all", "take_all", is_flag=True, help="All that the filters find."),
    _filters,
    click.option("--yes", is_flag=True, help="Do not ask."),
    click.option("--as", "operator", metavar="NAME", help="Who decides.  [the login name]"),
    where,
)
_why = click.option("--reason", required=True, metavar="TEXT", help="Why; it is kept for good.")


@click.group()
def transaction() -> None:
    """Which transactions are pending, why, and what is to become of them."""


# --- looking -------------------------------------------------------------------------------------


@transaction.command("list")
@_filters
@click.option("--limit", type=click.IntRange(min=1), help="So many, and no more.")
@where
@click.pass_context
def list_(
    context: click.Context,
    /,
    limit: int | None,
    namesrv: str,
    broker: str | None,
    in_json: bool,
    **filters: Any,
) -> None:
    """List the transactions that are not settled, the oldest first.

    Settled ones are listed with --state committed or --state rolled_back, the newest first.
    """
    cluster = Cluster(namesrv, broker)
    wanted = _wanted(**filters)
    if limit is None and any(one.state in ("committed", "rolled_back") for one in wanted):
        limit = _SETTLED_MAX
    rows = cluster.entries(wanted)
    with reader_may_leave():
        shown = islice(rows, limit)
        if in_json:
            _echo_array(map(entry_json, shown))
        else:
            _echo_table(shown)
    if limit is not None and next(rows, None) is not None:
        click.echo(f"escrowmq: there are more than {limit}: --limit shows them", err=True)
    end(context, cluster)


@transaction.command()
@click.argument("name", metavar="ID")
@where
@click.pass_context
def show(
    context: click.Context, name: str, namesrv: str, broker: str | None, in_json: bool
) -> None:
    """Print the fields of one transaction, settled or not."""
    _print_one(context, Cluster(namesrv, broker), name, in_json, field_lines)


@transaction.command()
@click.argument("name", metavar="ID")
@where
@click.pass_context
def explain(
    context: click.Context, name: str, namesrv: str, broker: str | None, in_json: bool
) -> None:
    """Tell the story of one transaction: every check, who decided, and what happens next."""
    _print_one(context, Cluster(namesrv, broker), name, in_json, story_lines)


def _print_one(
    context: click.Context,
    cluster: Cluster,
    name: str,
    in_json: bool,
    lines: Callable[[Told], Iterator[str]],
) -> None:
    stories = _stories(cluster, name)
    with reader_may_leave():
        for told in stories:
            if in_json:
                click.echo(json.dumps(story_json(told)))
            else:
                for line in lines(told):
                    click.echo(line)
    end(context, cluster)


# --- deciding ------------------------------------------------------------------------------------


@transaction.command()
@_targets
@_why
@click.pass_context
def commit(context: click.Context, /, reason: str, **rest: Any) -> None:
    """Deliver the messages of transactions, by hand and for good."""
    request = partial(_settling, _COMMIT, reason)
    _change(context, "commit", RequestCode.SETTLE_TRANSACTION, "committed", request, **rest)


@transaction.command()
@_targets
@_why
@click.pass_context
def rollback(context: click.Context, /, reason: str, **rest: Any) -> None:
    """Drop the messages of transactions, by hand and for good."""
    request = partial(_settling, _ROLLBACK, reason)
    _change(context, "roll back", RequestCode.SETTLE_TRANSACTION, "rolled_back", request, **rest)


@transaction.command()
@_targets
@click.option("--reason", default="", metavar="TEXT", help="Why; it is kept.")
@click.pass_context
def resume(context: click.Context, /, reason: str, **rest: Any) -> None:
    """Let the producers of stranded transactions be asked again, from the first check on."""
    request = partial(_resuming, reason)
    rest["states"] = rest["states"] or ("stranded",)
    _change(context, "resume", RequestCode.RESUME_TRANSACTION, "open", request, **rest)


def _settling(verdict: int, reason: str, name: str, operator: str) -> Header:
    return SettleTransaction(
        transaction_id=name, commit_or_rollback=verdict, reason=reason, operator=operator
    )


def _resuming(reason: str, name: str, operator: str) -> Header:
    return ResumeTransaction(transaction_id=name, reason=reason, operator=operator)


def _change(
    context: click.Context,
    verb: str,
    code: int,
    state: str,
    request: Callable[[str, str], Header],
    *,
    ids: tuple[str, ...],
    take_all: bool,
    yes: bool,
    operator: str | None,
    namesrv: str,
    broker: str | None,
    in_json: bool,
    **filters: Any,
) -> None:
    if bool(ids) == take_all:
        raise click.UsageError("name transactions by ID, or take --all that the filters find")
    if ids and any(
        value for name, value in filters.items() if (name, verb) != ("states", "resume")
    ):
        raise click.UsageError("filters go with --all, not with an ID")
    if not yes and not sys.stdin.isatty():
        raise click.UsageError(f"nobody is there to confirm: --yes to {verb} without asking")
    cluster = Cluster(namesrv, broker)
    targets = _find(cluster, ids) if ids else _find_all(cluster, filters)
    if cluster.failed and take_all:
        end(context, cluster)  # not a part of what was meant
    if targets and not yes:
        _confirm(verb, targets)
    name = _operator() if operator is None else operator
    requests = [(target, request(target.entry.transaction_id, name)) for target in targets]
    outcomes = cluster.change(code, state, requests)
    _report(context, cluster, outcomes, in_json)


def _find(cluster: Cluster, ids: Sequence[str]) -> list[Listed]:
    targets = []
    for name in dict.fromkeys(ids):
        stories = _stories(cluster, name)
        if len(stories) > 1:
            places = ", ".join(told.broker.address for told in stories)
            raise NoSuchTransaction(f"{name} is on several brokers ({places}): choose by --broker")
        targets.append(Listed(stories[0].broker, stories[0].story.transaction))
    return targets


def _find_all(cluster: Cluster, filters: dict[str, Any]) -> list[Listed]:
    if not {"committed", "rolled_back"}.isdisjoint(filters["states"]):
        raise click.UsageError("what is settled stays as it is: --state open or --state stranded")
    return list(cluster.entries(_wanted(**filters)))


def _stories(cluster: Cluster, name: str) -> list[Told]:
    stories = cluster.stories(name)
    if stories:
        return stories
    if cluster.failed:
        raise OutcomeUnknown("; ".join(cluster.failed))
    asked = ", ".join(broker.address for broker in cluster.brokers)
    raise NoSuchTransaction(
        f"no transaction {printable(name)} on {asked}: it never was there, or the log has lost it"
    )


def _confirm(verb: str, targets: Sequence[Listed]) -> None:
    for line in pending_lines(targets[:_SHOWN_MAX], SystemClock().now_ms(), width_of(sys.stderr)):
        click.echo(line, err=True)
    if len(targets) > _SHOWN_MAX:
        click.echo(f"… and {len(targets) - _SHOWN_MAX} more", err=True)
    count = "this transaction" if len(targets) == 1 else f"these {len(targets)} transactions"
    if not click.confirm(f"{verb.capitalize()} {count}?", err=True):
        click.echo("Nothing was changed.", err=True)
        raise click.Abort


def _report(
    context: click.Context, cluster: Cluster, outcomes: Iterable[Outcome], in_json: bool
) -> None:
    done = failed = 0
    with reader_may_leave():
        kept = []
        for outcome in outcomes:
            done, failed = done + (not outcome.error), failed + bool(outcome.error)
            if in_json:
                kept.append(_outcome_json(outcome))
            else:
                _echo_outcome(outcome)
        if in_json:
            _echo_array(kept)
        elif done + failed != 1:
            click.echo(f"{done} done, {failed} refused")
    end(context, cluster, 2 if failed else 0)


def _echo_outcome(outcome: Outcome) -> None:
    name = printable(outcome.target.entry.transaction_id)
    if outcome.error:
        click.echo(f"escrowmq: {name}: {printable(outcome.error)}", err=True)
    else:
        click.echo(f"{name}  {'already ' if outcome.already else ''}{outcome.state}")


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "transaction_id": outcome.target.entry.transaction_id,
        "broker": outcome.target.broker.name,
        "state": outcome.state or None,
        "already": outcome.already,
        "error": outcome.error or None,
    }


# --- small things --------------------------------------------------------------------------------


def _wanted(
    *,
    older_than: int | None,
    topic: str | None,
    group: str | None,
    checks: int | None,
    states: Sequence[str],
) -> list[ListTransactions]:
    """One question per state; those that are not settled can be asked for together."""
    asked: list[str | None] = list(dict.fromkeys(states))
    if {"open", "stranded"} <= set(asked) or not asked:
        asked = [None, *(state for state in asked if state not in ("open", "stranded"))]
    return [
        ListTransactions(
            state=state,
            topic=topic,
            group=group,
            older_than_ms=older_than,
            checks_min=checks,
            count_max=1_000,
        )
        for state in asked
    ]


def _echo_array(items: Iterable[dict[str, Any]]) -> None:
    """As they come: there may be a million."""
    before = "["
    for item in items:
        click.echo(f"{before}{json.dumps(item)}", nl=False)
        before = ",\n "
    click.echo("[]" if before == "[" else "]")


def _echo_table(rows: Iterable[Listed]) -> None:
    is_empty = True
    for line in pending_lines(rows, SystemClock().now_ms(), width_of(sys.stdout)):
        click.echo(line)
        is_empty = False
    if is_empty:
        click.echo("no transactions")


def _operator() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""  # the broker notes the address instead
