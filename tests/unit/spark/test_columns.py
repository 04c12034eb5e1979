"""Columns as Spark gets them: types to the letter, bodies whole, ids where they are missing."""

from __future__ import annotations

from typing import Any

import pytest
from pyspark.sql import types as sql
from pyspark.sql.pandas.types import to_arrow_schema

from escrowmq.errors import BrokenBody, InvalidOption
from escrowmq.message.compression import compress_body
from escrowmq.message.keys import encode_host, encode_offset_id
from escrowmq.message.record import (
    COMPRESSION_LZ4,
    COMPRESSION_ZLIB,
    COMPRESSION_ZSTD,
    NewRecord,
    with_compression,
)
from escrowmq.spark.columns import MessageColumns
from escrowmq.spark.schema import MESSAGE_COLUMNS, TRANSACTION_COLUMNS, Columns
from tests.support.record_blocks import encode_block
from tests.support.stores import HOST, NOW_MS, properties

COMPLETE = NewRecord(
    topic="orders",
    queue_id=3,
    body=b"\x00body",
    properties=properties(KEYS="k1 k2", TAGS="paid", UNIQ_KEY="ID", size="4"),
    flag=9,
    born_ms=NOW_MS - 5,
    born_host=encode_host("::1", 7),
    reconsume_times=2,
    prepared_offset=77,
)


def rows(*records: NewRecord, **kinds: Any) -> list[dict[str, Any]]:
    made = MessageColumns(
        encode_block(records), kinds.get("topic", "orders"), "broker-a"
    ).to_record_batch(MESSAGE_COLUMNS)
    found: list[dict[str, Any]] = made.to_pylist()
    return found


def test_a_message_has_all_its_columns() -> None:
    [row] = rows(COMPLETE)
    times = {name: row.pop(name).timestamp() * 1000 for name in ("born_time", "store_time")}
    assert times == {"born_time": NOW_MS - 5, "store_time": NOW_MS}
    assert dict(row.pop("properties"))["size"] == "4"
    assert row == {
        "topic": "orders",
        "broker": "broker-a",
        "queue_id": 3,
        "queue_offset": 0,
        "log_offset": 1000,
        "message_id": "ID",
        "keys": "k1 k2",
        "tags": "paid",
        "body": b"\x00body",
        "born_host": "[::1]:7",
        "reconsume_times": 2,
        "transaction_id": None,
        "prepared_offset": 77,
        "flag": 9,
    }


def test_what_a_message_does_not_have_is_null_and_its_place_names_it() -> None:
    first, second = rows(NewRecord("orders", 0, b"", born_host=HOST), COMPLETE)
    assert (first["keys"], first["tags"], first["body"]) == (None, None, b"")
    assert first["message_id"] == encode_offset_id(HOST, 1000)
    assert (second["message_id"], first["born_host"]) == ("ID", "127.0.0.1:10911")


def test_a_committed_message_names_its_transaction() -> None:
    committed = NewRecord("T", 0, b"", properties(UNIQ_KEY="A"), sys_flag=8)
    grouped = NewRecord("T", 0, b"", properties(UNIQ_KEY="B", TX_ID="A"), sys_flag=8)
    found = [row["transaction_id"] for row in rows(committed, grouped, COMPLETE)]
    assert found == ["A", "A", None]


def test_compressed_bodies_come_out_whole_among_plain_ones() -> None:
    kinds = [COMPRESSION_ZLIB, COMPRESSION_LZ4, COMPRESSION_ZSTD]
    packed = [
        NewRecord(
            "T", 0, compress_body(b"%d" % kind * 100, kind), sys_flag=with_compression(0, kind)
        )
        for kind in kinds
    ]
    found = [row["body"] for row in rows(COMPLETE, *packed, COMPLETE)]
    assert found == [b"\x00body", *(b"%d" % kind * 100 for kind in kinds), b"\x00body"]


def test_a_body_that_cannot_be_unpacked_is_named() -> None:
    with pytest.raises(BrokenBody, match="log offset 1000"):
        rows(NewRecord("T", 0, b"junk", sys_flag=with_compression(0, COMPRESSION_ZLIB)))


def test_text_that_is_none_is_replaced() -> None:
    [row] = rows(NewRecord("T", 0, b"", b"TAGS\x01\xff\x02"))
    assert row["tags"] == "\ufffd"


def test_the_topic_is_read_from_the_record_where_many_lie_together() -> None:
    found = rows(COMPLETE, NewRecord("other", 0, b""), topic=None)
    assert [row["topic"] for row in found] == ["orders", "other"]


@pytest.mark.parametrize("columns", [MESSAGE_COLUMNS, TRANSACTION_COLUMNS])
def test_spark_and_arrow_mean_the_same_types(columns: Columns) -> None:
    assert to_arrow_schema(columns.spark_schema(), timezone="UTC").equals(columns.arrow_schema())


def test_only_the_columns_that_are_wanted_in_their_order() -> None:
    chosen = MESSAGE_COLUMNS.select(["keys", "body"])
    made = MessageColumns(encode_block([COMPLETE]), "orders", None).to_record_batch(chosen)
    assert made.to_pylist() == [{"keys": "k1 k2", "body": b"\x00body"}]


@pytest.mark.parametrize(
    ("names", "why"),
    [(["bodi"], "did you mean body"), (["body", "body"], "only once"), ([], "at least one column")],
)
def test_columns_that_cannot_be_are_refused(names: list[str], why: str) -> None:
    with pytest.raises(InvalidOption, match=why):
        MESSAGE_COLUMNS.select(names)


def test_a_schema_of_the_users_may_choose_but_not_cast() -> None:
    some = sql.StructType([sql.StructField("flag", sql.IntegerType())])
    assert MESSAGE_COLUMNS.select_schema(some).names == ["flag"]
    with pytest.raises(InvalidOption, match="body is binary, not string"):
        MESSAGE_COLUMNS.select_schema(sql.StructType([sql.StructField("body", sql.StringType())]))
