"""`escrowmq message …`: send messages, follow them, and find one among millions.

Send what a command was given: one body, a file, or line after line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO

import click

from escrowmq.cli.access import access_options, current_access
from escrowmq.cli.brokers import Cluster, exit_with_failures
from escrowmq.cli.call import parse_name_servers
from escrowmq.cli.lookups import (
    MAX_TIMESTAMP_MS,
    find_by_id,
    find_by_key,
    find_by_offset,
    find_by_unique_key,
    message_not_found,
)
from escrowmq.cli.options import (
    cluster_options,
    complete_topic,
    namesrv_option,
    parse_duration_option,
    parse_start_option,
    parse_time_option,
)
from escrowmq.cli.output import ignore_broken_pipe, terminal_width
from escrowmq.cli.rendering import MessageView, message_json, message_line, message_lines
from escrowmq.cli.tail import MessageTail, TailRequest
from escrowmq.client.access import Access
from escrowmq.message.names import TOOLS_PRODUCER_GROUP
from escrowmq.remoting.headers import QueryMessage


@dataclass(frozen=True, slots=True)
class MessageTemplate:
    """All of a message but its body."""

    topic: str
    keys: Sequence[str]
    tag: str
    properties: Mapping[str, str]
    sharding_key: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class SentMessage:
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
        place = f"{self.broker}/{self.queue_id}#{self.queue_offset}"
        stored = "" if self.status == "SEND_OK" else f"  {self.status}"
        return f"{self.message_id}  {place}  id {self.offset_id}{stored}"

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
    """Empty lines are no messages."""
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
    """One after the other, each stored before the next is sent."""
    if dry_run:
        yield from (SentMessage(len(body)) for body in bodies)
        return
    # Not before: it starts a thread and an event loop, which other commands need not wait for.
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


_topic_argument = click.argument("topic", metavar="TOPIC", shell_complete=complete_topic)


@click.group()
def message() -> None:
    """Send messages, follow them as they come, find them and look at one."""


# --- sending -------------------------------------------------------------------------------------


@message.command()
@_topic_argument
@click.option("--body", metavar="TEXT", help="The message itself.")
@click.option("--file", type=click.File("rb"), help="One message: all that is in this file.")
@click.option("--key", "keys", multiple=True, help="To find it by; may be given again.")
@click.option("--tag", default="", help="For filters of consumers.")
@click.option(
    "--property",
    "properties",
    multiple=True,
    metavar="NAME=VALUE",
    help="May be given again.",
)
@click.option("--sharding-key", default="", help="The same one: the same queue, in order.")
@click.option(
    "--delay", callback=parse_duration_option, metavar="TIME", help="Not before: 90s, 10m, 2h."
)
@click.option("--dry-run", is_flag=True, help="Say what would be sent, and send nothing.")
@namesrv_option
@click.option("--json", "in_json", is_flag=True, help="JSON instead of text.")
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
    properties: tuple[str, ...],
    sharding_key: str,
    delay: int | None,
    dry_run: bool,
    namesrv: str,
    in_json: bool,
) -> None:
    """Send one message, or every line of standard input as one.

    \b
    escrowmq message send orders --body '{"order": 1}' --key 1 --tag new
    generate | escrowmq message send orders
    """
    if body is not None and file is not None:
        raise click.UsageError("--body or --file, not both")
    draft = MessageTemplate(
        topic=topic,
        keys=keys,
        tag=tag,
        properties=_parse_properties(properties),
        sharding_key=sharding_key,
        delay_s=(delay or 0) / 1000,
    )
    if body is None and file is None and sys.stdin.isatty():
        click.echo("one message a line; Ctrl-D ends", err=True)
    bodies = read_bodies(body, file, sys.stdin.buffer)
    count = 0
    with ignore_broken_pipe():
        for result in send_bodies(
            parse_name_servers(namesrv), current_access(), draft, bodies, dry_run
        ):
            count += 1
            click.echo(json.dumps(result.as_json()) if in_json else result.text)
    if not count:
        raise click.UsageError("nothing to send: --body, --file, or lines on standard input")
    context.exit(0)


def _parse_properties(texts: Iterable[str]) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals or not value:
            raise click.UsageError(f"--property {text!r} is not NAME=VALUE")
        pairs[name] = value
    return pairs


# --- looking -------------------------------------------------------------------------------------


@message.command()
@_topic_argument
@click.option(
    "--from",
    "start",
    default="latest",
    callback=parse_start_option,
    show_default=True,
    metavar="TIME|earliest|latest",
    help="Where to begin; a time is UTC.",
)
@click.option("--tag", default="*", help="Only with this tag, or A || B.")
@click.option("--sql", metavar="EXPRESSION", help="Only what this matches (SQL92).")
@click.option("--limit", type=click.IntRange(min=1), help="So many, then end.")
@click.option("--no-follow", is_flag=True, help="End where the topic ends now.")
@cluster_options
@click.pass_context
def tail(
    context: click.Context,
    topic: str,
    start: str | int,
    tag: str,
    sql: str | None,
    limit: int | None,
    no_follow: bool,
    namesrv: str,
    broker: str | None,
    in_json: bool,
) -> None:
    """Print the messages of a topic as they come, until Ctrl-C.

    No consumer group is moved and nobody notices. Bodies that are no text are shown in hex. With
    access control it needs SUB on the topic, and on the group TOOLS_CONSUMER.
    """
    if sql is not None and tag != "*":
        raise click.UsageError("--tag or --sql, not both")
    brokers = Cluster(namesrv, broker)
    kind = "TAG" if sql is None else "SQL92"
    wish = TailRequest(topic, start, sql or tag, kind, follow=not no_follow)
    following = MessageTail(brokers, wish)
    try:
        with ignore_broken_pipe():
            for found in islice(following.messages(), limit):
                _print_message(found, in_json)
    except KeyboardInterrupt:
        pass
    finally:
        following.close()
    exit_with_failures(context, brokers)


@message.command()
@_topic_argument
@click.option("--key", help="With this key.")
@click.option("--unique-key", help="What its sender calls it.")
@click.option("--id", "offset_id", metavar="ID", help="Where it lies: the id that a send answers.")
@click.option("--offset", type=click.IntRange(min=0), help="At this place of --queue.")
@click.option("--queue", type=click.IntRange(min=0), help="A queue's number.  [0]")
@click.option(
    "--since", callback=parse_time_option, metavar="TIME", help="Stored then or later; with --key."
)
@click.option(
    "--until", callback=parse_time_option, metavar="TIME", help="Stored until then; with --key."
)
@click.option("--limit", type=click.IntRange(1, 10_000), default=64, show_default=True)
@cluster_options
@click.pass_context
def find(
    context: click.Context,
    /,
    topic: str,
    key: str | None,
    unique_key: str | None,
    offset_id: str | None,
    offset: int | None,
    queue: int | None,
    since: int | None,
    until: int | None,
    limit: int,
    namesrv: str,
    broker: str | None,
    in_json: bool,
) -> None:
    """Find messages of a topic: by key, unique key, id, or place in a queue."""
    asked = [key, unique_key, offset_id, offset]
    if sum(one is not None for one in asked) != 1:
        raise click.UsageError("by what? one of --key, --unique-key, --id, --offset")
    brokers = Cluster(namesrv, broker)
    if key is not None:
        end_ms = MAX_TIMESTAMP_MS if until is None else until
        query = QueryMessage(
            topic=topic, key=key, max_num=limit, begin_timestamp=since or 0, end_timestamp=end_ms
        )
        found, what = find_by_key(brokers, query), f"of {topic} with key {key}"
    elif unique_key is not None:
        found = find_by_unique_key(brokers, unique_key, topic)
        what = f"of {topic} with unique key {unique_key}"
    elif offset_id is not None:
        found, what = find_by_id(brokers, offset_id, topic), f"of {topic} with id {offset_id}"
        found = [one for one in found if one.record.topic == topic]
    else:
        assert offset is not None
        found = find_by_offset(brokers, topic, queue or 0, offset)
        what = f"at {offset} in queue {queue or 0} of {topic}"
    if not found and not brokers.failures:
        raise message_not_found(brokers, what)
    with ignore_broken_pipe():
        for one in found[:limit]:
            _print_message(one, in_json)
    exit_with_failures(context, brokers)


@message.command()
@click.argument("name", metavar="ID")
@click.option(
    "--topic", help="Look there alone: quicker, for a unique key.", shell_complete=complete_topic
)
@cluster_options
@click.pass_context
def show(
    context: click.Context,
    name: str,
    topic: str | None,
    namesrv: str,
    broker: str | None,
    in_json: bool,
) -> None:
    """Print all of one message. ID is where it lies, or its unique key: a send answers both."""
    brokers = Cluster(namesrv, broker)
    found = find_by_id(brokers, name, topic)
    if not found and not brokers.failures:
        raise message_not_found(brokers, name)
    with ignore_broken_pipe():
        for number, one in enumerate(found):
            if in_json:
                click.echo(json.dumps(message_json(one)))
                continue
            if number:
                click.echo("\n---\n")
            for line in message_lines(one):
                click.echo(line)
    exit_with_failures(context, brokers)


def _print_message(message: MessageView, in_json: bool) -> None:
    """At once: who reads a pipe waits for it."""
    text = (
        json.dumps(message_json(message))
        if in_json
        else message_line(message, terminal_width(sys.stdout))
    )
    click.echo(text)
    sys.stdout.flush()
