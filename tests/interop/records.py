"""A decoder of stored records, to judge ours by. It shares no code with `escrowmq.message`."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping
from typing import NamedTuple

MAGIC_V1, MAGIC_V2, MAGIC_BLANK = 0xDAA320A7, 0xDAA320AB, 0xCBD43194


class Record(NamedTuple):
    """One stored message, field by field as it lies in the log."""

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


_HEAD = struct.Struct(">IIIiiqqiq")  # up to and with the born time
assert _HEAD.size == 48


def decode_records(data: bytes) -> list[Record]:
    """Records that lie back to back, as in the body of a pull."""
    records = []
    position = 0
    while position < len(data):
        record = decode_record(data, position)
        records.append(record)
        position += record.size
    return records


def decode_record(data: bytes, position: int = 0) -> Record:
    size, magic, crc, queue_id, flag, queue_offset, log_offset, sys_flag, born_ms = (
        _HEAD.unpack_from(data, position)
    )
    if magic not in (MAGIC_V1, MAGIC_V2):
        raise ValueError(f"no record at {position}: magic {magic:#x}")
    at = position + _HEAD.size
    born_host, at = _host(data, at, six=bool(sys_flag & 16))
    (stored_ms,) = struct.unpack_from(">q", data, at)
    store_host, at = _host(data, at + 8, six=bool(sys_flag & 32))
    reconsume_times, prepared_log_offset = struct.unpack_from(">iq", data, at)
    body, at = _counted(data, at + 12, ">I")
    topic, at = _counted(data, at, ">B" if magic == MAGIC_V1 else ">H")
    raw_properties, at = _counted(data, at, ">H")
    if at != position + size:
        raise ValueError(f"the record at {position} says {size} bytes and has {at - position}")
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


def _host(data: bytes, at: int, *, six: bool) -> tuple[str, int]:
    size, family = (16, socket.AF_INET6) if six else (4, socket.AF_INET)
    address = socket.inet_ntop(family, data[at : at + size])
    (port,) = struct.unpack_from(">i", data, at + size)
    return f"{address}:{port}", at + size + 4


def _counted(data: bytes, at: int, count: str) -> tuple[bytes, int]:
    (size,) = struct.unpack_from(count, data, at)
    start = at + struct.calcsize(count)
    if start + size > len(data):
        raise ValueError(f"{size} bytes at {start}, beyond the end of the data")
    return data[start : start + size], start + size
