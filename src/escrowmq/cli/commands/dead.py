"""`escrowmq message dead …`: list, show, resend, export and purge dead letters."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Final, TextIO

import click

from escrowmq.admin.cluster import Cluster
from escrowmq.admin.dead_letters import (
    DeadLetter,
    DeadLetterCriteria,
    DeadLetterPurge,
    DeadLetterState,
    ResendResult,
    ResendStatus,
    apply_purge,
    dead_letter_json,
    find_dead_letter,
    find_dead_letters,
    parse_dead_letter,
    pass_resent,
    plan_purge,
    resend_dead_letters,
)
from escrowmq.cli.options import (
    cluster_options,
    combine_options,
    complete_group,
    complete_topic,
    confirm,
    confirm_options,
    parse_time_option,
)
from escrowmq.cli.output import (
    TableColumn,
    exit_with_failures,
    field_lines,
    ignore_broken_pipe,
    print_json,
    print_json_array,
    print_lines,
    printable,
    table_lines,
    terminal_width,
)
from escrowmq.cli.rendering import body_lines
from escrowmq.errors import RecordNotFound
from escrowmq.message.names import UNIQUE_KEY
from escrowmq.parsing import format_timestamp

DEFAULT_RATE: Final = 100.0

_STATES: Final = tuple(state.value for state in DeadLetterState)

_criteria_options = combine_options(
    click.option(
        "--group",
        "groups",
        multiple=True,
        help="Only dead letters of this consumer group. Repeat for several.",
        shell_complete=complete_group,
    ),
    click.option(
        "--topic", help="Only messages that were sent to this topic.", shell_complete=complete_topic
    ),
    click.option(
        "--error",
        "error_type",
        metavar="TYPE",
        help="Only this type of error: app.BadPayload, or BadPayload.",
    ),
    click.option("--key", help="Only messages with this key or unique key."),
    click.option(
        "--since",
        "since_ms",
        callback=parse_time_option,
        metavar="TIME",
        help="Only dead letters that were stored at this time or later.",
    ),
    click.option(
        "--until",
        "until_ms",
        callback=parse_time_option,
        metavar="TIME",
        help="Only dead letters that were stored at this time or before.",
    ),
    click.option(
        "--attempts",
        "attempts_min",
        type=click.IntRange(min=0),
        default=0,
        metavar="N",
        help="Only messages that were delivered at least N times.",
    ),
)
_state_option = click.option(
    "--state",
    "states",
    type=click.Choice(_STATES),
    multiple=True,
    help="Only this state. Repeat for several.  [open]",
)


@click.group("dead")
def dead_letters() -> None:
    """List dead letters, and resend, export or purge them.

    A message whose deliveries to a group all failed becomes a dead letter of the group. It is open
    until it is resent to the group, or purged.
    """


def _criteria(states: Sequence[str] = (), **options: Any) -> DeadLetterCriteria:
    selected = tuple(map(DeadLetterState, states)) or (DeadLetterState.OPEN,)
    return DeadLetterCriteria(states=selected, **options)


# --- list and show -------------------------------------------------------------------------------

_COLUMNS: Final = (
    TableColumn("ID"),  # never cut, because users copy it
    TableColumn("STORED"),
    TableColumn("GROUP", can_shrink=True),
    TableColumn("TOPIC", can_shrink=True),
    TableColumn("KEYS", can_shrink=True),
    TableColumn("ATTEMPTS", is_number=True),
    TableColumn("STATE"),
    TableColumn("CAUSE", can_shrink=True),
)


@dead_letters.command("list")
@_criteria_options
@_state_option
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="List at most N.")
@cluster_options
@click.pass_context
def list_(
    context: click.Context,
    /,
    limit: int | None,
    cluster: Cluster,
    as_json: bool,
    **criteria: Any,
) -> None:
    """List dead letters with the cause of their last failure."""
    letters = islice(find_dead_letters(cluster, _criteria(**criteria)), limit)
    with ignore_broken_pipe():
        if as_json:
            print_json_array(map(_summary_json, letters))
        else:
            print_lines(_table_lines(letters))
    exit_with_failures(context, cluster)


def _summary_json(letter: DeadLetter) -> dict[str, Any]:
    content = dead_letter_json(letter)
    return {
        name: value
        for name, value in content.items()
        if name not in ("body", "body_base64", "properties")
    }


def _table_lines(letters: Iterable[DeadLetter]) -> Iterator[str]:
    rows = (
        (
            letter.message.offset_id,
            format_timestamp(letter.message.stored_ms),
            printable(letter.group),
            printable(letter.topic) or "-",
            printable(letter.message.keys) or "-",
            str(letter.attempts),
            letter.state.value,
            printable(letter.cause),
        )
        for letter in letters
    )
    is_empty = True
    for line in table_lines(_COLUMNS, rows, terminal_width()):
        yield line
        is_empty = False
    if is_empty:
        yield "no dead letters"


@dead_letters.command()
@click.argument("message_id", metavar="ID")
@cluster_options
@click.pass_context
def show(context: click.Context, /, message_id: str, cluster: Cluster, as_json: bool) -> None:
    """Print everything about a dead letter.

    ID is its offset id, as `list` prints it, or the unique key of the message.
    """
    letters = find_dead_letter(cluster, message_id)
    if not letters and not cluster.failures:
        raise _not_found(cluster, message_id)
    with ignore_broken_pipe():
        for number, letter in enumerate(letters):
            if as_json:
                print_json(dead_letter_json(letter))
                continue
            if number:
                click.echo("\n---\n")
            print_lines(_letter_lines(letter))
    exit_with_failures(context, cluster)


def _not_found(cluster: Cluster, message_id: str) -> RecordNotFound:
    return RecordNotFound(
        f"no dead letter {message_id} on {cluster.broker_names()}: it was never stored there, or "
        "it has expired"
    )


def _letter_lines(letter: DeadLetter) -> Iterator[str]:
    message, failure = letter.message, letter.message.failure
    queue = f"{printable(message.broker)}, queue {message.queue_id} #{message.queue_offset}"
    consumer = "" if failure is None else f"{failure.host} {failure.address}".strip()
    failed_ms = 0 if failure is None else failure.failed_ms
    fields = [
        ("id", message.offset_id),
        ("unique key", message.properties.get(UNIQUE_KEY, "")),
        ("group", letter.group),
        ("topic", letter.topic),
        ("state", letter.state.value),
        ("cause", letter.cause),
        ("failed", format_timestamp(failed_ms) if failed_ms else ""),
        ("consumer", consumer),
        ("attempts", str(letter.attempts)),
        ("stored", format_timestamp(message.stored_ms)),
        ("born", format_timestamp(message.born_ms)),
        ("position", queue),
        ("tags", message.tags),
        ("keys", message.keys),
        ("body", f"{len(message.body)} bytes"),
    ]
    if failure is not None and failure.is_from_client:
        fields.append(("note", "the cause was stored by a client: the broker cannot vouch for it"))
    yield from field_lines((name, printable(value)) for name, value in fields)
    yield ""
    yield from body_lines(message.body)


# --- resend --------------------------------------------------------------------------------------


@dead_letters.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--all", "select_all", is_flag=True, help="All open ones that the filters find.")
@click.option(
    "--file",
    type=click.File("r", encoding="utf-8"),
    help="Those of a file of `export`, with its bodies and properties, which may be edited.",
)
@_criteria_options
@click.option(
    "--rate",
    type=click.FloatRange(min=0, min_open=True),
    default=DEFAULT_RATE,
    show_default=True,
    metavar="N",
    help="Resend at most N per second.",
)
@confirm_options
@cluster_options
@click.pass_context
def resend(
    context: click.Context,
    /,
    ids: tuple[str, ...],
    select_all: bool,
    file: TextIO | None,
    rate: float,
    dry_run: bool,
    yes: bool,
    cluster: Cluster,
    as_json: bool,
    **criteria: Any,
) -> None:
    """Deliver dead letters to their group again. Other groups of the topic do not get them.

    \b
    escrowmq message dead resend --all --group billing --error BadPayload
    escrowmq message dead resend 0A00000700002A9F00000000000012C4

    What was resent once is not resent again, so this can be repeated after any failure.
    """
    if bool(ids) + select_all + (file is not None) != 1:
        raise click.UsageError("give the IDs of dead letters, or --all with filters, or --file")
    letters: list[DeadLetter] | None = None
    if ids:
        letters = _select(cluster, ids, criteria["groups"])
    elif file is not None:
        matches = _criteria(_STATES, **criteria).matches
        letters = [letter for letter in _read_export(file) if matches(letter)]

    def selected() -> Iterator[DeadLetter]:
        # Read twice instead of kept: there may be more than fits into memory.
        return (
            find_dead_letters(cluster, _criteria(**criteria)) if letters is None else iter(letters)
        )

    if dry_run:
        with ignore_broken_pipe():
            if as_json:
                print_json_array(map(_summary_json, selected()))
            else:
                print_lines(_table_lines(selected()))
        exit_with_failures(context, cluster)
    if not yes:
        confirm(_question(selected()), yes=False)
    results = resend_dead_letters(cluster, selected(), rate=rate)
    failed = _print_results(cluster, results, as_json)
    exit_with_failures(context, cluster, 2 if failed else 0)


def _select(cluster: Cluster, ids: Sequence[str], groups: Sequence[str]) -> list[DeadLetter]:
    letters: list[DeadLetter] = []
    for message_id in dict.fromkeys(ids):
        matches = find_dead_letter(cluster, message_id, groups)
        if not matches:
            cluster.require_all_answered()
            raise _not_found(cluster, message_id)
        if len({letter.group for letter in matches}) > 1:
            names = ", ".join(sorted({letter.group for letter in matches}))
            raise click.UsageError(
                f"{message_id} is a dead letter of several groups ({names}): choose one with "
                "--group"
            )
        letters += matches
    return letters


def _read_export(file: TextIO) -> Iterator[DeadLetter]:
    for number, line in enumerate(file, 1):
        try:
            if line.strip():
                yield parse_dead_letter(json.loads(line))
        except ValueError as error:
            raise click.UsageError(f"{file.name}, line {number}: {error}") from None


def _question(letters: Iterable[DeadLetter]) -> str:
    counts = Counter(letter.group for letter in letters)
    groups = ", ".join(f"{count} to {printable(group)}" for group, count in sorted(counts.items()))
    return f"Resend {_count(sum(counts.values()))}{f' ({groups})' if groups else ''}?"


def _count(count: int) -> str:
    return f"{count} dead letter" if count == 1 else f"{count} dead letters"


def _print_results(cluster: Cluster, results: Iterable[ResendResult], as_json: bool) -> int:
    """Print each result when it is there, and return how many failed."""
    counts: Counter[ResendStatus] = Counter()
    groups: set[str] = set()
    try:
        with ignore_broken_pipe():
            for result in results:
                counts[result.status] += 1
                groups.add(result.letter.group)
                _print_result(result, as_json)
    finally:
        # Also after Ctrl-C: what was resent need not be looked at again.
        if groups:
            pass_resent(cluster, groups)
    if not as_json:
        click.echo(", ".join(f"{counts[status]} {status.value}" for status in ResendStatus))
    return counts[ResendStatus.FAILED]


def _print_result(result: ResendResult, as_json: bool) -> None:
    letter = result.letter
    if as_json:
        content = _summary_json(letter)
        del content["state"]
        print_json({**content, "status": result.status.value, "detail": result.detail or None})
        return
    words = [
        letter.message.offset_id,
        result.status.value,
        f"{printable(letter.group)} <- {printable(letter.topic) or '-'}",
        printable(result.detail),
    ]
    click.echo("  ".join(words).rstrip(), err=result.status is ResendStatus.FAILED)


# --- export --------------------------------------------------------------------------------------


@dead_letters.command()
@_criteria_options
@_state_option
@cluster_options
@click.pass_context
def export(context: click.Context, /, cluster: Cluster, as_json: bool, **criteria: Any) -> None:
    """Print dead letters as lines of JSON, with properties and bodies.

    \b
    escrowmq message dead export --group billing > dead.jsonl
    escrowmq message dead resend --file dead.jsonl

    A body is `body` if it is text, else `body_base64`. `resend --file` takes both, also edited.
    """
    with ignore_broken_pipe():
        for letter in find_dead_letters(cluster, _criteria(**criteria)):
            print_json(dead_letter_json(letter))
    exit_with_failures(context, cluster)


# --- purge ---------------------------------------------------------------------------------------


@dead_letters.command()
@click.option("--all", "select_all", is_flag=True, help="Of all groups, if no --group is given.")
@_criteria_options
@confirm_options
@cluster_options
@click.pass_context
def purge(
    context: click.Context,
    /,
    select_all: bool,
    dry_run: bool,
    yes: bool,
    cluster: Cluster,
    as_json: bool,
    **criteria: Any,
) -> None:
    """Count dead letters as handled without delivering them again.

    \b
    escrowmq message dead purge --group billing --until 2026-03-01

    Each queue has a cursor, and everything before it is handled. It moves up to the first open
    dead letter that the filters do not find. The messages stay in the log until it expires: `list
    --state purged` shows them, and `resend ID` still delivers them.
    """
    if not criteria["groups"] and not select_all:
        raise click.UsageError("give --group, or --all for all groups")
    plans = plan_purge(cluster, _criteria(**criteria))
    if cluster.failures:
        exit_with_failures(context, cluster)  # rather than purge a part of what was meant
    purged = sum(plan.purged for plan in plans)
    if not dry_run:
        if plans and purged:
            confirm(f"Give up {_count(purged)}?", yes=yes)
        # Cursors also move over what was resent, which needs no confirmation.
        applied = apply_purge(cluster, plans)
        plans = [plan if plan in applied else replace(plan, purged=0) for plan in plans]
    _print_purge(plans, as_json=as_json, dry_run=dry_run)
    exit_with_failures(context, cluster)


def _print_purge(plans: Sequence[DeadLetterPurge], *, as_json: bool, dry_run: bool) -> None:
    if as_json:
        print_json([_purge_json(plan) for plan in plans])
        return
    for plan in plans:
        queue = plan.queue
        click.echo(
            f"{printable(queue.group)}  {printable(plan.broker.name)}/{queue.queue_id}  "
            f"{_count(plan.purged)} {'would be purged' if dry_run else 'purged'}"
        )
        if plan.blocked:
            click.echo(
                f"escrowmq: {_count(plan.blocked)} of {printable(queue.group)} stayed open: they "
                "follow one that the filters do not find; resend that one or purge it too",
                err=True,
            )
    if not plans:
        click.echo("no dead letters")


def _purge_json(plan: DeadLetterPurge) -> dict[str, Any]:
    return {
        "group": plan.queue.group,
        "broker": plan.broker.name,
        "queue": plan.queue.queue_id,
        "old_cursor": plan.queue.cursor,
        "new_cursor": plan.new_cursor,
        "purged": plan.purged,
        "blocked": plan.blocked,
    }
