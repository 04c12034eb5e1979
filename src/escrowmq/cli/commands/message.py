"""`escrowmq message …`: send messages, follow a topic, find and show messages; dead letters."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO, Final

import click

from escrowmq.admin.cluster import Cluster
from escrowmq.admin.messages import (
    MAX_TIMESTAMP_MS,
    MessageTail,
    MessageView,
    TailRequest,
    find_by_id,
    find_by_key,
    find_by_offset,
    find_by_unique_key,
    message_not_found,
)
from escrowmq.admin.offsets import StartPosition
from escrowmq.cli.commands.dead import dead_letters
from escrowmq.cli.options import (
    access_options,
    cluster_options,
    complete_topic,
    current_access,
    dry_run_option,
    json_option,
    namesrv_option,
    parse_duration_option,
    parse_pairs_option,
    parse_start_option,
    parse_time_option,
)
from escrowmq.cli.output import (
    exit_with_failures,
    ignore_broken_pipe,
    pause,
    print_json,
    print_lines,
    terminal_width,
)
from escrowmq.cli.rendering import message_json, message_line, message_lines
from escrowmq.client.access import Access
from escrowmq.message.names import TOOLS_PRODUCER_GROUP
from escrowmq.parsing import parse_servers
from escrowmq.remoting.headers import QueryMessage

_topic_argument = click.argument("topic", metavar="TOPIC", shell_complete=complete_topic)


@click.group()
def message() -> None:
    """Send messages, follow a topic, find and show messages, handle dead letters."""


message.add_command(dead_letters)


# --- send ----------------------------------------------------------------------------------------


@message.command()
@_topic_argument
@click.option("--body", metavar="TEXT", help="The body of one message.")
@click.option("--file", type=click.File("rb"), help="Send the content of this file as one message.")
@click.option("--key", "keys", multiple=True, help="A key to find it by. Repeat for several.")
@click.option("--tag", default="", help="The tag that consumers filter by.")
@click.option(
    "--property",
    "properties",
    multiple=True,
    callback=parse_pairs_option,
    metavar="NAME=VALUE",
    help="A property of the message. Repeat for several.",
)
@click.option(
    "--sharding-key",
    default="",
    help="Messages with the same sharding key go to the same queue, in order.",
)
@click.option(
    "--delay",
    "delay_ms",
    callback=parse_duration_option,
    metavar="TIME",
    help="Deliver the message after this time, such as 90s, 10m or 2h.",
)
@dry_run_option
@namesrv_option
@json_option
@access_options
@click.pass_context
def send(
    context: click.Context,
    /,
    topic: str,
    body: str | None,
    file: BinaryIO | None,
    keys: tuple[str, ...],
    tag: str,
    properties: dict[str, str],
    sharding_key: str,
    delay_ms: int | None,
    dry_run: bool,
    namesrv: str,
    as_json: bool,
) -> None:
    """Send one message, or every line of standard input as a message.

    \b
    escrowmq message send orders --body '{"order": 1}' --key 1 --tag new
    generate | escrowmq message send orders
    """
    if body is not None and file is not None:
        raise click.UsageError("give --body or --file, not both")
    template = MessageTemplate(
        topic=topic,
        keys=keys,
        tag=tag,
        properties=properties,
        sharding_key=sharding_key,
        delay_s=(delay_ms or 0) / 1000,
    )
    if body is None and file is None and sys.stdin.isatty():
        click.echo("type one message per line; Ctrl-D ends", err=True)
    bodies = read_bodies(body, file, sys.stdin.buffer)
    count = 0
    with ignore_broken_pipe():
        for sent in send_bodies(
            _parse_servers(namesrv), current_access(), template, bodies, dry_run
        ):
            count += 1
            if as_json:
                print_json(sent.as_json())
            else:
                click.echo(sent.text)
    if not count:
        raise click.UsageError("nothing to send: give --body, --file, or lines on standard input")
    context.exit(0)


@dataclass(frozen=True, slots=True)
class MessageTemplate:
    """Everything of a message except its body."""

    topic: str
    keys: Sequence[str]
    tag: str
    properties: Mapping[str, str]
    sharding_key: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class SentMessage:
    """The result of one send. A dry run knows only the size."""

    body_bytes: int
    message_id: str = ""
    offset_id: str = ""
    broker: str = ""
    queue_id: int = 0
    queue_offset: int = 0
    status: str = "not sent"

    @property
    def text(self) -> str:
        if not self.offset_id:
            return f"would send {self.body_bytes} bytes"
        position = f"{self.broker}/{self.queue_id}#{self.queue_offset}"
        status = "" if self.status == "SEND_OK" else f"  {self.status}"
        return f"{self.message_id}  {position}  id {self.offset_id}{status}"

    def as_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "unique_key": self.message_id or None,
            "id": self.offset_id or None,
            "broker": self.broker or None,
            "queue": self.queue_id,
            "queue_offset": self.queue_offset,
            "size": self.body_bytes,
        }


def read_bodies(body: str | None, file: BinaryIO | None, lines: BinaryIO) -> Iterator[bytes]:
    """Yield the bodies to send. Empty lines are skipped."""
    if body is not None:
        yield body.encode("utf-8", "surrogateescape")
    elif file is not None:
        yield file.read()
    else:
        yield from (text for line in lines if (text := line.rstrip(b"\r\n")))


def send_bodies(
    servers: Sequence[str],
    access: Access,
    template: MessageTemplate,
    bodies: Iterable[bytes],
    dry_run: bool,
) -> Iterator[SentMessage]:
    """Send one message after the other; each is stored before the next one is sent."""
    if dry_run:
        yield from (SentMessage(len(body)) for body in bodies)
        return
    # Imported here because it brings asyncio along, and other commands start faster without.
    from escrowmq.blocking import Producer
    from escrowmq.client.messages import Message

    with Producer(servers, group=TOOLS_PRODUCER_GROUP, access=access) as producer:
        for body in bodies:
            result = producer.send(
                Message(
                    template.topic,
                    body,
                    keys=template.keys,
                    tags=template.tag,
                    properties=template.properties,
                    sharding_key=template.sharding_key,
                    delay_s=template.delay_s,
                )
            )
            yield SentMessage(
                body_bytes=len(body),
                message_id=result.message_id,
                offset_id=result.offset_id,
                broker=result.queue.broker,
                queue_id=result.queue.queue_id,
                queue_offset=result.queue_offset,
                status=result.status.name,
            )


def _parse_servers(namesrv: str) -> list[str]:
    try:
        return parse_servers(namesrv)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="-n") from None


# --- tail ----------------------------------------------------------------------------------------

_POLL_INTERVAL_S: Final = 0.2


@message.command()
@_topic_argument
@click.option(
    "--from",
    "start",
    default="latest",
    callback=parse_start_option,
    show_default=True,
    metavar="TIME|earliest|latest",
    help="Where to begin. A TIME is UTC unless it has an offset.",
)
@click.option("--tag", default="*", help="Only messages with this tag, or with A || B.")
@click.option("--sql", metavar="EXPRESSION", help="Only messages that match this SQL92 expression.")
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Stop after this many messages."
)
@click.option("--no-follow", is_flag=True, help="Stop at the current end of the topic.")
@cluster_options
@click.pass_context
def tail(
    context: click.Context,
    topic: str,
    start: StartPosition,
    tag: str,
    sql: str | None,
    limit: int | None,
    no_follow: bool,
    cluster: Cluster,
    as_json: bool,
) -> None:
    """Print the messages of a topic as they arrive, until Ctrl-C.

    No consumer group is involved and no offset moves. Bodies that are not text are printed in
    hexadecimal. With access control, the account needs SUB on the topic and on the group
    TOOLS_CONSUMER.
    """
    if sql is not None and tag != "*":
        raise click.UsageError("give --tag or --sql, not both")
    expression_type = "TAG" if sql is None else "SQL92"
    request = TailRequest(topic, start, sql or tag, expression_type)
    messages = _tail_messages(MessageTail(cluster, request), follow=not no_follow)
    try:
        with ignore_broken_pipe():
            for message in islice(messages, limit):
                _print_message(message, as_json)
    except KeyboardInterrupt:
        pass  # the usual end of a command that follows
    exit_with_failures(context, cluster)


def _tail_messages(tail: MessageTail, *, follow: bool) -> Iterator[MessageView]:
    while True:
        messages = tail.poll()
        yield from messages
        if not messages:
            if not follow:
                return
            pause(_POLL_INTERVAL_S)


# --- find and show -------------------------------------------------------------------------------


@message.command()
@_topic_argument
@click.option("--key", help="Messages with this key.")
@click.option("--unique-key", help="The message with this unique key, given by its producer.")
@click.option(
    "--id", "offset_id", metavar="ID", help="The message with this offset id, as a send prints it."
)
@click.option(
    "--offset",
    "queue_offset",
    type=click.IntRange(min=0),
    metavar="N",
    help="The message at this queue offset of --queue.",
)
@click.option(
    "--queue", "queue_id", type=click.IntRange(min=0), metavar="N", help="A queue id.  [0]"
)
@click.option(
    "--since",
    "since_ms",
    callback=parse_time_option,
    metavar="TIME",
    help="With --key: stored at this time or later.",
)
@click.option(
    "--until",
    "until_ms",
    callback=parse_time_option,
    metavar="TIME",
    help="With --key: stored at this time or before.",
)
@click.option(
    "--limit",
    type=click.IntRange(1, 10_000),
    default=64,
    show_default=True,
    metavar="N",
    help="Print at most this many messages.",
)
@cluster_options
@click.pass_context
def find(
    context: click.Context,
    /,
    topic: str,
    key: str | None,
    unique_key: str | None,
    offset_id: str | None,
    queue_offset: int | None,
    queue_id: int | None,
    since_ms: int | None,
    until_ms: int | None,
    limit: int,
    cluster: Cluster,
    as_json: bool,
) -> None:
    """Find messages of a topic by key, unique key, id or queue offset."""
    criteria = [key, unique_key, offset_id, queue_offset]
    if sum(criterion is not None for criterion in criteria) != 1:
        raise click.UsageError("give one of --key, --unique-key, --id, --offset")
    if key is not None:
        query = QueryMessage(
            topic=topic,
            key=key,
            max_num=limit,
            begin_timestamp=since_ms or 0,
            end_timestamp=MAX_TIMESTAMP_MS if until_ms is None else until_ms,
        )
        messages, description = find_by_key(cluster, query), f"of {topic} with key {key}"
    elif unique_key is not None:
        messages = find_by_unique_key(cluster, unique_key, topic)
        description = f"of {topic} with unique key {unique_key}"
    elif offset_id is not None:
        found = find_by_id(cluster, offset_id, topic)
        messages = [message for message in found if message.record.topic == topic]
        description = f"of {topic} with id {offset_id}"
    else:
        assert queue_offset is not None
        messages = find_by_offset(cluster, topic, queue_id or 0, queue_offset)
        description = f"at offset {queue_offset} in queue {queue_id or 0} of {topic}"
    if not messages and not cluster.failures:
        raise message_not_found(cluster, description)
    with ignore_broken_pipe():
        for message in messages[:limit]:
            _print_message(message, as_json)
    exit_with_failures(context, cluster)


@message.command()
@click.argument("message_id", metavar="ID")
@click.option(
    "--topic",
    help="Search only this topic, which is faster for a unique key.",
    shell_complete=complete_topic,
)
@cluster_options
@click.pass_context
def show(
    context: click.Context, message_id: str, topic: str | None, cluster: Cluster, as_json: bool
) -> None:
    """Print everything about a message.

    ID is the offset id or the unique key of the message; `escrowmq message send` prints both.
    """
    messages = find_by_id(cluster, message_id, topic)
    if not messages and not cluster.failures:
        raise message_not_found(cluster, message_id)
    with ignore_broken_pipe():
        for number, message in enumerate(messages):
            if as_json:
                print_json(message_json(message))
                continue
            if number:
                click.echo("\n---\n")
            print_lines(message_lines(message))
    exit_with_failures(context, cluster)


def _print_message(message: MessageView, as_json: bool) -> None:
    """Print one line at once, for programs that read a pipe line by line."""
    if as_json:
        print_json(message_json(message))
    else:
        click.echo(message_line(message, terminal_width()))
        sys.stdout.flush()
