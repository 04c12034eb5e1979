"""mode=transactions: the records of the escrow, and RocketMQ's, as rows."""

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
from tests.support.record_blocks import block
from tests.support.stores import HOST, NOW_MS, properties

SENT = NewRecord(
    "orders",
    3,
    b"body",
    properties(PGROUP="p", UNIQ_KEY="id", KEYS="k", TRAN_MSG="true"),
    sys_flag=4,
    born_host=HOST,
)


def rows(*records: NewRecord, first: int = 0) -> list[dict[str, Any]]:
    columns = TransactionColumns(
        block(records, first=first), records[0].topic, "b"
    ).to_record_batch(TRANSACTION_COLUMNS)
    places = {"broker", "queue_id", "log_offset", "at", "born_time", "born_host", "queue_offset"}
    return [
        {name: value for name, value in row.items() if value is not None and name not in places}
        for row in columns.to_pylist()
    ]


def test_a_half_says_where_it_wants_to_go_and_whose_it_is() -> None:
    [row] = rows(make_half(SENT), first=7)
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


def test_a_half_of_a_transaction_with_a_marker_names_it() -> None:
    given = properties(PGROUP="p", UNIQ_KEY="id", TX_ID="marker", TRAN_MSG="true")
    [row] = rows(make_half(NewRecord("orders", 3, b"body", given, sys_flag=4, born_host=HOST)))
    assert (row["transaction_id"], row["message_id"], row["marker_id"]) == (
        "marker",
        "id",
        "marker",
    )


def test_a_half_of_a_writer_names_batch_and_attempt() -> None:
    given = properties(
        PGROUP="p",
        UNIQ_KEY="id",
        ESCROW_WRITER="w",
        ESCROW_BATCH="5",
        ESCROW_ATTEMPT="a1",
        ESCROW_FENCE="2",
    )
    [row] = rows(make_half(NewRecord("orders", 0, b"", given)))
    assert {name: row[name] for name in ("writer", "batch", "attempt", "fence")} == {
        "writer": "w",
        "batch": 5,
        "attempt": "a1",
        "fence": 2,
    }


def test_a_half_that_rocketmq_appended_again_names_its_former_place() -> None:
    given = properties(
        REAL_TOPIC="orders",
        REAL_QID="1",
        TRANSACTION_CHECK_TIMES="4",
        TRAN_PREPARED_QUEUE_OFFSET="12",
        UNIQ_KEY="id",
    )
    [row] = rows(NewRecord(names.HALF_TOPIC, 0, b"", given))
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
def test_an_op_of_ours_says_how_it_ended(state: TransactionState, verdict: str) -> None:
    peer = encode_host("10.0.0.1", 5)
    producers = make_op(9, state, "producer", born_host=peer, now_ms=NOW_MS)
    operators = make_op(10, state, "operator", "by hand", previous_offsets=[3, 4], now_ms=NOW_MS)
    assert rows(producers, operators) == [
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


def test_an_op_of_rocketmq_settles_one_or_several_and_does_not_say_how() -> None:
    ops = [NewRecord(names.OP_TOPIC, 0, body, b"TAGS\x01d\x02") for body in (b"4", b"5,6,7,", b"8")]
    assert rows(*ops) == [{"kind": "op", "half_offset": at} for at in (4, 5, 6, 7, 8)]
    assert rows(ops[0]) == [{"kind": "op", "half_offset": 4}]


def test_an_op_that_is_none_has_no_half() -> None:
    assert rows(NewRecord(names.OP_TOPIC, 0, b"junk", b"TAGS\x01d\x02")) == [{"kind": "op"}]


def test_steps_of_checks_name_whom_and_what() -> None:
    steps = [
        JournalEntry(5, "asked", 1, "10.0.0.1:5"),
        JournalEntry(5, "unknown", 300, ""),
        JournalEntry(6, "resumed", 0, "x", "bank is back"),
    ]
    assert rows(*(make_journal_record(step, now_ms=NOW_MS) for step in steps)) == [
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


def test_a_stranded_one_says_why() -> None:
    half = make_half(SENT)
    stored = decode_record(encode_record(half, 7, 0, NOW_MS, HOST), 0, LogOffset(0))
    [row] = rows(make_stranded(stored, "asked 15 times"))
    assert (row["kind"], row["transaction_id"], row["reason"]) == (
        "stranded",
        "id",
        "asked 15 times",
    )
    assert "half_offset" not in row


def test_a_decision_lists_its_halves() -> None:
    group = DecisionRecord(commits=[1, 2], by="producer 10.0.0.1:5")
    batch = DecisionRecord(
        commits=[3], rolls_back=[4], writer="w", batch=6, fence=2, winners=[Winner("a", 1)]
    )
    junk = NewRecord(names.DECISION_TOPIC, 0, b"\xff")
    records = [make_decision_record(one, now_ms=NOW_MS) for one in (group, batch)]
    found = rows(*records, junk)
    assert found[0] == {
        "kind": "decision",
        "commits": [1, 2],
        "rolls_back": [],
        "who": "producer 10.0.0.1:5",
    }
    assert found[1] == {
        "kind": "decision",
        "commits": [3],
        "rolls_back": [4],
        "writer": "w",
        "batch": 6,
        "fence": 2,
        "attempt": "a",
    }
    assert found[2] == {"kind": "decision", "commits": [], "rolls_back": []}
