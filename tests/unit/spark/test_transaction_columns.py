"""Rows of mode=transactions: the records that EscrowMQ and RocketMQ write about transactions."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.escrow.records import (
    JournalEntry,
    make_half,
    make_journal_record,
    make_op,
    make_stranded,
)
from escrowmq.escrow.writers import DecisionRecord, Winner, make_decision_record
from escrowmq.message import names
from escrowmq.message.keys import encode_host
from escrowmq.message.record import LogOffset, NewRecord, decode_record, encode_record
from escrowmq.message.transaction import TransactionState
from escrowmq.spark.schema import TRANSACTION_COLUMNS
from escrowmq.spark.transaction_columns import TransactionColumns
from tests.support.record_blocks import encode_block
from tests.support.stores import HOST, NOW_MS, properties

HALF = NewRecord(
    "orders",
    3,
    b"body",
    properties(PGROUP="p", UNIQ_KEY="id", KEYS="k", TRAN_MSG="true"),
    sys_flag=4,
    born_host=HOST,
)


# Columns that every record has.
COMMON = {"broker", "queue_id", "log_offset", "at", "born_time", "born_host", "queue_offset"}


def rows(*records: NewRecord, first: int = 0) -> list[dict[str, Any]]:
    """Return a row for each record, without nulls and the columns that every record has."""
    columns = TransactionColumns(encode_block(records, first=first), records[0].topic, "b")
    return [
        {name: value for name, value in row.items() if value is not None and name not in COMMON}
        for row in columns.to_record_batch(TRANSACTION_COLUMNS).to_pylist()
    ]


def test_a_half_has_its_target_its_group_and_its_ids() -> None:
    [row] = rows(make_half(HALF), first=7)
    assert row == {
        "kind": "half",
        "half_offset": 7,
        "transaction_id": "id",
        "message_id": "id",
        "group": "p",
        "topic": "orders",
        "topic_queue_id": 3,
        "keys": "k",
        "body_bytes": 4,
    }


def test_a_half_of_a_transaction_with_a_marker_has_its_id() -> None:
    half_properties = properties(PGROUP="p", UNIQ_KEY="id", TX_ID="marker", TRAN_MSG="true")
    [row] = rows(
        make_half(NewRecord("orders", 3, b"body", half_properties, sys_flag=4, born_host=HOST))
    )
    assert (row["transaction_id"], row["marker_id"]) == ("marker", "marker")
    assert row["message_id"] == "id"


def test_a_half_of_a_writer_has_batch_attempt_and_fence() -> None:
    half_properties = properties(
        PGROUP="p",
        UNIQ_KEY="id",
        ESCROW_WRITER="w",
        ESCROW_BATCH="5",
        ESCROW_ATTEMPT="a1",
        ESCROW_FENCE="2",
    )
    [row] = rows(make_half(NewRecord("orders", 0, b"", half_properties)))
    assert (row["writer"], row["batch"], row["attempt"], row["fence"]) == ("w", 5, "a1", 2)


def test_a_copy_by_rocketmq_has_the_offset_of_the_half_and_its_checks() -> None:
    half_properties = properties(
        REAL_TOPIC="orders",
        REAL_QID="1",
        TRANSACTION_CHECK_TIMES="4",
        TRAN_PREPARED_QUEUE_OFFSET="12",
        UNIQ_KEY="id",
    )
    [row] = rows(NewRecord(names.HALF_TOPIC, 0, b"", half_properties))
    assert (row["checks"], row["copy_of"], row["transaction_id"]) == (4, [12], "id")


@pytest.mark.parametrize(
    ("state", "verdict"),
    [
        (TransactionState.COMMITTED, "committed"),
        (TransactionState.ROLLED_BACK, "rolled_back"),
        (TransactionState.STRANDED, "stranded"),
        (TransactionState.OPEN, "moved"),
    ],
)
def test_an_op_of_escrowmq_has_the_verdict(state: TransactionState, verdict: str) -> None:
    peer = encode_host("10.0.0.1", 5)
    of_producer = make_op(9, state, "producer", born_host=peer, now_ms=NOW_MS)
    of_operator = make_op(10, state, "operator", "by hand", previous_offsets=[3, 4], now_ms=NOW_MS)
    assert rows(of_producer, of_operator) == [
        {"kind": "op", "half_offset": 9, "verdict": verdict, "who": "producer"},
        {
            "kind": "op",
            "half_offset": 10,
            "verdict": verdict,
            "who": "operator",
            "reason": "by hand",
            "copy_of": [3, 4],
        },
    ]


def test_an_op_of_rocketmq_has_one_or_several_halves_and_no_verdict() -> None:
    ops = [NewRecord(names.OP_TOPIC, 0, body, b"TAGS\x01d\x02") for body in (b"4", b"5,6,7,", b"8")]
    assert rows(*ops) == [{"kind": "op", "half_offset": offset} for offset in (4, 5, 6, 7, 8)]
    assert rows(ops[0]) == [{"kind": "op", "half_offset": 4}]


def test_an_invalid_op_has_no_half() -> None:
    assert rows(NewRecord(names.OP_TOPIC, 0, b"junk", b"TAGS\x01d\x02")) == [{"kind": "op"}]


def test_journal_entries_have_their_step_and_their_peer() -> None:
    entries = [
        JournalEntry(5, "asked", 1, "10.0.0.1:5"),
        JournalEntry(5, "unknown", 300, ""),
        JournalEntry(6, "resumed", 0, "x", "bank is back"),
    ]
    assert rows(*(make_journal_record(entry, now_ms=NOW_MS) for entry in entries)) == [
        {"kind": "check", "half_offset": 5, "step": "asked", "checks": 1, "who": "10.0.0.1:5"},
        {"kind": "check", "half_offset": 5, "step": "unknown", "checks": 300, "who": ""},
        {
            "kind": "check",
            "half_offset": 6,
            "step": "resumed",
            "checks": 0,
            "who": "x",
            "reason": "bank is back",
        },
    ]


def test_a_stranded_half_has_the_reason() -> None:
    half = make_half(HALF)
    stored = decode_record(encode_record(half, 7, 0, NOW_MS, HOST), 0, LogOffset(0))
    [row] = rows(make_stranded(stored, "checked 15 times"))
    assert (row["kind"], row["transaction_id"]) == ("stranded", "id")
    assert row["reason"] == "checked 15 times"
    assert "half_offset" not in row


def test_a_decision_has_its_halves() -> None:
    group = DecisionRecord(commits=[1, 2], by="producer 10.0.0.1:5")
    batch = DecisionRecord(
        commits=[3], rolls_back=[4], writer="w", batch=6, fence=2, winners=[Winner("a", 1)]
    )
    invalid = NewRecord(names.DECISION_TOPIC, 0, b"\xff")
    records = [make_decision_record(decision, now_ms=NOW_MS) for decision in (group, batch)]
    group_row, batch_row, invalid_row = rows(*records, invalid)
    assert group_row == {
        "kind": "decision",
        "commits": [1, 2],
        "rolls_back": [],
        "who": "producer 10.0.0.1:5",
    }
    assert batch_row == {
        "kind": "decision",
        "commits": [3],
        "rolls_back": [4],
        "writer": "w",
        "batch": 6,
        "fence": 2,
        "attempt": "a",
    }
    assert invalid_row == {"kind": "decision", "commits": [], "rolls_back": []}
