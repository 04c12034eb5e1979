"""Send what a command was given: one body, a file, or line after line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from escrowmq.client.access import Access

GROUP: Final = "TOOLS_PRODUCER"


@dataclass(frozen=True, slots=True)
class Draft:
    """All of a message but its body."""

    topic: str
    keys: Sequence[str]
    tag: str
    properties: Mapping[str, str]
    sharding_key: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class Sent:
    size: int
    message_id: str = ""
    offset_id: str = ""
    broker: str = ""
    queue_id: int = 0
    queue_offset: int = 0
    status: str = "not sent"

    @property
    def text(self) -> str:
        if not self.offset_id:
            return f"would send {self.size} bytes"
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
            "size": self.size,
        }


def bodies_of(body: str | None, file: BinaryIO | None, lines: BinaryIO) -> Iterator[bytes]:
    """Empty lines are no messages."""
    if body is not None:
        yield body.encode("utf-8", "surrogateescape")
    elif file is not None:
        yield file.read()
    else:
        yield from (text for line in lines if (text := line.rstrip(b"\r\n")))


def sent(
    servers: Sequence[str], access: Access, draft: Draft, bodies: Iterable[bytes], dry_run: bool
) -> Iterator[Sent]:
    """One after the other, each stored before the next is sent."""
    if dry_run:
        yield from (Sent(len(body)) for body in bodies)
        return
    # Not before: it starts a thread and an event loop, which other commands need not wait for.
    from escrowmq.blocking import Producer
    from escrowmq.client.messages import Message

    with Producer(servers, group=GROUP, access=access) as producer:
        for body in bodies:
            result = producer.send(
                Message(
                    draft.topic,
                    body,
                    keys=draft.keys,
                    tags=draft.tag,
                    properties=draft.properties,
                    sharding_key=draft.sharding_key,
                    delay_s=draft.delay_s,
                )
            )
            yield Sent(
                size=len(body),
                message_id=result.message_id,
                offset_id=result.offset_id,
                broker=result.queue.broker,
                queue_id=result.queue.queue_id,
                queue_offset=result.queue_offset,
                status=result.status.name,
            )
