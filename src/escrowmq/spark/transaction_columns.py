"""mode=transactions: what brokers write down about transactions, a row for each thing they wrote.

    kind      from                          half_offset: the half it speaks of
    half      the half topic                its own queue offset
    op        the op topic                  in its body; RocketMQ 5 settles several in one
    stranded  TRANS_CHECK_MAX_TIME_TOPIC    unknown; its transaction_id is the half's
    check     ESCROW_JOURNAL, ours          who was asked, and what came of it
    decision  ESCROW_DECISION, ours         `commits` and `rolls_back`: halves by queue offset

Rows of one transaction are those of one broker that share a half_offset. RocketMQ does not say how
a half ended; it was committed if a message with its log_offset as `prepared_offset` is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.errors import EscrowError
from escrowmq.escrow import records as shapes
from escrowmq.escrow.records import JOURNAL_EVENTS
from escrowmq.escrow.writers import DecisionRecord, decode_decision_body
from escrowmq.message import names
from escrowmq.message.names import ATTEMPT, BATCH, FENCE, WRITER
from escrowmq.spark.columns import (
    PropertyTable,
    decode_utf8,
    host_array,
    int_array,
    timestamp_array,
)
from escrowmq.spark.records import Records
from escrowmq.spark.schema import LONG_LIST, TRANSACTION_COLUMNS, Columns

_VERDICTS: Final = {"c": "committed", "r": "rolled_back", "s": "stranded", "m": "moved"}
_JOURNAL_HEAD_BYTES: Final = 11  # half 8, step 1, number of the check 2

ColumnArrays = dict[str, pa.Array]


class TransactionColumns:
    """Records of one of the topics above."""

    def __init__(self, records: Records, topic: str, broker: str | None) -> None:
        self._records = records
        self._topic = topic
        self._broker = broker

    def to_record_batch(self, columns: Columns) -> pa.RecordBatch:
        records = self._records
        made: ColumnArrays = {
            "broker": pa.repeat(pa.scalar(self._broker, pa.string()), len(records)),
            "queue_id": int_array(records.queue_id, pa.int32()),
            "queue_offset": int_array(records.queue_offset, pa.int64()),
            "log_offset": int_array(records.log_offset, pa.int64()),
            "at": timestamp_array(records.stored_ms),
            "born_time": timestamp_array(records.born_ms),
            "born_host": host_array(records.born_host),
        }
        kind, more = _TOPIC_DECODERS[self._topic]
        made |= more(records, PropertyTable(records.properties))
        if "half_row" in made:  # one record, several rows
            rows, offsets = made.pop("half_row"), made.pop("half_offset")
            made = {name: column.take(rows) for name, column in made.items()}
            made["half_offset"] = offsets
        count = len(made["half_offset"]) if "half_offset" in made else len(records)
        made["kind"] = pa.repeat(pa.scalar(kind), count)
        arrays = [
            made.get(name, pa.nulls(count, TRANSACTION_COLUMNS.arrow_types[name]))
            for name in columns.names
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=columns.arrow_schema())


def _half_columns(records: Records, table: PropertyTable) -> ColumnArrays:
    copies = table.values(names.COPY_OF)
    # RocketMQ appends a half again to ask about it, and says where it was.
    copies = pc.coalesce(copies, table.values(names.PREPARED_QUEUE_OFFSET))
    marker, message = table.values("TX_ID"), table.values(names.UNIQUE_KEY)
    return {
        "half_offset": int_array(records.queue_offset, pa.int64()),
        "transaction_id": pc.coalesce(marker, table.values(names.TRANSACTION_ID), message),
        "message_id": message,
        "marker_id": marker,
        "group": table.values(names.PRODUCER_GROUP),
        "topic": table.values(names.REAL_TOPIC),
        "topic_queue_id": parse_ints(table.values(names.REAL_QUEUE_ID), pa.int32()),
        "keys": table.values(names.KEYS),
        "body_bytes": int_array(records.body_bytes, pa.int32()),
        "checks": parse_ints(table.values(names.CHECK_TIMES), pa.int32()),
        "copy_of": parse_int_lists(copies),
        "writer": table.values(WRITER),
        "batch": parse_ints(table.values(BATCH), pa.int64()),
        "attempt": table.values(ATTEMPT),
        "fence": parse_ints(table.values(FENCE), pa.int64()),
    }


def _stranded_columns(records: Records, table: PropertyTable) -> ColumnArrays:
    made = _half_columns(records, table)
    made["half_offset"] = pa.nulls(len(records), pa.int64())
    made["reason"] = table.values(names.REASON)
    return made


def _op_columns(records: Records, table: PropertyTable) -> ColumnArrays:
    ended = table.values(names.OUTCOME)
    known = ended.dictionary_encode()
    verdicts = [_VERDICTS.get(letter) for letter in known.dictionary.to_pylist()]
    by = pc.coalesce(
        table.values(names.DECIDED_BY),
        pc.if_else(ended.is_valid(), shapes.BY_PRODUCER, pa.scalar(None, pa.string())),
    )
    made = {
        "verdict": pa.array(verdicts, pa.string()).take(known.indices),
        "who": by,
        "reason": table.values(names.REASON),
        "copy_of": parse_int_lists(table.values(names.PREVIOUS_OFFSETS)),
    }
    bodies = decode_utf8(records.body)
    parts = pc.split_pattern(bodies, ",")
    if pc.max(pc.list_value_length(parts)).as_py() == 1:
        return made | {"half_offset": parse_ints(bodies, pa.int64())}
    rows, places = pc.list_parent_indices(parts), parts.flatten()
    is_there = pc.not_equal(places, "")  # RocketMQ 5 ends its lists with a comma
    return made | {
        "half_offset": parse_ints(places.filter(is_there), pa.int64()),
        "half_row": rows.filter(is_there),
    }


def _check_columns(records: Records, table: PropertyTable) -> ColumnArrays:
    at = records.body_position
    steps = records.data[at + 8]
    number = records.data[at + 9].astype(np.int32) * 256 + records.data[at + 10]
    known = pa.array([*JOURNAL_EVENTS, None], pa.string())
    return {
        "half_offset": int_array(records.read_int64(at), pa.int64()),
        "step": known.take(pa.array(np.minimum(steps, len(JOURNAL_EVENTS)))),
        "checks": int_array(number, pa.int32()),
        "who": decode_utf8(records.body_from(_JOURNAL_HEAD_BYTES)),
    }


def _decision_columns(records: Records, table: PropertyTable) -> ColumnArrays:
    """They are few, and each is a document of its own."""
    found = [_decode_decision(body) for body in records.body.to_pylist()]
    return {
        "half_offset": pa.nulls(len(found), pa.int64()),
        "commits": pa.array([one.commits for one in found], LONG_LIST),
        "rolls_back": pa.array([one.rolls_back for one in found], LONG_LIST),
        "who": pa.array([one.by or None for one in found], pa.string()),
        "writer": pa.array([one.writer or None for one in found], pa.string()),
        "batch": pa.array([one.batch if one.writer else None for one in found], pa.int64()),
        "fence": pa.array([one.fence if one.writer else None for one in found], pa.int64()),
        "attempt": pa.array(
            [",".join(w.attempt for w in one.winners) or None for one in found], pa.string()
        ),
    }


def _decode_decision(body: bytes) -> DecisionRecord:
    try:
        return decode_decision_body(body)
    except EscrowError:
        return DecisionRecord()  # somebody else's record in a topic of this name


def parse_ints(texts: pa.Array, arrow_type: pa.DataType) -> pa.Array:
    """Numbers that are written as text; what is none is null."""
    try:
        return texts.cast(arrow_type)
    except pa.ArrowInvalid:
        found = [_parse_int(one) for one in texts.to_pylist()]
        return pa.array(found, pa.int64()).cast(arrow_type, safe=False)


def _parse_int(digits: str | None) -> int | None:
    if digits is None or not digits.isascii() or not digits.isdigit():
        return None
    return int(digits[:18])


def parse_int_lists(texts: pa.Array) -> pa.Array:
    """`1,2` as a list. Hardly any record has one."""
    if texts.null_count == len(texts):
        return pa.nulls(len(texts), LONG_LIST)
    found: list[Any] = [
        None if one is None else [int(part) for part in one.split(",") if part.isdecimal()]
        for one in texts.to_pylist()
    ]
    return pa.array(found, LONG_LIST)


_TOPIC_DECODERS: Final[dict[str, tuple[str, Callable[[Records, PropertyTable], ColumnArrays]]]] = {
    names.HALF_TOPIC: ("half", _half_columns),
    names.OP_TOPIC: ("op", _op_columns),
    names.STRANDED_TOPIC: ("stranded", _stranded_columns),
    names.JOURNAL_TOPIC: ("check", _check_columns),
    names.DECISION_TOPIC: ("decision", _decision_columns),
}
