"""`escrowmq group …`: who consumes, how far he is, and to send him elsewhere.

Consumer groups as people and programs read them, put together from what all brokers say.

Where a group would go by a reset, queue by queue, and to send it there.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import click

from escrowmq.cli.brokers import Cluster, exit_with_failures
from escrowmq.cli.call import BrokerAddress, SyncConnection
from escrowmq.cli.commands.topic import format_utc_or_none
from escrowmq.cli.figures import (
    NOT_FOUND_CODES,
    GroupProgress,
    all_progress,
    consumer_connections,
    group_configs,
    group_progress,
    topic_offsets,
    total_lag,
)
from escrowmq.cli.options import (
    EARLIEST,
    LATEST,
    cluster_options,
    complete_group,
    complete_topic,
    confirm,
    confirm_options,
    parse_start_option,
)
from escrowmq.cli.output import (
    QueryContext,
    TableColumn,
    field_lines,
    ignore_broken_pipe,
    query_command,
    table_lines,
    terminal_width,
)
from escrowmq.cli.rendering import printable
from escrowmq.errors import NoRoute
from escrowmq.message.names import is_system_group, retry_topic
from escrowmq.remoting.bodies import QueueName
from escrowmq.remoting.bodies_admin import (
    ConsumerConnections,
    TopicOffset,
    decode_queue_key,
    decode_queue_tables,
)
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import OffsetResponse, SearchOffset, decode_header
from escrowmq.remoting.headers_admin import DeleteGroup, ResetOffset

_LIST_COLUMNS: Final = (
    TableColumn("GROUP", can_shrink=True),
    TableColumn("MEMBERS", is_number=True),
    TableColumn("LAG", is_number=True),
    TableColumn("TOPICS", can_shrink=True),
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


def group_not_found(name: str, cluster: Cluster) -> NoRoute:
    asked = ", ".join(place.name for place in cluster.brokers)
    return NoRoute(f"no group {printable(name)} on {asked}: escrowmq group list shows them")


# --- all of them ---------------------------------------------------------------------------------


def list_groups(cluster: Cluster, *, with_own: bool) -> tuple[list[dict[str, Any]], Iterable[str]]:
    def question(
        caller: SyncConnection,
    ) -> tuple[list[str], dict[str, GroupProgress], dict[str, ConsumerConnections]]:
        names = [name for name in group_configs(caller) if with_own or not is_system_group(name)]
        return names, all_progress(caller), consumer_connections(caller, names)

    rows: dict[str, dict[str, Any]] = {}
    members: dict[str, set[str]] = {}
    topics: dict[str, set[str]] = {}
    for place, (names, progress, connected) in cluster.ask_all(question):
        for name in names:
            row = rows.setdefault(name, {"group": name, "members": 0, "lag": 0, "brokers": []})
            mine = progress.get(name, {})
            row["lag"] += total_lag(mine.values())
            row["brokers"].append(place.name)
            topics.setdefault(name, set()).update(queue.topic for queue in mine)
            there = connected[name].connection_set if name in connected else []
            members.setdefault(name, set()).update(client.client_id for client in there)
    content = []
    for name in sorted(rows):
        found = {"members": len(members[name]), "topics": sorted(topics[name])}
        content.append({**rows[name], **found})
    return content, _list_lines(content)


def _list_lines(content: list[dict[str, Any]]) -> Iterator[str]:
    if not content:
        yield "no groups"
    rows = (
        (
            printable(row["group"]),
            str(row["members"]),
            str(row["lag"]),
            ",".join(printable(topic) for topic in row["topics"]) or "-",
        )
        for row in content
    )
    yield from table_lines(_LIST_COLUMNS, rows, terminal_width(sys.stdout))


# --- how far they are ----------------------------------------------------------------------------


def list_lag_by_topic(cluster: Cluster) -> tuple[list[dict[str, Any]], Iterable[str]]:
    """Of every group, one row for each topic that it reads."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for _, progress in cluster.ask_all(all_progress):
        for group, queues in progress.items():
            for queue, one in queues.items() if not is_system_group(group) else ():
                row = rows.setdefault(
                    (group, queue.topic),
                    {"group": group, "topic": queue.topic, "lag": 0, "read_up_to": None},
                )
                row["lag"] += total_lag([one])
                read = format_utc_or_none(one.last_timestamp)
                row["read_up_to"] = max(row["read_up_to"] or "", read or "") or None
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
    yield from table_lines(_LAG_COLUMNS, rows, terminal_width(sys.stdout))


def list_lag_by_queue(
    cluster: Cluster, group: str, topic: str | None
) -> tuple[list[dict[str, Any]], Iterable[str]]:
    def question(caller: SyncConnection) -> GroupProgress | None:
        is_there = group in group_configs(caller)
        return group_progress(caller, group, topic) if is_there else None

    found = [told for _, told in cluster.ask_all(question) if told is not None]
    if not found and not cluster.failures:
        raise group_not_found(group, cluster)
    content = [
        {
            "topic": queue.topic,
            "broker": queue.broker_name,
            "queue": queue.queue_id,
            "read": one.consumer_offset,
            "end": one.broker_offset,
            "lag": total_lag([one]),
            "read_up_to": format_utc_or_none(one.last_timestamp),
        }
        for progress in found
        for queue, one in progress.items()
    ]
    content.sort(key=lambda row: (row["topic"], row["broker"], row["queue"]))
    return content, queue_lines(content)


def queue_lines(content: list[dict[str, Any]]) -> Iterator[str]:
    if not content:
        yield "it has read nothing"
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
    yield from table_lines(_QUEUE_COLUMNS, rows, terminal_width(sys.stdout))
    yield f"lag in all: {sum(row['lag'] for row in content)}"


# --- one of them ---------------------------------------------------------------------------------


def show_group(cluster: Cluster, name: str) -> tuple[dict[str, Any], Iterable[str]]:
    def question(
        caller: SyncConnection,
    ) -> tuple[dict[str, Any] | None, ConsumerConnections | None]:
        return group_configs(caller).get(name), consumer_connections(caller, [name]).get(name)

    found = [(place, *told) for place, told in cluster.ask_all(question) if told[0] is not None]
    if not found and not cluster.failures:
        raise group_not_found(name, cluster)
    members: dict[str, dict[str, Any]] = {}
    wanted: dict[str, str] = {}
    habits: dict[str, str] = {}
    for _, _, told in found:
        if told is None:
            continue
        habits = {"consumes": told.consume_type, "model": told.message_model}
        for topic, subscription in told.subscription_table.items():
            wanted[topic] = subscription.sub_string
        for client in told.connection_set:
            members[client.client_id] = {
                "client": client.client_id,
                "address": client.client_addr,
                "language": client.language,
                "version": client.version,
            }
    lags, lag_lines = list_lag_by_queue(cluster, name, None)
    content = {
        "group": name,
        "settings": {place.name: config for place, config, _ in found},
        **habits,
        "subscriptions": wanted,
        "members": [members[client] for client in sorted(members)],
        "queues": lags,
    }
    return content, _show_lines(content, lag_lines)


def _show_lines(content: dict[str, Any], lag_lines: Iterable[str]) -> Iterator[str]:
    yield f"group {printable(content['group'])}"
    for broker, config in content["settings"].items():
        yield ""
        fields = [("broker", printable(broker))]
        fields += [
            (text, str(config[key])) for key, text in _SETTING_LABELS.items() if key in config
        ]
        yield from field_lines(fields)
    yield ""
    if "consumes" in content:
        yield f"{content['consumes']}, {content['model']}"
    for topic, expression in sorted(content["subscriptions"].items()):
        yield f"wants {printable(topic)}: {printable(expression)}"
    rows = [
        (
            printable(one["client"]),
            one["address"],
            printable(one["language"]),
            str(one["version"]),
        )
        for one in content["members"]
    ]
    if not rows:
        yield "nobody of it is connected"
    yield from table_lines(_MEMBER_COLUMNS, rows, terminal_width(sys.stdout))
    yield ""
    yield from lag_lines


_RESET_TO_LATEST: Final = -1
_OFFSET_CHANGE_COLUMNS: Final = (
    TableColumn("TOPIC", can_shrink=True),
    TableColumn("BROKER", can_shrink=True),
    TableColumn("QUEUE", is_number=True),
    TableColumn("FROM", is_number=True),
    TableColumn("TO", is_number=True),
    TableColumn("WHICH IS"),
)


@dataclass(frozen=True, slots=True)
class OffsetChange:
    queue: QueueName
    old_offset: int
    new_offset: int

    @property
    def text(self) -> str:
        count = self.new_offset - self.old_offset
        if not count:
            return "no change"
        return f"{-count} read again" if count < 0 else f"{count} skipped"

    def as_json(self) -> dict[str, Any]:
        return {
            "topic": self.queue.topic,
            "broker": self.queue.broker_name,
            "queue": self.queue.queue_id,
            "from": self.old_offset,
            "to": self.new_offset,
        }


def plan_offset_changes(
    cluster: Cluster, group: str, topic: str | None, target: str | int
) -> list[OffsetChange]:
    """Nothing is changed. Brokers that do not know the group are left out from here on."""

    def question(caller: SyncConnection) -> list[OffsetChange] | None:
        if group not in group_configs(caller):
            return None
        progress = group_progress(caller, group, topic)
        return _broker_offset_changes(caller, progress, group, topic, target)

    found = cluster.ask_all(question, ignored_codes=NOT_FOUND_CODES)
    known = [(place, moves) for place, moves in found if moves is not None]
    if not known and not cluster.failures:
        raise group_not_found(group, cluster)
    cluster.brokers = [place for place, moves in known if moves]
    return [move for _, moves in known for move in moves]


def _broker_offset_changes(
    connection: SyncConnection,
    progress: GroupProgress,
    group: str,
    topic: str | None,
    target: str | int,
) -> list[OffsetChange]:
    wanted = {queue.topic for queue in progress if topic or not _is_retry_topic(queue.topic, group)}
    moves = []
    for offsets in topic_offsets(connection, sorted(wanted)).values():
        for queue, place in offsets.items():
            if queue in progress:
                after = _target_offset(connection, queue, place, target)
                moves.append(OffsetChange(queue, progress[queue].consumer_offset, after))
    return sorted(moves, key=lambda move: (move.queue.topic, move.queue.queue_id))


def _is_retry_topic(topic: str, group: str) -> bool:
    """Its messages have been read once: they are read again by themselves."""
    return topic == retry_topic(group)


def _target_offset(
    connection: SyncConnection, queue: QueueName, bounds: TopicOffset, target: str | int
) -> int:
    if target == EARLIEST:
        return bounds.min_offset
    if target == LATEST:
        return bounds.max_offset
    asked = SearchOffset(topic=queue.topic, queue_id=queue.queue_id, timestamp=int(target))
    reply = connection.call(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, asked)
    return decode_header(OffsetResponse, reply.ext_fields).offset


def offset_change_lines(changes: Sequence[OffsetChange]) -> Iterator[str]:
    rows = (
        (
            printable(move.queue.topic),
            printable(move.queue.broker_name),
            str(move.queue.queue_id),
            str(move.old_offset),
            str(move.new_offset),
            move.text,
        )
        for move in changes
    )
    yield from table_lines(_OFFSET_CHANGE_COLUMNS, rows, terminal_width(sys.stdout))


def reset_offsets(
    cluster: Cluster, group: str, topics: Sequence[str], target: str | int
) -> list[dict[str, Any]]:
    """The places where the group goes on, as its brokers say."""
    timestamp = {EARLIEST: 0, LATEST: _RESET_TO_LATEST}.get(str(target))
    time = int(target) if timestamp is None else timestamp
    done: list[dict[str, Any]] = []
    for topic in topics:
        asked = ResetOffset(topic=topic, group=group, timestamp=time, is_force=True)
        for place, table in cluster.ask_all(partial(_reset_on_broker, request=asked)):
            done += _new_offsets(place, table)
    return done


def _reset_on_broker(connection: SyncConnection, request: ResetOffset) -> dict[str, int]:
    body = connection.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, request).body
    return dict(decode_queue_tables(body).get("offsetTable", {}))


def _new_offsets(broker: BrokerAddress, table: dict[str, int]) -> Iterator[dict[str, Any]]:
    for key, offset in table.items():
        queue = decode_queue_key(key)
        yield {
            "topic": queue.topic,
            "broker": broker.name,
            "queue": queue.queue_id,
            "offset": offset,
        }


_name_argument = click.argument("name", metavar="GROUP", shell_complete=complete_group)


@click.group()
def group() -> None:
    """Consumer groups: who is connected, how far they are; reset and delete them."""


# --- looking -------------------------------------------------------------------------------------


@group.command("list")
@click.option("--all", "with_own", is_flag=True, help="Also those of RocketMQ's own tools.")
@query_command
def list_(view: QueryContext, with_own: bool) -> None:
    """List groups, their members that are connected, and what they have not read."""
    view.show(list_groups, with_own=with_own)


@group.command()
@_name_argument
@query_command
def show(view: QueryContext, name: str) -> None:
    """Print the settings of a group, who of it is connected, and how far it is."""
    view.show(show_group, name)


@group.command()
@click.argument("name", metavar="[GROUP]", required=False, shell_complete=complete_group)
@click.option("--topic", help="Only of this topic.", shell_complete=complete_topic)
@query_command
def lag(view: QueryContext, name: str | None, topic: str | None) -> None:
    """Print how many messages groups have not read, the slowest first.

    With a GROUP, queue by queue. READ UP TO is when the last message was stored that it has read.
    """
    if name is not None:
        view.show(list_lag_by_queue, name, topic)
    elif topic is None:
        view.show(list_lag_by_topic)
    else:
        raise click.UsageError("--topic goes with a GROUP; escrowmq topic show has all its groups")


# --- changing ------------------------------------------------------------------------------------


@group.command()
@_name_argument
@click.option(
    "--to",
    "target",
    required=True,
    callback=parse_start_option,
    metavar="TIME|earliest|latest",
    help="2026-01-01T00:00 (UTC): read again what was stored then or later.",
)
@click.option(
    "--topic", help="Only of this topic.  [all that it reads]", shell_complete=complete_topic
)
@confirm_options
@cluster_options
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
    brokers = Cluster(namesrv, broker)
    moves = plan_offset_changes(brokers, name, topic, target)
    brokers.require_all_answered()
    if not moves:
        raise NoRoute(f"group {name} has read no topic: name one with --topic")
    if dry_run or not in_json:
        _print_offset_changes(moves, in_json=in_json, is_question=not dry_run)
    if dry_run:
        context.exit(0)
    confirm(f"Move group {name} to these places?", yes=yes)
    done = reset_offsets(brokers, name, sorted({move.queue.topic for move in moves}), target)
    with ignore_broken_pipe():
        if in_json:
            click.echo(json.dumps(done))
        else:
            click.echo(f"{name}  {len(done)} queues moved")
    exit_with_failures(context, brokers)


def _print_offset_changes(changes: list[OffsetChange], *, in_json: bool, is_question: bool) -> None:
    with ignore_broken_pipe():
        if in_json:
            click.echo(json.dumps([move.as_json() for move in changes]))
            return
        for line in offset_change_lines(changes):
            click.echo(line, err=is_question)


@group.command()
@click.argument("names", nargs=-1, required=True, metavar="GROUP...", shell_complete=complete_group)
@click.option("--keep-offsets", is_flag=True, help="Do not forget how far it has read.")
@confirm_options
@cluster_options
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
    brokers = Cluster(namesrv, broker)
    for name in names:
        text = _group_summary(brokers, name)
        click.echo(f"{text}, would be deleted" if dry_run else text, err=not dry_run)
    if dry_run:
        context.exit(0)
    what = names[0] if len(names) == 1 else f"these {len(names)} groups"
    confirm(f"Delete {what} for good?", yes=yes)
    forget = not keep_offsets
    with ignore_broken_pipe():
        for name in names:
            asked = DeleteGroup(group_name=name, clean_offset=forget, remove_offset=forget)
            _delete_group(brokers, name, asked, in_json)
    exit_with_failures(context, brokers)


def _group_summary(cluster: Cluster, name: str) -> str:
    found = cluster.ask_all(
        lambda caller: (
            name in group_configs(caller),
            consumer_connections(caller, [name]),
            total_lag(group_progress(caller, name).values()),
        )
    )
    cluster.require_all_answered()
    if not any(is_there for _, (is_there, _, _) in found):
        raise group_not_found(name, cluster)
    members = {
        client.client_id
        for _, (_, connected, _) in found
        for told in connected.values()
        for client in told.connection_set
    }
    unread = sum(lag for _, (_, _, lag) in found)
    return f"{name}: {len(members)} members connected, {unread} messages not read"


def _delete_group(cluster: Cluster, name: str, request: DeleteGroup, in_json: bool) -> None:
    code: Any = RequestCode.DELETE_SUBSCRIPTIONGROUP
    done = cluster.ask_all(lambda caller: caller.call(code, request))
    if in_json:
        click.echo(json.dumps({"group": name, "deleted_on": [place.name for place, _ in done]}))
    elif done:
        places = ", ".join(place.name for place, _ in done)
        click.echo(f"{name}  deleted on {places}")
