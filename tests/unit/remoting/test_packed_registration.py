"""Packed registrations: those of RocketMQ's brokers, and invalid ones."""

from __future__ import annotations

import struct
import zlib

import pytest

from escrowmq.errors import BrokenBody
from escrowmq.message.topic_config import DataVersion, TopicConfig
from escrowmq.remoting.bodies import decode_packed_registration

VERSION = b'{"counter":3,"stateVersion":1,"timestamp":5}'
ORDERS = b"orders 4 2 6 SINGLE_TAG"


def int32(value: int) -> bytes:
    return struct.pack(">i", value)


def with_length(data: bytes) -> bytes:
    return int32(len(data)) + data


def packed(
    *topics: bytes, version: bytes = VERSION, servers: bytes = b"[]", appended: bytes = b""
) -> bytes:
    """Return the body of a registration as RocketMQ packs it."""
    table = int32(len(topics)) + b"".join(map(with_length, topics))
    return zlib.compress(with_length(version) + table + with_length(servers) + appended, 9)


@pytest.mark.parametrize(
    "topic",
    [ORDERS, ORDERS + b" ", ORDERS + b' {"k":"v"}', ORDERS + b' {"a key":"with spaces"}'],
    ids=["4.9", "no attributes", "attributes", "spaces in attributes"],
)
def test_topics_are_decoded_with_and_without_attributes(topic: bytes) -> None:
    body = packed(topic, b"stock 1 1 4 MULTI_TAG", servers=b'["f:1"]')
    registration = decode_packed_registration(body)
    topics = registration.topic_config_serialize_wrapper
    assert topics.data_version == DataVersion(state_version=1, timestamp=5, counter=3)
    assert topics.topic_config_table == {
        "orders": TopicConfig(topic_name="orders", read_queue_nums=4, write_queue_nums=2, perm=6),
        "stock": TopicConfig(
            topic_name="stock",
            read_queue_nums=1,
            write_queue_nums=1,
            perm=4,
            topic_filter_type="MULTI_TAG",
        ),
    }
    assert registration.filter_server_list == ["f:1"]


def test_the_part_that_only_5_0_brokers_append_is_ignored() -> None:
    appended = int32(1) + with_length(b'{"topic":"static","currIdMap":{0:0}}')
    registration = decode_packed_registration(packed(ORDERS, appended=appended))
    assert list(registration.topic_config_serialize_wrapper.topic_config_table) == ["orders"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        packed(ORDERS)[:-5],
        zlib.compress(b""),
        zlib.compress(int32(-1)),
        zlib.compress(int32(2**31 - 1)),
        zlib.compress(with_length(VERSION) + int32(-1)),
        zlib.compress(with_length(VERSION) + int32(2**31 - 1)),
        zlib.compress(with_length(VERSION) + int32(1) + with_length(ORDERS)),
        packed(ORDERS, version=b"[]"),
        packed(ORDERS, version=b'{"counter":"x"}'),
        packed(b"orders"),
        packed(b"orders x 4 6 SINGLE_TAG"),
        packed(b"orders 4 99999999999 6 SINGLE_TAG"),
        packed(b"\xff 4 4 6 SINGLE_TAG"),
        packed(ORDERS, servers=b"{}"),
        packed(ORDERS, servers=b"[1]"),
        packed(ORDERS, servers=b"["),
    ],
)
def test_anything_else_is_a_broken_body(body: bytes) -> None:
    with pytest.raises(BrokenBody):
        decode_packed_registration(body)


def test_a_small_body_that_decompresses_to_a_large_one_is_refused() -> None:
    bomb = packed(ORDERS, appended=bytes(1_000_000))
    assert len(bomb) < 2_000
    with pytest.raises(BrokenBody, match="more than 1000 bytes"):
        decode_packed_registration(bomb, bytes_max=1_000)
