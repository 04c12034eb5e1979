"""Decode the records of transactions (mode=transactions): one row per record, or per decided half.

    kind      topic                         half_offset: the half that the record is about
    half      the half topic                its own queue offset
    op        the op topic                  in its body; an op of RocketMQ 5 decides several halves
    stranded  TRANS_CHECK_MAX_TIME_TOPIC    unknown; it has the transaction_id of the half
    check     ESCROW_JOURNAL                a check of a producer, and its result
    decision  ESCROW_DECISION               none; `commits` and `rolls_back` list halves

The last two topics exist only in EscrowMQ. Rows of one half are those of one broker with the same
half_offset. RocketMQ does not record how a half ended: it was committed if there is a message whose
`prepared_offset` is the log_offset of the half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.errors import EscrowError
from escrowmq.escrow.records import BY_PRODUCER, JOURNAL_EVENTS
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
_JOURNAL_HEAD_BYTES: Final = 11  # half offset 8, step 1, number of the check 2

ColumnArrays = dict[str, pa.Array]


class TransactionColumns:
    """The rows of records from one of the topics above."""

    def __init__(self, records: Records, topic: str, broker: str | None) -> None:
        self._records = records
        self._topic = topic
        self._broker = broker

    def to_record_batch(self, columns: Columns) -> pa.RecordBatch:
        records = self._records
        arrays: ColumnArrays = {
            "broker": pa.repeat(pa.scalar(self._broker, pa.string()), len(records)),
            "queue_id": int_array(records.queue_id, pa.int32()),
            "queue_offset": int_array(records.queue_offset, pa.int64()),
            "log_offset": int_array(records.log_offset, pa.int64()),
            "at": timestamp_array(records.stored_ms),
            "born_time": timestamp_array(records.born_ms),
            "born_host": host_array(records.born_host),
        }
        kind, decode = _TOPIC_DECODERS[self._topic]
        arrays |= decode(records, PropertyTable(records.properties))
        if "half_row" in arrays:  # a record with several halves becomes several rows
            rows, offsets = arrays.pop("half_row"), arrays.pop("half_offset")
            arrays = {name: column.take(rows) for name, column in arrays.items()}
            arrays["half_offset"] = offsets
        count = len(arrays["half_offset"]) if "half_offset" in arrays else len(records)
        arrays["kind"] = pa.repeat(pa.scalar(kind), count)
        selected = [
            arrays.get(name, pa.nulls(count, TRANSACTION_COLUMNS.arrow_types[name]))
            for name in columns.names
        ]
        return pa.RecordBatch.from_arrays(selected, schema=columns.arrow_schema())


def _half_columns(records: Records, table: PropertyTable) -> ColumnArrays:
    copies = table.values(names.COPY_OF)
    # RocketMQ appends a half again when it checks it, with the offset where it was before.
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
    arrays = _half_columns(records, table)
    arrays["half_offset"] = pa.nulls(len(records), pa.int64())
    arrays["reason"] = table.values(names.REASON)
    return arrays


def _op_columns(records: Records, table: PropertyTable) -> ColumnArrays:
    outcomes = table.values(names.OUTCOME)
    letters = outcomes.dictionary_encode()
    verdicts = [_VERDICTS.get(letter) for letter in letters.dictionary.to_pylist()]
    # An op of EscrowMQ without this property was written for a decision of the producer.
    decided_by = pc.coalesce(
        table.values(names.DECIDED_BY),
        pc.if_else(outcomes.is_valid(), BY_PRODUCER, pa.scalar(None, pa.string())),
    )
    arrays = {
        "verdict": pa.array(verdicts, pa.string()).take(letters.indices),
        "who": decided_by,
        "reason": table.values(names.REASON),
        "copy_of": parse_int_lists(table.values(names.PREVIOUS_OFFSETS)),
    }
    bodies = decode_utf8(records.body)
    parts = pc.split_pattern(bodies, ",")
    if pc.max(pc.list_value_length(parts)).as_py() == 1:
        return arrays | {"half_offset": parse_ints(bodies, pa.int64())}
    rows, offsets = pc.list_parent_indices(parts), parts.flatten()
    is_offset = pc.not_equal(offsets, "")  # RocketMQ 5 ends its lists with a comma
    return arrays | {
        "half_offset": parse_ints(offsets.filter(is_offset), pa.int64()),
        "half_row": rows.filter(is_offset),
    }


def _check_columns(records: Records, table: PropertyTable) -> ColumnArrays:
    position = records.body_position
    steps = records.data[position + 8]
    check_number = records.data[position + 9].astype(np.int32) * 256 + records.data[position + 10]
    step_names = pa.array([*JOURNAL_EVENTS, None], pa.string())  # an unknown step becomes null
    # The client's address or the operator, and what they said, if anything.
    text = decode_utf8(records.body_from(_JOURNAL_HEAD_BYTES))
    parts = pc.extract_regex(text, r"^(?P<who>[^\n]*)\n?(?P<reason>(?s:.*))$")
    return {
        "half_offset": int_array(records.read_int64(position), pa.int64()),
        "step": step_names.take(pa.array(np.minimum(steps, len(JOURNAL_EVENTS)))),
        "checks": int_array(check_number, pa.int32()),
        "who": parts.field(0),
        "reason": pc.if_else(pc.equal(parts.field(1), ""), None, parts.field(1)),
    }


def _decision_columns(records: Records, table: PropertyTable) -> ColumnArrays:
    """Decode decision records one by one: they are few, and each has a body of its own kind."""
    decisions = [_decode_decision(body) for body in records.body.to_pylist()]
    return {
        "half_offset": pa.nulls(len(decisions), pa.int64()),
        "commits": pa.array([decision.commits for decision in decisions], LONG_LIST),
        "rolls_back": pa.array([decision.rolls_back for decision in decisions], LONG_LIST),
        "who": pa.array([decision.by or None for decision in decisions], pa.string()),
        "reason": pa.array([decision.reason or None for decision in decisions], pa.string()),
        "writer": pa.array([decision.writer or None for decision in decisions], pa.string()),
        "batch": pa.array(
            [decision.batch if decision.writer else None for decision in decisions], pa.int64()
        ),
        "fence": pa.array(
            [decision.fence if decision.writer else None for decision in decisions], pa.int64()
        ),
        "attempt": pa.array(
            [
                ",".join(winner.attempt for winner in decision.winners) or None
                for decision in decisions
            ],
            pa.string(),
        ),
    }


def _decode_decision(body: bytes) -> DecisionRecord:
    try:
        return decode_decision_body(body)
    except EscrowError:
        return DecisionRecord()  # a record of another program in a topic of this name


def parse_ints(texts: pa.Array, arrow_type: pa.DataType) -> pa.Array:
    """Return numbers from text; null for a text that is not a number."""
    try:
        return texts.cast(arrow_type)
    except pa.ArrowInvalid:
        numbers = [_parse_int(text) for text in texts.to_pylist()]
        return pa.array(numbers, pa.int64()).cast(arrow_type, safe=False)


def _parse_int(digits: str | None) -> int | None:
    if digits is None or not digits.isascii() or not digits.isdigit():
        return None
    return int(digits[:18])


def parse_int_lists(texts: pa.Array) -> pa.Array:
    """Return lists from text such as `1,2`. Few records have one."""
    if texts.null_count == len(texts):
        return pa.nulls(len(texts), LONG_LIST)
    lists: list[Any] = [
        None if text is None else [int(part[:18]) for part in text.split(",") if part.isdecimal()]
        for text in texts.to_pylist()
    ]
    return pa.array(lists, LONG_LIST)


_TOPIC_DECODERS: Final[dict[str, tuple[str, Callable[[Records, PropertyTable], ColumnArrays]]]] = {
    names.HALF_TOPIC: ("half", _half_columns),
    names.OP_TOPIC: ("op", _op_columns),
    names.STRANDED_TOPIC: ("stranded", _stranded_columns),
    names.JOURNAL_TOPIC: ("check", _check_columns),
    names.DECISION_TOPIC: ("decision", _decision_columns),
}
