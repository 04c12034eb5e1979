"""A REGISTER_BROKER body, packed. Some brokers send it; we read it and never write it.

A zlib stream of:

    sized   data version, JSON
    int     number of topics, then for each
    sized     name readQueues writeQueues perm filterType [attributes]     between single spaces
    sized   filter servers, JSON
    ...     from version 5.0.0 on, where the queues of static topics lie: not read

`sized` is an int and that many bytes; ints have four bytes, big-endian. Attributes are not read:
no route has them.
"""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from escrowmq.errors import BrokenBody
from escrowmq.message import sysflag
from escrowmq.message.compression import decompress_body
from escrowmq.message.fastjson import lenient_json
from escrowmq.wire.bodies import (
    DataVersion,
    RegisterBrokerBody,
    TopicConfig,
    TopicConfigs,
    decode_body,
)

UNPACKED_BYTES_MAX: Final = 64 * 1024 * 1024

_INT = struct.Struct(">i")
_ZLIB = sysflag.COMPRESSED | sysflag.COMPRESSION_ZLIB


def decode_packed(
    body: bytes | memoryview, *, bytes_max: int = UNPACKED_BYTES_MAX
) -> RegisterBrokerBody:
    """Raises BrokenBody, whatever is wrong."""
    reader = _Reader(decompress_body(body, _ZLIB, body_bytes_max=bytes_max))
    version = decode_body(DataVersion, reader.sized("data version"))
    topics = {}
    for _ in range(reader.count("number of topics")):
        topic = _topic(reader.sized("topic"))
        topics[topic.topic_name] = topic
    servers = lenient_json(reader.sized("filter servers"))
    try:
        return RegisterBrokerBody(
            topic_config_serialize_wrapper=TopicConfigs(
                topic_config_table=topics, data_version=version
            ),
            filter_server_list=msgspec.convert(servers, list[str]),
        )
    except msgspec.ValidationError as error:
        raise BrokenBody(f"packed registration: filter servers: {error}") from error


def _topic(data: bytes) -> TopicConfig:
    try:
        name, read_queues, write_queues, perm, filter_type, *_ = data.decode().split(" ", 5)
        fields = {
            "topicName": name,
            "readQueueNums": read_queues,
            "writeQueueNums": write_queues,
            "perm": perm,
            "topicFilterType": filter_type,
        }
        return msgspec.convert(fields, TopicConfig, strict=False)
    except (UnicodeDecodeError, ValueError) as error:
        raise BrokenBody(f"packed registration: topic {data[:80]!r}: {error}") from error


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def count(self, what: str) -> int:
        left = len(self._data) - self._at
        if left < _INT.size:
            raise BrokenBody(f"packed registration: ends before {what}")
        (number,) = _INT.unpack_from(self._data, self._at)
        self._at += _INT.size
        if not 0 <= number <= left - _INT.size:
            raise BrokenBody(f"packed registration: {what}: {number}, {left} bytes are left")
        return int(number)

    def sized(self, what: str) -> bytes:
        length = self.count(what)
        self._at += length
        return self._data[self._at - length : self._at]
