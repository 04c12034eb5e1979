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

from escrowmq.broker.metadata import RETRY_PREFIX
from escrowmq.cli.brokers import Brokers, end
from escrowmq.cli.call import BrokerPlace, Caller
from escrowmq.cli.commands.topic import utc_or_none
from escrowmq.cli.figures import (
    GONE,
    Progress,
    connections,
    group_configs,
    is_own_group,
    lag_of,
    progress_of,
    progress_of_all,
    topic_offsets,
)
from escrowmq.cli.options import (
    EARLIEST,
    LATEST,
    careful,
    confirm,
    group_names,
    place_in_time,
    topic_names,
    where,
)
from escrowmq.cli.output import (
    Column,
    View,
    field_lines,
    looking,
    reader_may_leave,
    table_lines,
    width_of,
)
from escrowmq.cli.rendering import printable
from escrowmq.errors import NoRoute
from escrowmq.remoting.bodies import QueueName
from escrowmq.remoting.bodies_admin import ConsumerConnections, TopicOffset, queue_of, queue_tables
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import OffsetAnswer, SearchOffset, decode_header
from escrowmq.remoting.headers_admin import DeleteGroup, ResetOffset

_LIST: Final = (
    Column("GROUP", gives_way=True),
    Column("MEMBERS", is_number=True),
    Column("LAG", is_number=True),
    Column("TOPICS", gives_way=True),
)
_LAGS: Final = (
    Column("GROUP", gives_way=True),
    Column("TOPIC", gives_way=True),
    Column("LAG", is_number=True),
    Column("READ UP TO"),
)
_QUEUES: Final = (
    Column("TOPIC", gives_way=True),
    Column("BROKER", gives_way=True),
    Column("QUEUE", is_number=True),
    Column("READ", is_number=True),
    Column("END", is_number=True),
    Column("LAG", is_number=True),
    Column("READ UP TO"),
)
_MEMBERS: Final = (
    Column("CLIENT", gives_way=True),
    Column("ADDRESS"),
    Column("LANGUAGE"),
    Column("VERSION", is_number=True),
)
_SHOWN: Final = {
    "consumeEnable": "may read",
    "consumeBroadcastEnable": "may read as broadcast",
    "retryMaxTimes": "deliveries before a dead letter",
    "retryQueueNums": "retry queues",
}


def no_group(name: str, brokers: Brokers) -> NoRoute:
    asked = ", ".join(place.name for place in brokers.brokers)
    return NoRoute(f"no group {printable(name)} on {asked}: escrowmq group list shows them")


# --- all of them ---------------------------------------------------------------------------------


def found_groups(brokers: Brokers, *, with_own: bool) -> tuple[list[dict[str, Any]], Iterable[str]]:
    def question(
        caller: Caller,
    ) -> tuple[list[str], dict[str, Progress], dict[str, ConsumerConnections]]:
        names = [name for name in group_configs(caller) if with_own or not is_own_group(name)]
        return names, progress_of_all(caller), connections(caller, names)

    rows: dict[str, dict[str, Any]] = {}
    members: dict[str, set[str]] = {}
    topics: dict[str, set[str]] = {}
    for place, (names, progress, connected) in brokers.ask(question):
        for name in names:
            row = rows.setdefault(name, {"group": name, "members": 0, "lag": 0, "brokers": []})
            mine = progress.get(name, {})
            row["lag"] += lag_of(mine.values())
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
    yield from table_lines(_LIST, rows, width_of(sys.stdout))


# --- how far they are ----------------------------------------------------------------------------


def lags_by_topic(brokers: Brokers) -> tuple[list[dict[str, Any]], Iterable[str]]:
    """Of every group, one row for each topic that it reads."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for _, progress in brokers.ask(progress_of_all):
        for group, queues in progress.items():
            for queue, one in queues.items() if not is_own_group(group) else ():
                row = rows.setdefault(
                    (group, queue.topic),
                    {"group": group, "topic": queue.topic, "lag": 0, "read_up_to": None},
                )
                row["lag"] += lag_of([one])
                read = utc_or_none(one.last_timestamp)
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
    yield from table_lines(_LAGS, rows, width_of(sys.stdout))


def lags_by_queue(
    brokers: Brokers, group: str, topic: str | None
) -> tuple[list[dict[str, Any]], Iterable[str]]:
    def question(caller: Caller) -> Progress | None:
        is_there = group in group_configs(caller)
        return progress_of(caller, group, topic) if is_there else None

    found = [told for _, told in brokers.ask(question) if told is not None]
    if not found and not brokers.failed:
        raise no_group(group, brokers)
    content = [
        {
            "topic": queue.topic,
            "broker": queue.broker_name,
            "queue": queue.queue_id,
            "read": one.consumer_offset,
            "end": one.broker_offset,
            "lag": lag_of([one]),
            "read_up_to": utc_or_none(one.last_timestamp),
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
    yield from table_lines(_QUEUES, rows, width_of(sys.stdout))
    yield f"lag in all: {sum(row['lag'] for row in content)}"


# --- one of them ---------------------------------------------------------------------------------


def shown_group(brokers: Brokers, name: str) -> tuple[dict[str, Any], Iterable[str]]:
    def question(
        caller: Caller,
    ) -> tuple[dict[str, Any] | None, ConsumerConnections | None]:
        return group_configs(caller).get(name), connections(caller, [name]).get(name)

    found = [(place, *told) for place, told in brokers.ask(question) if told[0] is not None]
    if not found and not brokers.failed:
        raise no_group(name, brokers)
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
    lags, lag_lines = lags_by_queue(brokers, name, None)
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
        fields += [(text, str(config[key])) for key, text in _SHOWN.items() if key in config]
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
    yield from table_lines(_MEMBERS, rows, width_of(sys.stdout))
    yield ""
    yield from lag_lines


_TO_THE_END: Final = -1
_COLUMNS: Final = (
    Column("TOPIC", gives_way=True),
    Column("BROKER", gives_way=True),
    Column("QUEUE", is_number=True),
    Column("FROM", is_number=True),
    Column("TO", is_number=True),
    Column("WHICH IS"),
)


@dataclass(frozen=True, slots=True)
class Move:
    queue: QueueName
    before: int
    after: int

    @property
    def text(self) -> str:
        count = self.after - self.before
        if not count:
            return "no change"
        return f"{-count} read again" if count < 0 else f"{count} skipped"

    def as_json(self) -> dict[str, Any]:
        return {
            "topic": self.queue.topic,
            "broker": self.queue.broker_name,
            "queue": self.queue.queue_id,
            "from": self.before,
            "to": self.after,
        }


def planned_moves(brokers: Brokers, group: str, topic: str | None, target: str | int) -> list[Move]:
    """Nothing is changed. Brokers that do not know the group are left out from here on."""

    def question(caller: Caller) -> list[Move] | None:
        if group not in group_configs(caller):
            return None
        progress = progress_of(caller, group, topic)
        return _moves_of(caller, progress, group, topic, target)

    found = brokers.ask(question, unless=GONE)
    known = [(place, moves) for place, moves in found if moves is not None]
    if not known and not brokers.failed:
        raise no_group(group, brokers)
    brokers.brokers = [place for place, moves in known if moves]
    return [move for _, moves in known for move in moves]


def _moves_of(
    caller: Caller, progress: Progress, group: str, topic: str | None, target: str | int
) -> list[Move]:
    wanted = {queue.topic for queue in progress if topic or not _is_retry(queue.topic, group)}
    moves = []
    for offsets in topic_offsets(caller, sorted(wanted)).values():
        for queue, place in offsets.items():
            if queue in progress:
                after = _target(caller, queue, place, target)
                moves.append(Move(queue, progress[queue].consumer_offset, after))
    return sorted(moves, key=lambda move: (move.queue.topic, move.queue.queue_id))


def _is_retry(topic: str, group: str) -> bool:
    """Its messages have been read once: they are read again by themselves."""
    return topic == f"{RETRY_PREFIX}{group}"


def _target(caller: Caller, queue: QueueName, place: TopicOffset, target: str | int) -> int:
    if target == EARLIEST:
        return place.min_offset
    if target == LATEST:
        return place.max_offset
    asked = SearchOffset(topic=queue.topic, queue_id=queue.queue_id, timestamp=int(target))
    reply = caller.call(RequestCode.SEARCH_OFFSET_BY_TIMESTAMP, asked)
    return decode_header(OffsetAnswer, reply.ext_fields).offset


def move_lines(moves: Sequence[Move]) -> Iterator[str]:
    rows = (
        (
            printable(move.queue.topic),
            printable(move.queue.broker_name),
            str(move.queue.queue_id),
            str(move.before),
            str(move.after),
            move.text,
        )
        for move in moves
    )
    yield from table_lines(_COLUMNS, rows, width_of(sys.stdout))


def reset_offsets(
    brokers: Brokers, group: str, topics: Sequence[str], target: str | int
) -> list[dict[str, Any]]:
    """The places where the group goes on, as its brokers say."""
    timestamp = {EARLIEST: 0, LATEST: _TO_THE_END}.get(str(target))
    time = int(target) if timestamp is None else timestamp
    done: list[dict[str, Any]] = []
    for topic in topics:
        asked = ResetOffset(topic=topic, group=group, timestamp=time, is_force=True)
        for place, table in brokers.ask(partial(_reset, asked=asked)):
            done += _places(place, table)
    return done


def _reset(caller: Caller, asked: ResetOffset) -> dict[str, int]:
    body = caller.call(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, asked).body
    return dict(queue_tables(body).get("offsetTable", {}))


def _places(place: BrokerPlace, table: dict[str, int]) -> Iterator[dict[str, Any]]:
    for key, offset in table.items():
        queue = queue_of(key)
        yield {
            "topic": queue.topic,
            "broker": place.name,
            "queue": queue.queue_id,
            "offset": offset,
        }


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
