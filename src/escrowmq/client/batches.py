"""Many messages of one topic in one request: what may go together, and how much."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from escrowmq.client.messages import Message, SendResult
from escrowmq.client.packing import Packed, properties_text
from escrowmq.errors import LocalProtocolError
from escrowmq.message import names
from escrowmq.message.batch import BatchItem, encode_batch

BATCH_BYTES_MAX: Final = 1 << 20  # of one request; a broker takes 4 MiB unless it is told otherwise
_AROUND_BYTES: Final = 22  # what the layout adds to body and properties of each

Item = tuple[str, BatchItem]  # with the message's id


def refuse_mixed(messages: Sequence[Message]) -> None:
    """Raises LocalProtocolError: these cannot be one batch."""
    if not messages:
        raise LocalProtocolError("a batch has a message at least")
    first = messages[0]
    for message in messages:
        if message.topic != first.topic:
            raise LocalProtocolError(
                f"a batch is of one topic, not of {first.topic} and {message.topic}: "
                "send a batch for each"
            )
        if message.sharding_key != first.sharding_key:
            raise LocalProtocolError(
                "a batch goes to one queue, so all of it has one sharding key: send one for each"
            )
        if message.is_delayed:
            raise LocalProtocolError("no message of a batch is delayed: send it by itself")
        if names.TRANSACTIONAL in message.properties:
            raise LocalProtocolError(
                "no message of a batch is transactional: use producer.transaction, which decides "
                "any number of messages at once"
            )


def items_of(
    messages: Iterable[Message], keys: Iterator[str], more: Mapping[str, str]
) -> list[Item]:
    """`more`: properties that all of them get."""
    items = []
    for message in messages:
        message_id = message.properties.get(names.UNIQUE_KEY) or next(keys)
        properties = properties_text(message, message_id, more).encode()
        items.append((message_id, BatchItem(message.flag, message.body, properties)))
    return items


def cut(items: Sequence[Item], bytes_max: int) -> Iterator[list[Item]]:
    """In order, as many to a request as fit; a message that is longer than that goes alone."""
    chunk: list[Item] = []
    filled = 0
    for item in items:
        size = _AROUND_BYTES + len(item[1].body) + len(item[1].properties)
        if chunk and filled + size > bytes_max:
            yield chunk
            chunk, filled = [], 0
        chunk.append(item)
        filled += size
    if chunk:
        yield chunk


def pack_batch(topic: str, chunk: Sequence[Item], sharding_key: str) -> Packed:
    return Packed(
        topic,
        encode_batch(item for _, item in chunk),
        f"{names.WAIT_STORED}\x01true\x02",
        0,
        0,
        chunk[0][0],
        sharding_key,
        batch=True,
    )


def results_of(result: SendResult, ids: Sequence[str]) -> list[SendResult]:
    """One for each message, from the answer to all: their places follow each other."""
    places = result.offset_id.split(",")
    places += [""] * (len(ids) - len(places))
    return [
        SendResult(result.status, message_id, place, result.queue, result.queue_offset + number)
        for number, (message_id, place) in enumerate(zip(ids, places, strict=False))
    ]
