"""Topics as people and programs read them, put together from what all brokers say."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

from escrowmq.cli.brokers import Brokers
from escrowmq.cli.call import BrokerPlace, Caller
from escrowmq.cli.figures import (
    GONE,
    Offsets,
    Progress,
    groups_of,
    is_inner,
    lag_of,
    own_topics,
    progress_of,
    topic_config,
    topic_configs,
    topic_offsets,
)
from escrowmq.cli.record import printable, utc
from escrowmq.cli.table import Column, field_lines, table_lines, width_of
from escrowmq.errors import NoRoute
from escrowmq.wire.bodies import TopicConfig

_LIST: Final = (
    Column("TOPIC", gives_way=True),
    Column("QUEUES", is_number=True),
    Column("PERM"),
    Column("BROKERS", gives_way=True),
)
_LONG: Final = (Column("MESSAGES", is_number=True), Column("LAST"))
_QUEUES: Final = (
    Column("BROKER", gives_way=True),
    Column("QUEUE", is_number=True),
    Column("FIRST", is_number=True),
    Column("END", is_number=True),
    Column("MESSAGES", is_number=True),
    Column("LAST"),
)
_GROUPS: Final = (Column("GROUP", gives_way=True), Column("LAG", is_number=True))


def found_topics(
    brokers: Brokers, *, with_own: bool, long: bool
) -> tuple[list[dict[str, Any]], Iterable[str]]:
    def question(caller: Caller) -> tuple[dict[str, TopicConfig], dict[str, Offsets]]:
        own = set() if with_own else own_topics(caller)
        configs = {
            name: config
            for name, config in topic_configs(caller).items()
            if with_own or not (name in own or is_inner(name))
        }
        return configs, topic_offsets(caller, list(configs)) if long else {}

    rows: dict[str, dict[str, Any]] = {}
    for place, (configs, offsets) in brokers.ask(question):
        for name, config in configs.items():
            _add(rows, place, config, offsets.get(name))
    content = [rows[name] for name in sorted(rows)]
    return content, _list_lines(content, long)


def _add(
    rows: dict[str, dict[str, Any]],
    place: BrokerPlace,
    config: TopicConfig,
    offsets: Offsets | None,
) -> None:
    row = rows.setdefault(
        config.topic_name,
        {
            "topic": config.topic_name,
            "read_queues": 0,
            "write_queues": 0,
            "perm": perm_text(config.perm),
            "order": config.order,
            "brokers": [],
        },
    )
    row["read_queues"] += config.read_queue_nums
    row["write_queues"] += config.write_queue_nums
    row["brokers"].append(place.name)
    if row["perm"] != perm_text(config.perm):
        row["perm"] = "differs"
    if offsets is not None:
        last = max((one.last_update_timestamp for one in offsets.values()), default=0)
        known = row.get("last_stored")
        row["messages"] = row.get("messages", 0) + messages_in(offsets)
        row["last_stored"] = max(utc_or_none(last) or "", known or "") or None


def _list_lines(content: list[dict[str, Any]], long: bool) -> Iterator[str]:
    if not content:
        yield "no topics"
    columns = (*_LIST, *_LONG) if long else _LIST
    yield from table_lines(columns, (_list_cells(row, long) for row in content), _width())


def _list_cells(row: dict[str, Any], long: bool) -> list[str]:
    read, write = row["read_queues"], row["write_queues"]
    cells = [
        printable(row["topic"]),
        str(read) if read == write else f"{read}/{write}",
        row["perm"],
        ",".join(map(printable, row["brokers"])),
    ]
    if long:
        cells += [str(row.get("messages", "-")), row.get("last_stored") or "-"]
    return cells


# --- one of them ---------------------------------------------------------------------------------


def shown_topic(brokers: Brokers, name: str) -> tuple[dict[str, Any], Iterable[str]]:
    def question(caller: Caller) -> tuple[TopicConfig, Offsets, dict[str, Progress]]:
        config = topic_config(caller, name)
        groups = {group: progress_of(caller, group, name) for group in groups_of(caller, name)}
        return config, topic_offsets(caller, [name]).get(name, {}), groups

    found = brokers.ask(question, unless=GONE)
    if not found and not brokers.failed:
        asked = ", ".join(place.name for place in brokers.brokers)
        raise NoRoute(f"no topic {printable(name)} on {asked}: escrowmq topic list shows them")
    lags: dict[str, int] = {}
    for _, (_, _, groups) in found:
        for group, progress in groups.items():
            lags[group] = lags.get(group, 0) + lag_of(progress.values())
    content = {
        "topic": name,
        "brokers": [_broker_json(place, *told[:2]) for place, told in found],
        "groups": [{"group": group, "lag": lags[group]} for group in sorted(lags)],
    }
    return content, _show_lines(content)


def _broker_json(place: BrokerPlace, config: TopicConfig, offsets: Offsets) -> dict[str, Any]:
    return {
        "broker": place.name,
        "read_queues": config.read_queue_nums,
        "write_queues": config.write_queue_nums,
        "perm": perm_text(config.perm),
        "order": config.order,
        "attributes": config.attributes,
        "messages": messages_in(offsets),
        "queues": [
            {
                "queue": queue.queue_id,
                "first": one.min_offset,
                "end": one.max_offset,
                "last_stored": utc(one.last_update_timestamp)
                if one.last_update_timestamp
                else None,
            }
            for queue, one in sorted(offsets.items(), key=lambda item: item[0].queue_id)
        ],
    }


def _show_lines(content: dict[str, Any]) -> Iterator[str]:
    yield f"topic {printable(content['topic'])}"
    for told in content["brokers"]:
        attributes = ", ".join(f"{name}={value}" for name, value in told["attributes"].items())
        yield ""
        yield from field_lines(
            [
                ("broker", printable(told["broker"])),
                ("queues", f"{told['read_queues']} to read, {told['write_queues']} to write"),
                ("perm", told["perm"] + (", in order" if told["order"] else "")),
                ("messages", str(told["messages"])),
                *([("attributes", printable(attributes))] if attributes else []),
            ]
        )
    rows = [
        (
            printable(told["broker"]),
            *(str(queue[field]) for field in ("queue", "first", "end")),
            str(queue["end"] - queue["first"]),
            queue["last_stored"] or "-",
        )
        for told in content["brokers"]
        for queue in told["queues"]
    ]
    yield ""
    yield from table_lines(_QUEUES, rows, _width())
    yield ""
    groups = [(printable(one["group"]), str(one["lag"])) for one in content["groups"]]
    if not groups:
        yield "nobody has read it"
    yield from table_lines(_GROUPS, groups, _width())


# --- small things --------------------------------------------------------------------------------


def messages_in(offsets: Offsets) -> int:
    return sum(one.max_offset - one.min_offset for one in offsets.values())


def perm_text(perm: int) -> str:
    return ("r" if perm & 4 else "") + ("w" if perm & 2 else "") or "none"


def utc_or_none(stored_ms: int) -> str | None:
    return utc(stored_ms) if stored_ms > 0 else None


def _width() -> int | None:
    return width_of(sys.stdout)
