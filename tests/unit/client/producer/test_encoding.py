"""Encoding of messages: properties, delays, compression, batches."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq import Message
from escrowmq.client.producer.sender import (
    MessageEncoder,
    batch_entries,
    check_batch,
    encode_batch_message,
    properties_text,
    split_batch,
)
from escrowmq.errors import LocalProtocolError
from escrowmq.message import record
from escrowmq.message.batch import decode_batch
from escrowmq.message.compression import decompress_body
from escrowmq.message.properties import decode_properties

texts = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), min_size=1, max_size=9)


@given(st.dictionaries(texts, texts, max_size=5), texts)
def test_encoded_properties_decode_to_the_same_values(properties: dict[str, str], key: str) -> None:
    text = properties_text(Message("t", b"", properties=properties), key)
    assert decode_properties(text.encode()) == {"UNIQ_KEY": key, "WAIT": "true", **properties}


@given(st.dictionaries(st.text(max_size=3), st.text(max_size=3), min_size=1, max_size=3))
def test_properties_that_cannot_be_decoded_again_are_refused(properties: dict[str, str]) -> None:
    message = Message("t", b"", properties=properties)
    is_invalid = any(
        not part or "\x01" in part or "\x02" in part for item in properties.items() for part in item
    )
    if is_invalid:
        with pytest.raises(LocalProtocolError):
            properties_text(message, "k")
    else:
        assert (
            properties.items() <= decode_properties(properties_text(message, "k").encode()).items()
        )


def test_fields_of_a_message_become_properties() -> None:
    message = Message(
        "t", b"", keys=["k1", "k2"], tags="x", sharding_key="s", properties={"a": "b"}
    )
    encoded = properties_text(message, "id", {"extra": "1"}).encode()
    assert decode_properties(encoded) == {
        "UNIQ_KEY": "id",
        "WAIT": "true",
        "KEYS": "k1 k2",
        "TAGS": "x",
        "__SHARDINGKEY": "s",
        "a": "b",
        "extra": "1",
    }


@pytest.mark.parametrize(
    ("delay", "name", "value"),
    [
        ({"delay_level": 3}, "DELAY", "3"),
        ({"delay_s": 1.5}, "TIMER_DELAY_MS", "1500"),
        ({"delay_s": 0.0001}, "TIMER_DELAY_MS", "1"),
        ({"deliver_at": datetime(2030, 1, 1, tzinfo=UTC)}, "TIMER_DELIVER_MS", "1893456000000"),
    ],
)
def test_a_delay_is_a_property(delay: dict[str, Any], name: str, value: str) -> None:
    message = Message("t", b"", **delay)
    assert decode_properties(properties_text(message, "k").encode())[name] == value
    assert name not in properties_text(message, "k", with_delay=False)


@pytest.mark.parametrize(
    "delay",
    [
        {"delay_level": -1},
        {"delay_level": 1.5},
        {"delay_s": -0.1},
        {"delay_s": float("nan")},
        {"delay_s": float("inf")},
        {"delay_level": 1, "delay_s": 1},
        {"deliver_at": datetime(2030, 1, 1)},  # noqa: DTZ001
    ],
)
def test_an_invalid_delay_is_refused(delay: dict[str, Any]) -> None:
    with pytest.raises(LocalProtocolError):
        Message("t", b"", **delay)


@pytest.mark.parametrize("compression", ["zlib", "lz4", "zstd"])
def test_a_long_body_is_compressed(compression: str) -> None:
    body = b"much the same " * 1000
    encoded = MessageEncoder(compress_above_bytes=4096, compression=compression).encode(
        Message("t", body), "t", "k", sys_flag=4
    )
    assert len(encoded.body) < len(body)
    assert encoded.sys_flag & record.TRANSACTION_MASK == 4
    assert record.is_compressed(encoded.sys_flag)
    assert decompress_body(encoded.body, encoded.sys_flag, body_bytes_max=1 << 20) == body


def test_a_short_or_incompressible_body_is_not_compressed() -> None:
    at_limit = bytes(range(256)) * 16  # 4,096 bytes
    assert MessageEncoder().encode(Message("t", at_limit), "t", "k").body is at_limit
    eager = MessageEncoder(compress_above_bytes=10)
    assert eager.encode(Message("t", b"no gain here"), "t", "k").sys_flag == 0


def test_compression_can_be_disabled() -> None:
    encoder = MessageEncoder(compress_above_bytes=None)
    assert encoder.encode(Message("t", b"a" * 9999), "t", "k").sys_flag == 0


def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(ValueError, match="zlib, lz4, zstd"):
        MessageEncoder(compression="gzip")


@pytest.mark.parametrize(
    ("topic", "body", "error_text"),
    [
        ("t", b"", "is empty"),
        ("t", b"x" * 11, "11 bytes, the producer's limit is 10"),
        ("order.created", b"x", "only letters, digits"),
        ("two words", b"x", "only letters, digits"),
        ("t" * 128, b"x", "128 characters, the limit is 127"),
        ("RMQ_SYS_TRANS_HALF_TOPIC", b"x", "system topic"),
        ("SCHEDULE_TOPIC_XXXX", b"x", "system topic"),
    ],
)
def test_a_message_that_the_java_client_refuses_is_refused(
    topic: str, body: bytes, error_text: str
) -> None:
    encoder = MessageEncoder(compress_above_bytes=1, body_bytes_max=10)
    with pytest.raises(LocalProtocolError, match=error_text):
        encoder.encode(Message(topic, body), topic, "k")


def test_a_message_at_the_limits_of_the_java_client_is_encoded() -> None:
    topic = "%|" + "a" * 125
    encoder = MessageEncoder(body_bytes_max=10)
    assert encoder.encode(Message(topic, b"x" * 10), topic, "k").body == b"x" * 10


def test_a_body_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="body_bytes_max must be at least 1"):
        MessageEncoder(body_bytes_max=0)


@pytest.mark.parametrize(
    ("messages", "error_text"),
    [
        ([], "at least one message"),
        ([Message("t", b""), Message("u", b"")], "one topic"),
        ([Message("t", b"", delay_level=1)], "delayed"),
        ([Message("t", b"", properties={"TRAN_MSG": "true"})], "transactional"),
        ([Message("t", b"", sharding_key="a"), Message("t", b"", sharding_key="b")], "sharding"),
    ],
)
def test_messages_that_cannot_be_one_batch_are_refused(
    messages: list[Message], error_text: str
) -> None:
    with pytest.raises(LocalProtocolError, match=error_text):
        check_batch(messages)


@given(st.lists(st.binary(max_size=60), min_size=1, max_size=20), st.integers(1, 400))
def test_a_split_batch_contains_all_messages_in_order(bodies: list[bytes], bytes_max: int) -> None:
    messages = [Message("t", body) for body in bodies]
    items = batch_entries(messages, (str(number) for number in range(99)), {"a": "b"})
    chunks = list(split_batch(items, bytes_max))
    encoded = [encode_batch_message("t", chunk, "") for chunk in chunks]
    decoded = [item for batch in encoded for item in decode_batch(batch.body)]
    assert [bytes(item.body) for item in decoded] == bodies
    for batch, chunk in zip(encoded, chunks, strict=True):
        assert len(batch.body) <= bytes_max or len(chunk) == 1
