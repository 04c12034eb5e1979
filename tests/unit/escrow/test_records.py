"""The records of a transaction, from the send to the message that consumers get."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from escrowmq.broker.processors.send import is_plain_half
from escrowmq.errors import CorruptRecord
from escrowmq.escrow.half_table import Attempt
from escrowmq.escrow.records import (
    JOURNAL_EVENTS,
    JournalEntry,
    decode_journal_entry,
    decode_op,
    make_copy,
    make_final,
    make_half,
    make_journal_record,
    make_op,
    make_plain_half,
    make_stranded,
    parse_attempt,
    parse_half,
    parse_immunity_ms,
    plain_commit_offset,
)
from escrowmq.message import names
from escrowmq.message.broker_marks import remove_broker_properties
from escrowmq.message.keys import tags_and_keys
from escrowmq.message.properties import decode_properties, encode_properties
from escrowmq.message.record import LogOffset, NewRecord, StoredRecord, decode_record, encode_record
from escrowmq.message.transaction import TransactionState
from tests.support.broker_requests import send_request
from tests.support.escrows import COMMIT, EscrowBench, end_request, position_of
from tests.support.stores import HOST

HALF_PROPERTIES = "TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01k\x02"


def stored_record(record: NewRecord, *, log_offset: int = 0, queue_offset: int = 0) -> StoredRecord:
    """Return a record as it is read from the log."""
    data = encode_record(record, queue_offset, log_offset, 1_000, HOST)
    return decode_record(data, 0, LogOffset(log_offset))


def sent_record(properties: str = HALF_PROPERTIES, **changes: Any) -> NewRecord:
    """Return a half as a producer sends it."""
    return NewRecord("T", 3, b"body", properties.encode(), **changes)


def test_a_half_has_the_fields_that_rocketmq_writes() -> None:
    half = make_half(sent_record(flag=7, sys_flag=4 | 1, reconsume_times=2))
    assert (half.topic, half.queue_id, half.body) == (names.HALF_TOPIC, 0, b"body")
    assert (half.flag, half.sys_flag, half.reconsume_times) == (7, 1, 2)
    assert decode_properties(half.properties) == {
        "PGROUP": "p",
        "UNIQ_KEY": "k",
        "__transactionId__": "k",
        "TRAN_MSG": "true",
        "REAL_TOPIC": "T",
        "REAL_QID": "3",
    }


property_names = st.sampled_from(
    [
        "a",
        "TAGS",
        "KEYS",
        "PGROUP",
        "XREAL_",
        "MY_TRAN_MSG",
        "TRAN_MSG",
        "REAL_TOPIC",
        "REAL_QID",
        "ESCROW_COPY_OF",
        "ESCROW_WRITER",
        "TRANSACTION_CHECK_TIMES",
        "__transactionId__",
    ]
)
property_values = st.sampled_from(
    ["true", "TRAN_MSG", "x", "TRAN_MSG\x01true", "REAL_TOPIC\x01y", "9", " "]
)


# These are not delivered to consumers.
INTERNAL_NAMES = {
    *("TRAN_MSG", "REAL_TOPIC", "REAL_QID", "ESCROW_COPY_OF", "ESCROW_WRITER"),
    *("TRANSACTION_CHECK_TIMES", "__transactionId__"),
}


@given(st.lists(st.tuples(property_names, property_values), max_size=8), st.integers(0, 8))
def test_consumers_get_the_properties_that_were_sent(
    items: list[tuple[str, str]], index: int
) -> None:
    """Half, copy and final keep all properties that are not internal, in any order."""
    items.insert(index, ("TRAN_MSG", "true"))
    items.append(("UNIQ_KEY", "k"))
    text = "".join(f"{name}\x01{value}\x02" for name, value in items)
    record = sent_record(remove_broker_properties(text.encode()).decode())
    half = stored_record(make_half(record), log_offset=50)
    facts = parse_half(half)
    assert facts is not None
    assert (facts.topic, facts.queue_id, facts.key) == ("T", 3, b"k")
    moved = stored_record(make_copy(half, 9), log_offset=90)
    moved_facts = parse_half(moved)
    assert moved_facts is not None
    assert moved_facts.previous_offsets == (9,)
    assert msgspec.structs.replace(moved_facts, previous_offsets=()) == facts
    for source in (half, moved):
        final = make_final(source, facts.topic, facts.queue_id)
        assert (final.topic, final.queue_id, final.body) == ("T", 3, b"body")
        assert (final.prepared_offset, final.sys_flag) == (source.log_offset, 8)
        delivered = decode_properties(final.properties)
        delivered.pop("TRANSACTION_CHECK_TIMES", None)
        expected = decode_properties(record.properties)
        for name in INTERNAL_NAMES:
            expected.pop(name, None)
        assert delivered == expected


@pytest.mark.parametrize(
    "text",
    [
        HALF_PROPERTIES,
        HALF_PROPERTIES[:-1],
        "UNIQ_KEY\x01k\x02TRAN_MSG\x01true\x02",
        "UNIQ_KEY\x01k\x02PGROUP\x01\x02TRAN_MSG\x01true\x02",
        "a\x01b\x02TRAN_MSG\x01true\x02PGROUP\x01p\x02UNIQ_KEY\x01k\x02KEYS\x01x y\x02",
        "UNIQ_KEY\x01k0\x02TRAN_MSG\x01true\x02UNIQ_KEY\x01k\x02XPGROUP\x01x\x02PGROUP\x01p",
        HALF_PROPERTIES + "TAGS\x01a\x02KEYS\x01 x  y ",
        HALF_PROPERTIES + "TAGS\x01a\x02TAGS\x01\x02KEYS\x01x\x02KEYS\x01\x02",
        HALF_PROPERTIES + "TAGS\x01\u00e9\x02KEYS\x01\u4e2d \u6587\x02XTAGS\x01b\x02XKEYS\x01z",
    ],
)
def test_the_fast_path_makes_the_same_half_as_the_general_one(text: str) -> None:
    added = "CLUSTER\x01C\x02"
    properties, final_properties, group, key, derived = make_plain_half(text, added, "T", 3)
    half = stored_record(NewRecord(names.HALF_TOPIC, 0, b"body", properties))
    facts = parse_half(half)
    separator = "" if text.endswith("\x02") else "\x02"
    general = parse_half(stored_record(make_half(sent_record(text + separator + added))))
    assert facts == general
    assert facts is not None
    assert (facts.group, facts.key) == (group, key)
    assert final_properties == make_final(half, "T", 3).properties
    parsed = tags_and_keys("T", final_properties, 0)
    assert parsed == tags_and_keys(names.HALF_TOPIC, properties, 0)
    assert derived in (parsed, None)
    assert derived is not None or "\x01\x02" in text, "only an empty value has to be parsed later"


@settings(suppress_health_check=[HealthCheck.filter_too_much])  # many properties are not plain
@given(st.lists(st.tuples(property_names, property_values), max_size=8), st.integers(0, 8))
def test_the_fast_path_equals_the_general_one_for_any_plain_properties(
    items: list[tuple[str, str]], index: int
) -> None:
    items.insert(index, ("TRAN_MSG", "true"))
    items.append(("UNIQ_KEY", "k"))
    text = "".join(f"{name}\x01{value}\x02" for name, value in items)
    assume(is_plain_half(text))
    properties, final_properties, group, key, derived = make_plain_half(text, "", "T", 3)
    half = stored_record(NewRecord(names.HALF_TOPIC, 0, b"body", properties))
    assert parse_half(half) == parse_half(make_half(sent_record(text)))
    assert final_properties == make_final(half, "T", 3).properties
    assert derived == tags_and_keys("T", final_properties, 0)
    assert derived == tags_and_keys(names.HALF_TOPIC, properties, 0)
    assert (group, key) == (decode_properties(text.encode()).get("PGROUP", ""), b"k")


@pytest.mark.parametrize(
    ("properties", "is_parked"),
    [
        ("TRAN_MSG\x01true\x02UNIQ_KEY\x01k\x02", True),
        ("UNIQ_KEY\x01k\x02TRAN_MSG\x01true", True),  # no separator at the end
        ("a\x01b\x02TRAN_MSG\x01true\x02TRAN_MSG\x01true\x02", True),
        ("MY_TRAN_MSG\x01true\x02UNIQ_KEY\x01k\x02", False),
        ("a\x01TRAN_MSG\x01true\x02UNIQ_KEY\x01k\x02", False),  # within a value
        ("TRAN_MSG\x01false\x02UNIQ_KEY\x01k\x02", False),
        ("TRAN_MSG\x01true\x02TRAN_MSG\x01false\x02", False),  # the last one counts
        ("TRAN_MSGtrue\x02UNIQ_KEY\x01k\x02", False),
        ("TRAN_MSG\x01True\x02UNIQ_KEY\x01k\x02", True),
    ],
)
def test_only_the_property_tran_msg_makes_a_send_a_half(properties: str, is_parked: bool) -> None:
    bench = EscrowBench()
    bench.turn(send_request(body=b"x", properties=properties))
    position = position_of(bench.channel.response())
    assert bench.bodies() == ([] if is_parked else [b"x"])
    assert len(bench.coordinator.halves) == is_parked
    if is_parked:
        assert bench.request(end_request(position, COMMIT, group="")).code == 0
        [record] = bench.messages()
        assert "TRAN_MSG" not in decode_properties(record.properties)
        assert bytes(record.body) == b"x"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None),
        ("5", 5_000),
        ("0.5", 500),
        (" 7 ", 7_000),
        ("", None),
        ("-1", None),
        ("0", 0),
        ("-5", 0),
        ("nan", None),
        ("inf", None),
        ("1e400", None),
        ("five", None),
        ("99999999999999999999", None),
    ],
)
def test_immunity_times_are_parsed(text: str | None, expected: int | None) -> None:
    assert parse_immunity_ms(text) == expected


@pytest.mark.parametrize("text", ["0", "-5"])
def test_an_immunity_time_of_zero_means_a_check_at_once(text: str) -> None:
    bench = EscrowBench()
    bench.park("k", CHECK_IMMUNITY_TIME_IN_SECONDS=text)
    bench.tick()
    assert len(bench.channel.oneway_requests) == 1


@pytest.mark.parametrize("text", ["nan", "-1", "soon"])
def test_an_invalid_immunity_time_means_the_setting_of_the_broker(text: str) -> None:
    bench = EscrowBench()
    bench.park("k", CHECK_IMMUNITY_TIME_IN_SECONDS=text)
    bench.tick(bench.config.immunity_ms - 1)
    assert bench.channel.oneway_requests == []
    bench.tick(1)
    assert len(bench.channel.oneway_requests) == 1


@pytest.mark.parametrize(
    ("body", "halves"),
    [
        (b"123", [123]),
        (b"123,", [123]),
        (b"123,124,", [123, 124]),
        (b"0,5,7", [0, 5, 7]),
        (b"", None),
        (b",", None),
        (b"x", None),
        (b"1,x,", None),
        (b"-1", None),
        (b"1" * 30, None),
    ],
)
def test_an_op_names_one_half_or_several(body: bytes, halves: list[int] | None) -> None:
    op = decode_op(stored_record(NewRecord(names.OP_TOPIC, 0, body, b"TAGS\x01d\x02")))
    assert (None if op is None else op.half_offsets) == halves
    if op is not None:
        assert op.state is None  # RocketMQ's ops do not have it
    assert decode_op(stored_record(NewRecord(names.OP_TOPIC, 0, body, b"TAGS\x01x\x02"))) is None


@given(
    st.one_of(
        st.integers(0, 10**19).map(lambda number: b"%d" % number),
        st.text("0123456789,- x", max_size=22).map(str.encode),
    ),
    st.sampled_from(
        [
            b"TAGS\x01d\x02ENDED\x01c\x02",
            b"TAGS\x01d\x02ENDED\x01r\x02",
            b"TAGS\x01d\x02ENDED\x01c\x02REASON\x01late\x02",
            b"TAGS\x01d\x02",
        ]
    ),
)
def test_the_short_way_to_read_an_op_agrees_with_the_long_one(
    body: bytes, properties: bytes
) -> None:
    record = stored_record(NewRecord(names.OP_TOPIC, 0, body, properties))
    op = decode_op(record)
    offset = plain_commit_offset(record)
    if offset is not None:
        assert op is not None
        assert (op.half_offsets, op.previous_offsets) == ([offset], [])
        assert (op.state, op.reason) == (TransactionState.COMMITTED, "")
    elif properties == b"TAGS\x01d\x02ENDED\x01c\x02":
        assert op is None or not body.isdigit()


@pytest.mark.parametrize("state", TransactionState)
def test_an_op_of_escrowmq_has_the_state_and_the_reason(state: TransactionState) -> None:
    record = make_op(
        7, state, "producer 1.2.3.4:5", "because\x02of\x01it", previous_offsets=(3, 5), now_ms=9
    )
    assert record.body == b"7"  # every version of RocketMQ can read this
    op = decode_op(stored_record(record))
    assert op is not None
    assert (op.half_offsets, op.previous_offsets, op.state) == ([7], [3, 5], state)
    assert (op.by, op.reason) == ("producer 1.2.3.4:5", "because of it")


@pytest.mark.parametrize(
    "properties", [{}, {"REAL_QID": "1"}, {"REAL_TOPIC": "T", "REAL_QID": "x"}]
)
def test_a_record_without_a_real_topic_and_queue_is_no_half(properties: dict[str, str]) -> None:
    record = NewRecord(names.HALF_TOPIC, 0, b"", encode_properties(properties))
    assert parse_half(stored_record(record)) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Attempt("w", 4, "a", 2)),
        ({"ESCROW_FENCE": "x"}, Attempt("w", 4, "a", 0)),
        ({"ESCROW_BATCH": "-4"}, None),
        ({"ESCROW_BATCH": ""}, None),
        ({"ESCROW_WRITER": ""}, None),
    ],
)
def test_an_attempt_needs_a_writer_and_a_valid_batch(
    changes: dict[str, str], expected: Attempt | None
) -> None:
    properties = {
        "ESCROW_WRITER": "w",
        "ESCROW_BATCH": "4",
        "ESCROW_ATTEMPT": "a",
        "ESCROW_FENCE": "2",
    }
    assert parse_attempt(properties | changes) == expected


def test_a_stranded_message_has_the_reason() -> None:
    half = stored_record(make_half(sent_record(flag=7)))
    record = make_stranded(half, "checked 3 times")
    assert (record.topic, record.queue_id, record.flag) == (names.STRANDED_TOPIC, 0, 7)
    assert decode_properties(record.properties)["ESCROW_REASON"] == "checked 3 times"


def test_a_journal_entry_is_read_as_it_was_written() -> None:
    for event in JOURNAL_EVENTS:
        for reason in ("", "database is down: 数据库"):
            entry = JournalEntry(2**40, event, 15, "1.2.3.4:5", reason)
            record = stored_record(make_journal_record(entry, now_ms=5))
            assert decode_journal_entry(record) == msgspec.structs.replace(entry, stored_ms=1_000)


def test_a_journal_entry_limits_its_check_number() -> None:
    record = make_journal_record(JournalEntry(1, "asked", 70_000, "1.2.3.4:5"), now_ms=5)
    assert decode_journal_entry(stored_record(record)).check_number == 65_535


@pytest.mark.parametrize("body", [b"", b"short", struct.pack(">qBH", 1, 99, 1)])
def test_a_record_that_is_no_journal_entry_is_corrupt(body: bytes) -> None:
    with pytest.raises(CorruptRecord):
        decode_journal_entry(stored_record(NewRecord(names.JOURNAL_TOPIC, 0, body)))
