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

from escrowmq.cli.brokers import Cluster, exit_with_failures
from escrowmq.cli.call import BrokerAddress, SyncConnection
from escrowmq.cli.figures import (
    GroupProgress,
    all_progress,
    broker_runtime,
    broker_settings,
    system_topics,
    topic_configs,
    topic_offsets,
    total_lag,
)
from escrowmq.cli.options import (
    cluster_options,
    complete_broker,
    confirm,
    confirm_options,
    watch_option,
)
from escrowmq.cli.output import (
    QueryContext,
    TableColumn,
    field_lines,
    ignore_broken_pipe,
    pause,
    query_command,
    table_lines,
    terminal_width,
)
from escrowmq.cli.output import show_repeatedly as show_again
from escrowmq.cli.rendering import printable
from escrowmq.clock import Clock, SystemClock
from escrowmq.config.properties_file import write_property
from escrowmq.message.names import is_system_group
from escrowmq.parsing import format_rough_duration, format_size, format_timestamp
from escrowmq.remoting.codes import RequestCode

_LIST_COLUMNS: Final = (
    TableColumn("BROKER", can_shrink=True),
    TableColumn("ADDRESS"),
    TableColumn("VERSION", can_shrink=True),
    TableColumn("UP"),
    TableColumn("IN/S", is_number=True),
    TableColumn("OUT/S", is_number=True),
    TableColumn("DISK", is_number=True),
    TableColumn("STATE"),
)
_UNITS_S: Final = {"days": 86_400, "hours": 3_600, "minutes": 60, "seconds": 1}


def list_brokers(cluster: Cluster) -> tuple[list[dict[str, Any]], Iterable[str]]:
    content = [_broker_json(place, table) for place, table in cluster.ask_all(broker_runtime)]
    rows = (
        (
            printable(row["broker"]),
            row["address"],
            printable(row["version"]),
            format_rough_duration(row["up_s"] * 1000),
            f"{row['in_per_s']:.1f}",
            f"{row['out_per_s']:.1f}",
            disk_text(row["disk_used"]),
            "ok" if row["takes_messages"] else "takes no messages",
        )
        for row in content
    )
    return content, table_lines(_LIST_COLUMNS, rows, terminal_width(sys.stdout))


def _broker_json(broker: BrokerAddress, table: dict[str, str]) -> dict[str, Any]:
    return {
        "broker": broker.name,
        "address": broker.address,
        "version": table.get("brokerVersionDesc", ""),
        "up_s": uptime_s(table),
        "in_per_s": recent_rate(table, "putTps"),
        "out_per_s": recent_rate(table, "getTransferedTps"),
        "disk_used": disk_used_ratio(table),
        "takes_messages": table.get("brokerActive", "true") == "true",
    }


def show_broker(cluster: Cluster) -> tuple[list[dict[str, Any]], Iterable[str]]:
    found = cluster.ask_all(broker_runtime)
    content = [{"broker": place.name, "address": place.address, **told} for place, told in found]
    return content, _show_lines(content)


def _show_lines(content: list[dict[str, Any]]) -> Iterator[str]:
    for number, table in enumerate(content):
        if number:
            yield ""
        yield from field_lines((name, printable(value)) for name, value in table.items())


# --- figures among the texts ---------------------------------------------------------------------


def uptime_s(table: dict[str, str]) -> int:
    """`[ 1 days, 2 hours, 3 minutes, 4 seconds ]`"""
    parts = re.findall(r"(\d+) (days|hours|minutes|seconds)", table.get("runtime", ""))
    return sum(int(count) * _UNITS_S[unit] for count, unit in parts)


def recent_rate(table: dict[str, str], name: str) -> float:
    """Over the last ten seconds."""
    first = table.get(name, "").partition(" ")[0]
    try:
        return float(first)
    except ValueError:
        return 0.0


def disk_used_ratio(table: dict[str, str]) -> float | None:
    try:
        return float(table["commitLogDiskRatio"])
    except (KeyError, ValueError):
        return None


def disk_text(used: float | None) -> str:
    return "-" if used is None else f"{used:.0%}"


MAX_TOPICS: Final = 2_000  # looked at on each broker: more would take longer than people watch
_TOP_BROKER_COLUMNS: Final = (
    TableColumn("BROKER", can_shrink=True),
    TableColumn("IN/S", is_number=True),
    TableColumn("OUT/S", is_number=True),
    TableColumn("BYTES/S", is_number=True),
    TableColumn("DISK", is_number=True),
    TableColumn("UP"),
)
_TOP_TOPIC_COLUMNS: Final = (
    TableColumn("TOPIC", can_shrink=True),
    TableColumn("IN/S", is_number=True),
    TableColumn("MESSAGES", is_number=True),
)
_TOP_GROUP_COLUMNS: Final = (
    TableColumn("GROUP", can_shrink=True),
    TableColumn("TOPIC", can_shrink=True),
    TableColumn("READ/S", is_number=True),
    TableColumn("LAG", is_number=True),
)

_NamePair = tuple[str, str]


@dataclass(slots=True)
class ClusterSample:
    """Totals at one moment; who was not there before has no rate yet."""

    taken_s: float
    runtime_tables: dict[str, dict[str, str]] = field(default_factory=dict)  # by broker
    max_offsets: dict[_NamePair, int] = field(default_factory=dict)  # by broker and topic
    min_offsets: dict[_NamePair, int] = field(default_factory=dict)
    consumer_offsets: dict[tuple[str, _NamePair], int] = field(
        default_factory=dict
    )  # by broker, group and topic
    lags: dict[tuple[str, _NamePair], int] = field(default_factory=dict)


class ClusterMonitor:
    def __init__(self, cluster: Cluster, *, max_rows: int, clock: Clock | None = None) -> None:
        self._cluster = cluster
        self._max_rows = max_rows
        self._clock = clock or SystemClock()
        self._previous: ClusterSample | None = None

    def take_sample(self) -> ClusterSample:
        look = ClusterSample(self._clock.elapsed_s())
        for place, (table, offsets, progress) in self._cluster.ask_all(_broker_totals):
            look.runtime_tables[place.name] = table
            for topic, queues in offsets.items():
                here = (place.name, topic)
                look.max_offsets[here] = sum(one.max_offset for one in queues.values())
                look.min_offsets[here] = sum(one.min_offset for one in queues.values())
            for group, read in progress.items():
                _add_group_progress(look, place.name, group, read)
        self._previous = look
        return look

    def report(self) -> tuple[dict[str, Any], Iterable[str]]:
        """Since the look before."""
        before = self._previous
        look = self.take_sample()
        content = compare_samples(before or look, look)
        content["at"] = format_timestamp(self._clock.now_ms())
        return content, _top_lines(content, self._max_rows)


def _broker_totals(
    connection: SyncConnection,
) -> tuple[dict[str, str], dict[str, Any], dict[str, GroupProgress]]:
    table = broker_runtime(connection)
    own = system_topics(connection)
    topics = sorted(name for name in topic_configs(connection) if name not in own)[:MAX_TOPICS]
    progress = {
        group: read
        for group, read in all_progress(connection).items()
        if not is_system_group(group)
    }
    return table, topic_offsets(connection, topics), progress


def _add_group_progress(
    sample: ClusterSample, broker: str, group: str, progress: GroupProgress
) -> None:
    for queue, one in progress.items():
        here = broker, (group, queue.topic)
        sample.consumer_offsets[here] = sample.consumer_offsets.get(here, 0) + one.consumer_offset
        sample.lags[here] = sample.lags.get(here, 0) + total_lag([one])


def compare_samples(previous: ClusterSample, current: ClusterSample) -> dict[str, Any]:
    """For programs; topics and groups over all brokers, the busiest first."""
    seconds = max(current.taken_s - previous.taken_s, 0.001)
    topics: dict[str, dict[str, Any]] = {}
    for here, max_offset in current.max_offsets.items():
        row = topics.setdefault(here[1], {"topic": here[1], "in_per_s": 0.0, "messages": 0})
        row["in_per_s"] += max(0, max_offset - previous.max_offsets.get(here, max_offset)) / seconds
        row["messages"] += max_offset - current.min_offsets[here]
    groups: dict[_NamePair, dict[str, Any]] = {}
    for place, read in current.consumer_offsets.items():
        group, topic = place[1]
        empty = {"group": group, "topic": topic, "read_per_s": 0.0, "lag": 0}
        row = groups.setdefault(place[1], empty)
        row["read_per_s"] += max(0, read - previous.consumer_offsets.get(place, read)) / seconds
        row["lag"] += current.lags[place]
    return {
        "brokers": [
            _broker_rates(name, previous, current, seconds)
            for name in sorted(current.runtime_tables)
        ],
        "topics": sorted(topics.values(), key=lambda row: (-row["in_per_s"], row["topic"])),
        "groups": sorted(
            groups.values(), key=lambda row: (-row["read_per_s"], -row["lag"], row["group"])
        ),
    }


def _broker_rates(
    name: str, previous: ClusterSample, current: ClusterSample, seconds: float
) -> dict[str, Any]:
    table = current.runtime_tables[name]
    old = previous.runtime_tables.get(name, table)

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
        "disk_used": disk_used_ratio(table),
        "up_s": uptime_s(table),
    }


def _top_lines(content: dict[str, Any], max_rows: int) -> Iterator[str]:
    width = terminal_width(sys.stdout)
    yield f"escrowmq top  {content['at']}"
    yield ""
    rows = [
        (
            printable(row["broker"]),
            f"{row['in_per_s']:.1f}",
            f"{row['out_per_s']:.1f}",
            format_size(row["bytes_per_s"]),
            disk_text(row["disk_used"]),
            format_rough_duration(row["up_s"] * 1000),
        )
        for row in content["brokers"]
    ]
    yield from table_lines(_TOP_BROKER_COLUMNS, rows, width)
    yield ""
    topics = [
        (printable(row["topic"]), f"{row['in_per_s']:.1f}", str(row["messages"]))
        for row in content["topics"][:max_rows]
    ]
    yield from table_lines(_TOP_TOPIC_COLUMNS, topics, width)
    yield ""
    groups = [
        (
            printable(row["group"]),
            printable(row["topic"]),
            f"{row['read_per_s']:.1f}",
            str(row["lag"]),
        )
        for row in content["groups"][:max_rows]
    ]
    yield from table_lines(_TOP_GROUP_COLUMNS, groups, width)


HIDDEN_VALUE: Final = "***"  # what brokers say instead of a secret


@click.group()
def broker() -> None:
    """Which brokers there are, how they are, what they do, and their settings."""


@broker.command("list")
@query_command
def list_(view: QueryContext) -> None:
    """List the brokers, what they do, and how full their disks are."""
    view.show(list_brokers)


@broker.command()
@click.argument("name", metavar="[BROKER]", required=False, shell_complete=complete_broker)
@watch_option
@cluster_options
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
    brokers = Cluster(namesrv, name or broker)
    found = partial(show_broker, brokers)
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
@cluster_options
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
    brokers = Cluster(namesrv, broker)
    live = ClusterMonitor(brokers, max_rows=rows)
    try:
        live.take_sample()
        pause(every_s)
    except KeyboardInterrupt:
        context.exit(0)
    show_again(context, brokers, live.report, in_json=in_json, every_s=every_s, repeat_count=count)


# --- settings ------------------------------------------------------------------------------------


@broker.group()
def config() -> None:
    """The settings of running brokers; those of a file: escrowmq config."""


@config.command("get")
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@cluster_options
@click.pass_context
def get(
    context: click.Context, keys: tuple[str, ...], namesrv: str, broker: str | None, in_json: bool
) -> None:
    """Print settings of running brokers: all of them, or these."""
    brokers = Cluster(namesrv, broker)
    found = {place.name: values for place, values in brokers.ask_all(broker_settings)}
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
    with ignore_broken_pipe():
        if in_json:
            click.echo(json.dumps(wanted))
        else:
            for name, values in wanted.items():
                for key, value in sorted(values.items()):
                    click.echo(f"{printable(name)}  {key}={printable(value)}")
    exit_with_failures(context, brokers)


@config.command("set")
@click.argument("pairs", nargs=-1, required=True, metavar="KEY=VALUE...")
@confirm_options
@cluster_options
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
    brokers = Cluster(namesrv, broker)
    before = brokers.ask_all(broker_settings)
    brokers.require_all_answered()
    for place, values in before:
        for key, value in wanted.items():
            shown = HIDDEN_VALUE if values.get(key) == HIDDEN_VALUE else value
            text = f"{place.name}  {key}: {values.get(key, '-')} -> {shown}"
            click.echo(printable(text), err=not dry_run)
    if dry_run:
        context.exit(0)
    confirm("Change these settings?", yes=yes)
    body = "".join(f"{write_property(key, value)}\n" for key, value in wanted.items()).encode()
    done = brokers.ask_all(lambda caller: caller.call(RequestCode.UPDATE_BROKER_CONFIG, None, body))
    with ignore_broken_pipe():
        for place, _ in done:
            content = {"broker": place.name, "changed": list(wanted)}
            click.echo(json.dumps(content) if in_json else f"{place.name}  changed")
    exit_with_failures(context, brokers)
