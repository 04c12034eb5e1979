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
from escrowmq.escrow.records import STEPS
from escrowmq.escrow.writers import ATTEMPT, BATCH, FENCE, WRITER, Decision, read_decision
from escrowmq.message import names
from escrowmq.spark.columns import PropertyTable, hosts, numbers, text, times
from escrowmq.spark.records import Records
from escrowmq.spark.schema import LONGS, TRANSACTION, Columns

_VERDICTS: Final = {"c": "committed", "r": "rolled_back", "s": "stranded", "m": "moved"}
_JOURNAL_HEAD: Final = 11  # half 8, step 1, number of the check 2

Made = dict[str, pa.Array]


class TransactionColumns:
    """Records of one of the topics above."""

    def __init__(self, records: Records, topic: str, broker: str | None) -> None:
        self._records = records
        self._topic = topic
        self._broker = broker

    def batch(self, columns: Columns) -> pa.RecordBatch:
        records = self._records
        made: Made = {
            "broker": pa.repeat(pa.scalar(self._broker, pa.string()), len(records)),
            "queue_id": numbers(records.queue_id, pa.int32()),
            "queue_offset": numbers(records.queue_offset, pa.int64()),
            "log_offset": numbers(records.log_offset, pa.int64()),
            "at": times(records.stored_ms),
            "born_time": times(records.born_ms),
            "born_host": hosts(records.born_host),
        }
        kind, more = _KINDS[self._topic]
        made |= more(records, PropertyTable(records.properties))
        if "half_row" in made:  # one record, several rows
            rows, offsets = made.pop("half_row"), made.pop("half_offset")
            made = {name: column.take(rows) for name, column in made.items()}
            made["half_offset"] = offsets
        count = len(made["half_offset"]) if "half_offset" in made else len(records)
        made["kind"] = pa.repeat(pa.scalar(kind), count)
        arrays = [
            made.get(name, pa.nulls(count, TRANSACTION.types[name])) for name in columns.names
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=columns.arrow())


def _halves(records: Records, table: PropertyTable) -> Made:
    copies = table.value_of(shapes.COPY_OF)
    # RocketMQ appends a half again to ask about it, and says where it was.
    copies = pc.coalesce(copies, table.value_of(shapes.PREPARED_QUEUE_OFFSET))
    marker, message = table.value_of("TX_ID"), table.value_of(names.UNIQUE_KEY)
    return {
        "half_offset": numbers(records.queue_offset, pa.int64()),
        "transaction_id": pc.coalesce(marker, table.value_of(shapes.TRANSACTION_ID), message),
        "message_id": message,
        "marker_id": marker,
        "group": table.value_of(names.PRODUCER_GROUP),
        "topic": table.value_of(names.REAL_TOPIC),
        "topic_queue_id": whole(table.value_of(names.REAL_QUEUE_ID), pa.int32()),
        "keys": table.value_of(names.KEYS),
        "body_bytes": numbers(records.body_bytes, pa.int32()),
        "checks": whole(table.value_of(shapes.CHECK_TIMES), pa.int32()),
        "copy_of": lists(copies),
        "writer": table.value_of(WRITER),
        "batch": whole(table.value_of(BATCH), pa.int64()),
        "attempt": table.value_of(ATTEMPT),
        "fence": whole(table.value_of(FENCE), pa.int64()),
    }


def _stranded(records: Records, table: PropertyTable) -> Made:
    made = _halves(records, table)
    made["half_offset"] = pa.nulls(len(records), pa.int64())
    made["reason"] = table.value_of(shapes.REASON)
    return made


def _ops(records: Records, table: PropertyTable) -> Made:
    ended = table.value_of(shapes.OUTCOME)
    known = ended.dictionary_encode()
    verdicts = [_VERDICTS.get(letter) for letter in known.dictionary.to_pylist()]
    by = pc.coalesce(
        table.value_of(shapes.DECIDED_BY),
        pc.if_else(ended.is_valid(), shapes.PRODUCER, pa.scalar(None, pa.string())),
    )
    made = {
        "verdict": pa.array(verdicts, pa.string()).take(known.indices),
        "who": by,
        "reason": table.value_of(shapes.REASON),
        "copy_of": lists(table.value_of(shapes.ALSO)),
    }
    bodies = text(records.body)
    parts = pc.split_pattern(bodies, ",")
    if pc.max(pc.list_value_length(parts)).as_py() == 1:
        return made | {"half_offset": whole(bodies, pa.int64())}
    rows, places = pc.list_parent_indices(parts), parts.flatten()
    is_there = pc.not_equal(places, "")  # RocketMQ 5 ends its lists with a comma
    return made | {
        "half_offset": whole(places.filter(is_there), pa.int64()),
        "half_row": rows.filter(is_there),
    }


def _checks(records: Records, table: PropertyTable) -> Made:
    at = records.body_at
    steps = records.data[at + 8]
    number = records.data[at + 9].astype(np.int32) * 256 + records.data[at + 10]
    known = pa.array([*STEPS, None], pa.string())
    return {
        "half_offset": numbers(records.longs(at), pa.int64()),
        "step": known.take(pa.array(np.minimum(steps, len(STEPS)))),
        "checks": numbers(number, pa.int32()),
        "who": text(records.body_from(_JOURNAL_HEAD)),
    }


def _decisions(records: Records, table: PropertyTable) -> Made:
    """They are few, and each is a document of its own."""
    found = [_decision(body) for body in records.body.to_pylist()]
    return {
        "half_offset": pa.nulls(len(found), pa.int64()),
        "commits": pa.array([one.commits for one in found], LONGS),
        "rolls_back": pa.array([one.rolls_back for one in found], LONGS),
        "who": pa.array([one.by or None for one in found], pa.string()),
        "writer": pa.array([one.writer or None for one in found], pa.string()),
        "batch": pa.array([one.batch if one.writer else None for one in found], pa.int64()),
        "fence": pa.array([one.fence if one.writer else None for one in found], pa.int64()),
        "attempt": pa.array(
            [",".join(w.attempt for w in one.winners) or None for one in found], pa.string()
        ),
    }


def _decision(body: bytes) -> Decision:
    try:
        return read_decision(body)
    except EscrowError:
        return Decision()  # somebody else's record in a topic of this name


def whole(written: pa.Array, kind: pa.DataType) -> pa.Array:
    """Numbers that are written as text; what is none is null."""
    try:
        return written.cast(kind)
    except pa.ArrowInvalid:
        found = [_number(one) for one in written.to_pylist()]
        return pa.array(found, pa.int64()).cast(kind, safe=False)


def _number(written: str | None) -> int | None:
    if written is None or not written.isascii() or not written.isdigit():
        return None
    return int(written[:18])


def lists(written: pa.Array) -> pa.Array:
    """`1,2` as a list. Hardly any record has one."""
    if written.null_count == len(written):
        return pa.nulls(len(written), LONGS)
    found: list[Any] = [
        None if one is None else [int(part) for part in one.split(",") if part.isdecimal()]
        for one in written.to_pylist()
    ]
    return pa.array(found, LONGS)


_KINDS: Final[dict[str, tuple[str, Callable[[Records, PropertyTable], Made]]]] = {
    names.HALF_TOPIC: ("half", _halves),
    names.OP_TOPIC: ("op", _ops),
    names.STRANDED_TOPIC: ("stranded", _stranded),
    names.JOURNAL_TOPIC: ("check", _checks),
    names.DECISION_TOPIC: ("decision", _decisions),
}
