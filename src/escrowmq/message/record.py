"""One message as it lies in the commit log and travels in a pull answer, byte by byte.

    total size 4 | magic 4 | body CRC 4 | queue id 4 | flag 4 | queue offset 8 | log offset 8
    | sysFlag 4 | born ms 8 | born host 8 or 20 | stored ms 8 | store host 8 or 20
    | reconsume times 4 | prepared transaction offset 8 | body length 4, body
    | topic length 1 or 2, topic | properties length 2, properties

Two layouts, told apart by the magic: V1 has one byte for the topic's length (at most 127), V2 two.
The end of a log file is a blank record: the bytes that remain (4) and its own magic (4).

The CRC covers the body alone. A *sealed* record ends its properties with `__CRC32#`, ten digits,
which cover everything before them; RocketMQ calls that enabledAppendPropCRC.

The bits of a message's sysFlag.

bit 0        the body is compressed
bit 1        several tags
bits 2-3     transaction: 0 none, 4 half, 8 commit, 12 rollback
bits 4, 5    born host, store host is IPv6
bits 6, 7    inner batch: needs unwrapping, is one
bits 8-10    how it is compressed: 0 and 0x300 zlib, 0x100 LZ4, 0x200 zstd

CRC-32, the fastest there is: `isal` takes a third of zlib's time (extra `[fast]`).

The two kinds of offset that the wire and the disk put side by side.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final, NewType

import msgspec

from escrowmq.errors import CorruptRecord, RecordRefused
from escrowmq.message.names import RECORD_CRC

COMPRESSED: Final = 0x1
MULTI_TAGS: Final = 0x2

TRANSACTION_MASK: Final = 0xC
TRANSACTION_NONE: Final = 0x0
TRANSACTION_PREPARED: Final = 0x4
TRANSACTION_COMMIT: Final = 0x8
TRANSACTION_ROLLBACK: Final = 0xC

BORN_HOST_IPV6: Final = 0x10
STORE_HOST_IPV6: Final = 0x20

NEED_UNWRAP: Final = 0x40
INNER_BATCH: Final = 0x80

COMPRESSION_MASK: Final = 0x700
COMPRESSION_LZ4: Final = 0x100
COMPRESSION_ZSTD: Final = 0x200
COMPRESSION_ZLIB: Final = 0x300


def transaction_type(sys_flag: int) -> int:
    return sys_flag & TRANSACTION_MASK


def with_transaction_type(sys_flag: int, value: int) -> int:
    return sys_flag & ~TRANSACTION_MASK | value


def is_compressed(sys_flag: int) -> bool:
    return bool(sys_flag & COMPRESSED)


def with_compression(sys_flag: int, compression_type: int) -> int:
    """Marks the body compressed in that way."""
    return sys_flag & ~COMPRESSION_MASK | COMPRESSED | compression_type


def without_compression(sys_flag: int) -> int:
    return sys_flag & ~(COMPRESSION_MASK | COMPRESSED)


try:
    from isal.isal_zlib import crc32
except ImportError:  # the same function, slower
    from zlib import crc32

__all__ = ["crc32"]


LogOffset = NewType("LogOffset", int)  # a byte position in the commit log
QueueOffset = NewType("QueueOffset", int)  # a count of messages in one queue


MAGIC_V1: Final = 0xDAA320A7
MAGIC_V2: Final = 0xDAA320AB
MAGIC_BLANK: Final = 0xCBD43194
BLANK: Final = struct.Struct(">iI")

CRC_MASK: Final = 0x7FFFFFFF
TOPIC_BYTES_MAX_V1: Final = 127
TOPIC_BYTES_MAX: Final = 255
PROPERTIES_BYTES_MAX: Final = 32_767
RECORD_BYTES_MIN: Final = 91  # V1, both hosts IPv4, nothing in it

_CRC_PROPERTY_NAME: Final = RECORD_CRC.encode() + b"\x01"
_CRC_PROPERTY_BYTES: Final = len(_CRC_PROPERTY_NAME) + 10 + 1
CRC_PROPERTY_BYTES_MAX: Final = (
    _CRC_PROPERTY_BYTES + 1
)  # with the separator that may have to go before it
_PROPERTIES_LENGTH = struct.Struct(">h")
pack_properties_length = _PROPERTIES_LENGTH.pack
_TOPIC_LENGTH_V2 = struct.Struct(">h")


def _head(born_bytes: int, store_bytes: int) -> struct.Struct:
    return struct.Struct(
        ">i"  # total size
        "I"  # magic
        "I"  # body CRC
        "i"  # queue id
        "i"  # flag
        "q"  # queue offset
        "q"  # log offset
        "i"  # sysFlag
        "q"  # born ms
        f"{born_bytes}s"
        "q"  # stored ms
        f"{store_bytes}s"
        "i"  # reconsume times
        "q"  # prepared transaction offset
        "i"  # body length
    )


# By the two IPv6 bits of the sysFlag.
_HEADS = {
    0: _head(8, 8),
    BORN_HOST_IPV6: _head(20, 8),
    STORE_HOST_IPV6: _head(8, 20),
    BORN_HOST_IPV6 | STORE_HOST_IPV6: _head(20, 20),
}
_HOST_BITS = BORN_HOST_IPV6 | STORE_HOST_IPV6
HEAD_V4 = _HEADS[0]
_HEAD_V4_BYTES = HEAD_V4.size
assert _HEAD_V4_BYTES + 1 + 2 == RECORD_BYTES_MIN
_SYS_FLAG_POSITION = 36


class NewRecord(msgspec.Struct, frozen=True, gc=False):
    """A message to be appended. Where it will lie is the store's business."""

    # A msgspec struct and not a dataclass: one is made for every message sent, and this is
    # five times cheaper to make.
    topic: str
    queue_id: int
    body: bytes
    properties: bytes = b""
    flag: int = 0
    sys_flag: int = 0
    born_ms: int = 0
    born_host: bytes = b"\0" * 8
    reconsume_times: int = 0
    prepared_offset: int = 0
    # Its tags code and all its keys, if whoever made it knows them already.
    tags_and_keys: tuple[int, list[bytes]] | None = None


class StoredRecord(msgspec.Struct, frozen=True, gc=False):
    """A record that was read and checked. `body` is a slice of what it was read from."""

    # In the order of the layout, so that what was unpacked can be handed over as it is.
    size: int
    magic: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: QueueOffset
    log_offset: LogOffset
    sys_flag: int
    born_ms: int
    born_host: bytes
    stored_ms: int
    store_host: bytes
    reconsume_times: int
    prepared_offset: int
    body: bytes | memoryview
    topic: str
    properties: bytes


def copy_record(
    record: NewRecord | StoredRecord,
    *,
    topic: str,
    queue_id: int,
    properties: bytes,
    reconsume_times: int | None = None,
) -> NewRecord:
    """The same message for another queue; what it was born with stays."""
    return NewRecord(
        topic=topic,
        queue_id=queue_id,
        body=bytes(record.body),
        properties=properties,
        flag=record.flag,
        sys_flag=record.sys_flag,
        born_ms=record.born_ms,
        born_host=record.born_host,
        reconsume_times=record.reconsume_times if reconsume_times is None else reconsume_times,
        prepared_offset=record.prepared_offset,
    )


@lru_cache(maxsize=65_536)
def encode_topic(topic: str) -> tuple[int, bytes]:
    """The magic that a topic's length asks for, and its length and name as records hold them."""
    name = topic.encode()
    if not 1 <= len(name) <= TOPIC_BYTES_MAX:
        raise RecordRefused(f"a topic of {len(name)} bytes, not 1 to {TOPIC_BYTES_MAX}")
    if len(name) <= TOPIC_BYTES_MAX_V1:
        return MAGIC_V1, bytes([len(name)]) + name
    return MAGIC_V2, _TOPIC_LENGTH_V2.pack(len(name)) + name


def encode_record(
    record: NewRecord,
    queue_offset: int,
    log_offset: int,
    stored_ms: int,
    store_host: bytes,
    append_crc: bool = False,
) -> bytes:
    _, pieces = encode_record_pieces(
        record, queue_offset, log_offset, stored_ms, store_host, append_crc
    )
    return b"".join(pieces)


def encode_record_pieces(
    record: NewRecord,
    queue_offset: int,
    log_offset: int,
    stored_ms: int,
    store_host: bytes,
    append_crc: bool = False,
) -> tuple[int, tuple[bytes, ...]]:
    """Its size, and what it is made of, not yet joined: many records are joined at once."""
    magic, topic = encode_topic(record.topic)
    body, properties, sys_flag = record.body, record.properties, record.sys_flag & ~_HOST_BITS
    born_host, body_bytes = record.born_host, len(body)
    if append_crc:
        separator = b"" if not properties or properties.endswith(b"\x02") else b"\x02"
        properties = b"".join((properties, separator, b"\0" * _CRC_PROPERTY_BYTES))
    head, head_bytes = HEAD_V4, _HEAD_V4_BYTES
    if len(born_host) + len(store_host) != 16:
        sys_flag |= BORN_HOST_IPV6 if len(born_host) == 20 else 0
        sys_flag |= STORE_HOST_IPV6 if len(store_host) == 20 else 0
        head = _HEADS[sys_flag & _HOST_BITS]
        head_bytes = head.size
    size = head_bytes + body_bytes + len(topic) + 2 + len(properties)
    packed = head.pack(
        size,
        magic,
        crc32(body) & CRC_MASK,
        record.queue_id,
        record.flag,
        queue_offset,
        log_offset,
        sys_flag,
        record.born_ms,
        born_host,
        stored_ms,
        store_host,
        record.reconsume_times,
        record.prepared_offset,
        body_bytes,
    )
    pieces = (packed, body, topic, pack_properties_length(len(properties)), properties)
    return (size, (_fill_in_crc(b"".join(pieces)),)) if append_crc else (size, pieces)


def encoded_size(record: NewRecord, *, store_host: bytes, append_crc: bool = False) -> int:
    """How long `encode_record` will make it, without making it."""
    properties = record.properties
    size = _HEAD_V4_BYTES - 16 + len(record.born_host) + len(store_host)
    size += len(record.body) + len(encode_topic(record.topic)[1]) + 2 + len(properties)
    if append_crc:
        size += _CRC_PROPERTY_BYTES + (1 if properties and not properties.endswith(b"\x02") else 0)
    return size


def encode_blank(remaining_bytes: int) -> bytes:
    return BLANK.pack(remaining_bytes, MAGIC_BLANK)


def decode_record(data: bytes | memoryview, position: int, log_offset: LogOffset) -> StoredRecord:
    """The record at `data[at:]`, checked in every way that its layout allows.

    `log_offset` is where it should think it lies: what is stored at the wrong place is corrupt.
    """
    if len(data) - position < RECORD_BYTES_MIN:
        raise CorruptRecord(log_offset, "the log ends inside this record")
    host_bits = data[position + _SYS_FLAG_POSITION + 3] & _HOST_BITS
    head = _HEADS[host_bits]
    if len(data) - position < head.size:
        raise CorruptRecord(log_offset, "the log ends inside this record")
    fields = head.unpack_from(data, position)
    size, magic, body_crc, _, _, _, own_offset = fields[:7]
    body_size = fields[14]
    if magic != MAGIC_V1 and magic != MAGIC_V2:
        raise CorruptRecord(log_offset, f"magic {magic:#010x} is not a record's")
    if size < RECORD_BYTES_MIN or size > len(data) - position:
        raise CorruptRecord(log_offset, f"a size of {size} does not fit")
    if own_offset != log_offset:
        raise CorruptRecord(log_offset, f"it says that it lies at {own_offset}")
    body_at = position + head.size
    body_end = body_at + body_size
    topic, properties = _decode_topic_and_properties(
        data, body_end, position + size, magic, log_offset, body_size
    )
    body = data[body_at:body_end]
    if crc32(body) & CRC_MASK != body_crc:
        raise CorruptRecord(log_offset, "the body's checksum is wrong")
    _check_properties(data[position : position + size], properties, log_offset)
    # mypy cannot count what was unpacked; the layout above can.
    return StoredRecord(*fields[:14], body, topic, properties)  # type: ignore[call-arg]


def _decode_topic_and_properties(
    data: bytes | memoryview,
    body_end: int,
    record_end: int,
    magic: int,
    log_offset: LogOffset,
    body_size: int,
) -> tuple[str, bytes]:
    """Topic and properties, if the three lengths add up to the record's size."""
    length_bytes = 1 if magic == MAGIC_V1 else 2
    if body_size < 0 or body_end + length_bytes > record_end:
        raise CorruptRecord(log_offset, f"a body of {body_size} bytes does not fit")
    topic_at = body_end + length_bytes
    length = data[body_end]
    if length_bytes == 2 or length > TOPIC_BYTES_MAX_V1:
        length = int.from_bytes(data[body_end:topic_at], "big", signed=True)
    topic_end = topic_at + length
    if not topic_at < topic_end <= record_end - 2:
        raise CorruptRecord(log_offset, "the topic does not fit")
    (properties_size,) = _PROPERTIES_LENGTH.unpack_from(data, topic_end)
    if properties_size < 0 or topic_end + 2 + properties_size != record_end:
        raise CorruptRecord(log_offset, "the parts do not add up to the size")
    try:
        topic = str(data[topic_at:topic_end], "utf-8")
    except UnicodeDecodeError:
        raise CorruptRecord(log_offset, "the topic is not text") from None
    if "\0" in topic:
        raise CorruptRecord(log_offset, "the topic has a zero byte in it")
    return topic, bytes(data[topic_end + 2 : record_end])


def _check_properties(
    encoded: bytes | memoryview, properties: bytes, log_offset: LogOffset
) -> None:
    # No property has a zero byte: one here is a sector that was never written.
    if 0 in properties:
        raise CorruptRecord(log_offset, "the properties have a zero byte in them")
    seal = properties[-_CRC_PROPERTY_BYTES:]
    if not seal[-11:-1].isdigit() and not seal.startswith(_CRC_PROPERTY_NAME):
        return  # nothing like a seal: most records have none
    is_named = seal.startswith(_CRC_PROPERTY_NAME) and seal.endswith(b"\x02")
    is_right = seal[-11:-1].isdigit() and _crc_digits(encoded) == seal[-11:-1]
    if is_named != is_right and (seal.startswith(_CRC_PROPERTY_NAME) or is_right):
        # The digits are wrong; or they are right, and what stands around them is not.
        raise CorruptRecord(log_offset, "the record's seal is wrong")


def _fill_in_crc(encoded: bytes) -> bytes:
    digits = _crc_digits(encoded)
    return b"".join((encoded[:-_CRC_PROPERTY_BYTES], _CRC_PROPERTY_NAME, digits, b"\x02"))


def _crc_digits(encoded: bytes | memoryview) -> bytes:
    """Ten decimal digits, the least significant first."""
    value = crc32(encoded[:-_CRC_PROPERTY_BYTES]) & CRC_MASK
    return (b"%010d" % value)[::-1]
