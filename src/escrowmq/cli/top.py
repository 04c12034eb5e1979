"""What a cluster does at this moment: rates, counted between two looks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from escrowmq.cli.brokers import Brokers
from escrowmq.cli.call import Caller
from escrowmq.cli.figures import (
    Progress,
    is_own_group,
    lag_of,
    own_topics,
    progress_of_all,
    runtime,
    topic_configs,
    topic_offsets,
)
from escrowmq.cli.machines import disk_ratio, disk_text, up_s
from escrowmq.cli.pending import duration_text
from escrowmq.cli.record import printable
from escrowmq.cli.table import Column, table_lines, width_of
from escrowmq.clock import Clock, SystemClock, utc_text

TOPICS_MAX: Final = 2_000  # looked at on each broker: more would take longer than people watch
_BROKERS: Final = (
    Column("BROKER", gives_way=True),
    Column("IN/S", is_number=True),
    Column("OUT/S", is_number=True),
    Column("BYTES/S", is_number=True),
    Column("DISK", is_number=True),
    Column("UP"),
)
_TOPICS: Final = (
    Column("TOPIC", gives_way=True),
    Column("IN/S", is_number=True),
    Column("MESSAGES", is_number=True),
)
_GROUPS: Final = (
    Column("GROUP", gives_way=True),
    Column("TOPIC", gives_way=True),
    Column("READ/S", is_number=True),
    Column("LAG", is_number=True),
)

_Place = tuple[str, str]


@dataclass(slots=True)
class Look:
    """Totals at one moment; who was not there before has no rate yet."""

    at_s: float
    tables: dict[str, dict[str, str]] = field(default_factory=dict)  # by broker
    ends: dict[_Place, int] = field(default_factory=dict)  # by broker and topic
    firsts: dict[_Place, int] = field(default_factory=dict)
    reads: dict[tuple[str, _Place], int] = field(default_factory=dict)  # by broker, group and topic
    lags: dict[tuple[str, _Place], int] = field(default_factory=dict)


class Top:
    def __init__(self, brokers: Brokers, *, rows_max: int, clock: Clock | None = None) -> None:
        self._brokers = brokers
        self._rows_max = rows_max
        self._clock = clock or SystemClock()
        self._before: Look | None = None

    def look(self) -> Look:
        look = Look(self._clock.elapsed_s())
        for place, (table, offsets, progress) in self._brokers.ask(_totals):
            look.tables[place.name] = table
            for topic, queues in offsets.items():
                here = (place.name, topic)
                look.ends[here] = sum(one.max_offset for one in queues.values())
                look.firsts[here] = sum(one.min_offset for one in queues.values())
            for group, read in progress.items():
                _add_reads(look, place.name, group, read)
        self._before = look
        return look

    def found(self) -> tuple[dict[str, Any], Iterable[str]]:
        """Since the look before."""
        before = self._before
        look = self.look()
        content = summary(before or look, look)
        content["at"] = utc_text(self._clock.now_ms())
        return content, _lines(content, self._rows_max)


def _totals(caller: Caller) -> tuple[dict[str, str], dict[str, Any], dict[str, Progress]]:
    table = runtime(caller)
    own = own_topics(caller)
    topics = sorted(name for name in topic_configs(caller) if name not in own)[:TOPICS_MAX]
    progress = {
        group: read for group, read in progress_of_all(caller).items() if not is_own_group(group)
    }
    return table, topic_offsets(caller, topics), progress


def _add_reads(look: Look, broker: str, group: str, progress: Progress) -> None:
    for queue, one in progress.items():
        here = broker, (group, queue.topic)
        look.reads[here] = look.reads.get(here, 0) + one.consumer_offset
        look.lags[here] = look.lags.get(here, 0) + lag_of([one])


def summary(before: Look, now: Look) -> dict[str, Any]:
    """For programs; topics and groups over all brokers, the busiest first."""
    seconds = max(now.at_s - before.at_s, 0.001)
    topics: dict[str, dict[str, Any]] = {}
    for here, end in now.ends.items():
        row = topics.setdefault(here[1], {"topic": here[1], "in_per_s": 0.0, "messages": 0})
        row["in_per_s"] += max(0, end - before.ends.get(here, end)) / seconds
        row["messages"] += end - now.firsts[here]
    groups: dict[_Place, dict[str, Any]] = {}
    for place, read in now.reads.items():
        group, topic = place[1]
        empty = {"group": group, "topic": topic, "read_per_s": 0.0, "lag": 0}
        row = groups.setdefault(place[1], empty)
        row["read_per_s"] += max(0, read - before.reads.get(place, read)) / seconds
        row["lag"] += now.lags[place]
    return {
        "brokers": [_broker(name, before, now, seconds) for name in sorted(now.tables)],
        "topics": sorted(topics.values(), key=lambda row: (-row["in_per_s"], row["topic"])),
        "groups": sorted(
            groups.values(), key=lambda row: (-row["read_per_s"], -row["lag"], row["group"])
        ),
    }


def _broker(name: str, before: Look, now: Look, seconds: float) -> dict[str, Any]:
    table = now.tables[name]
    old = before.tables.get(name, table)

    def per_s(key: str) -> float:
        try:
            return max(0, int(table[key]) - int(old[key])) / seconds
        except (KeyError, ValueError):
            return 0.0

    return {
        "broker": name,
        "in_per_s": per_s("msgPutTotalTodayNow"),
        "out_per_s": per_s("msgGetTotalTodayNow"),
        "bytes_per_s": per_s("commitLogMaxOffset"),
        "disk_used": disk_ratio(table),
        "up_s": up_s(table),
    }


def _lines(content: dict[str, Any], rows_max: int) -> Iterator[str]:
    width = width_of(sys.stdout)
    yield f"escrowmq top  {content['at']}"
    yield ""
    rows = [
        (
            printable(row["broker"]),
            f"{row['in_per_s']:.1f}",
            f"{row['out_per_s']:.1f}",
            size_text(row["bytes_per_s"]),
            disk_text(row["disk_used"]),
            duration_text(row["up_s"] * 1000),
        )
        for row in content["brokers"]
    ]
    yield from table_lines(_BROKERS, rows, width)
    yield ""
    topics = [
        (printable(row["topic"]), f"{row['in_per_s']:.1f}", str(row["messages"]))
        for row in content["topics"][:rows_max]
    ]
    yield from table_lines(_TOPICS, topics, width)
    yield ""
    groups = [
        (
            printable(row["group"]),
            printable(row["topic"]),
            f"{row['read_per_s']:.1f}",
            str(row["lag"]),
        )
        for row in content["groups"][:rows_max]
    ]
    yield from table_lines(_GROUPS, groups, width)


def size_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
