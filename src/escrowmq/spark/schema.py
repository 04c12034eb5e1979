"""The columns of a message, as Spark and as Arrow know them. Spark compares them to the letter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import types as sql

from escrowmq.errors import BadOption
from escrowmq.parsing import suggestion

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
STRINGS: Final = pa.map_(pa.string(), pa.string())
LONGS: Final = pa.list_(pa.int64())
_SPARK_TYPES: Final[tuple[tuple[pa.DataType, sql.DataType], ...]] = (
    (pa.string(), sql.StringType()),
    (pa.binary(), sql.BinaryType()),
    (pa.int32(), sql.IntegerType()),
    (pa.int64(), sql.LongType()),
    (TIMESTAMP, sql.TimestampType()),
    (STRINGS, sql.MapType(sql.StringType(), sql.StringType())),
    (LONGS, sql.ArrayType(sql.LongType())),
)


@dataclass(frozen=True)
class Columns:
    """Some of the columns that a reader can make, in the order in which they are wanted."""

    types: Mapping[str, Any]  # name -> Arrow's type

    @property
    def names(self) -> list[str]:
        return list(self.types)

    def __contains__(self, name: str) -> bool:
        return name in self.types

    def only(self, names: Sequence[str]) -> Columns:
        """Raises BadOption."""
        for name in names:
            if name not in self.types:
                raise BadOption(
                    f"there is no column {name!r}{suggestion(name, self.types)}; "
                    f"there are {', '.join(self.types)}"
                )
        if not names or len(set(names)) < len(names):
            raise BadOption(f"columns are named once each, and one at least: {', '.join(names)!r}")
        return Columns({name: self.types[name] for name in names})

    def spark(self) -> sql.StructType:
        return sql.StructType(
            [sql.StructField(name, _spark_type(kind)) for name, kind in self.types.items()]
        )

    def arrow(self) -> pa.Schema:
        return pa.schema(list(self.types.items()))

    def chosen_by(self, schema: sql.StructType) -> Columns:
        """Those of the schema that `.schema(…)` gave, or that we gave ourselves."""
        chosen = self.only(schema.names)
        for field in schema.fields:
            if field.dataType != _spark_type(chosen.types[field.name]):
                wanted = _spark_type(chosen.types[field.name]).simpleString()
                raise BadOption(
                    f"column {field.name} is {wanted}, not {field.dataType.simpleString()}: "
                    f"leave .schema(…) out and cast afterwards"
                )
        return chosen


MESSAGE: Final = Columns(
    {
        "topic": pa.string(),
        "broker": pa.string(),
        "queue_id": pa.int32(),
        "queue_offset": pa.int64(),
        "log_offset": pa.int64(),
        "message_id": pa.string(),
        "keys": pa.string(),
        "tags": pa.string(),
        "body": pa.binary(),
        "properties": STRINGS,
        "born_time": TIMESTAMP,
        "store_time": TIMESTAMP,
        "born_host": pa.string(),
        "reconsume_times": pa.int32(),
        "transaction_id": pa.string(),
        "prepared_offset": pa.int64(),
        "flag": pa.int32(),
    }
)

TRANSACTION: Final = Columns(
    {
        "kind": pa.string(),
        "broker": pa.string(),
        "queue_id": pa.int32(),
        "queue_offset": pa.int64(),
        "log_offset": pa.int64(),
        "at": TIMESTAMP,
        "half_offset": pa.int64(),
        "transaction_id": pa.string(),
        "message_id": pa.string(),
        "marker_id": pa.string(),
        "group": pa.string(),
        "topic": pa.string(),
        "topic_queue_id": pa.int32(),
        "keys": pa.string(),
        "body_bytes": pa.int32(),
        "checks": pa.int32(),
        "step": pa.string(),
        "verdict": pa.string(),
        "who": pa.string(),
        "reason": pa.string(),
        "copy_of": LONGS,
        "commits": LONGS,
        "rolls_back": LONGS,
        "writer": pa.string(),
        "batch": pa.int64(),
        "attempt": pa.string(),
        "fence": pa.int64(),
        "born_time": TIMESTAMP,
        "born_host": pa.string(),
    }
)


def _spark_type(kind: pa.DataType) -> sql.DataType:
    return next(ours for theirs, ours in _SPARK_TYPES if theirs.equals(kind))
