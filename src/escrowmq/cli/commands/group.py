"""`escrowmq group …`: list consumer groups, show their lag, reset their offsets, delete them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import click

from escrowmq.admin.cluster import Cluster
from escrowmq.admin.offsets import (
    AppliedOffset,
    OffsetChange,
    StartPosition,
    apply_reset,
    group_not_found,
    plan_reset,
)
from escrowmq.admin.queries import (
    GroupProgress,
    all_progress,
    consumer_connections,
    group_configs,
    group_progress,
    total_lag,
)
from escrowmq.cli.commands.topic import timestamp_or_none
from escrowmq.cli.options import (
    cluster_options,
    complete_group,
    complete_topic,
    confirm,
    confirm_options,
    parse_start_option,
)
from escrowmq.cli.output import (
    QueryContext,
    QueryResult,
    TableColumn,
    exit_with_failures,
    field_lines,
    ignore_broken_pipe,
    print_json,
    printable,
    query_command,
    table_lines,
    terminal_width,
)
from escrowmq.client.sync_connection import SyncConnection
from escrowmq.errors import NoRoute
from escrowmq.message.names import is_system_group
from escrowmq.remoting.bodies_admin import ConsumerConnections
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers_admin import DeleteGroup

_group_argument = click.argument("group", metavar="GROUP", shell_complete=complete_group)


@click.group()
def group() -> None:
    """List consumer groups, show their lag, reset their offsets, delete them."""


# --- list ----------------------------------------------------------------------------------------


@group.command("list")
@click.option(
    "--all", "include_system", is_flag=True, help="Include the groups of RocketMQ itself."
)
@query_command
def list_(query: QueryContext, include_system: bool) -> None:
    """List the groups with their connected members and their lag."""
    query.show(list_groups, include_system=include_system)


_LIST_COLUMNS: Final = (
    TableColumn("GROUP", can_shrink=True),
    TableColumn("MEMBERS", is_number=True),
    TableColumn("LAG", is_number=True),
    TableColumn("TOPICS", can_shrink=True),
)


def list_groups(cluster: Cluster, *, include_system: bool) -> QueryResult:
    def fetch(
        connection: SyncConnection,
    ) -> tuple[list[str], dict[str, GroupProgress], dict[str, ConsumerConnections]]:
        progress = all_progress(connection)
        # The group of the transaction cursors has offsets, but no configuration.
        group_names = dict.fromkeys([*group_configs(connection), *progress])
        names = [name for name in group_names if include_system or not is_system_group(name)]
        return names, progress, consumer_connections(connection, names)

    rows: dict[str, dict[str, Any]] = {}
    members: dict[str, set[str]] = {}
    topics: dict[str, set[str]] = {}
    for broker, (names, progress, connections) in cluster.ask_all(fetch):
        for name in names:
            row = rows.setdefault(name, {"group": name, "members": 0, "lag": 0, "brokers": []})
            offsets = progress.get(name, {})
            row["lag"] += total_lag(offsets.values())
            row["brokers"].append(broker.name)
            topics.setdefault(name, set()).update(queue.topic for queue in offsets)
            # A member is connected to every broker, and counts once.
            clients = connections[name].connection_set if name in connections else []
            members.setdefault(name, set()).update(client.client_id for client in clients)
    content = [
        {**rows[name], "members": len(members[name]), "topics": sorted(topics[name])}
        for name in sorted(rows)
    ]
    return content, _list_lines(content)


def _list_lines(content: list[dict[str, Any]]) -> Iterator[str]:
    if not content:
        yield "no groups"
    rows = (
        (
            printable(row["group"]),
            str(row["members"]),
            str(row["lag"]),
            ",".join(map(printable, row["topics"])) or "-",
        )
        for row in content
    )
    yield from table_lines(_LIST_COLUMNS, rows, terminal_width())


# --- show ----------------------------------------------------------------------------------------


@group.command()
@_group_argument
@query_command
def show(query: QueryContext, group: str) -> None:
    """Print the settings of a group, its connected members, and its lag."""
    query.show(show_group, group)


_MEMBER_COLUMNS: Final = (
    TableColumn("CLIENT", can_shrink=True),
    TableColumn("ADDRESS"),
    TableColumn("LANGUAGE"),
    TableColumn("VERSION", is_number=True),
)
_SETTING_LABELS: Final = {
    "consumeEnable": "may read",
    "consumeBroadcastEnable": "may read as broadcast",
    "retryMaxTimes": "deliveries before a dead letter",
    "retryQueueNums": "retry queues",
}


def show_group(cluster: Cluster, group: str) -> QueryResult:
    def fetch(
        connection: SyncConnection,
    ) -> tuple[dict[str, Any] | None, ConsumerConnections | None]:
        config = group_configs(connection).get(group)
        return config, consumer_connections(connection, [group]).get(group)

    settings: dict[str, dict[str, Any]] = {}
    members: dict[str, dict[str, Any]] = {}
    subscriptions: dict[str, str] = {}
    consumption: dict[str, str] = {}
    for broker, (config, connections) in cluster.ask_all(fetch):
        if config is None:
            continue
        settings[broker.name] = config
        if connections is None:
            continue
        consumption = {"consumes": connections.consume_type, "model": connections.message_model}
        for topic, subscription in connections.subscription_table.items():
            subscriptions[topic] = subscription.sub_string
        for client in connections.connection_set:
            members[client.client_id] = {
                "client": client.client_id,
                "address": client.client_addr,
                "language": client.language,
                "version": client.version,
            }
    if not settings and not cluster.failures:
        raise group_not_found(cluster, group)
    queues, queue_lines = list_lag_by_queue(cluster, group, None)
    content = {
        "group": group,
        "settings": settings,
        **consumption,
        "subscriptions": subscriptions,
        "members": [members[client_id] for client_id in sorted(members)],
        "queues": queues,
    }
    return content, _show_lines(content, queue_lines)


def _show_lines(content: dict[str, Any], queue_lines: Iterable[str]) -> Iterator[str]:
    yield f"group {printable(content['group'])}"
    for broker, config in content["settings"].items():
        yield ""
        labelled = [
            (label, str(config[key])) for key, label in _SETTING_LABELS.items() if key in config
        ]
        yield from field_lines([("broker", printable(broker)), *labelled])
    yield ""
    if "consumes" in content:
        yield f"{content['consumes']}, {content['model']}"
    for topic, expression in sorted(content["subscriptions"].items()):
        yield f"subscribes to {printable(topic)}: {printable(expression)}"
    if not content["members"]:
        yield "no member is connected"
    rows = (
        (
            printable(member["client"]),
            member["address"],
            printable(member["language"]),
            str(member["version"]),
        )
        for member in content["members"]
    )
    yield from table_lines(_MEMBER_COLUMNS, rows, terminal_width())
    yield ""
    yield from queue_lines


# --- lag -----------------------------------------------------------------------------------------


@group.command()
@click.argument("group", metavar="[GROUP]", required=False, shell_complete=complete_group)
@click.option("--topic", help="Only this topic; needs a GROUP.", shell_complete=complete_topic)
@query_command
def lag(query: QueryContext, group: str | None, topic: str | None) -> None:
    """Print how many messages each group has not read yet, the largest lag first.

    With a GROUP, print its lag for each queue. READ UP TO is the time at which the last message
    that the group has read was stored.
    """
    if group is not None:
        query.show(list_lag_by_queue, group, topic)
    elif topic is None:
        query.show(list_lag_by_topic)
    else:
        raise click.UsageError(
            "--topic needs a GROUP; `escrowmq topic show` lists the groups of a topic"
        )


_LAG_COLUMNS: Final = (
    TableColumn("GROUP", can_shrink=True),
    TableColumn("TOPIC", can_shrink=True),
    TableColumn("LAG", is_number=True),
    TableColumn("READ UP TO"),
)
_QUEUE_COLUMNS: Final = (
    TableColumn("TOPIC", can_shrink=True),
    TableColumn("BROKER", can_shrink=True),
    TableColumn("QUEUE", is_number=True),
    TableColumn("READ", is_number=True),
    TableColumn("END", is_number=True),
    TableColumn("LAG", is_number=True),
    TableColumn("READ UP TO"),
)


def list_lag_by_topic(cluster: Cluster) -> QueryResult:
    """Return a row for each group and each topic that it reads."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for _, progress in cluster.ask_all(all_progress):
        for group, queues in progress.items():
            if is_system_group(group):
                continue
            for queue, offset in queues.items():
                row = rows.setdefault(
                    (group, queue.topic),
                    {"group": group, "topic": queue.topic, "lag": 0, "read_up_to": None},
                )
                row["lag"] += total_lag([offset])
                read_up_to = timestamp_or_none(offset.last_timestamp)
                row["read_up_to"] = max(row["read_up_to"] or "", read_up_to or "") or None
    content = sorted(rows.values(), key=lambda row: (-row["lag"], row["group"], row["topic"]))
    return content, _lag_lines(content)


def _lag_lines(content: list[dict[str, Any]]) -> Iterator[str]:
    if not content:
        yield "no group has read anything"
    rows = (
        (
            printable(row["group"]),
            printable(row["topic"]),
            str(row["lag"]),
            row["read_up_to"] or "-",
        )
        for row in content
    )
    yield from table_lines(_LAG_COLUMNS, rows, terminal_width())


def list_lag_by_queue(cluster: Cluster, group: str, topic: str | None) -> QueryResult:
    """Return a row for each queue that one group reads."""

    def fetch(connection: SyncConnection) -> GroupProgress | None:
        if group not in group_configs(connection):
            return None
        return group_progress(connection, group, topic)

    answers = [progress for _, progress in cluster.ask_all(fetch) if progress is not None]
    if not answers and not cluster.failures:
        raise group_not_found(cluster, group)
    content = [
        {
            "topic": queue.topic,
            "broker": queue.broker_name,
            "queue": queue.queue_id,
            "read": offset.consumer_offset,
            "end": offset.broker_offset,
            "lag": total_lag([offset]),
            "read_up_to": timestamp_or_none(offset.last_timestamp),
        }
        for progress in answers
        for queue, offset in progress.items()
    ]
    content.sort(key=lambda row: (row["topic"], row["broker"], row["queue"]))
    return content, _queue_lines(content)


def _queue_lines(content: list[dict[str, Any]]) -> Iterator[str]:
    if not content:
        yield "the group has read nothing"
        return
    rows = (
        (
            printable(row["topic"]),
            printable(row["broker"]),
            *(str(row[name]) for name in ("queue", "read", "end", "lag")),
            row["read_up_to"] or "-",
        )
        for row in content
    )
    yield from table_lines(_QUEUE_COLUMNS, rows, terminal_width())
    yield f"total lag: {sum(row['lag'] for row in content)}"


# --- reset ---------------------------------------------------------------------------------------


@group.command()
@_group_argument
@click.option(
    "--to",
    "target",
    required=True,
    callback=parse_start_option,
    metavar="TIME|earliest|latest",
    help="Where to continue. A TIME such as 2026-01-01T00:00 (UTC) selects the first message "
    "that was stored then or later.",
)
@click.option(
    "--topic",
    help="Reset only this topic.  [all topics that the group reads]",
    shell_complete=complete_topic,
)
@confirm_options
@cluster_options
@click.pass_context
def reset(
    context: click.Context,
    group: str,
    target: StartPosition,
    topic: str | None,
    dry_run: bool,
    yes: bool,
    cluster: Cluster,
    as_json: bool,
) -> None:
    """Move a group back to read messages again, or forward to skip them.

    Connected members continue from the new offsets at once. Other members start from there when
    they connect.
    """
    changes = plan_reset(cluster, group, topic, target)
    cluster.require_all_answered()
    if not changes:
        raise NoRoute(f"group {group} has not read any topic yet: name one with --topic")
    with ignore_broken_pipe():
        if dry_run and as_json:
            print_json([_change_json(change) for change in changes])
        elif not as_json:
            _print_changes(changes, to_stderr=not dry_run)
    if dry_run:
        context.exit(0)
    confirm(f"Reset the offsets of group {group}?", yes=yes)
    applied = apply_reset(cluster, group, changes, target)
    with ignore_broken_pipe():
        if as_json:
            print_json([_applied_json(offset) for offset in applied])
        else:
            click.echo(f"{group}  offsets of {len(applied)} queues reset")
    exit_with_failures(context, cluster)


_CHANGE_COLUMNS: Final = (
    TableColumn("TOPIC", can_shrink=True),
    TableColumn("BROKER", can_shrink=True),
    TableColumn("QUEUE", is_number=True),
    TableColumn("FROM", is_number=True),
    TableColumn("TO", is_number=True),
    TableColumn("EFFECT"),
)


def _print_changes(changes: Sequence[OffsetChange], *, to_stderr: bool) -> None:
    rows = (
        (
            printable(change.queue.topic),
            printable(change.queue.broker_name),
            str(change.queue.queue_id),
            str(change.old_offset),
            str(change.new_offset),
            _effect_text(change),
        )
        for change in changes
    )
    width = terminal_width(sys.stderr if to_stderr else sys.stdout)
    for line in table_lines(_CHANGE_COLUMNS, rows, width):
        click.echo(line, err=to_stderr)


def _effect_text(change: OffsetChange) -> str:
    count = change.new_offset - change.old_offset
    if not count:
        return "no change"
    return f"{-count} read again" if count < 0 else f"{count} skipped"


def _change_json(change: OffsetChange) -> dict[str, Any]:
    return {
        "topic": change.queue.topic,
        "broker": change.queue.broker_name,
        "queue": change.queue.queue_id,
        "from": change.old_offset,
        "to": change.new_offset,
    }


def _applied_json(applied: AppliedOffset) -> dict[str, Any]:
    return {
        "topic": applied.queue.topic,
        "broker": applied.broker.name,
        "queue": applied.queue.queue_id,
        "offset": applied.offset,
    }


# --- delete --------------------------------------------------------------------------------------


@group.command()
@click.argument(
    "groups", nargs=-1, required=True, metavar="GROUP...", shell_complete=complete_group
)
@click.option("--keep-offsets", is_flag=True, help="Keep the offsets, in case the group returns.")
@confirm_options
@cluster_options
@click.pass_context
def delete(
    context: click.Context,
    groups: tuple[str, ...],
    keep_offsets: bool,
    dry_run: bool,
    yes: bool,
    cluster: Cluster,
    as_json: bool,
) -> None:
    """Delete groups and their offsets on every broker. This cannot be undone.

    Stop the consumers first: a member that is still connected creates its group again.
    """
    for group in groups:
        text = _group_summary(cluster, group)
        click.echo(f"{text}, would be deleted" if dry_run else text, err=not dry_run)
    if dry_run:
        context.exit(0)
    target = groups[0] if len(groups) == 1 else f"these {len(groups)} groups"
    confirm(f"Delete {target} permanently?", yes=yes)
    with ignore_broken_pipe():
        for group in groups:
            _delete_group(cluster, group, keep_offsets=keep_offsets, as_json=as_json)
    exit_with_failures(context, cluster)


def _group_summary(cluster: Cluster, group: str) -> str:
    answers = cluster.ask_all(
        lambda connection: (
            group in group_configs(connection),
            consumer_connections(connection, [group]),
            total_lag(group_progress(connection, group).values()),
        )
    )
    cluster.require_all_answered()
    if not any(exists for _, (exists, _, _) in answers):
        raise group_not_found(cluster, group)
    members = {
        client.client_id
        for _, (_, connections, _) in answers
        for connected in connections.values()
        for client in connected.connection_set
    }
    unread = sum(lag for _, (_, _, lag) in answers)
    return f"{group}: {len(members)} members connected, {unread} messages not read"


def _delete_group(cluster: Cluster, group: str, *, keep_offsets: bool, as_json: bool) -> None:
    purge = not keep_offsets
    header = DeleteGroup(group_name=group, clean_offset=purge, remove_offset=purge)
    code = RequestCode.DELETE_SUBSCRIPTIONGROUP
    deleted = cluster.ask_all(lambda connection: connection.call(code, header))
    names = [broker.name for broker, _ in deleted]
    if as_json:
        print_json({"group": group, "deleted_on": names})
    elif names:
        click.echo(f"{group}  deleted on {', '.join(names)}")
