"""`escrowmq topic …`: list and show topics; create, change and delete them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import click
import msgspec

from escrowmq.admin.cluster import BrokerAddress, Cluster
from escrowmq.admin.queries import (
    NOT_FOUND_CODES,
    GroupProgress,
    QueueOffsets,
    group_progress,
    groups_of_topic,
    message_count,
    system_topics,
    topic_config,
    topic_configs,
    topic_offsets,
    total_lag,
)
from escrowmq.admin.topics import DEFAULT_QUEUES, delete_topic, write_topic
from escrowmq.cli.options import (
    cluster_options,
    combine_options,
    complete_topic,
    confirm,
    confirm_options,
    dry_run_option,
    parse_pair,
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
from escrowmq.message.names import is_group_topic
from escrowmq.message.topic_config import TopicConfig
from escrowmq.parsing import format_timestamp

_PERMISSIONS: Final = {"rw": 6, "r": 4, "w": 2, "none": 0}
_MAX_QUEUES: Final = 65_536

_topic_argument = click.argument("topic", metavar="TOPIC", shell_complete=complete_topic)
_config_options = combine_options(
    click.option(
        "--queues",
        type=click.IntRange(1, _MAX_QUEUES),
        metavar="N",
        help="Number of queues on each broker.",
    ),
    click.option(
        "--perm",
        type=click.Choice(list(_PERMISSIONS)),
        help="Whether the topic can be read and written.",
    ),
    click.option(
        "--attribute",
        "attributes",
        multiple=True,
        metavar="NAME=VALUE",
        help="RocketMQ's topic attributes. Repeat for several; an empty VALUE removes one.",
    ),
)


@click.group()
def topic() -> None:
    """List and show topics; create, change and delete them."""


# --- list ----------------------------------------------------------------------------------------


@topic.command("list")
@click.option(
    "--all",
    "include_system",
    is_flag=True,
    help="Include the topics of the system, of retries and of dead letters.",
)
@click.option(
    "-l", "--long", is_flag=True, help="Add the number of messages and the time of the last one."
)
@query_command
def list_(query: QueryContext, include_system: bool, long: bool) -> None:
    """List the topics of all brokers."""
    query.show(list_topics, include_system=include_system, long=long)


_LIST_COLUMNS: Final = (
    TableColumn("TOPIC", can_shrink=True),
    TableColumn("QUEUES", is_number=True),
    TableColumn("PERM"),
    TableColumn("BROKERS", can_shrink=True),
)
_LONG_COLUMNS: Final = (TableColumn("MESSAGES", is_number=True), TableColumn("LAST MESSAGE"))


def list_topics(cluster: Cluster, *, include_system: bool, long: bool) -> QueryResult:
    def fetch(connection: SyncConnection) -> tuple[list[TopicConfig], dict[str, QueueOffsets]]:
        hidden = set() if include_system else system_topics(connection)
        configs = {
            name: config
            for name, config in topic_configs(connection).items()
            if include_system or not (name in hidden or is_group_topic(name))
        }
        offsets = topic_offsets(connection, list(configs)) if long else {}
        return list(configs.values()), offsets

    rows: dict[str, dict[str, Any]] = {}
    for broker, (configs, offsets) in cluster.ask_all(fetch):
        for config in configs:
            _add_topic(rows, broker, config, offsets.get(config.topic_name))
    content = [rows[name] for name in sorted(rows)]
    return content, _list_lines(content, long)


def _add_topic(
    rows: dict[str, dict[str, Any]],
    broker: BrokerAddress,
    config: TopicConfig,
    offsets: QueueOffsets | None,
) -> None:
    """Add what one broker has of a topic to the row of the topic."""
    permission = permission_text(config.perm)
    row = rows.setdefault(
        config.topic_name,
        {
            "topic": config.topic_name,
            "read_queues": 0,
            "write_queues": 0,
            "perm": permission,
            "order": config.order,
            "brokers": [],
        },
    )
    row["read_queues"] += config.read_queue_nums
    row["write_queues"] += config.write_queue_nums
    row["brokers"].append(broker.name)
    if row["perm"] != permission:
        row["perm"] = "differs"
    if offsets is not None:
        last_ms = max((queue.last_update_timestamp for queue in offsets.values()), default=0)
        # ISO 8601 texts sort as the times do.
        last_stored = max(timestamp_or_none(last_ms) or "", row.get("last_stored") or "")
        row["messages"] = row.get("messages", 0) + message_count(offsets)
        row["last_stored"] = last_stored or None


def _list_lines(content: list[dict[str, Any]], long: bool) -> Iterator[str]:
    if not content:
        yield "no topics"
    columns = (*_LIST_COLUMNS, *_LONG_COLUMNS) if long else _LIST_COLUMNS
    yield from table_lines(columns, (_list_cells(row, long) for row in content), terminal_width())


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


# --- show ----------------------------------------------------------------------------------------


@topic.command()
@_topic_argument
@query_command
def show(query: QueryContext, topic: str) -> None:
    """Print the settings of a topic, its queues, and the lag of its groups."""
    query.show(show_topic, topic)


_QUEUE_COLUMNS: Final = (
    TableColumn("BROKER", can_shrink=True),
    TableColumn("QUEUE", is_number=True),
    TableColumn("FIRST", is_number=True),
    TableColumn("END", is_number=True),
    TableColumn("MESSAGES", is_number=True),
    TableColumn("LAST MESSAGE"),
)
_GROUP_COLUMNS: Final = (TableColumn("GROUP", can_shrink=True), TableColumn("LAG", is_number=True))


def show_topic(cluster: Cluster, topic: str) -> QueryResult:
    def fetch(
        connection: SyncConnection,
    ) -> tuple[TopicConfig, QueueOffsets, dict[str, GroupProgress]]:
        config = topic_config(connection, topic)
        groups = {
            group: group_progress(connection, group, topic)
            for group in groups_of_topic(connection, topic)
        }
        return config, topic_offsets(connection, [topic]).get(topic, {}), groups

    answers = cluster.ask_all(fetch, ignored_codes=NOT_FOUND_CODES)
    if not answers and not cluster.failures:
        raise topic_not_found(cluster, topic)
    lags: dict[str, int] = {}
    for _, (_, _, groups) in answers:
        for group, progress in groups.items():
            lags[group] = lags.get(group, 0) + total_lag(progress.values())
    content = {
        "topic": topic,
        "brokers": [
            _broker_json(broker, config, offsets) for broker, (config, offsets, _) in answers
        ],
        "groups": [{"group": group, "lag": lags[group]} for group in sorted(lags)],
    }
    return content, _show_lines(content)


def _broker_json(
    broker: BrokerAddress, config: TopicConfig, offsets: QueueOffsets
) -> dict[str, Any]:
    return {
        "broker": broker.name,
        "read_queues": config.read_queue_nums,
        "write_queues": config.write_queue_nums,
        "perm": permission_text(config.perm),
        "order": config.order,
        "attributes": config.attributes,
        "messages": message_count(offsets),
        "queues": [
            {
                "queue": queue.queue_id,
                "first": bounds.min_offset,
                "end": bounds.max_offset,
                "last_stored": timestamp_or_none(bounds.last_update_timestamp),
            }
            for queue, bounds in sorted(offsets.items(), key=lambda item: item[0].queue_id)
        ],
    }


def _show_lines(content: dict[str, Any]) -> Iterator[str]:
    yield f"topic {printable(content['topic'])}"
    for broker in content["brokers"]:
        attributes = ", ".join(f"{name}={value}" for name, value in broker["attributes"].items())
        yield ""
        yield from field_lines(
            [
                ("broker", printable(broker["broker"])),
                ("queues", f"{broker['read_queues']} to read, {broker['write_queues']} to write"),
                ("perm", broker["perm"] + (", ordered" if broker["order"] else "")),
                ("messages", str(broker["messages"])),
                *([("attributes", printable(attributes))] if attributes else []),
            ]
        )
    queue_rows = (
        (
            printable(broker["broker"]),
            *(str(queue[field]) for field in ("queue", "first", "end")),
            str(queue["end"] - queue["first"]),
            queue["last_stored"] or "-",
        )
        for broker in content["brokers"]
        for queue in broker["queues"]
    )
    yield ""
    yield from table_lines(_QUEUE_COLUMNS, queue_rows, terminal_width())
    yield ""
    if not content["groups"]:
        yield "no group has read this topic"
    group_rows = ((printable(row["group"]), str(row["lag"])) for row in content["groups"])
    yield from table_lines(_GROUP_COLUMNS, group_rows, terminal_width())


# --- create and update ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ConfigChange:
    """The configuration that one broker is to have of a topic; `old` is None for a new topic."""

    broker: BrokerAddress
    old: TopicConfig | None
    new: TopicConfig

    @property
    def text(self) -> str:
        before = "" if self.old is None else f"{_config_text(self.old)} -> "
        return before + _config_text(self.new)


@topic.command()
@click.argument("topic", metavar="TOPIC")
@_config_options
@click.option("--order", is_flag=True, help="Mark the topic as ordered by queue.")
@dry_run_option
@cluster_options
@click.pass_context
def create(
    context: click.Context,
    topic: str,
    queues: int | None,
    perm: str | None,
    attributes: tuple[str, ...],
    order: bool,
    dry_run: bool,
    cluster: Cluster,
    as_json: bool,
) -> None:
    """Create a topic on every broker.

    It has 4 queues and can be read and written, unless options say otherwise.
    """
    existing = _existing_configs(cluster, topic)
    if existing:
        names = ", ".join(broker.name for broker, _ in existing)
        raise click.UsageError(
            f"the topic {topic} already exists on {names}: use `escrowmq topic update`"
        )
    queue_count = DEFAULT_QUEUES if queues is None else queues
    config = TopicConfig(
        topic_name=topic,
        read_queue_nums=queue_count,
        write_queue_nums=queue_count,
        perm=_PERMISSIONS[perm or "rw"],
        order=order,
    )
    changes = [_ConfigChange(broker, None, config) for broker in cluster.brokers()]
    _apply_changes(cluster, changes, "created", attributes, dry_run=dry_run, as_json=as_json)
    exit_with_failures(context, cluster)


@topic.command()
@_topic_argument
@_config_options
@confirm_options
@cluster_options
@click.pass_context
def update(
    context: click.Context,
    topic: str,
    queues: int | None,
    perm: str | None,
    attributes: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    cluster: Cluster,
    as_json: bool,
) -> None:
    """Change settings of a topic on every broker that has it.

    Reducing the number of queues hides the messages of the removed queues, and asks for a
    confirmation.
    """
    if queues is None and perm is None and not attributes:
        raise click.UsageError("nothing to change: give --queues, --perm or --attribute")
    existing = _existing_configs(cluster, topic)
    if not existing:
        raise topic_not_found(cluster, topic)
    changes = []
    for broker, old in existing:
        new = msgspec.structs.replace(
            old,
            topic_name=topic,
            read_queue_nums=old.read_queue_nums if queues is None else queues,
            write_queue_nums=old.write_queue_nums if queues is None else queues,
            perm=old.perm if perm is None else _PERMISSIONS[perm],
        )
        changes.append(_ConfigChange(broker, old, new))
    has_fewer_queues = queues is not None and any(
        queues < old.read_queue_nums for _, old in existing
    )
    if has_fewer_queues and not dry_run:
        for change in changes:
            click.echo(f"{change.broker.name}: {topic}: {change.text}", err=True)
        confirm("Hide the messages of the queues that are removed?", yes=yes)
    _apply_changes(cluster, changes, "updated", attributes, dry_run=dry_run, as_json=as_json)
    exit_with_failures(context, cluster)


def _existing_configs(cluster: Cluster, topic: str) -> list[tuple[BrokerAddress, TopicConfig]]:
    """Return the configuration of a topic on each broker. Raises if a broker does not answer."""
    configs = cluster.ask_all(
        lambda connection: topic_config(connection, topic), ignored_codes=NOT_FOUND_CODES
    )
    cluster.require_all_answered()
    return configs


def _apply_changes(
    cluster: Cluster,
    changes: Sequence[_ConfigChange],
    verb: str,
    attributes: tuple[str, ...],
    *,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Write the configurations, unless this is a dry run, and print one line for each broker."""
    encoded_attributes = _encode_attributes(attributes)
    change_by_address = {change.broker.address: change for change in changes}

    def write(connection: SyncConnection) -> _ConfigChange:
        change = change_by_address[connection.address]
        if not dry_run:
            write_topic(connection, change.new, encoded_attributes)
        return change

    action = f"would be {verb}" if dry_run else verb
    with ignore_broken_pipe():
        for broker, change in cluster.ask_all(write, brokers=[c.broker for c in changes]):
            topic = change.new.topic_name
            if as_json:
                outcome = {"topic": topic, "broker": broker.name, "done": not dry_run}
                print_json({**outcome, **_config_json(change.new)})
                continue
            line = f"{topic}  {action} on {broker.name}: {change.text}"
            click.echo(f"{line}, {encoded_attributes}" if encoded_attributes else line)


def _encode_attributes(texts: tuple[str, ...]) -> str | None:
    """Return attributes as the request has them, `+name=value,-name`; None without any."""
    parts = []
    for text in texts:
        name, value = parse_pair("--attribute", text, allow_empty=True)
        if "," in text:
            raise click.UsageError(f"--attribute {text!r} must not contain a comma")
        parts.append(f"+{name}={value}" if value else f"-{name}")
    return ",".join(parts) or None


def _config_text(config: TopicConfig) -> str:
    read, write = config.read_queue_nums, config.write_queue_nums
    queues = f"{read} queues" if read == write else f"{read} queues to read, {write} to write"
    return f"{queues}, {permission_text(config.perm)}"


def _config_json(config: TopicConfig) -> dict[str, Any]:
    return {
        "read_queues": config.read_queue_nums,
        "write_queues": config.write_queue_nums,
        "perm": config.perm,
        "order": config.order,
    }


# --- delete --------------------------------------------------------------------------------------


@topic.command()
@click.argument(
    "topics", nargs=-1, required=True, metavar="TOPIC...", shell_complete=complete_topic
)
@confirm_options
@cluster_options
@click.pass_context
def delete(
    context: click.Context,
    topics: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    cluster: Cluster,
    as_json: bool,
) -> None:
    """Delete topics with their messages and offsets on every broker. This cannot be undone."""
    offsets = cluster.ask_all(lambda connection: topic_offsets(connection, topics))
    cluster.require_all_answered()
    for topic in topics:
        counts = [message_count(tables[topic]) for _, tables in offsets if topic in tables]
        if not counts:
            raise topic_not_found(cluster, topic)
        text = f"{topic}: {sum(counts)} messages on {_broker_count_text(len(counts))}"
        click.echo(f"{text}, would be deleted" if dry_run else text, err=not dry_run)
    if dry_run:
        context.exit(0)
    target = topics[0] if len(topics) == 1 else f"these {len(topics)} topics"
    confirm(f"Delete {target} permanently?", yes=yes)
    with ignore_broken_pipe():
        for topic in topics:
            deleted_on = delete_topic(cluster, topic)
            if as_json:
                print_json({"topic": topic, "deleted_on": [broker.name for broker in deleted_on]})
            else:
                click.echo(f"{topic}  deleted on {_broker_count_text(len(deleted_on))}")
    exit_with_failures(context, cluster)


# --- shared by the commands ----------------------------------------------------------------------


def permission_text(perm: int) -> str:
    return ("r" if perm & 4 else "") + ("w" if perm & 2 else "") or "none"


def timestamp_or_none(stored_ms: int) -> str | None:
    return format_timestamp(stored_ms) if stored_ms > 0 else None


def topic_not_found(cluster: Cluster, topic: str) -> NoRoute:
    return NoRoute(
        f"there is no topic {topic} on {cluster.broker_names()}: `escrowmq topic list` shows them"
    )


def _broker_count_text(count: int) -> str:
    return "1 broker" if count == 1 else f"{count} brokers"
