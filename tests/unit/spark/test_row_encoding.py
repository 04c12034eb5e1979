"""Packets: every row once, in its order, in a queue of its topic, with a key that is its own."""

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


def a_packer(*, topic: str = "t", batch_bytes: int = 500, alone: bool = False) -> BatchEncoder:
    return BatchEncoder(
        queues,
        topic,
        key_prefix("sink", 7, 0),
        batch_bytes=batch_bytes,
        first_queue=1,
        send_delayed_singly=alone,
    )


def some(
    bodies: Sequence[bytes],
    topics: list[str | None] | None = None,
    shards: list[str | None] | None = None,
    texts: list[str] | None = None,
    delayed: list[bool] | None = None,
) -> RowBatch:
    return RowBatch(pa.array(bodies, pa.binary()), topics, shards, texts, delayed)


def plain(*bodies: bytes) -> RowBatch:
    return some(bodies)


def packed(packer: BatchEncoder, *all_rows: RowBatch) -> list[SendBatch]:
    packets = [packet for rows in all_rows for packet in packer.add(rows)]
    return [*packets, *packer.flush()]


def unpacked(packets: Sequence[SendBatch]) -> list[tuple[int, bytes, dict[str, str]]]:
    return [
        (packet.queue.queue_id, bytes(item.body), decode_properties(item.properties))
        for packet in packets
        for item in decode_batch(b"".join(packet.body_parts))
    ]


def test_rows_come_in_packets_of_bounded_size_to_one_queue_after_the_other() -> None:
    bodies = [b"%03d" % number * 30 for number in range(40)]
    packets = packed(a_packer(), plain(*bodies[:25]), plain(*bodies[25:]))
    assert all(packet.body_bytes <= 500 for packet in packets)
    assert all(packet.body_bytes == len(b"".join(packet.body_parts)) for packet in packets)
    assert [packet.queue.queue_id for packet in packets[:5]] == [1, 2, 3, 0, 1]
    assert [body for _, body, _ in unpacked(packets)] == bodies
    assert sum(packet.message_count for packet in packets) == 40


@pytest.mark.parametrize("kind", [pa.binary(), pa.string(), pa.large_binary(), pa.large_string()])
def test_bodies_may_be_of_any_kind_and_length_and_part_of_a_larger_column(
    kind: pa.DataType,
) -> None:
    bodies = ["", "a", "\u00e4" * 300, "", "xy" * 2000, "z"]
    column = pa.array(["before", *bodies, "behind"], kind).slice(1, len(bodies))
    rows = unpacked(packed(a_packer(), RowBatch(column, None, None, None, None)))
    assert [body.decode() for _, body, _ in rows] == bodies
    assert packed(a_packer(), some([])) == []


def test_a_rows_key_says_which_row_it_is() -> None:
    keys = [row[2]["UNIQ_KEY"] for row in unpacked(packed(a_packer(), plain(*[b"x"] * 30)))]
    assert len(set(keys)) == 30
    again = packed(a_packer(batch_bytes=10_000), plain(*[b"x"] * 9), plain(*[b"x"] * 21))
    assert [row[2]["UNIQ_KEY"] for row in unpacked(again)] == keys
    assert keys[3] == key_prefix("sink", 7, 0) + "00000003"
    assert key_prefix("sink", 7, 0) != key_prefix("sink", 7, 1) != key_prefix("sink", 8, 1)


def test_rows_of_one_sharding_key_stay_in_one_queue_and_in_order() -> None:
    shards: list[str | None] = [f"s{number % 5}" for number in range(50)]
    bodies = [b"%d" % number for number in range(50)]
    texts = [f"__SHARDINGKEY\x01{shard}\x02" for shard in shards]
    rows = unpacked(packed(a_packer(), some(bodies, None, shards, texts, None)))
    for shard in set(shards):
        of_shard = [row for row in rows if row[2]["__SHARDINGKEY"] == shard]
        assert {queue for queue, _, _ in of_shard} == {java_hash(str(shard)) % 4}
        numbers = [int(body) for _, body, _ in of_shard]
        assert numbers == sorted(numbers)
    assert len(rows) == 50


def test_a_row_may_have_a_topic_of_its_own() -> None:
    rows = some([b"1", b"2", b"3"], ["a", None, "a"], None, None, None)
    packets = packed(a_packer(), rows)
    assert {(p.queue.topic, p.message_count) for p in packets} == {("a", 2), ("t", 1)}
    with pytest.raises(RowRefused, match="row 0 has no topic"):
        packed(a_packer(topic=""), some([b"1"], [None], None, None, None))


@pytest.mark.parametrize(("alone", "packets"), [(True, 2), (False, 1)])
def test_a_delayed_row_travels_alone_where_it_must(alone: bool, packets: int) -> None:
    rows = some([b"1", b"2"], None, None, ["", "DELAY\x013\x02"], [False, True])
    found = packed(a_packer(alone=alone), rows)
    assert len(found) == packets
    single = [packet for packet in found if packet.single_properties is not None]
    for packet in single:
        assert packet.body_parts == [b"2"]
        assert decode_properties(packet.single_properties or b"")["DELAY"] == "3"


def test_a_row_that_no_broker_takes_is_named() -> None:
    long = b"x" * MAX_MESSAGE_BYTES
    with pytest.raises(RowRefused, match="row 1 has a body of"):
        packed(a_packer(), plain(b"1", long))
    with pytest.raises(RowRefused, match="row 0 has a body of"):
        packed(a_packer(), some([long], None, None, [""], None))
