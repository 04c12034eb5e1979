"""`escrowmq broker …`: list brokers, show their figures and rates, read and change settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import click

from escrowmq.admin.cluster import BrokerAddress, Cluster
from escrowmq.admin.queries import (
    GroupProgress,
    QueueOffsets,
    all_progress,
    broker_runtime,
    broker_settings,
    disk_used_ratio,
    recent_rate,
    system_topics,
    topic_configs,
    topic_offsets,
    total_lag,
    uptime_s,
)
from escrowmq.cli.options import (
    cluster_options,
    complete_broker,
    confirm,
    confirm_options,
    parse_pair,
    watch_option,
)
from escrowmq.cli.output import (
    QueryContext,
    QueryResult,
    TableColumn,
    exit_with_failures,
    field_lines,
    ignore_broken_pipe,
    pause,
    print_json,
    printable,
    query_command,
    show_repeatedly,
    table_lines,
    terminal_width,
)
from escrowmq.client.sync_connection import SyncConnection
from escrowmq.clock import Clock, SystemClock
from escrowmq.config.properties_file import write_property
from escrowmq.message.names import is_system_group
from escrowmq.parsing import format_rough_duration, format_size, format_timestamp
from escrowmq.remoting.codes import RequestCode


@click.group()
def broker() -> None:
    """List brokers, watch what they do, read and change their settings."""


# --- list and show -------------------------------------------------------------------------------


@broker.command("list")
@query_command
def list_(query: QueryContext) -> None:
    """List the brokers with their message rates and disk usage."""
    query.show(list_brokers)


@broker.command()
@click.argument("name", metavar="[BROKER]", required=False, shell_complete=complete_broker)
@watch_option
@cluster_options
@click.pass_context
def show(
    context: click.Context,
    name: str | None,
    interval_s: float | None,
    cluster: Cluster,
    as_json: bool,
) -> None:
    """Print all figures of brokers, by RocketMQ's names.

    BROKER is a name or HOST:PORT. Without it, all brokers are printed.
    """
    if name is not None:
        if cluster.selected_broker is not None:
            raise click.UsageError("give the broker as an argument or with --broker, not both")
        cluster = context.with_resource(Cluster(cluster.servers, cluster.access, broker=name))
    show_repeatedly(
        context, cluster, lambda: show_broker(cluster), as_json=as_json, interval_s=interval_s
    )


_LIST_COLUMNS: Final = (
    TableColumn("BROKER", can_shrink=True),
    TableColumn("ADDRESS"),
    TableColumn("VERSION", can_shrink=True),
    TableColumn("UPTIME"),
    TableColumn("IN/S", is_number=True),
    TableColumn("OUT/S", is_number=True),
    TableColumn("DISK", is_number=True),
    TableColumn("STATE"),
)


def list_brokers(cluster: Cluster) -> QueryResult:
    content = [_broker_json(entry, runtime) for entry, runtime in cluster.ask_all(broker_runtime)]
    rows = (
        (
            printable(row["broker"]),
            row["address"],
            printable(row["version"]),
            format_rough_duration(row["up_s"] * 1000),
            f"{row['in_per_s']:.1f}",
            f"{row['out_per_s']:.1f}",
            disk_text(row["disk_used"]),
            "ok" if row["takes_messages"] else "refuses messages",
        )
        for row in content
    )
    return content, table_lines(_LIST_COLUMNS, rows, terminal_width())


def _broker_json(broker: BrokerAddress, runtime: dict[str, str]) -> dict[str, Any]:
    return {
        "broker": broker.name,
        "address": broker.address,
        "version": runtime.get("brokerVersionDesc", ""),
        "up_s": uptime_s(runtime),
        "in_per_s": recent_rate(runtime, "putTps"),
        "out_per_s": recent_rate(runtime, "getTransferedTps"),
        "disk_used": disk_used_ratio(runtime),
        "takes_messages": runtime.get("brokerActive", "true") == "true",
    }


def show_broker(cluster: Cluster) -> QueryResult:
    content = [
        {"broker": entry.name, "address": entry.address, **runtime}
        for entry, runtime in cluster.ask_all(broker_runtime)
    ]
    return content, _show_lines(content)


def _show_lines(content: list[dict[str, Any]]) -> Iterator[str]:
    for number, table in enumerate(content):
        if number:
            yield ""
        yield from field_lines((name, printable(value)) for name, value in table.items())


def disk_text(used_ratio: float | None) -> str:
    return "-" if used_ratio is None else f"{used_ratio:.0%}"


# --- top -----------------------------------------------------------------------------------------


@broker.command()
@click.option(
    "--every",
    "interval_s",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two samples.",
)
@click.option(
    "--count",
    "repeat_count",
    type=click.IntRange(min=1),
    metavar="N",
    help="Stop after N results.  [never]",
)
@click.option(
    "--rows",
    "max_rows",
    type=click.IntRange(min=1),
    default=10,
    show_default=True,
    metavar="N",
    help="Number of topics and of groups to show.",
)
@cluster_options
@click.pass_context
def top(
    context: click.Context,
    interval_s: float,
    repeat_count: int | None,
    max_rows: int,
    cluster: Cluster,
    as_json: bool,
) -> None:
    """Show the busiest brokers, topics and groups until Ctrl-C.

    Rates are measured between two samples. With --json, each result is one line.
    """
    monitor = ClusterMonitor(cluster, max_rows=max_rows)
    try:
        monitor.take_sample()
        pause(interval_s)
    except KeyboardInterrupt:
        context.exit(0)
    show_repeatedly(
        context,
        cluster,
        monitor.report,
        as_json=as_json,
        interval_s=interval_s,
        repeat_count=repeat_count,
    )


MAX_TOPICS: Final = 2_000  # per broker; asking about more would take longer than an interval
_TOP_BROKER_COLUMNS: Final = (
    TableColumn("BROKER", can_shrink=True),
    TableColumn("IN/S", is_number=True),
    TableColumn("OUT/S", is_number=True),
    TableColumn("BYTES/S", is_number=True),
    TableColumn("DISK", is_number=True),
    TableColumn("UPTIME"),
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

_BrokerTopic = tuple[str, str]
_GroupTopic = tuple[str, str]
_BrokerGroupTopic = tuple[str, _GroupTopic]


@dataclass(slots=True)
class ClusterSample:
    """Totals at one moment. What the sample before does not have gets no rate yet."""

    taken_s: float
    runtime_tables: dict[str, dict[str, str]] = field(default_factory=dict)  # by broker
    max_offsets: dict[_BrokerTopic, int] = field(default_factory=dict)
    min_offsets: dict[_BrokerTopic, int] = field(default_factory=dict)
    consumer_offsets: dict[_BrokerGroupTopic, int] = field(default_factory=dict)
    lags: dict[_BrokerGroupTopic, int] = field(default_factory=dict)


class ClusterMonitor:
    """Take samples of a cluster and report the rates between the last two."""

    def __init__(self, cluster: Cluster, *, max_rows: int, clock: Clock | None = None) -> None:
        self._cluster = cluster
        self._max_rows = max_rows
        self._clock = clock or SystemClock()
        self._previous: ClusterSample | None = None

    def take_sample(self) -> ClusterSample:
        sample = ClusterSample(self._clock.elapsed_s())
        for broker, (runtime, offsets, progress) in self._cluster.ask_all(_broker_totals):
            sample.runtime_tables[broker.name] = runtime
            for topic, queues in offsets.items():
                key = (broker.name, topic)
                sample.max_offsets[key] = sum(queue.max_offset for queue in queues.values())
                sample.min_offsets[key] = sum(queue.min_offset for queue in queues.values())
            for group, group_offsets in progress.items():
                _add_group_progress(sample, broker.name, group, group_offsets)
        self._previous = sample
        return sample

    def report(self) -> QueryResult:
        previous = self._previous
        sample = self.take_sample()
        content = compare_samples(previous or sample, sample)
        content["at"] = format_timestamp(self._clock.now_ms())
        return content, _top_lines(content, self._max_rows)


def _broker_totals(
    connection: SyncConnection,
) -> tuple[dict[str, str], dict[str, QueueOffsets], dict[str, GroupProgress]]:
    runtime = broker_runtime(connection)
    hidden = system_topics(connection)
    topics = sorted(name for name in topic_configs(connection) if name not in hidden)[:MAX_TOPICS]
    progress = {
        group: offsets
        for group, offsets in all_progress(connection).items()
        if not is_system_group(group)
    }
    return runtime, topic_offsets(connection, topics), progress


def _add_group_progress(
    sample: ClusterSample, broker: str, group: str, progress: GroupProgress
) -> None:
    for queue, offset in progress.items():
        key = broker, (group, queue.topic)
        sample.consumer_offsets[key] = sample.consumer_offsets.get(key, 0) + offset.consumer_offset
        sample.lags[key] = sample.lags.get(key, 0) + total_lag([offset])


def compare_samples(previous: ClusterSample, current: ClusterSample) -> dict[str, Any]:
    """Return rates of brokers, and of topics and groups over all brokers, the busiest first.

    A rate is never negative: offsets fall if a topic is deleted and created again, or if a group
    is reset.
    """
    seconds = max(current.taken_s - previous.taken_s, 0.001)
    topics: dict[str, dict[str, Any]] = {}
    for key, max_offset in current.max_offsets.items():
        _, topic = key
        row = topics.setdefault(topic, {"topic": topic, "in_per_s": 0.0, "messages": 0})
        row["in_per_s"] += max(0, max_offset - previous.max_offsets.get(key, max_offset)) / seconds
        row["messages"] += max_offset - current.min_offsets[key]
    groups: dict[_GroupTopic, dict[str, Any]] = {}
    for group_key, offset in current.consumer_offsets.items():
        _, (group, topic) = group_key
        row = groups.setdefault(
            (group, topic), {"group": group, "topic": topic, "read_per_s": 0.0, "lag": 0}
        )
        old_offset = previous.consumer_offsets.get(group_key, offset)
        row["read_per_s"] += max(0, offset - old_offset) / seconds
        row["lag"] += current.lags[group_key]
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
    runtime = current.runtime_tables[name]
    old_runtime = previous.runtime_tables.get(name, runtime)

    def per_s(key: str) -> float:
        try:
            return max(0, int(runtime[key]) - int(old_runtime[key])) / seconds
        except (KeyError, ValueError):
            return 0.0

    return {
        "broker": name,
        "in_per_s": per_s("msgPutTotalTodayNow"),
        "out_per_s": per_s("msgGetTotalTodayNow"),
        "bytes_per_s": per_s("commitLogMaxOffset"),
        "disk_used": disk_used_ratio(runtime),
        "up_s": uptime_s(runtime),
    }


def _top_lines(content: dict[str, Any], max_rows: int) -> Iterator[str]:
    width = terminal_width()
    yield f"escrowmq top  {content['at']}"
    yield ""
    broker_rows = (
        (
            printable(row["broker"]),
            f"{row['in_per_s']:.1f}",
            f"{row['out_per_s']:.1f}",
            format_size(row["bytes_per_s"]),
            disk_text(row["disk_used"]),
            format_rough_duration(row["up_s"] * 1000),
        )
        for row in content["brokers"]
    )
    yield from table_lines(_TOP_BROKER_COLUMNS, broker_rows, width)
    yield ""
    topic_rows = (
        (printable(row["topic"]), f"{row['in_per_s']:.1f}", str(row["messages"]))
        for row in content["topics"][:max_rows]
    )
    yield from table_lines(_TOP_TOPIC_COLUMNS, topic_rows, width)
    yield ""
    group_rows = (
        (
            printable(row["group"]),
            printable(row["topic"]),
            f"{row['read_per_s']:.1f}",
            str(row["lag"]),
        )
        for row in content["groups"][:max_rows]
    )
    yield from table_lines(_TOP_GROUP_COLUMNS, group_rows, width)


# --- settings ------------------------------------------------------------------------------------

HIDDEN_VALUE: Final = "***"  # brokers send this in place of a secret


@broker.group()
def config() -> None:
    """Read and change the settings of running brokers.

    `escrowmq config` shows the settings of a configuration file.
    """


@config.command("get")
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@cluster_options
@click.pass_context
def get(context: click.Context, keys: tuple[str, ...], cluster: Cluster, as_json: bool) -> None:
    """Print settings of running brokers: these KEYs, or all of them."""
    settings = {entry.name: values for entry, values in cluster.ask_all(broker_settings)}
    existing = {key for values in settings.values() for key in values}
    unknown = [key for key in keys if key not in existing]
    if unknown and settings:
        raise click.UsageError(
            f"there is no setting {', '.join(unknown)}: `escrowmq broker config get` shows all"
        )
    selected = {
        name: {key: value for key, value in values.items() if not keys or key in keys}
        for name, values in settings.items()
    }
    with ignore_broken_pipe():
        if as_json:
            print_json(selected)
        else:
            for line in _setting_lines(selected):
                click.echo(line)
    exit_with_failures(context, cluster)


def _setting_lines(settings: dict[str, dict[str, str]]) -> Iterable[str]:
    return (
        f"{printable(name)}  {key}={printable(value)}"
        for name, values in settings.items()
        for key, value in sorted(values.items())
    )


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
    cluster: Cluster,
    as_json: bool,
) -> None:
    """Change settings of running brokers: of all of them, or with --broker of one.

    A broker that was started with -c FILE also writes them to that file. Other brokers lose them
    when they stop.
    """
    changes = dict(parse_pair("the setting", pair, allow_empty=True) for pair in pairs)
    current = cluster.ask_all(broker_settings)
    cluster.require_all_answered()
    for entry, values in current:
        for key, value in changes.items():
            shown = HIDDEN_VALUE if values.get(key) == HIDDEN_VALUE else value
            text = f"{entry.name}  {key}: {values.get(key, '-')} -> {shown}"
            click.echo(printable(text), err=not dry_run)
    if dry_run:
        context.exit(0)
    confirm("Change these settings?", yes=yes)
    body = "".join(f"{write_property(key, value)}\n" for key, value in changes.items()).encode()
    code = RequestCode.UPDATE_BROKER_CONFIG
    changed = cluster.ask_all(lambda connection: connection.call(code, None, body))
    with ignore_broken_pipe():
        for entry, _ in changed:
            if as_json:
                print_json({"broker": entry.name, "changed": list(changes)})
            else:
                click.echo(f"{entry.name}  changed")
    exit_with_failures(context, cluster)
