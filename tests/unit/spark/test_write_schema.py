"""Columns of a table to be written: which are accepted, and what becomes of their values."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import ArrayType, IntegerType, LongType, MapType, StringType, StructType

from escrowmq.errors import ConfigError, RowRefused
from escrowmq.spark.row_encoding import binary_values, check_columns, read_rows

STRING_MAP = pa.map_(pa.string(), pa.string())
TYPES = {
    "int": IntegerType(),
    "bigint": LongType(),
    "array<string>": ArrayType(StringType()),
    "array<int>": ArrayType(IntegerType()),
    "map<string,string>": MapType(StringType(), StringType()),
    "map<string,int>": MapType(StringType(), IntegerType()),
}


def schema(text: str) -> StructType:
    """Parse a schema in SQL's notation, because Spark's own parser needs a JVM."""
    schema = StructType()
    for column in text.split(", "):
        name, _, type_name = column.partition(" ")
        schema = schema.add(name, TYPES.get(type_name, type_name))
    return schema


def batch(**columns: Any) -> pa.RecordBatch:
    types = {"properties": STRING_MAP, "body": pa.binary()}
    arrays = {name: pa.array(values, type=types.get(name)) for name, values in columns.items()}
    return pa.RecordBatch.from_pydict(arrays)


@pytest.mark.parametrize(
    "ddl",
    [
        "body binary",
        "body string, topic string, tags string, keys array<string>, sharding_key string",
        "body string, properties map<string,string>, delay double, delay_level int, keys string",
        "body binary, queue_offset bigint, born_time timestamp",
    ],
)
def test_a_table_with_valid_columns_is_accepted(ddl: str) -> None:
    check_columns(schema(ddl), "t")


@pytest.mark.parametrize(
    ("ddl", "topic", "reason"),
    [
        ("id int", "t", "no column id"),
        ("body string, tag string", "t", "did you mean tags"),
        ("tags string", "t", "no column body"),
        ("body int", "t", "column body is int, but must be binary or string: cast it"),
        ("body string, properties map<string,int>", "t", "must be map<string,string>"),
        ("body string, keys array<int>", "t", "must be string or array<string>"),
        ("body string, delay string", "t", "a number of seconds"),
        ("body string", "", "no topic: set .option"),
    ],
)
def test_a_table_with_an_invalid_column_is_refused(ddl: str, topic: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason.replace("(", r"\(")):
        check_columns(schema(ddl), topic)


def test_bodies_of_a_slice_and_of_large_strings_are_read() -> None:
    rows = read_rows(batch(body=[b"a", b"", b"ccc", b"d"]).slice(1, 2), 0)
    assert [bytes(body) for body in binary_values(rows.bodies)] == [b"", b"ccc"]
    large = pa.RecordBatch.from_pydict({"body": pa.array(["x", "yy"], type=pa.large_string())})
    assert [bytes(body) for body in binary_values(read_rows(large, 0).bodies)] == [b"x", b"yy"]
    assert rows.properties is None
    assert rows.topics is None


def test_the_other_columns_become_properties() -> None:
    rows = read_rows(
        batch(
            body=[b"1", b"2"],
            tags=["red", None],
            keys=[["a", "b"], None],
            sharding_key=[None, "s"],
            properties=[[("own", "1"), ("UNIQ_KEY", "no"), ("ESCROW_BY", "no")], None],
            delay=[Decimal("1.5"), None],
        ),
        0,
    )
    assert rows.properties == [
        "own\x011\x02KEYS\x01a b\x02TAGS\x01red\x02TIMER_DELAY_MS\x011500\x02",
        "__SHARDINGKEY\x01s\x02",
    ]
    assert rows.is_delayed == [True, False]
    assert rows.sharding_keys == [None, "s"]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"body": [b"1", None]}, "row 101 has a null body"),
        ({"body": [b"1"], "tags": ["a\x02b"]}, "row 100: property 'TAGS' is empty or contains"),
        ({"body": [b"1"], "delay": [3], "delay_level": [1]}, "a delay and a delay_level"),
        ({"body": [b"1"], "delay": [-3]}, "a negative delay"),
        ({"body": [b"1"], "tags": ["a" * 40_000]}, "the limit is 32000"),
    ],
)
def test_a_row_that_cannot_be_a_message_is_refused(columns: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowRefused, match=reason):
        read_rows(batch(**columns), 100)
