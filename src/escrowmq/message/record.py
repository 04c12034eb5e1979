"""A record: one message as the commit log stores it and a pull returns it, byte by byte.

    total size 4 | magic 4 | body CRC 4 | queue id 4 | flag 4 | queue offset 8 | log offset 8
    | sysFlag 4 | born ms 8 | born host 8 or 20 | stored ms 8 | store host 8 or 20
    | reconsume times 4 | prepared transaction offset 8 | body length 4, body
    | topic length 1 or 2, topic | properties length 2, properties

There are two layouts, told apart by the magic: V1 has one byte for the length of the topic (at most
127), V2 has two. A log segment ends with a blank record: the number of remaining bytes (4) and a
magic of its own (4).

The body CRC covers the body alone. With the record CRC (RocketMQ's enabledAppendPropCRC, on by
default), the properties end with `__CRC32#` and ten digits, a CRC of everything before them. It
belongs to the record and not to the message: it is removed when a record is read, and whatever a
sender put in its place is removed when a record is written.

The bits of the sysFlag:

    bit 0        the body is compressed
    bit 1        several tags
    bits 2-3     transaction: 0 none, 4 half, 8 commit, 12 rollback
    bits 4, 5    the born host, the store host is IPv6
    bits 6, 7    inner batch: needs unwrapping, is one
    bits 8-10    compression: 0 and 0x300 zlib, 0x100 LZ4, 0x200 zstd
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import lru_cache
from typing import Final, NewType

import msgspec

from escrowmq.errors import CorruptRecord, RecordRefused
from escrowmq.message.names import RECORD_CRC

# CRC-32 of `isal` takes a third of the time of zlib's; it is installed with the extra `[fast]`.
try:
    from isal.isal_zlib import crc32 as crc32
except ImportError:
    from zlib import crc32 as crc32

LogOffset = NewType("LogOffset", int)  # a byte position in the commit log
QueueOffset = NewType("QueueOffset", int)  # a count of messages in one queue

# --- sysFlag -------------------------------------------------------------------------------------

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
    """Return one of TRANSACTION_…."""
    return sys_flag & TRANSACTION_MASK


def with_transaction_type(sys_flag: int, value: int) -> int:
    return sys_flag & ~TRANSACTION_MASK | value


def is_compressed(sys_flag: int) -> bool:
    return bool(sys_flag & COMPRESSED)


def with_compression(sys_flag: int, compression_type: int) -> int:
    """Return the flag of a body that is compressed with one of COMPRESSION_…."""
    return sys_flag & ~COMPRESSION_MASK | COMPRESSED | compression_type


# --- layout --------------------------------------------------------------------------------------

MAGIC_V1: Final = 0xDAA320A7
MAGIC_V2: Final = 0xDAA320AB
MAGIC_BLANK: Final = 0xCBD43194
BLANK: Final = struct.Struct(">iI")

CRC_MASK: Final = 0x7FFFFFFF
TOPIC_BYTES_MAX_V1: Final = 127
TOPIC_BYTES_MAX: Final = 255
PROPERTIES_BYTES_MAX: Final = 32_767
RECORD_BYTES_MIN: Final = 91  # V1, both hosts IPv4, no body, no properties

CRC_PROPERTY_NAME: Final = RECORD_CRC.encode() + b"\x01"
CRC_PROPERTY_BYTES: Final = len(CRC_PROPERTY_NAME) + 10 + 1
CRC_PROPERTY_BYTES_MAX: Final = CRC_PROPERTY_BYTES + 1  # with a separator before it, if needed
_PROPERTIES_LENGTH = struct.Struct(">h")
pack_properties_length = _PROPERTIES_LENGTH.pack
_TOPIC_LENGTH_V2 = struct.Struct(">h")
_ITEM_END: Final = 2  # ends a property


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


# The head of a record, by the two IPv6 bits of the sysFlag.
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


# --- values --------------------------------------------------------------------------------------


class NewRecord(msgspec.Struct, frozen=True, gc=False):
    """A message to be appended. The store assigns its offsets."""

    # A msgspec struct and not a dataclass: one is created for every message sent, and this is
    # five times cheaper to create.
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
    # The tags code and all keys, if the creator of the record knows them already.
    tags_and_keys: tuple[int, list[bytes]] | None = None


class StoredRecord(msgspec.Struct, frozen=True, gc=False):
    """A record that was read and checked. `body` is a slice of the data it was read from.

    `properties` are without the record CRC.
    """

    # In the order of the layout, so that the unpacked values can be passed on as they are.
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
    """Return the same message for another queue. Its born time, born host and flags stay."""
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


# --- encoding ------------------------------------------------------------------------------------


@lru_cache(maxsize=65_536)
def encode_topic(topic: str) -> tuple[int, bytes]:
    """Return the magic for a topic of this length, and length and name as records hold them.

    Raises RecordRefused if the topic is empty or too long.
    """
    name = topic.encode()
    if not 1 <= len(name) <= TOPIC_BYTES_MAX:
        raise RecordRefused(f"the topic has {len(name)} bytes, expected 1 to {TOPIC_BYTES_MAX}")
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
    """Return the size of a record and its pieces, not joined: a batch joins many at once."""
    magic, topic = encode_topic(record.topic)
    body, properties, sys_flag = record.body, record.properties, record.sys_flag & ~_HOST_BITS
    born_host, body_bytes = record.born_host, len(body)
    if CRC_PROPERTY_NAME in properties:
        properties = without_crc_property(properties)
    properties_bytes = len(properties)
    if append_crc:
        if properties and properties[-1] != _ITEM_END:
            properties += b"\x02"
        properties_bytes = len(properties) + CRC_PROPERTY_BYTES
    head, head_bytes = HEAD_V4, _HEAD_V4_BYTES
    if len(born_host) + len(store_host) != 16:
        sys_flag |= BORN_HOST_IPV6 if len(born_host) == 20 else 0
        sys_flag |= STORE_HOST_IPV6 if len(store_host) == 20 else 0
        head = _HEADS[sys_flag & _HOST_BITS]
        head_bytes = head.size
    size = head_bytes + body_bytes + len(topic) + 2 + properties_bytes
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
    if not append_crc:
        return size, (packed, body, topic, pack_properties_length(properties_bytes), properties)
    tail = b"".join((topic, pack_properties_length(properties_bytes), properties))
    # One CRC over the pieces, each continuing the one before, costs less than to join them first.
    crc_property = encode_crc_property(crc32(tail, crc32(body, crc32(packed))))
    return size, (packed, body, tail, crc_property)


def encode_crc_property(crc: int) -> bytes:
    """Return the record CRC as the last property of a record: the least significant digit first."""
    return b"%b%b\x02" % (CRC_PROPERTY_NAME, (b"%010d" % (crc & CRC_MASK))[::-1])


def encode_crc_properties(crcs: list[int]) -> list[bytes]:
    """Return the same for many records. One format of all digits takes a third of the time."""
    digits = b"%010d" * len(crcs) % tuple([crc & CRC_MASK for crc in reversed(crcs)])
    digits = digits[::-1]
    name = CRC_PROPERTY_NAME
    return [b"%b%b\x02" % (name, digits[begin : begin + 10]) for begin in range(0, len(digits), 10)]


def has_crc_property(properties: bytes) -> bool:
    """Return whether a sender has set the property that only the broker may set."""
    return CRC_PROPERTY_NAME in properties


def without_crc_property(properties: bytes) -> bytes:
    """Return the properties without anything that looks like a record CRC.

    Clients copy properties from messages that they received, and a CRC of another record would
    make this one look damaged.
    """
    items = properties.split(b"\x02")
    return b"".join(item + b"\x02" for item in items if item and CRC_PROPERTY_NAME not in item)


def encoded_size(record: NewRecord, *, store_host: bytes, append_crc: bool = False) -> int:
    """Return the size that `encode_record` would produce, without encoding."""
    properties = record.properties
    if CRC_PROPERTY_NAME in properties:
        properties = without_crc_property(properties)
    size = _HEAD_V4_BYTES - 16 + len(record.born_host) + len(store_host)
    size += len(record.body) + len(encode_topic(record.topic)[1]) + 2 + len(properties)
    if append_crc:
        size += CRC_PROPERTY_BYTES + (1 if properties and not properties.endswith(b"\x02") else 0)
    return size


def encode_blank(remaining_bytes: int) -> bytes:
    """Return the record that ends a segment."""
    return BLANK.pack(remaining_bytes, MAGIC_BLANK)


# --- decoding ------------------------------------------------------------------------------------


def decode_record(data: bytes | memoryview, position: int, log_offset: LogOffset) -> StoredRecord:
    """Return the record at `data[position:]`, checked in every way that its layout allows.

    The record must contain `log_offset` as its own: a record at the wrong offset is corrupt. Raises
    CorruptRecord.
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
        raise CorruptRecord(log_offset, f"its magic {magic:#010x} is not that of a record")
    if size < RECORD_BYTES_MIN or size > len(data) - position:
        raise CorruptRecord(log_offset, f"its size {size} is impossible")
    if own_offset != log_offset:
        raise CorruptRecord(log_offset, f"it contains another log offset, {own_offset}")
    body_begin = position + head.size
    body_end = body_begin + body_size
    topic, properties = _decode_topic_and_properties(
        data, body_end, position + size, magic, log_offset, body_size
    )
    body = data[body_begin:body_end]
    if crc32(body) & CRC_MASK != body_crc:
        raise CorruptRecord(log_offset, "the body's checksum is wrong")
    properties = _check_properties(data, position, position + size, properties, log_offset)
    # mypy cannot count the unpacked values; the layout above guarantees their number.
    return StoredRecord(*fields[:14], body, topic, properties)  # type: ignore[call-arg]


def _decode_topic_and_properties(
    data: bytes | memoryview,
    body_end: int,
    record_end: int,
    magic: int,
    log_offset: LogOffset,
    body_size: int,
) -> tuple[str, bytes]:
    """Return topic and properties, after checking that all lengths add up to the record's size."""
    length_bytes = 1 if magic == MAGIC_V1 else 2
    if body_size < 0 or body_end + length_bytes > record_end:
        raise CorruptRecord(log_offset, f"a body of {body_size} bytes does not fit into it")
    topic_begin = body_end + length_bytes
    length = data[body_end]
    if length_bytes == 2 or length > TOPIC_BYTES_MAX_V1:
        length = int.from_bytes(data[body_end:topic_begin], "big", signed=True)
    topic_end = topic_begin + length
    if not topic_begin < topic_end <= record_end - 2:
        raise CorruptRecord(log_offset, "the topic does not fit into it")
    (properties_size,) = _PROPERTIES_LENGTH.unpack_from(data, topic_end)
    if properties_size < 0 or topic_end + 2 + properties_size != record_end:
        raise CorruptRecord(log_offset, "its parts do not add up to its size")
    try:
        topic = str(data[topic_begin:topic_end], "utf-8")
    except UnicodeDecodeError:
        raise CorruptRecord(log_offset, "the topic is not valid text") from None
    if "\0" in topic:
        raise CorruptRecord(log_offset, "the topic contains a zero byte")
    return topic, bytes(data[topic_end + 2 : record_end])


def _check_properties(
    data: bytes | memoryview, begin: int, end: int, properties: bytes, log_offset: LogOffset
) -> bytes:
    """Check the record CRC, if the record between these positions has one.

    Return the properties without it.
    """
    # No property contains a zero byte. If there is one, a sector of the disk was never written.
    if 0 in properties:
        raise CorruptRecord(log_offset, "the properties contain a zero byte")
    crc_property = properties[-CRC_PROPERTY_BYTES:]
    has_name, digits = crc_property.startswith(CRC_PROPERTY_NAME), crc_property[-11:-1]
    if not has_name and not digits.isdigit():
        return properties  # a record without a record CRC
    expected = encode_crc_property(crc32(data[begin : end - CRC_PROPERTY_BYTES]))
    if crc_property == expected:
        return properties[:-CRC_PROPERTY_BYTES]
    if has_name or digits == expected[-11:-1]:
        # Either the digits are wrong, or they are right and the bytes around them are damaged.
        raise CorruptRecord(log_offset, "the record CRC is wrong")
    return properties


# --- damaged records -----------------------------------------------------------------------------

ReadPart = Callable[[int, int], bytes]  # the bytes of a record between two positions, or fewer


class RecordClaims(msgspec.Struct, frozen=True):
    """What the bytes of a damaged record say about it. Any of it may be wrong."""

    size: int  # the field
    parts_size: int  # the sum of the lengths of its parts; -1 if these are impossible
    magic: int
    log_offset: int
    queue_id: int
    queue_offset: int
    topic: str  # empty if it cannot be read

    def wrong_bits(self, log_offset: int) -> int:
        """Return how many bits of magic and log offset differ from those of a record there."""
        magic_bits = min((self.magic ^ magic).bit_count() for magic in (MAGIC_V1, MAGIC_V2))
        return magic_bits + ((self.log_offset ^ log_offset) & (1 << 64) - 1).bit_count()


def read_claims(read: ReadPart) -> RecordClaims | None:
    """Read a record that may be damaged; None if there are not even the bytes of a head.

    Only the head and the lengths are read, never the body.
    """
    head_bytes = read(0, _HEADS[_HOST_BITS].size)
    if len(head_bytes) < _HEAD_V4_BYTES:
        return None
    head = _HEADS[head_bytes[_SYS_FLAG_POSITION + 3] & _HOST_BITS]
    if len(head_bytes) < head.size:
        return None
    fields = head.unpack_from(head_bytes)
    size, magic, _, queue_id, _, queue_offset, log_offset = fields[:7]
    is_v2 = (magic ^ MAGIC_V2).bit_count() < (magic ^ MAGIC_V1).bit_count()
    parts_size, topic = _read_parts(read, head.size, fields[14], 2 if is_v2 else 1)
    return RecordClaims(size, parts_size, magic, log_offset, queue_id, queue_offset, topic)


def _read_parts(
    read: ReadPart, head_size: int, body_size: int, length_bytes: int
) -> tuple[int, str]:
    """Return the sum of all lengths and the topic; -1 and no topic if a length is impossible."""
    if body_size < 0:
        return -1, ""
    topic_begin = head_size + body_size + length_bytes
    encoded_length = read(topic_begin - length_bytes, topic_begin)
    topic_bytes = int.from_bytes(encoded_length, "big", signed=True)
    if len(encoded_length) < length_bytes or topic_bytes < 1:
        return -1, ""
    topic_end = topic_begin + topic_bytes
    topic = str(read(topic_begin, topic_end), "utf-8", "replace")
    properties_length = read(topic_end, topic_end + 2)
    if len(properties_length) < 2:
        return -1, ""
    (properties_bytes,) = _PROPERTIES_LENGTH.unpack(properties_length)
    return (-1 if properties_bytes < 0 else topic_end + 2 + properties_bytes), topic
