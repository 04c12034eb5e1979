"""Columns of messages for Spark: types, decompressed bodies, generated ids, selection."""

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


def rows(*records: NewRecord, topic: str | None = "orders") -> list[dict[str, Any]]:
    """Return one row for each record, with all columns."""
    columns = MessageColumns(encode_block(records), topic, "broker-a")
    result: list[dict[str, Any]] = columns.to_record_batch(MESSAGE_COLUMNS).to_pylist()
    return result


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


def test_a_missing_property_is_null_and_a_missing_id_is_the_offset_id() -> None:
    first, second = rows(NewRecord("orders", 0, b"", born_host=HOST), COMPLETE)
    assert (first["keys"], first["tags"], first["body"]) == (None, None, b"")
    assert first["message_id"] == encode_offset_id(HOST, 1000)
    assert (second["message_id"], first["born_host"]) == ("ID", "127.0.0.1:10911")


def test_a_committed_message_has_the_id_of_its_transaction() -> None:
    committed = NewRecord("T", 0, b"", properties(UNIQ_KEY="A"), sys_flag=8)
    grouped = NewRecord("T", 0, b"", properties(UNIQ_KEY="B", TX_ID="A"), sys_flag=8)
    ids = [row["transaction_id"] for row in rows(committed, grouped, COMPLETE)]
    assert ids == ["A", "A", None]


def test_compressed_bodies_are_decompressed() -> None:
    types = [COMPRESSION_ZLIB, COMPRESSION_LZ4, COMPRESSION_ZSTD]
    bodies = [b"%d" % compression * 100 for compression in types]
    compressed = [
        NewRecord("T", 0, compress_body(body, type_), sys_flag=with_compression(0, type_))
        for body, type_ in zip(bodies, types, strict=True)
    ]
    decompressed = [row["body"] for row in rows(COMPLETE, *compressed, COMPLETE)]
    assert decompressed == [COMPLETE.body, *bodies, COMPLETE.body]


def test_a_body_that_cannot_be_decompressed_is_an_error_with_its_offset() -> None:
    with pytest.raises(BrokenBody, match="log offset 1000"):
        rows(NewRecord("T", 0, b"junk", sys_flag=with_compression(0, COMPRESSION_ZLIB)))


def test_bytes_that_are_not_utf8_are_replaced() -> None:
    [row] = rows(NewRecord("T", 0, b"", b"TAGS\x01\xff\x02"))
    assert row["tags"] == "\ufffd"


def test_without_a_fixed_topic_each_row_has_the_topic_of_its_record() -> None:
    topics = [row["topic"] for row in rows(COMPLETE, NewRecord("other", 0, b""), topic=None)]
    assert topics == ["orders", "other"]


@pytest.mark.parametrize("columns", [MESSAGE_COLUMNS, TRANSACTION_COLUMNS])
def test_the_schemas_of_spark_and_arrow_are_the_same(columns: Columns) -> None:
    assert to_arrow_schema(columns.spark_schema(), timezone="UTC").equals(columns.arrow_schema())


def test_a_batch_has_only_the_selected_columns_in_their_order() -> None:
    selected = MESSAGE_COLUMNS.select(["keys", "body"])
    batch = MessageColumns(encode_block([COMPLETE]), "orders", None).to_record_batch(selected)
    assert batch.to_pylist() == [{"keys": "k1 k2", "body": b"\x00body"}]


@pytest.mark.parametrize(
    ("names", "reason"),
    [(["bodi"], "did you mean body"), (["body", "body"], "only once"), ([], "at least one column")],
)
def test_an_invalid_selection_is_refused(names: list[str], reason: str) -> None:
    with pytest.raises(InvalidOption, match=reason):
        MESSAGE_COLUMNS.select(names)


def test_a_schema_of_the_user_can_select_columns_but_not_cast_them() -> None:
    schema = sql.StructType([sql.StructField("flag", sql.IntegerType())])
    assert MESSAGE_COLUMNS.select_schema(schema).names == ["flag"]
    with pytest.raises(InvalidOption, match="body is binary, not string"):
        MESSAGE_COLUMNS.select_schema(sql.StructType([sql.StructField("body", sql.StringType())]))
