"""An independent decoder of stored records, which checks ours.

It shares no code with `escrowmq.message`.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from typing import NamedTuple

MAGIC_V1, MAGIC_V2, MAGIC_BLANK = 0xDAA320A7, 0xDAA320AB, 0xCBD43194


class Record(NamedTuple):
    """A stored message, with its fields in the order of the log."""

    size: int
    magic: int
    body_crc: int
    queue_id: int
    flag: int
    queue_offset: int
    log_offset: int
    sys_flag: int
    born_ms: int
    born_host: str
    stored_ms: int
    store_host: str
    reconsume_times: int
    prepared_log_offset: int
    body: bytes
    topic: str
    raw_properties: bytes

    @property
    def properties(self) -> dict[str, str]:
        return decode_properties(self.raw_properties.decode())


_HEAD = struct.Struct(">IIIiiqqiq")  # up to and including the born time
assert _HEAD.size == 48


def decode_records(data: bytes) -> list[Record]:
    """Return consecutive records, as in the body of a pull response."""
    records = []
    position = 0
    while position < len(data):
        record = decode_record(data, position)
        records.append(record)
        position += record.size
    return records


def decode_record(data: bytes, position: int = 0) -> Record:
    """Return the record at a position. Raises ValueError if it is malformed."""
    size, magic, crc, queue_id, flag, queue_offset, log_offset, sys_flag, born_ms = (
        _HEAD.unpack_from(data, position)
    )
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise ValueError(f"no record at {position}: magic {magic:#x}")
    cursor = position + _HEAD.size
    born_host, cursor = _host(data, cursor, six=bool(sys_flag & 16))
    (stored_ms,) = struct.unpack_from(">q", data, cursor)
    store_host, cursor = _host(data, cursor + 8, six=bool(sys_flag & 32))
    reconsume_times, prepared_log_offset = struct.unpack_from(">iq", data, cursor)
    body, cursor = _counted(data, cursor + 12, ">I")
    topic, cursor = _counted(data, cursor, ">B" if magic == MAGIC_V1 else ">H")
    raw_properties, cursor = _counted(data, cursor, ">H")
    if cursor != position + size:
        raise ValueError(f"record at {position} declares {size} bytes, has {cursor - position}")
    return Record(
        size=size,
        magic=magic,
        body_crc=crc,
        queue_id=queue_id,
        flag=flag,
        queue_offset=queue_offset,
        log_offset=log_offset,
        sys_flag=sys_flag,
        born_ms=born_ms,
        born_host=born_host,
        stored_ms=stored_ms,
        store_host=store_host,
        reconsume_times=reconsume_times,
        prepared_log_offset=prepared_log_offset,
        body=body,
        topic=topic.decode(),
        raw_properties=raw_properties,
    )


def decode_properties(text: str) -> dict[str, str]:
    pairs = (item.split("\x01", 1) for item in text.split("\x02") if "\x01" in item)
    return {name: value for name, value in pairs if name and value}


def encode_properties(properties: Mapping[str, str]) -> str:
    return "".join(f"{name}\x01{value}\x02" for name, value in properties.items())


def _host(data: bytes, cursor: int, *, six: bool) -> tuple[str, int]:
    size, family = (16, socket.AF_INET6) if six else (4, socket.AF_INET)
    address = socket.inet_ntop(family, data[cursor : cursor + size])
    (port,) = struct.unpack_from(">i", data, cursor + size)
    return f"{address}:{port}", cursor + size + 4


def _counted(data: bytes, cursor: int, count: str) -> tuple[bytes, int]:
    (size,) = struct.unpack_from(count, data, cursor)
    start = cursor + struct.calcsize(count)
    if start + size > len(data):
        raise ValueError(f"{size} bytes at {start} reach beyond the end of the data")
    return data[start : start + size], start + size
