"""`escrowmq topic …`: which topics there are, and to make, change and delete them.

Topics as people and programs read them, put together from what all brokers say.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

import click

from escrowmq.cli.brokers import Cluster, exit_with_failures
from escrowmq.cli.call import BrokerAddress, SyncConnection, error_text, parse_name_servers
from escrowmq.cli.figures import (
    NOT_FOUND_CODES,
    GroupProgress,
    QueueOffsets,
    group_progress,
    groups_of_topic,
    system_topics,
    topic_config,
    topic_configs,
    topic_offsets,
    total_lag,
)
from escrowmq.cli.options import (
    cluster_options,
    combine_options,
    complete_topic,
    confirm,
    confirm_options,
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
from escrowmq.errors import EscrowError, NoRoute
from escrowmq.message.names import is_group_topic
from escrowmq.message.topic_config import TopicConfig
from escrowmq.parsing import format_timestamp
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers_admin import CreateTopic, DeleteTopicInNamesrv, TopicHeader

_LIST_COLUMNS: Final = (
    TableColumn("TOPIC", can_shrink=True),
    TableColumn("QUEUES", is_number=True),
    TableColumn("PERM"),
    TableColumn("BROKERS", can_shrink=True),
)
_LONG_COLUMNS: Final = (TableColumn("MESSAGES", is_number=True), TableColumn("LAST"))
_QUEUE_COLUMNS: Final = (
    TableColumn("BROKER", can_shrink=True),
    TableColumn("QUEUE", is_number=True),
    TableColumn("FIRST", is_number=True),
    TableColumn("END", is_number=True),
    TableColumn("MESSAGES", is_number=True),
    TableColumn("LAST"),
)
_GROUP_COLUMNS: Final = (TableColumn("GROUP", can_shrink=True), TableColumn("LAG", is_number=True))


def list_topics(
    cluster: Cluster, *, with_own: bool, long: bool
) -> tuple[list[dict[str, Any]], Iterable[str]]:
    def question(caller: SyncConnection) -> tuple[dict[str, TopicConfig], dict[str, QueueOffsets]]:
        own = set() if with_own else system_topics(caller)
        configs = {
            name: config
            for name, config in topic_configs(caller).items()
            if with_own or not (name in own or is_group_topic(name))
        }
        return configs, topic_offsets(caller, list(configs)) if long else {}

    rows: dict[str, dict[str, Any]] = {}
    for place, (configs, offsets) in cluster.ask_all(question):
        for name, config in configs.items():
            _add_topic(rows, place, config, offsets.get(name))
    content = [rows[name] for name in sorted(rows)]
    return content, _list_lines(content, long)


def _add_topic(
    rows: dict[str, dict[str, Any]],
    broker: BrokerAddress,
    config: TopicConfig,
    offsets: QueueOffsets | None,
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
    row["brokers"].append(broker.name)
    if row["perm"] != perm_text(config.perm):
        row["perm"] = "differs"
    if offsets is not None:
        last = max((one.last_update_timestamp for one in offsets.values()), default=0)
        known = row.get("last_stored")
        row["messages"] = row.get("messages", 0) + message_count(offsets)
        row["last_stored"] = max(format_utc_or_none(last) or "", known or "") or None


def _list_lines(content: list[dict[str, Any]], long: bool) -> Iterator[str]:
    if not content:
        yield "no topics"
    columns = (*_LIST_COLUMNS, *_LONG_COLUMNS) if long else _LIST_COLUMNS
    yield from table_lines(columns, (_list_cells(row, long) for row in content), _stdout_width())


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


def show_topic(cluster: Cluster, name: str) -> tuple[dict[str, Any], Iterable[str]]:
    def question(
        caller: SyncConnection,
    ) -> tuple[TopicConfig, QueueOffsets, dict[str, GroupProgress]]:
        config = topic_config(caller, name)
        groups = {
            group: group_progress(caller, group, name) for group in groups_of_topic(caller, name)
        }
        return config, topic_offsets(caller, [name]).get(name, {}), groups

    found = cluster.ask_all(question, ignored_codes=NOT_FOUND_CODES)
    if not found and not cluster.failures:
        asked = ", ".join(place.name for place in cluster.brokers)
        raise NoRoute(f"no topic {printable(name)} on {asked}: escrowmq topic list shows them")
    lags: dict[str, int] = {}
    for _, (_, _, groups) in found:
        for group, progress in groups.items():
            lags[group] = lags.get(group, 0) + total_lag(progress.values())
    content = {
        "topic": name,
        "brokers": [_broker_json(place, *told[:2]) for place, told in found],
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
        "perm": perm_text(config.perm),
        "order": config.order,
        "attributes": config.attributes,
        "messages": message_count(offsets),
        "queues": [
            {
                "queue": queue.queue_id,
                "first": one.min_offset,
                "end": one.max_offset,
                "last_stored": format_timestamp(one.last_update_timestamp)
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
    yield from table_lines(_QUEUE_COLUMNS, rows, _stdout_width())
    yield ""
    groups = [(printable(one["group"]), str(one["lag"])) for one in content["groups"]]
    if not groups:
        yield "nobody has read it"
    yield from table_lines(_GROUP_COLUMNS, groups, _stdout_width())


# --- small things --------------------------------------------------------------------------------


def message_count(offsets: QueueOffsets) -> int:
    return sum(one.max_offset - one.min_offset for one in offsets.values())


def perm_text(perm: int) -> str:
    return ("r" if perm & 4 else "") + ("w" if perm & 2 else "") or "none"


def format_utc_or_none(stored_ms: int) -> str | None:
    return format_timestamp(stored_ms) if stored_ms > 0 else None


def _stdout_width() -> int | None:
    return terminal_width(sys.stdout)


_PERMS: Final = {"rw": 6, "r": 4, "w": 2, "none": 0}
_MAX_QUEUES: Final = 65_536

_name_argument = click.argument("name", metavar="TOPIC", shell_complete=complete_topic)
_settings_options = combine_options(
    click.option(
        "--queues",
        type=click.IntRange(1, _MAX_QUEUES),
        metavar="N",
        help="Queues on each broker.  [4]",
    ),
    click.option(
        "--perm", type=click.Choice(list(_PERMS)), help="Whether it is read and written.  [rw]"
    ),
    click.option(
        "--attribute",
        "attributes",
        multiple=True,
        metavar="NAME=VALUE",
        help="RocketMQ's attributes; may be given again. An empty value takes one away.",
    ),
)


@click.group()
def topic() -> None:
    """Which topics there are; make, change and delete them."""


# --- looking -------------------------------------------------------------------------------------


@topic.command("list")
@click.option("--all", "with_own", is_flag=True, help="Also those of the broker and of groups.")
@click.option("-l", "--long", is_flag=True, help="Also messages and the time of the last one.")
@query_command
def list_(view: QueryContext, with_own: bool, long: bool) -> None:
    """List topics, one line each over all brokers."""
    view.show(list_topics, with_own=with_own, long=long)


@topic.command()
@_name_argument
@query_command
def show(view: QueryContext, name: str) -> None:
    """Print the settings of a topic, its queues, and how far its groups are."""
    view.show(show_topic, name)


# --- changing ------------------------------------------------------------------------------------


@topic.command()
@click.argument("name", metavar="TOPIC")
@_settings_options
@click.option("--order", is_flag=True, help="Say that its messages are in order by queue.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@cluster_options
@click.pass_context
def create(
    context: click.Context,
    name: str,
    queues: int | None,
    perm: str | None,
    attributes: tuple[str, ...],
    order: bool,
    dry_run: bool,
    namesrv: str,
    broker: str | None,
    in_json: bool,
) -> None:
    """Make a topic, on every broker."""
    brokers = Cluster(namesrv, broker)
    there = _existing_configs(brokers, name)
    brokers.require_all_answered()
    if there:
        places = ", ".join(place.name for place, _ in there)
        raise click.UsageError(f"{name} is there already, on {places}: escrowmq topic update")
    count = 4 if queues is None else queues
    wanted = TopicConfig(
        topic_name=name,
        read_queue_nums=count,
        write_queue_nums=count,
        perm=_PERMS[perm or "rw"],
        order=order,
    )
    changes = [(place, wanted, "") for place in brokers.brokers]
    _apply_changes(
        context, brokers, changes, "created", attributes, dry_run=dry_run, in_json=in_json
    )


@topic.command()
@_name_argument
@_settings_options
@confirm_options
@cluster_options
@click.pass_context
def update(
    context: click.Context,
    name: str,
    queues: int | None,
    perm: str | None,
    attributes: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    namesrv: str,
    broker: str | None,
    in_json: bool,
) -> None:
    """Change settings of a topic, on every broker that has it.

    Fewer queues hide the messages of those that are left out; that is asked about first.
    """
    if queues is None and perm is None and not attributes:
        raise click.UsageError("nothing to change: --queues, --perm or --attribute")
    brokers = Cluster(namesrv, broker)
    there = _existing_configs(brokers, name)
    brokers.require_all_answered()
    if not there:
        raise _topic_not_found(name, brokers)
    changes = []
    for place, before in there:
        wanted = TopicConfig(
            topic_name=name,
            read_queue_nums=before.read_queue_nums if queues is None else queues,
            write_queue_nums=before.write_queue_nums if queues is None else queues,
            perm=before.perm if perm is None else _PERMS[perm],
            topic_filter_type=before.topic_filter_type,
            topic_sys_flag=before.topic_sys_flag,
            order=before.order,
        )
        changes.append((place, wanted, f"{_config_text(before)} -> "))
    fewer = queues is not None and any(queues < before.read_queue_nums for _, before in there)
    if fewer and not dry_run:
        for place, wanted, before_text in changes:
            click.echo(f"{place.name}: {name}: {before_text}{_config_text(wanted)}", err=True)
        confirm("Hide the messages of the queues that are left out?", yes=yes)
    _apply_changes(
        context, brokers, changes, "updated", attributes, dry_run=dry_run, in_json=in_json
    )


@topic.command()
@click.argument("names", nargs=-1, required=True, metavar="TOPIC...", shell_complete=complete_topic)
@confirm_options
@cluster_options
@click.pass_context
def delete(
    context: click.Context,
    names: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    namesrv: str,
    broker: str | None,
    in_json: bool,
) -> None:
    """Delete topics with their messages and offsets, on every broker, for good."""
    brokers = Cluster(namesrv, broker)
    found = brokers.ask_all(lambda caller: topic_offsets(caller, names))
    brokers.require_all_answered()
    for name in names:
        counts = [
            sum(queue.max_offset - queue.min_offset for queue in tables[name].values())
            for _, tables in found
            if name in tables
        ]
        if not counts:
            raise _topic_not_found(name, brokers)
        text = f"{name}: {sum(counts)} messages on {_broker_count_text(len(counts))}"
        click.echo(f"{text}, would be deleted" if dry_run else text, err=not dry_run)
    if dry_run:
        context.exit(0)
    what = names[0] if len(names) == 1 else f"these {len(names)} topics"
    confirm(f"Delete {what} for good?", yes=yes)
    with ignore_broken_pipe():
        for name in names:
            _delete_topic(brokers, name, namesrv if broker is None else "", in_json)
    exit_with_failures(context, brokers)


def _delete_topic(cluster: Cluster, name: str, namesrv: str, in_json: bool) -> None:
    code, asked = RequestCode.DELETE_TOPIC_IN_BROKER, TopicHeader(topic=name)
    done = cluster.ask_all(lambda caller: caller.call(code, asked), ignored_codes=NOT_FOUND_CODES)
    for address in parse_name_servers(namesrv):
        try:
            with SyncConnection(address) as caller:
                caller.call(RequestCode.DELETE_TOPIC_IN_NAMESRV, DeleteTopicInNamesrv(topic=name))
        except EscrowError as error:
            cluster.failures.append(f"{address}: {error_text(error)}")
    if in_json:
        click.echo(json.dumps({"topic": name, "deleted_on": [place.name for place, _ in done]}))
    else:
        click.echo(f"{name}  deleted on {_broker_count_text(len(done))}")


def _apply_changes(
    context: click.Context,
    cluster: Cluster,
    changes: list[tuple[BrokerAddress, TopicConfig, str]],
    verb: str,
    attributes: tuple[str, ...],
    *,
    dry_run: bool,
    in_json: bool,
) -> None:
    told = _encode_attributes(attributes)
    by_place = {place: (wanted, before) for place, wanted, before in changes}
    cluster.brokers = list(by_place)
    configs = {place.address: wanted for place, wanted, _ in changes}

    def put(caller: SyncConnection) -> None:
        if not dry_run:
            _put_config(caller, configs[caller.address], told)

    with ignore_broken_pipe():
        for place, _ in cluster.ask_all(put):
            wanted, before = by_place[place]
            word = f"would be {verb}" if dry_run else verb
            if in_json:
                content = {"topic": wanted.topic_name, "broker": place.name, "done": not dry_run}
                click.echo(json.dumps({**content, **_config_json(wanted)}))
            else:
                text = (
                    f"{wanted.topic_name}  {word} on {place.name}: {before}{_config_text(wanted)}"
                )
                click.echo(f"{text}, {told}" if told else text)
    exit_with_failures(context, cluster)


def _put_config(connection: SyncConnection, config: TopicConfig, attributes: str | None) -> None:
    connection.call(
        RequestCode.UPDATE_AND_CREATE_TOPIC,
        CreateTopic(
            topic=config.topic_name,
            read_queue_nums=config.read_queue_nums,
            write_queue_nums=config.write_queue_nums,
            perm=config.perm,
            topic_filter_type=config.topic_filter_type,
            topic_sys_flag=config.topic_sys_flag,
            order=config.order,
            attributes=attributes,
        ),
    )


# --- small things --------------------------------------------------------------------------------


def _existing_configs(cluster: Cluster, name: str) -> list[tuple[BrokerAddress, TopicConfig]]:
    return cluster.ask_all(lambda caller: topic_config(caller, name), ignored_codes=NOT_FOUND_CODES)


def _encode_attributes(pairs: tuple[str, ...]) -> str | None:
    """As the request wants them: +name=value,-name."""
    parts = []
    for text in pairs:
        name, equals, value = text.partition("=")
        if not name or not equals or "," in text:
            raise click.UsageError(f"--attribute {text!r} is not NAME=VALUE")
        parts.append(f"+{name}={value}" if value else f"-{name}")
    return ",".join(parts) or None


def _config_text(config: TopicConfig) -> str:
    read, write = config.read_queue_nums, config.write_queue_nums
    queues = f"{read} queues" if read == write else f"{read} queues to read, {write} to write"
    return f"{queues}, {perm_text(config.perm)}"


def _config_json(config: TopicConfig) -> dict[str, Any]:
    return {
        "read_queues": config.read_queue_nums,
        "write_queues": config.write_queue_nums,
        "perm": config.perm,
        "order": config.order,
    }


def _broker_count_text(count: int) -> str:
    return "1 broker" if count == 1 else f"{count} brokers"


def _topic_not_found(name: str, cluster: Cluster) -> NoRoute:
    asked = ", ".join(place.name for place in cluster.brokers)
    return NoRoute(f"no topic {name} on {asked}: escrowmq topic list shows them")
