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

from escrowmq.cli.brokers import exit_with_failures
from escrowmq.cli.cluster import (
    ClusterTransactions,
    DecisionResult,
    TransactionListing,
    TransactionView,
)
from escrowmq.cli.options import (
    cluster_options,
    combine_options,
    complete_topic,
    parse_duration_option,
)
from escrowmq.cli.output import TableColumn, ignore_broken_pipe, table_lines, terminal_width
from escrowmq.cli.rendering import printable
from escrowmq.clock import SystemClock
from escrowmq.errors import OutcomeUnknown, TransactionNotFound
from escrowmq.parsing import format_rough_duration, format_timestamp
from escrowmq.remoting.bodies import TransactionEntry, TransactionStep
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import Header, ListTransactions, ResumeTransaction, SettleTransaction

_LIST_COLUMNS: Final = (
    TableColumn("TRANSACTION"),  # never cut, or nobody could copy it
    TableColumn("STATE"),
    TableColumn("GROUP", can_shrink=True),
    TableColumn("TOPIC", can_shrink=True),
    TableColumn("AGE"),
    TableColumn("CHECKS"),
    TableColumn("NEXT DUE"),
)
_DECIDED_STATES: Final = ("committed", "rolled_back")
_STEP_LABELS: Final = {"unknown": "answered", "appended_again": "appended again"}


# --- for programs --------------------------------------------------------------------------------


def listing_json(listing: TransactionListing) -> dict[str, Any]:
    entry = listing.entry
    return {
        "transaction_id": entry.transaction_id,
        "group": entry.group,
        "topic": entry.topic,
        "state": entry.state,
        "parked_at": format_timestamp(entry.parked_at),
        "checks": entry.checks,
        "next_due": None if entry.next_due is None else format_timestamp(entry.next_due),
        "broker": listing.broker.name,
        "queue_id": entry.queue_id,
        "queue_offset": entry.queue_offset,
        "log_offset": entry.log_offset,
        "size": entry.size,
        "why": entry.why,
    }


def history_json(view: TransactionView) -> dict[str, Any]:
    story = view.history
    return {
        **listing_json(TransactionListing(view.broker, story.transaction)),
        "pending_because": story.pending_because,
        "steps": [
            {
                "at": format_timestamp(step.at) if step.at else None,
                "what": step.what,
                "who": step.who,
                "reason": step.reason,
                "detail": step.detail,
            }
            for step in story.steps
        ],
    }


# --- a table -------------------------------------------------------------------------------------


def listing_lines(
    rows: Iterable[TransactionListing], now_ms: int, width: int | None
) -> Iterator[str]:
    return table_lines(
        _LIST_COLUMNS, (_listing_cells(listed.entry, now_ms) for listed in rows), width
    )


def _listing_cells(entry: TransactionEntry, now_ms: int) -> tuple[str, ...]:
    return (
        printable(entry.transaction_id),
        entry.state,
        printable(entry.group),
        printable(entry.topic),
        format_rough_duration(now_ms - entry.parked_at),
        str(entry.checks),
        _due_text(entry, now_ms),
    )


def _due_text(entry: TransactionEntry, now_ms: int) -> str:
    if entry.next_due is None:
        return "-"
    left_ms = entry.next_due - now_ms
    duration = format_rough_duration(abs(left_ms))
    return f"in {duration}" if left_ms > 0 else f"since {duration}"


# --- one of them ---------------------------------------------------------------------------------


def transaction_field_lines(view: TransactionView) -> Iterator[str]:
    fields = history_json(view)
    steps = fields.pop("steps")
    for name, value in fields.items():
        yield f"{name:<16} {'-' if value in (None, '') else printable(str(value))}"
    yield f"{'steps':<16} {', '.join(step['what'] for step in steps)}"


def history_lines(view: TransactionView) -> Iterator[str]:
    entry = view.history.transaction
    name = printable(entry.transaction_id)
    yield (
        f"transaction {name} of group {printable(entry.group)} for topic "
        f"{printable(entry.topic)}, on {view.broker.name}: {entry.state}"
    )
    for step in view.history.steps:
        at = format_timestamp(step.at) if step.at else f"{'(time not noted)':<24}"
        yield f"  {at}  {_STEP_LABELS.get(step.what, step.what):<14}  {printable(_step_text(step))}"
    if view.history.pending_because:
        yield f"why:   {printable(view.history.pending_because)}"
    yield f"next:  {_next_step_text(entry, name)}"


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


def _next_step_text(entry: TransactionEntry, transaction_id: str) -> str:
    if entry.state in _DECIDED_STATES:
        return "nothing: it is settled for good"
    if entry.next_due is None:
        return f"nothing by itself: escrowmq transaction resume|commit|rollback {transaction_id}"
    return f"if nobody decides, its producer is asked when due: {format_timestamp(entry.next_due)}"


_MAX_CONFIRM_ROWS: Final = 20  # of those that a confirmation asks about
_DEFAULT_DECIDED_LIMIT: Final = 1_000  # listed, if nobody says how many: the log may hold millions
_STATES: Final = ("open", "stranded", "committed", "rolled_back")
_COMMIT, _ROLLBACK = 8, 12


_filter_options = combine_options(
    click.option(
        "--older-than",
        callback=parse_duration_option,
        metavar="TIME",
        help="Parked so long ago: 90s, 10m, 2h.",
    ),
    click.option("--topic", help="Only for this topic.", shell_complete=complete_topic),
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
_target_options = combine_options(
    click.argument("ids", nargs=-1, metavar="[ID]..."),
    click.option("--all", "take_all", is_flag=True, help="All that the filters find."),
    _filter_options,
    click.option("--yes", is_flag=True, help="Do not ask."),
    click.option("--as", "operator", metavar="NAME", help="Who decides.  [the login name]"),
    cluster_options,
)
_reason_option = click.option(
    "--reason", required=True, metavar="TEXT", help="Why; it is kept for good."
)


@click.group()
def transaction() -> None:
    """Which transactions are pending, why, and what is to become of them."""


# --- looking -------------------------------------------------------------------------------------


@transaction.command("list")
@_filter_options
@click.option("--limit", type=click.IntRange(min=1), help="So many, and no more.")
@cluster_options
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
    cluster = ClusterTransactions(namesrv, broker)
    wanted = _list_requests(**filters)
    if limit is None and any(one.state in ("committed", "rolled_back") for one in wanted):
        limit = _DEFAULT_DECIDED_LIMIT
    rows = cluster.list_transactions(wanted)
    with ignore_broken_pipe():
        shown = islice(rows, limit)
        if in_json:
            _print_json_array(map(listing_json, shown))
        else:
            _print_table(shown)
    if limit is not None and next(rows, None) is not None:
        click.echo(f"escrowmq: there are more than {limit}: --limit shows them", err=True)
    exit_with_failures(context, cluster)


@transaction.command()
@click.argument("name", metavar="ID")
@cluster_options
@click.pass_context
def show(
    context: click.Context, name: str, namesrv: str, broker: str | None, in_json: bool
) -> None:
    """Print the fields of one transaction, settled or not."""
    _print_histories(
        context, ClusterTransactions(namesrv, broker), name, in_json, transaction_field_lines
    )


@transaction.command()
@click.argument("name", metavar="ID")
@cluster_options
@click.pass_context
def explain(
    context: click.Context, name: str, namesrv: str, broker: str | None, in_json: bool
) -> None:
    """Tell the story of one transaction: every check, who decided, and what happens next."""
    _print_histories(context, ClusterTransactions(namesrv, broker), name, in_json, history_lines)


def _print_histories(
    context: click.Context,
    cluster: ClusterTransactions,
    transaction_id: str,
    in_json: bool,
    render: Callable[[TransactionView], Iterator[str]],
) -> None:
    stories = _require_histories(cluster, transaction_id)
    with ignore_broken_pipe():
        for told in stories:
            if in_json:
                click.echo(json.dumps(history_json(told)))
            else:
                for line in render(told):
                    click.echo(line)
    exit_with_failures(context, cluster)


# --- deciding ------------------------------------------------------------------------------------


@transaction.command()
@_target_options
@_reason_option
@click.pass_context
def commit(context: click.Context, /, reason: str, **options: Any) -> None:
    """Deliver the messages of transactions, by hand and for good."""
    request = partial(_settle_request, _COMMIT, reason)
    _change_transactions(
        context, "commit", RequestCode.SETTLE_TRANSACTION, "committed", request, **options
    )


@transaction.command()
@_target_options
@_reason_option
@click.pass_context
def rollback(context: click.Context, /, reason: str, **options: Any) -> None:
    """Drop the messages of transactions, by hand and for good."""
    request = partial(_settle_request, _ROLLBACK, reason)
    _change_transactions(
        context, "roll back", RequestCode.SETTLE_TRANSACTION, "rolled_back", request, **options
    )


@transaction.command()
@_target_options
@click.option("--reason", default="", metavar="TEXT", help="Why; it is kept.")
@click.pass_context
def resume(context: click.Context, /, reason: str, **options: Any) -> None:
    """Let the producers of stranded transactions be asked again, from the first check on."""
    request = partial(_resume_request, reason)
    options["states"] = options["states"] or ("stranded",)
    _change_transactions(
        context, "resume", RequestCode.RESUME_TRANSACTION, "open", request, **options
    )


def _settle_request(verdict: int, reason: str, transaction_id: str, operator: str) -> Header:
    return SettleTransaction(
        transaction_id=transaction_id, commit_or_rollback=verdict, reason=reason, operator=operator
    )


def _resume_request(reason: str, transaction_id: str, operator: str) -> Header:
    return ResumeTransaction(transaction_id=transaction_id, reason=reason, operator=operator)


def _change_transactions(
    context: click.Context,
    verb: str,
    code: int,
    state: str,
    make_request: Callable[[str, str], Header],
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
    cluster = ClusterTransactions(namesrv, broker)
    targets = _find_by_id(cluster, ids) if ids else _find_by_filters(cluster, filters)
    if cluster.failures and take_all:
        exit_with_failures(context, cluster)  # not a part of what was meant
    if targets and not yes:
        _confirm_change(verb, targets)
    name = _login_name() if operator is None else operator
    requests = [(target, make_request(target.entry.transaction_id, name)) for target in targets]
    outcomes = cluster.apply(code, state, requests)
    _print_results(context, cluster, outcomes, in_json)


def _find_by_id(cluster: ClusterTransactions, ids: Sequence[str]) -> list[TransactionListing]:
    targets = []
    for name in dict.fromkeys(ids):
        stories = _require_histories(cluster, name)
        if len(stories) > 1:
            places = ", ".join(told.broker.address for told in stories)
            raise TransactionNotFound(
                f"{name} is on several brokers ({places}): choose by --broker"
            )
        targets.append(TransactionListing(stories[0].broker, stories[0].history.transaction))
    return targets


def _find_by_filters(
    cluster: ClusterTransactions, filters: dict[str, Any]
) -> list[TransactionListing]:
    if not {"committed", "rolled_back"}.isdisjoint(filters["states"]):
        raise click.UsageError("what is settled stays as it is: --state open or --state stranded")
    return list(cluster.list_transactions(_list_requests(**filters)))


def _require_histories(cluster: ClusterTransactions, transaction_id: str) -> list[TransactionView]:
    stories = cluster.histories(transaction_id)
    if stories:
        return stories
    if cluster.failures:
        raise OutcomeUnknown("; ".join(cluster.failures))
    asked = ", ".join(broker.address for broker in cluster.brokers)
    raise TransactionNotFound(
        f"no transaction {printable(transaction_id)} on {asked}: it never was there, or "
        "the log has lost it"
    )


def _confirm_change(verb: str, targets: Sequence[TransactionListing]) -> None:
    for line in listing_lines(
        targets[:_MAX_CONFIRM_ROWS], SystemClock().now_ms(), terminal_width(sys.stderr)
    ):
        click.echo(line, err=True)
    if len(targets) > _MAX_CONFIRM_ROWS:
        click.echo(f"… and {len(targets) - _MAX_CONFIRM_ROWS} more", err=True)
    count = "this transaction" if len(targets) == 1 else f"these {len(targets)} transactions"
    if not click.confirm(f"{verb.capitalize()} {count}?", err=True):
        click.echo("Nothing was changed.", err=True)
        raise click.Abort


def _print_results(
    context: click.Context,
    cluster: ClusterTransactions,
    results: Iterable[DecisionResult],
    in_json: bool,
) -> None:
    done = failed = 0
    with ignore_broken_pipe():
        kept = []
        for outcome in results:
            done, failed = done + (not outcome.error), failed + bool(outcome.error)
            if in_json:
                kept.append(_result_json(outcome))
            else:
                _print_result(outcome)
        if in_json:
            _print_json_array(kept)
        elif done + failed != 1:
            click.echo(f"{done} done, {failed} refused")
    exit_with_failures(context, cluster, 2 if failed else 0)


def _print_result(result: DecisionResult) -> None:
    name = printable(result.listing.entry.transaction_id)
    if result.error:
        click.echo(f"escrowmq: {name}: {printable(result.error)}", err=True)
    else:
        click.echo(f"{name}  {'already ' if result.was_already_decided else ''}{result.state}")


def _result_json(result: DecisionResult) -> dict[str, Any]:
    return {
        "transaction_id": result.listing.entry.transaction_id,
        "broker": result.listing.broker.name,
        "state": result.state or None,
        "already": result.was_already_decided,
        "error": result.error or None,
    }


# --- small things --------------------------------------------------------------------------------


def _list_requests(
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


def _print_json_array(items: Iterable[dict[str, Any]]) -> None:
    """As they come: there may be a million."""
    before = "["
    for item in items:
        click.echo(f"{before}{json.dumps(item)}", nl=False)
        before = ",\n "
    click.echo("[]" if before == "[" else "]")


def _print_table(rows: Iterable[TransactionListing]) -> None:
    is_empty = True
    for line in listing_lines(rows, SystemClock().now_ms(), terminal_width(sys.stdout)):
        click.echo(line)
        is_empty = False
    if is_empty:
        click.echo("no transactions")


def _login_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""  # the broker notes the address instead
