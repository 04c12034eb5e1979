"""`escrowmq group …`: who consumes, how far he is, and to send him elsewhere."""

from __future__ import annotations

import json
from typing import Any

import click

from escrowmq.cli.brokers import Brokers, end
from escrowmq.cli.complete import group_names, topic_names
from escrowmq.cli.figures import connections, group_configs, lag_of, progress_of
from escrowmq.cli.groups import (
    found_groups,
    lags_by_queue,
    lags_by_topic,
    no_group,
    shown_group,
)
from escrowmq.cli.options import careful, confirm, place_in_time, where
from escrowmq.cli.output import reader_may_leave
from escrowmq.cli.resets import Move, move_lines, planned_moves, reset_offsets
from escrowmq.cli.watch import View, looking
from escrowmq.errors import NoRoute
from escrowmq.wire.codes import RequestCode
from escrowmq.wire.headers_admin import DeleteGroup

_name = click.argument("name", metavar="GROUP", shell_complete=group_names)


@click.group()
def group() -> None:
    """Consumer groups: who is connected, how far they are; reset and delete them."""


# --- looking -------------------------------------------------------------------------------------


@group.command("list")
@click.option("--all", "with_own", is_flag=True, help="Also those of RocketMQ's own tools.")
@looking
def list_(view: View, with_own: bool) -> None:
    """List groups, their members that are connected, and what they have not read."""
    view.show(found_groups, with_own=with_own)


@group.command()
@_name
@looking
def show(view: View, name: str) -> None:
    """Print the settings of a group, who of it is connected, and how far it is."""
    view.show(shown_group, name)


@group.command()
@click.argument("name", metavar="[GROUP]", required=False, shell_complete=group_names)
@click.option("--topic", help="Only of this topic.", shell_complete=topic_names)
@looking
def lag(view: View, name: str | None, topic: str | None) -> None:
    """Print how many messages groups have not read, the slowest first.

    With a GROUP, queue by queue. READ UP TO is when the last message was stored that it has read.
    """
    if name is not None:
        view.show(lags_by_queue, name, topic)
    elif topic is None:
        view.show(lags_by_topic)
    else:
        raise click.UsageError("--topic goes with a GROUP; escrowmq topic show has all its groups")


# --- changing ------------------------------------------------------------------------------------


@group.command()
@_name
@click.option(
    "--to",
    "target",
    required=True,
    callback=place_in_time,
    metavar="TIME|earliest|latest",
    help="2026-01-01T00:00 (UTC): read again what was stored then or later.",
)
@click.option(
    "--topic", help="Only of this topic.  [all that it reads]", shell_complete=topic_names
)
@careful
@where
@click.pass_context
def reset(
    context: click.Context,
    name: str,
    target: str | int,
    topic: str | None,
    dry_run: bool,
    yes: bool,
    namesrv: str,
    broker: str | None,
    in_json: bool,
) -> None:
    """Let a group go on from another place: back to read again, or forward to skip.

    Members that are connected are told; others begin there when they come back.
    """
    brokers = Brokers(namesrv, broker)
    moves = planned_moves(brokers, name, topic, target)
    brokers.must_have_answered()
    if not moves:
        raise NoRoute(f"group {name} has read no topic: name one with --topic")
    if dry_run or not in_json:
        _echo_moves(moves, in_json=in_json, is_question=not dry_run)
    if dry_run:
        context.exit(0)
    confirm(f"Move group {name} to these places?", yes=yes)
    done = reset_offsets(brokers, name, sorted({move.queue.topic for move in moves}), target)
    with reader_may_leave():
        if in_json:
            click.echo(json.dumps(done))
        else:
            click.echo(f"{name}  {len(done)} queues moved")
    end(context, brokers)


def _echo_moves(moves: list[Move], *, in_json: bool, is_question: bool) -> None:
    with reader_may_leave():
        if in_json:
            click.echo(json.dumps([move.as_json() for move in moves]))
            return
        for line in move_lines(moves):
            click.echo(line, err=is_question)


@group.command()
@click.argument("names", nargs=-1, required=True, metavar="GROUP...", shell_complete=group_names)
@click.option("--keep-offsets", is_flag=True, help="Do not forget how far it has read.")
@careful
@where
@click.pass_context
def delete(
    context: click.Context,
    names: tuple[str, ...],
    keep_offsets: bool,
    dry_run: bool,
    yes: bool,
    namesrv: str,
    broker: str | None,
    in_json: bool,
) -> None:
    """Delete groups and their offsets, on every broker, for good.

    A member that is still connected makes its group again: stop the consumers first.
    """
    brokers = Brokers(namesrv, broker)
    for name in names:
        text = _about(brokers, name)
        click.echo(f"{text}, would be deleted" if dry_run else text, err=not dry_run)
    if dry_run:
        context.exit(0)
    what = names[0] if len(names) == 1 else f"these {len(names)} groups"
    confirm(f"Delete {what} for good?", yes=yes)
    forget = not keep_offsets
    with reader_may_leave():
        for name in names:
            asked = DeleteGroup(group_name=name, clean_offset=forget, remove_offset=forget)
            _delete(brokers, name, asked, in_json)
    end(context, brokers)


def _about(brokers: Brokers, name: str) -> str:
    found = brokers.ask(
        lambda caller: (
            name in group_configs(caller),
            connections(caller, [name]),
            lag_of(progress_of(caller, name).values()),
        )
    )
    brokers.must_have_answered()
    if not any(is_there for _, (is_there, _, _) in found):
        raise no_group(name, brokers)
    members = {
        client.client_id
        for _, (_, connected, _) in found
        for told in connected.values()
        for client in told.connection_set
    }
    unread = sum(lag for _, (_, _, lag) in found)
    return f"{name}: {len(members)} members connected, {unread} messages not read"


def _delete(brokers: Brokers, name: str, asked: DeleteGroup, in_json: bool) -> None:
    code: Any = RequestCode.DELETE_SUBSCRIPTIONGROUP
    done = brokers.ask(lambda caller: caller.call(code, asked))
    if in_json:
        click.echo(json.dumps({"group": name, "deleted_on": [place.name for place, _ in done]}))
    elif done:
        places = ", ".join(place.name for place, _ in done)
        click.echo(f"{name}  deleted on {places}")
