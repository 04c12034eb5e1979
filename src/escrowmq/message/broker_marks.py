"""What only a broker may write into a message: properties and bits of the sysFlag.

A start believes these marks: a final, a moved half and a delivered delayed message are recognised
by them. Every path that stores what a client sent therefore removes them first. They are removed
and not refused, because clients of RocketMQ send received messages again with all their properties.

To reserve another property, add it to BROKER_PROPERTIES, or give it the prefix ESCROW_.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from escrowmq.message import names
from escrowmq.message.properties import find_property, parse_boolean
from escrowmq.message.record import COMPRESSED, COMPRESSION_MASK, MULTI_TAGS

POP_CHECKPOINT: Final = "POP_CK"
# What a broker adds to every message for information. The message has those of the broker it was
# received from, if a consumer forwards it.
ADDED_PROPERTIES: Final = ("MSG_REGION", "TRACE_ON", names.CLUSTER)
BROKER_PROPERTIES: Final = (
    names.REAL_TOPIC,
    names.REAL_QUEUE_ID,
    names.CHECK_TIMES,
    names.PREPARED_QUEUE_OFFSET,
    names.RECORD_CRC,
    POP_CHECKPOINT,
)
BROKER_PROPERTY_PREFIX: Final = "ESCROW_"
# A client sets these four on the halves of a writer, and on no other message.
WRITER_PROPERTIES: Final = (names.WRITER, names.BATCH, names.ATTEMPT, names.FENCE)

# The bits of the sysFlag that describe the body and the tags. All others are the broker's: the
# transaction type, the lengths of the two addresses, and batches in the body.
CLIENT_SYS_FLAGS: Final = COMPRESSED | MULTI_TAGS | COMPRESSION_MASK

_PREFIX: Final = BROKER_PROPERTY_PREFIX.encode()
_NAMES: Final = frozenset(name.encode() for name in BROKER_PROPERTIES)
_ADDED_NAMES: Final = frozenset(name.encode() for name in ADDED_PROPERTIES)
_WRITER_NAMES: Final = frozenset(name.encode() for name in WRITER_PROPERTIES)
_NO_NAMES: Final[frozenset[bytes]] = frozenset()


def may_have_broker_properties(properties: str) -> bool:
    """Return whether broker properties have to be removed; True for some texts without any.

    It searches for parts of the names, one literal at a time: Python finds a literal in a str
    five times faster than in bytes, and twice as fast as a regular expression does.
    """
    return (
        "REAL_" in properties
        or "ESCROW_" in properties
        or "TRAN_P" in properties
        or "CHECK_TIMES" in properties
        or "__CRC32#" in properties
        or "POP_CK\x01" in properties
        or "MSG_REGION\x01" in properties
    )


def remove_broker_properties(encoded: bytes, *, keeps_added: bool = False) -> bytes:
    """Return properties without those that only a broker writes; all others stay as they are.

    A half keeps the properties that say which writer it belongs to. With `keeps_added`, what a
    broker adds for information stays too: the message was stored by this broker.
    """
    kept = _NO_NAMES
    if _PREFIX in encoded and parse_boolean(find_property(encoded, b"TRAN_MSG")):
        kept = _WRITER_NAMES
    removed = _NAMES if keeps_added else _NAMES | _ADDED_NAMES
    items = [
        item for item in encoded.split(b"\x02") if item and not _is_removed(item, removed, kept)
    ]
    return b"".join(item + b"\x02" for item in items)


def _is_removed(item: bytes, removed: Collection[bytes], kept: Collection[bytes]) -> bool:
    name = item.partition(b"\x01")[0]
    return name in removed or (name.startswith(_PREFIX) and name not in kept)
