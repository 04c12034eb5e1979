"""`escrowmq broker …`: which brokers there are, how they are, what they do, how they are set.

Brokers as people and programs read them.

What a cluster does at this moment: rates, counted between two looks.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import click

from escrowmq.cli.brokers import Brokers, end
from escrowmq.cli.call import BrokerPlace, Caller
from escrowmq.cli.commands.transaction import duration_text
from escrowmq.cli.figures import (
    Progress,
    is_own_group,
    lag_of,
    own_topics,
    progress_of_all,
    runtime,
    settings,
    topic_configs,
    topic_offsets,
)
from escrowmq.cli.options import broker_names, careful, confirm, watch, where
from escrowmq.cli.output import (
    Column,
    View,
    field_lines,
    looking,
    pause,
    reader_may_leave,
    table_lines,
    width_of,
)
from escrowmq.cli.output import show as show_again
from escrowmq.cli.rendering import printable
from escrowmq.clock import Clock, SystemClock, utc_text
from escrowmq.config.properties_file import write_property
from escrowmq.remoting.codes import RequestCode

_LIST: Final = (
    Column("BROKER", gives_way=True),
    Column("ADDRESS"),
    Column("VERSION", gives_way=True),
    Column("UP"),
    Column("IN/S", is_number=True),
    Column("OUT/S", is_number=True),
    Column("DISK", is_number=True),
    Column("STATE"),
)
_UNITS_S: Final = {"days": 86_400, "hours": 3_600, "minutes": 60, "seconds": 1}


def found_brokers(brokers: Brokers) -> tuple[list[dict[str, Any]], Iterable[str]]:
    content = [_as_json(place, table) for place, table in brokers.ask(runtime)]
    rows = (
        (
            printable(row["broker"]),
            row["address"],
            printable(row["version"]),
            duration_text(row["up_s"] * 1000),
            f"{row['in_per_s']:.1f}",
            f"{row['out_per_s']:.1f}",
            disk_text(row["disk_used"]),
            "ok" if row["takes_messages"] else "takes no messages",
        )
        for row in content
    )
    return content, table_lines(_LIST, rows, width_of(sys.stdout))


def _as_json(place: BrokerPlace, table: dict[str, str]) -> dict[str, Any]:
    return {
        "broker": place.name,
        "address": place.address,
        "version": table.get("brokerVersionDesc", ""),
        "up_s": up_s(table),
        "in_per_s": rate(table, "putTps"),
        "out_per_s": rate(table, "getTransferedTps"),
        "disk_used": disk_ratio(table),
        "takes_messages": table.get("brokerActive", "true") == "true",
    }


def shown_broker(brokers: Brokers) -> tuple[list[dict[str, Any]], Iterable[str]]:
    found = brokers.ask(runtime)
    content = [{"broker": place.name, "address": place.address, **told} for place, told in found]
    return content, _show_lines(content)


def _show_lines(content: list[dict[str, Any]]) -> Iterator[str]:
    for number, table in enumerate(content):
        if number:
            yield ""
        yield from field_lines((name, printable(value)) for name, value in table.items())


# --- figures among the texts ---------------------------------------------------------------------


def up_s(table: dict[str, str]) -> int:
    """`[ 1 days, 2 hours, 3 minutes, 4 seconds ]`"""
    parts = re.findall(r"(\d+) (days|hours|minutes|seconds)", table.get("runtime", ""))
    return sum(int(count) * _UNITS_S[unit] for count, unit in parts)


def rate(table: dict[str, str], name: str) -> float:
    """Over the last ten seconds."""
    first = table.get(name, "").partition(" ")[0]
    try:
        return float(first)
    except ValueError:
        return 0.0


def disk_ratio(table: dict[str, str]) -> float | None:
    try:
        return float(table["commitLogDiskRatio"])
    except (KeyError, ValueError):
        return None


def disk_text(used: float | None) -> str:
    return "-" if used is None else f"{used:.0%}"


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
    for here, max_offset in now.ends.items():
        row = topics.setdefault(here[1], {"topic": here[1], "in_per_s": 0.0, "messages": 0})
        row["in_per_s"] += max(0, max_offset - before.ends.get(here, max_offset)) / seconds
        row["messages"] += max_offset - now.firsts[here]
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


HIDDEN: Final = "***"  # what brokers say instead of a secret


@click.group()
def broker() -> None:
    """Which brokers there are, how they are, what they do, and their settings."""


@broker.command("list")
@looking
def list_(view: View) -> None:
    """List the brokers, what they do, and how full their disks are."""
    view.show(found_brokers)


@broker.command()
@click.argument("name", metavar="[BROKER]", required=False, shell_complete=broker_names)
@watch
@where
@click.pass_context
def show(
    context: click.Context,
    name: str | None,
    every_s: float | None,
    namesrv: str,
    broker: str | None,
    in_json: bool,
) -> None:
    """Print all figures of a broker, by RocketMQ's names. BROKER is a name or an address."""
    brokers = Brokers(namesrv, name or broker)
    found = partial(shown_broker, brokers)
    show_again(context, brokers, found, in_json=in_json, every_s=every_s)


@broker.command()
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to count.",
)
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="So many times, then end.")
@click.option("--rows", type=click.IntRange(min=1), default=10, show_default=True, metavar="N")
@where
@click.pass_context
def top(
    context: click.Context,
    every_s: float,
    count: int | None,
    rows: int,
    namesrv: str,
    broker: str | None,
    in_json: bool,
) -> None:
    """Watch what brokers, topics and groups do now, the busiest first, until Ctrl-C.

    Rates are counted between two looks. With --json each look is one line.
    """
    brokers = Brokers(namesrv, broker)
    live = Top(brokers, rows_max=rows)
    try:
        live.look()
        pause(every_s)
    except KeyboardInterrupt:
        context.exit(0)
    show_again(context, brokers, live.found, in_json=in_json, every_s=every_s, count=count)


# --- settings ------------------------------------------------------------------------------------


@broker.group()
def config() -> None:
    """The settings of running brokers; those of a file: escrowmq config."""


@config.command("get")
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@where
@click.pass_context
def get(
    context: click.Context, keys: tuple[str, ...], namesrv: str, broker: str | None, in_json: bool
) -> None:
    """Print settings of running brokers: all of them, or these."""
    brokers = Brokers(namesrv, broker)
    found = {place.name: values for place, values in brokers.ask(settings)}
    known = {key for values in found.values() for key in values}
    unknown = [key for key in keys if key not in known]
    if unknown and found:
        raise click.UsageError(
            f"there is no setting {', '.join(unknown)}: escrowmq broker config get shows all"
        )
    wanted = {
        name: {key: value for key, value in values.items() if not keys or key in keys}
        for name, values in found.items()
    }
    with reader_may_leave():
        if in_json:
            click.echo(json.dumps(wanted))
        else:
            for name, values in wanted.items():
                for key, value in sorted(values.items()):
                    click.echo(f"{printable(name)}  {key}={printable(value)}")
    end(context, brokers)


@config.command("set")
@click.argument("pairs", nargs=-1, required=True, metavar="KEY=VALUE...")
@careful
@where
@click.pass_context
def set_(
    context: click.Context,
    pairs: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    namesrv: str,
    broker: str | None,
    in_json: bool,
) -> None:
    """Change settings of running brokers, of all of them unless --broker says which.

    A broker that was started with -c FILE writes them there; others forget them when they stop.
    """
    wanted = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key.strip() or not equals:
            raise click.UsageError(f"{pair!r} is not KEY=VALUE")
        wanted[key.strip()] = value
    brokers = Brokers(namesrv, broker)
    before = brokers.ask(settings)
    brokers.must_have_answered()
    for place, values in before:
        for key, value in wanted.items():
            shown = HIDDEN if values.get(key) == HIDDEN else value
            text = f"{place.name}  {key}: {values.get(key, '-')} -> {shown}"
            click.echo(printable(text), err=not dry_run)
    if dry_run:
        context.exit(0)
    confirm("Change these settings?", yes=yes)
    body = "".join(f"{write_property(key, value)}\n" for key, value in wanted.items()).encode()
    done = brokers.ask(lambda caller: caller.call(RequestCode.UPDATE_BROKER_CONFIG, None, body))
    with reader_may_leave():
        for place, _ in done:
            content = {"broker": place.name, "changed": list(wanted)}
            click.echo(json.dumps(content) if in_json else f"{place.name}  changed")
    end(context, brokers)
