"""Consumer groups as people and programs read them, put together from what all brokers say."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

from escrowmq.cli.brokers import Brokers
from escrowmq.cli.call import Caller
from escrowmq.cli.figures import (
    Progress,
    connections,
    group_configs,
    is_own_group,
    lag_of,
    progress_of,
    progress_of_all,
)
from escrowmq.cli.record import printable
from escrowmq.cli.table import Column, field_lines, table_lines, width_of
from escrowmq.cli.topics import utc_or_none
from escrowmq.errors import NoRoute
from escrowmq.wire.bodies_admin import ConsumerConnections

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
