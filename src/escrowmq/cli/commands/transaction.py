"""`escrowmq transaction …`: list and explain transactions, and decide them by hand."""

from __future__ import annotations

import getpass
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, Final

import click

from escrowmq.admin.cluster import Cluster
from escrowmq.admin.transactions import (
    DecisionResult,
    TransactionListing,
    TransactionView,
    decide_transactions,
    list_transactions,
    transaction_cursors,
    transaction_histories,
)
from escrowmq.cli.options import (
    cluster_options,
    combine_options,
    complete_topic,
    confirm,
    parse_duration_option,
    yes_option,
)
from escrowmq.cli.output import (
    QueryContext,
    QueryResult,
    TableColumn,
    exit_with_failures,
    field_lines,
    ignore_broken_pipe,
    print_json,
    print_json_array,
    print_lines,
    printable,
    query_command,
    table_lines,
    terminal_width,
)
from escrowmq.clock import SystemClock
from escrowmq.errors import AmbiguousTransaction, OutcomeUnknown, TransactionNotFound
from escrowmq.message import names
from escrowmq.parsing import format_rough_duration, format_timestamp
from escrowmq.remoting.bodies import TransactionEntry, TransactionStep
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import Header, ListTransactions, ResumeTransaction, SettleTransaction

_STATES: Final = ("open", "stranded", "committed", "rolled_back")
_DECIDED_STATES: Final = frozenset(("committed", "rolled_back"))
_PAGE_SIZE: Final = 1_000
_DEFAULT_DECIDED_LIMIT: Final = 1_000  # without --limit: a log may hold millions

_filter_options = combine_options(
    click.option(
        "--older-than",
        callback=parse_duration_option,
        metavar="TIME",
        help="Only transactions that were parked at least this long ago: 90s, 10m, 2h.",
    ),
    click.option("--topic", help="Only messages for this topic.", shell_complete=complete_topic),
    click.option("--group", help="Only this producer group; also to choose among equal IDs."),
    click.option(
        "--checks",
        type=click.IntRange(min=0),
        metavar="N",
        help="Only transactions that were checked at least N times.",
    ),
    click.option(
        "--state",
        "states",
        type=click.Choice(_STATES),
        multiple=True,
        help="Only this state. Repeat for several.  [open and stranded]",
    ),
)
_offset_option = click.option(
    "--offset",
    "half_offset",
    type=click.IntRange(min=0),
    metavar="N",
    help="The one at this offset of the half queue, if several have the ID.",
)
_group_option = click.option("--group", help="The one of this producer group.")
_target_options = combine_options(
    click.argument("ids", nargs=-1, metavar="[ID]..."),
    _offset_option,
    click.option(
        "--all", "select_all", is_flag=True, help="All transactions that the filters find."
    ),
    _filter_options,
    yes_option,
    click.option("--as", "operator", metavar="NAME", help="The name to record.  [the login name]"),
    cluster_options,
)
_reason_option = click.option(
    "--reason", required=True, metavar="TEXT", help="The reason, stored with the decision."
)


@click.group()
def transaction() -> None:
    """List and explain transactions; commit, roll back or resume them by hand."""


# --- list ----------------------------------------------------------------------------------------


@transaction.command("list")
@_filter_options
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="List at most N.")
@cluster_options
@click.pass_context
def list_(
    context: click.Context,
    /,
    limit: int | None,
    cluster: Cluster,
    as_json: bool,
    **filters: Any,
) -> None:
    """List the transactions that are not decided, the oldest first.

    Decided transactions are listed with --state committed or --state rolled_back, the newest
    first.
    """
    requests = _list_requests(**filters)
    if limit is None and any(request.state in _DECIDED_STATES for request in requests):
        limit = _DEFAULT_DECIDED_LIMIT
    listings = list_transactions(cluster, requests)
    with ignore_broken_pipe():
        shown = islice(listings, limit)
        if as_json:
            print_json_array(map(listing_json, shown))
        else:
            _print_table(shown)
    if limit is not None and next(listings, None) is not None:
        click.echo(f"escrowmq: there are more than {limit}; raise --limit to see them", err=True)
    exit_with_failures(context, cluster)


_LIST_COLUMNS: Final = (
    TableColumn("TRANSACTION"),  # never cut, because users copy it
    TableColumn("STATE"),
    TableColumn("GROUP", can_shrink=True),
    TableColumn("TOPIC", can_shrink=True),
    TableColumn("AGE"),
    TableColumn("CHECKS"),
    TableColumn("NEXT CHECK"),
)


def _list_requests(
    *,
    older_than: int | None,
    topic: str | None,
    group: str | None,
    checks: int | None,
    states: Sequence[str],
) -> list[ListTransactions]:
    """Return a request for each state. One request without a state finds all undecided ones."""
    selected: list[str | None] = list(dict.fromkeys(states))
    if {"open", "stranded"} <= set(selected) or not selected:
        selected = [None, *(state for state in selected if state in _DECIDED_STATES)]
    return [
        ListTransactions(
            state=state,
            topic=topic,
            group=group,
            older_than_ms=older_than,
            checks_min=checks,
            count_max=_PAGE_SIZE,
        )
        for state in selected
    ]


def _print_table(listings: Iterable[TransactionListing]) -> None:
    is_empty = True
    for line in _table_lines(listings, terminal_width()):
        click.echo(line)
        is_empty = False
    if is_empty:
        click.echo("no transactions")


def _table_lines(listings: Iterable[TransactionListing], width: int | None) -> Iterator[str]:
    now_ms = SystemClock().now_ms()
    rows = (
        (
            printable(entry.transaction_id),
            entry.state,
            printable(entry.group),
            printable(entry.topic),
            format_rough_duration(now_ms - entry.parked_at),
            str(entry.checks),
            _due_text(entry, now_ms),
        )
        for entry in (listing.entry for listing in listings)
    )
    return table_lines(_LIST_COLUMNS, rows, width)


def _due_text(entry: TransactionEntry, now_ms: int) -> str:
    if entry.next_due is None:
        return "-"
    remaining_ms = entry.next_due - now_ms
    duration = format_rough_duration(abs(remaining_ms))
    return f"in {duration}" if remaining_ms > 0 else f"due for {duration}"


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


# --- cursors -------------------------------------------------------------------------------------


@transaction.command()
@query_command
def cursors(query: QueryContext) -> None:
    """Show how far each broker is with its half queue and its op queue.

    Every half before the half cursor is decided, and every op before the op cursor is about such a
    half. RocketMQ keeps both as offsets of the group CID_RMQ_SYS_TRANS.
    """
    query.show(list_cursors)


_CURSOR_COLUMNS: Final = (
    TableColumn("BROKER"),
    TableColumn("QUEUE", can_shrink=True),
    TableColumn("CURSOR", is_number=True),
    TableColumn("END", is_number=True),
    TableColumn("FIRST OPEN", is_number=True),
    TableColumn("OPEN", is_number=True),
    TableColumn("STRANDED", is_number=True),
    TableColumn("NEXT CHECK"),
)


def list_cursors(cluster: Cluster) -> QueryResult:
    content = [
        {
            "broker": broker.name,
            "half": {
                "topic": names.HALF_TOPIC,
                "cursor": queues.half_cursor,
                "end": queues.half_end,
                "first_open": queues.first_open,
            },
            "op": {"topic": names.OP_TOPIC, "cursor": queues.op_cursor, "end": queues.op_end},
            "open": queues.open,
            "stranded": queues.stranded,
            "next_due": None if queues.next_due is None else format_timestamp(queues.next_due),
        }
        for broker, queues in transaction_cursors(cluster)
    ]
    return content, _cursor_lines(content)


def _cursor_lines(content: list[dict[str, Any]]) -> Iterator[str]:
    def text(value: object) -> str:
        return "-" if value is None else str(value)

    rows: list[tuple[str, ...]] = []
    for row in content:
        half, op = row["half"], row["op"]
        broker = printable(row["broker"])
        open_halves = (half["first_open"], row["open"], row["stranded"], row["next_due"])
        half_queue = (broker, half["topic"], str(half["cursor"]), str(half["end"]))
        op_queue = (broker, op["topic"], str(op["cursor"]), str(op["end"]))
        rows.append((*half_queue, *map(text, open_halves)))
        rows.append((*op_queue, *[""] * len(open_halves)))
    return table_lines(_CURSOR_COLUMNS, rows, terminal_width())


# --- show and explain ----------------------------------------------------------------------------


@transaction.command()
@click.argument("transaction_id", metavar="ID")
@_group_option
@_offset_option
@cluster_options
@click.pass_context
def show(
    context: click.Context,
    /,
    transaction_id: str,
    cluster: Cluster,
    as_json: bool,
    **precision: Any,
) -> None:
    """Print the fields of a transaction, decided or not."""
    views = _require_histories(cluster, transaction_id, **precision)
    _print_histories(context, cluster, views, as_json, transaction_lines)


@transaction.command()
@click.argument("transaction_id", metavar="ID")
@_group_option
@_offset_option
@cluster_options
@click.pass_context
def explain(
    context: click.Context,
    /,
    transaction_id: str,
    cluster: Cluster,
    as_json: bool,
    **precision: Any,
) -> None:
    """Print the history of a transaction: its checks, who decided it, and what happens next."""
    views = _require_histories(cluster, transaction_id, **precision)
    _print_histories(context, cluster, views, as_json, history_lines)


def _print_histories(
    context: click.Context,
    cluster: Cluster,
    views: Iterable[TransactionView],
    as_json: bool,
    render: Callable[[TransactionView], Iterator[str]],
) -> None:
    with ignore_broken_pipe():
        for view in views:
            if as_json:
                print_json(history_json(view))
            else:
                print_lines(render(view))
    exit_with_failures(context, cluster)


def _require_histories(
    cluster: Cluster, transaction_id: str, *, group: str | None, half_offset: int | None
) -> list[TransactionView]:
    try:
        views = transaction_histories(cluster, transaction_id, group=group, half_offset=half_offset)
    except AmbiguousTransaction as error:
        raise AmbiguousTransaction(f"{error} (--group, --offset)") from error
    if views:
        return views
    if cluster.failures:
        raise OutcomeUnknown("; ".join(map(str, cluster.failures)))
    addresses = ", ".join(broker.address for broker in cluster.brokers())
    raise TransactionNotFound(
        f"there is no transaction {transaction_id}"
        f"{'' if group is None else f' of group {group}'}"
        f"{'' if half_offset is None else f' at offset {half_offset}'} on {addresses}: it was "
        "never parked there, or its log files have expired"
    )


def history_json(view: TransactionView) -> dict[str, Any]:
    history = view.history
    return {
        **listing_json(TransactionListing(view.broker, history.transaction)),
        "pending_because": history.pending_because,
        "steps": [
            {
                "at": format_timestamp(step.at) if step.at else None,
                "what": step.what,
                "who": step.who,
                "reason": step.reason,
                "detail": step.detail,
                "records": [
                    {
                        "kind": record.kind,
                        "topic": record.topic,
                        "queue_id": record.queue_id,
                        "queue_offset": record.queue_offset,
                        "log_offset": record.log_offset,
                    }
                    for record in step.records
                ],
            }
            for step in history.steps
        ],
    }


def transaction_lines(view: TransactionView) -> Iterator[str]:
    fields = history_json(view)
    steps = fields.pop("steps")
    yield from field_lines(
        [
            *((name, _field_text(value)) for name, value in fields.items()),
            ("steps", ", ".join(step["what"] for step in steps)),
        ]
    )


def _field_text(value: object) -> str:
    return "" if value is None else printable(str(value))


_STEP_LABELS: Final = {
    "asked": "checked",
    "unknown": "answered",
    "unknown_at_send": "undecided",
    "appended_again": "moved",
}


def history_lines(view: TransactionView) -> Iterator[str]:
    """Yield what happened to a transaction, one line per step, then why it waits and what is next.

    2026-01-01T00:00:00.000Z  parked          3 messages; sent from 10.0.0.7:52110
                                half: RMQ_SYS_TRANS_HALF_TOPIC queue 0 offset 17, log offset 4711
    """
    entry = view.history.transaction
    transaction_id = printable(entry.transaction_id)
    yield (
        f"transaction {transaction_id} of group {printable(entry.group)} for topic "
        f"{printable(entry.topic)}, on {view.broker.name}: {entry.state}"
    )
    for step in view.history.steps:
        time = format_timestamp(step.at) if step.at else f"{'(time unknown)':<24}"
        label = _STEP_LABELS.get(step.what, step.what)
        yield f"  {time}  {label:<14}  {printable(_step_text(step))}"
        for record in step.records:
            yield (
                f"{'':<28}{record.kind}: {printable(record.topic)} queue {record.queue_id} "
                f"offset {record.queue_offset}, log offset {record.log_offset}"
            )
    if view.history.pending_because:
        yield f"why:   {printable(view.history.pending_because)}"
    yield f"next:  {_next_step_text(entry, transaction_id)}"


def _step_text(step: TransactionStep) -> str:
    match step.what:
        case "parked":
            return f"{step.detail}; sent from {step.who}"
        case "asked":
            return f"asked {step.who} ({step.detail})"
        case "unknown":
            return f"{step.who} does not know yet ({step.detail}){_quoted(step.reason)}"
        case "unknown_at_send":
            return f"{step.who} does not know yet, after its send{_quoted(step.reason)}"
    reason = _quoted(step.reason)
    detail = f"; {step.detail}" if step.detail else ""
    return f"by {step.who or 'an unknown operator'}{reason}{detail}"


def _quoted(reason: str) -> str:
    return f': "{reason}"' if reason else ""


def _next_step_text(entry: TransactionEntry, transaction_id: str) -> str:
    if entry.state in _DECIDED_STATES:
        return "nothing: the transaction is decided"
    if entry.next_due is None:
        return (
            "nothing happens by itself; use `escrowmq transaction resume|commit|rollback "
            f"{transaction_id}`"
        )
    return f"the broker checks with the producer at {format_timestamp(entry.next_due)}"


# --- commit, rollback, resume --------------------------------------------------------------------

_COMMIT, _ROLLBACK = 8, 12  # as END_TRANSACTION encodes the verdict
_MAX_CONFIRM_ROWS: Final = 20  # rows to show before a confirmation


@transaction.command()
@_target_options
@_reason_option
@click.pass_context
def commit(context: click.Context, /, reason: str, **options: Any) -> None:
    """Deliver the messages of transactions. This cannot be undone."""
    make_header = partial(_settle_header, _COMMIT, reason)
    code = RequestCode.SETTLE_TRANSACTION
    _change_transactions(context, "commit", code, "committed", make_header, **options)


@transaction.command()
@_target_options
@_reason_option
@click.pass_context
def rollback(context: click.Context, /, reason: str, **options: Any) -> None:
    """Drop the messages of transactions. This cannot be undone."""
    make_header = partial(_settle_header, _ROLLBACK, reason)
    code = RequestCode.SETTLE_TRANSACTION
    _change_transactions(context, "roll back", code, "rolled_back", make_header, **options)


@transaction.command()
@_target_options
@click.option(
    "--reason", default="", metavar="TEXT", help="The reason, stored with the transaction."
)
@click.pass_context
def resume(context: click.Context, /, reason: str, **options: Any) -> None:
    """Check stranded transactions again, starting with the first check."""
    make_header = partial(_resume_header, reason)
    options["states"] = options["states"] or ("stranded",)
    code = RequestCode.RESUME_TRANSACTION
    _change_transactions(context, "resume", code, "open", make_header, **options)


def _settle_header(verdict: int, reason: str, entry: TransactionEntry, operator: str) -> Header:
    return SettleTransaction(
        transaction_id=entry.transaction_id,
        half_offset=entry.queue_offset,
        commit_or_rollback=verdict,
        reason=reason,
        operator=operator,
    )


def _resume_header(reason: str, entry: TransactionEntry, operator: str) -> Header:
    return ResumeTransaction(
        transaction_id=entry.transaction_id,
        half_offset=entry.queue_offset,
        reason=reason,
        operator=operator,
    )


def _change_transactions(
    context: click.Context,
    verb: str,
    code: RequestCode,
    state: str,
    make_header: Callable[[TransactionEntry, str], Header],
    *,
    ids: tuple[str, ...],
    half_offset: int | None,
    select_all: bool,
    yes: bool,
    operator: str | None,
    cluster: Cluster,
    as_json: bool,
    **filters: Any,
) -> None:
    """Select transactions, ask for a confirmation, and decide or resume them.

    `make_header(entry, operator)` returns the request, which names the position of the
    transaction, because others may have the same id. `state` is the state afterwards.
    """
    if bool(ids) == select_all:
        raise click.UsageError("give the IDs of transactions, or --all with filters")
    if half_offset is not None and len(ids) != 1:
        raise click.UsageError("--offset needs exactly one ID")
    # `resume` has set `states` itself.
    given = [
        name
        for name, value in filters.items()
        if value and name != "group" and (name, verb) != ("states", "resume")
    ]
    if ids and given:
        raise click.UsageError("filters other than --group need --all instead of an ID")
    if not yes and not sys.stdin.isatty():
        raise click.UsageError(
            "this needs a confirmation, and standard input is not a terminal: use --yes to "
            f"{verb} without asking"
        )
    if ids:
        listings = _find_by_id(cluster, ids, filters["group"], half_offset)
    else:
        listings = _find_by_filters(cluster, filters)
    if cluster.failures and select_all:
        exit_with_failures(context, cluster)  # rather than change a part of what was meant
    if listings and not yes:
        _confirm_change(verb, listings)
    name = _login_name() if operator is None else operator
    targets = [(listing, make_header(listing.entry, name)) for listing in listings]
    results = decide_transactions(cluster, code, state, targets)
    _print_results(context, cluster, results, as_json)


def _find_by_id(
    cluster: Cluster, ids: Sequence[str], group: str | None, half_offset: int | None
) -> list[TransactionListing]:
    listings = []
    for transaction_id in dict.fromkeys(ids):
        views = _require_histories(cluster, transaction_id, group=group, half_offset=half_offset)
        if len(views) > 1:
            addresses = ", ".join(view.broker.address for view in views)
            raise TransactionNotFound(
                f"{transaction_id} is on several brokers ({addresses}): choose one with --broker"
            )
        [view] = views
        listings.append(TransactionListing(view.broker, view.history.transaction))
    return listings


def _find_by_filters(cluster: Cluster, filters: dict[str, Any]) -> list[TransactionListing]:
    if not _DECIDED_STATES.isdisjoint(filters["states"]):
        raise click.UsageError("a decision cannot be changed: use --state open or --state stranded")
    return list(list_transactions(cluster, _list_requests(**filters)))


def _confirm_change(verb: str, listings: Sequence[TransactionListing]) -> None:
    for line in _table_lines(listings[:_MAX_CONFIRM_ROWS], terminal_width(sys.stderr)):
        click.echo(line, err=True)
    if len(listings) > _MAX_CONFIRM_ROWS:
        click.echo(f"… and {len(listings) - _MAX_CONFIRM_ROWS} more", err=True)
    count = "this transaction" if len(listings) == 1 else f"these {len(listings)} transactions"
    confirm(f"{verb.capitalize()} {count}?", yes=False)


def _print_results(
    context: click.Context, cluster: Cluster, results: Iterable[DecisionResult], as_json: bool
) -> None:
    done = failed = 0
    with ignore_broken_pipe():
        json_rows = []
        for result in results:
            done += not result.error
            failed += bool(result.error)
            if as_json:
                json_rows.append(_result_json(result))
            else:
                _print_result(result)
        if as_json:
            print_json_array(json_rows)
        elif done + failed != 1:
            click.echo(f"{done} done, {failed} refused")
    exit_with_failures(context, cluster, 2 if failed else 0)


def _print_result(result: DecisionResult) -> None:
    transaction_id = printable(result.listing.entry.transaction_id)
    if result.error:
        click.echo(f"escrowmq: {transaction_id}: {printable(result.error)}", err=True)
    else:
        already = "already " if result.was_already_decided else ""
        click.echo(f"{transaction_id}  {already}{result.state}")


def _result_json(result: DecisionResult) -> dict[str, Any]:
    return {
        "transaction_id": result.listing.entry.transaction_id,
        "broker": result.listing.broker.name,
        "state": result.state or None,
        "already": result.was_already_decided,
        "error": result.error or None,
    }


def _login_name() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return ""  # the broker records the address of the connection instead
