"""Rows encoded into batches: each row is in one batch, in order, with its own unique key."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa
import pytest

from escrowmq.client.messages import MessageQueue
from escrowmq.errors import RowRefused
from escrowmq.message.batch import decode_batch
from escrowmq.message.keys import java_hash
from escrowmq.message.properties import decode_properties
from escrowmq.spark.row_encoding import (
    MAX_MESSAGE_BYTES,
    BatchEncoder,
    RowBatch,
    SendBatch,
    key_prefix,
)


def queues(topic: str) -> list[MessageQueue]:
    return [MessageQueue(topic, "b", queue_id) for queue_id in range(4)]


def new_encoder(
    *, topic: str = "t", batch_bytes: int = 500, send_delayed_singly: bool = False
) -> BatchEncoder:
    return BatchEncoder(
        queues,
        topic,
        key_prefix("sink", 7, 0),
        batch_bytes=batch_bytes,
        first_queue=1,
        send_delayed_singly=send_delayed_singly,
    )


def rows_of(
    bodies: Sequence[bytes],
    topics: list[str | None] | None = None,
    shards: list[str | None] | None = None,
    texts: list[str] | None = None,
    delayed: list[bool] | None = None,
) -> RowBatch:
    return RowBatch(pa.array(bodies, pa.binary()), topics, shards, texts, delayed)


def encode(encoder: BatchEncoder, *all_rows: RowBatch) -> list[SendBatch]:
    batches = [batch for rows in all_rows for batch in encoder.add(rows)]
    return [*batches, *encoder.flush()]


def decode(batches: Sequence[SendBatch]) -> list[tuple[int, bytes, dict[str, str]]]:
    """Return queue id, body and properties of each message."""
    return [
        (batch.queue.queue_id, bytes(item.body), decode_properties(item.properties))
        for batch in batches
        for item in decode_batch(b"".join(batch.body_parts))
    ]


def keys_of(batches: Sequence[SendBatch]) -> list[str]:
    return [properties["UNIQ_KEY"] for _, _, properties in decode(batches)]


def test_batches_have_a_bounded_size_and_go_to_each_queue_in_turn() -> None:
    bodies = [b"%03d" % number * 30 for number in range(40)]
    batches = encode(new_encoder(), rows_of(bodies[:25]), rows_of(bodies[25:]))
    assert all(batch.body_bytes <= 500 for batch in batches)
    assert all(batch.body_bytes == len(b"".join(batch.body_parts)) for batch in batches)
    assert [batch.queue.queue_id for batch in batches[:5]] == [1, 2, 3, 0, 1]
    assert [body for _, body, _ in decode(batches)] == bodies
    assert sum(batch.message_count for batch in batches) == 40


@pytest.mark.parametrize("type_", [pa.binary(), pa.string(), pa.large_binary(), pa.large_string()])
def test_bodies_may_be_of_any_type_and_length_and_a_slice_of_a_column(type_: pa.DataType) -> None:
    bodies = ["", "a", "\u00e4" * 300, "", "xy" * 2000, "z"]
    column = pa.array(["before", *bodies, "after"], type_).slice(1, len(bodies))
    messages = decode(encode(new_encoder(), RowBatch(column, None, None, None, None)))
    assert [body.decode() for _, body, _ in messages] == bodies
    assert encode(new_encoder(), rows_of([])) == []


def test_the_unique_key_of_a_row_depends_only_on_its_number() -> None:
    keys = keys_of(encode(new_encoder(), rows_of([b"x"] * 30)))
    assert len(set(keys)) == 30
    large = new_encoder(batch_bytes=10_000)
    assert keys_of(encode(large, rows_of([b"x"] * 9), rows_of([b"x"] * 21))) == keys
    assert keys[3] == key_prefix("sink", 7, 0) + "00000003"
    assert key_prefix("sink", 7, 0) != key_prefix("sink", 7, 1) != key_prefix("sink", 8, 1)


def test_rows_of_one_sharding_key_stay_in_one_queue_and_in_order() -> None:
    shards: list[str | None] = [f"s{number % 5}" for number in range(50)]
    bodies = [b"%d" % number for number in range(50)]
    texts = [f"__SHARDINGKEY\x01{shard}\x02" for shard in shards]
    messages = decode(encode(new_encoder(), rows_of(bodies, None, shards, texts, None)))
    for shard in set(shards):
        of_shard = [message for message in messages if message[2]["__SHARDINGKEY"] == shard]
        assert {queue for queue, _, _ in of_shard} == {java_hash(str(shard)) % 4}
        numbers = [int(body) for _, body, _ in of_shard]
        assert numbers == sorted(numbers)
    assert len(messages) == 50


def test_a_row_may_have_its_own_topic() -> None:
    rows = rows_of([b"1", b"2", b"3"], ["a", None, "a"], None, None, None)
    batches = encode(new_encoder(), rows)
    assert {(batch.queue.topic, batch.message_count) for batch in batches} == {("a", 2), ("t", 1)}
    with pytest.raises(RowRefused, match="row 0 has no topic"):
        encode(new_encoder(topic=""), rows_of([b"1"], [None], None, None, None))


@pytest.mark.parametrize(("singly", "batch_count"), [(True, 2), (False, 1)])
def test_a_delayed_row_is_sent_singly_if_the_broker_needs_it(
    singly: bool, batch_count: int
) -> None:
    rows = rows_of([b"1", b"2"], None, None, ["", "DELAY\x013\x02"], [False, True])
    batches = encode(new_encoder(send_delayed_singly=singly), rows)
    assert len(batches) == batch_count
    singles = [batch for batch in batches if batch.single_properties is not None]
    assert len(singles) == (1 if singly else 0)
    for batch in singles:
        assert batch.body_parts == [b"2"]
        assert decode_properties(batch.single_properties or b"")["DELAY"] == "3"


def test_a_row_that_is_too_large_for_a_broker_is_refused_with_its_number() -> None:
    too_large = b"x" * MAX_MESSAGE_BYTES
    with pytest.raises(RowRefused, match="row 1 has a body of"):
        encode(new_encoder(), rows_of([b"1", too_large]))
    with pytest.raises(RowRefused, match="row 0 has a body of"):
        encode(new_encoder(), rows_of([too_large], None, None, [""], None))
