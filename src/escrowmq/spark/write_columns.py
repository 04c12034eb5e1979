"""Which columns a table to be written may have, and their values as Python sees them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    MapType,
    StringType,
    StructType,
)

from escrowmq.errors import ConfigError, RowRefused

Bytes = bytes | memoryview

_TEXT: Final = (StringType,)
_NUMBER: Final = (IntegralType, FloatType, DoubleType, DecimalType)
_KINDS: Final[dict[str, tuple[tuple[type[DataType], ...], str]]] = {
    "body": ((BinaryType, StringType), "binary or string"),
    "topic": (_TEXT, "string"),
    "tags": (_TEXT, "string"),
    "keys": ((StringType, ArrayType), "string or array<string>"),
    "properties": ((MapType,), "map<string,string>"),
    "sharding_key": (_TEXT, "string"),
    "delay": (_NUMBER, "a number of seconds"),
    "delay_level": ((IntegralType,), "int"),
}
# What the source gives and a sink cannot set: a table that was read can be written as it is.
READ_ONLY: Final = frozenset(
    (
        *("broker", "queue_id", "queue_offset", "log_offset", "message_id", "born_time", "flag"),
        *("store_time", "born_host", "reconsume_times", "transaction_id", "prepared_offset"),
    )
)
# Properties that the client or the broker sets, and that a message which was read still has.
RESERVED: Final = frozenset(
    (
        *("UNIQ_KEY", "WAIT", "MSG_REGION", "TRACE_ON", "CLUSTER", "TRAN_MSG", "PGROUP", "DELAY"),
        *("REAL_TOPIC", "REAL_QID", "__transactionId__", "MIN_OFFSET", "MAX_OFFSET", "POP_CK"),
        *("CONSUME_START_TIME", "RECONSUME_TIME", "ORIGIN_MESSAGE_ID", "RETRY_TOPIC", "TX_ID"),
        *("TRANSACTION_CHECK_TIMES", "TRAN_PREPARED_QUEUE_OFFSET", "INNER_MULTI_DISPATCH"),
    )
)
_RESERVED_BEGINNINGS: Final = ("ESCROW_", "TIMER_", "CHECK_IMMUNITY")
_SEPARATORS: Final = ("\x01", "\x02", "\0")


def check_columns(schema: StructType, topic: str) -> None:
    """Raises ConfigError unless rows of this schema can be messages."""
    for field in schema.fields:
        if field.name in READ_ONLY:
            continue
        kind = _KINDS.get(field.name)
        if kind is None:
            close = difflib.get_close_matches(field.name, _KINDS, n=1)
            hint = f"did you mean {close[0]}? Else" if close else ""
            raise ConfigError(
                f"the sink has no column {field.name}; {hint} drop it, or put it into the "
                f"properties or the body. Columns: {', '.join(_KINDS)}".replace("; Else", "; else")
            )
        if not isinstance(field.dataType, kind[0]) or not _is_of_text(field.dataType):
            raise ConfigError(
                f"column {field.name} is {field.dataType.simpleString()}, and should be {kind[1]}: "
                f"cast it, as in df.withColumn('{field.name}', …)"
            )
    names = schema.fieldNames()
    if "body" not in names:
        raise ConfigError(
            "the table has no column body (binary or string): make one, as in "
            "df.selectExpr('to_json(struct(*)) AS body')"
        )
    if "topic" not in names and not topic:
        raise ConfigError("no topic: set .option('topic', …), or give the table a column topic")


def _is_of_text(kind: DataType) -> bool:
    if isinstance(kind, ArrayType):
        return isinstance(kind.elementType, StringType)
    if isinstance(kind, MapType):
        return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)
    return True


@dataclass(slots=True)
class Rows:
    """One Arrow batch. What is None is not in the table; else one value per row."""

    bodies: pa.Array[Any]
    topics: list[str | None] | None
    sharding_keys: list[str | None] | None
    properties: list[str] | None  # encoded, without the unique key
    delayed: list[bool] | None


def rows_of(batch: pa.RecordBatch, first_row: int) -> Rows:
    """Raises RowRefused for the first row that cannot be a message, by its number."""
    columns = {name: batch.column(name) for name in batch.schema.names if name in _KINDS}
    body = columns["body"]
    if body.null_count:
        at = first_row + body.is_null().index(pa.scalar(True)).as_py()
        raise RowRefused(f"row {at} has no body (it is null): filter it, or coalesce the column")
    texts = {name: columns[name].to_pylist() for name in columns if name != "body"}
    topics, sharding_keys = texts.pop("topic", None), texts.get("sharding_key")
    delayed = None
    if "delay" in texts or "delay_level" in texts:
        nothing = [None] * len(batch)
        delays = zip(texts.get("delay", nothing), texts.get("delay_level", nothing), strict=True)
        delayed = [bool(seconds) or bool(level) for seconds, level in delays]
    properties = None
    if texts:
        names = list(texts)
        properties = [
            _encoded(dict(zip(names, values, strict=True)), first_row + at)
            for at, values in enumerate(zip(*texts.values(), strict=True))
        ]
    return Rows(body, topics, sharding_keys, properties, delayed)


def bytes_of(column: pa.Array[Any]) -> list[Bytes]:
    """The values as views of the Arrow buffer: nothing is copied."""
    wide = pa.types.is_large_binary(column.type) or pa.types.is_large_string(column.type)
    _, offsets, data = column.buffers()
    if data is None or offsets is None:
        return [b""] * len(column)
    size = 8 if wide else 4
    begin, end = size * column.offset, size * (column.offset + len(column) + 1)
    places = memoryview(offsets)[begin:end].cast("q" if wide else "i").tolist()
    view = memoryview(data)
    return [view[at:to] for at, to in pairwise(places)]


def _encoded(values: dict[str, Any], row: int) -> str:
    """As they travel: name, 0x01, value, 0x02."""
    found: dict[str, str] = {}
    for name, value in values.get("properties") or ():
        if name not in RESERVED and not name.startswith(_RESERVED_BEGINNINGS) and value:
            found[name] = value
    keys = values.get("keys")
    if isinstance(keys, list):
        keys = " ".join(key for key in keys if key)
    for name, value in (
        ("KEYS", keys),
        ("TAGS", values.get("tags")),
        ("__SHARDINGKEY", values.get("sharding_key")),
    ):
        if value:
            found[name] = value
    seconds, level = values.get("delay"), values.get("delay_level")
    if seconds and level:
        raise RowRefused(f"row {row} has a delay and a delay_level: give one of them")
    if (seconds or 0) < 0 or (level or 0) < 0:
        raise RowRefused(f"row {row} has a negative delay: use 0 or null for none")
    if seconds:
        found["TIMER_DELAY_MS"] = str(int(seconds * 1000))
    if level:
        found["DELAY"] = str(level)
    for name, value in found.items():
        if not name or any(mark in name or mark in value for mark in _SEPARATORS):
            raise RowRefused(
                f"row {row}: property {name!r} contains 0x00, 0x01 or 0x02, which no property may"
            )
    text = "".join(f"{name}\x01{value}\x02" for name, value in found.items())
    if len(text.encode()) > 32_000:
        raise RowRefused(f"row {row} has properties of {len(text)} characters, limit 32,000")
    return text
