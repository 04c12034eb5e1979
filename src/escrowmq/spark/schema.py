"""The columns that readers produce, with their Arrow and Spark types.

Spark checks that the Arrow schema of every batch equals the schema of the query exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import types as sql

from escrowmq.errors import InvalidOption
from escrowmq.parsing import did_you_mean

TIMESTAMP: Final = pa.timestamp("us", tz="UTC")
STRING_MAP: Final = pa.map_(pa.string(), pa.string())
LONG_LIST: Final = pa.list_(pa.int64())
_SPARK_TYPES: Final[tuple[tuple[pa.DataType, sql.DataType], ...]] = (
    (pa.string(), sql.StringType()),
    (pa.binary(), sql.BinaryType()),
    (pa.int32(), sql.IntegerType()),
    (pa.int64(), sql.LongType()),
    (TIMESTAMP, sql.TimestampType()),
    (STRING_MAP, sql.MapType(sql.StringType(), sql.StringType())),
    (LONG_LIST, sql.ArrayType(sql.LongType())),
)


@dataclass(frozen=True)
class Columns:
    """Columns of a reader, in the order of its rows."""

    arrow_types: Mapping[str, Any]  # name -> Arrow type

    @property
    def names(self) -> list[str]:
        return list(self.arrow_types)

    def __contains__(self, name: str) -> bool:
        return name in self.arrow_types

    def select(self, names: Sequence[str]) -> Columns:
        """Return only these columns, in this order. Raises InvalidOption."""
        for name in names:
            if name not in self.arrow_types:
                raise InvalidOption(
                    f"there is no column {name!r}{did_you_mean(name, self.arrow_types)}; "
                    f"there are {', '.join(self.arrow_types)}"
                )
        if not names or len(set(names)) < len(names):
            raise InvalidOption(
                f"name at least one column, and each only once: {', '.join(names)!r}"
            )
        return Columns({name: self.arrow_types[name] for name in names})

    def spark_schema(self) -> sql.StructType:
        return sql.StructType(
            [sql.StructField(name, _spark_type(kind)) for name, kind in self.arrow_types.items()]
        )

    def arrow_schema(self) -> pa.Schema:
        return pa.schema(list(self.arrow_types.items()))

    def select_schema(self, schema: sql.StructType) -> Columns:
        """Return the columns of a schema, which a user may have set with `.schema(…)`.

        Raises InvalidOption if a type differs.
        """
        columns = self.select(schema.names)
        for field in schema.fields:
            spark_type = _spark_type(columns.arrow_types[field.name])
            if field.dataType != spark_type:
                raise InvalidOption(
                    f"column {field.name} is {spark_type.simpleString()}, not "
                    f"{field.dataType.simpleString()}: remove .schema(…) and cast afterwards"
                )
        return columns


MESSAGE_COLUMNS: Final = Columns(
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
        "properties": STRING_MAP,
        "born_time": TIMESTAMP,
        "store_time": TIMESTAMP,
        "born_host": pa.string(),
        "reconsume_times": pa.int32(),
        "transaction_id": pa.string(),
        "prepared_offset": pa.int64(),
        "flag": pa.int32(),
    }
)

TRANSACTION_COLUMNS: Final = Columns(
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
        "copy_of": LONG_LIST,
        "commits": LONG_LIST,
        "rolls_back": LONG_LIST,
        "writer": pa.string(),
        "batch": pa.int64(),
        "attempt": pa.string(),
        "fence": pa.int64(),
        "born_time": TIMESTAMP,
        "born_host": pa.string(),
    }
)


def _spark_type(arrow_type: pa.DataType) -> sql.DataType:
    return next(spark for arrow, spark in _SPARK_TYPES if arrow.equals(arrow_type))
