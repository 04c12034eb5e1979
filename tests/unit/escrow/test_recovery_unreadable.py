"""Recovery with unreadable records: each of them is skipped, and all others count.

A record is unreadable in one of two ways. Either its queue entry still points to it and the CRC of
its body is wrong, or the queue was rebuilt after the damage and has a blank entry in its place.
"""

from __future__ import annotations

import logging
from typing import Final

import pytest

from escrowmq.message import names
from escrowmq.message.record import NewRecord, StoredRecord
from tests.support.broker_requests import stored_records
from tests.support.escrows import (
    COMMIT,
    ESCROW,
    ROLLBACK,
    EscrowBench,
    decide_batch_request,
    query_writer_request,
    writer_state,
)
from tests.support.rocketmq_directories import RocketMQDirectory, record_position
from tests.support.stores import NOW_MS

BODY_INDEX: Final = 88  # of the body in an encoded record
OP_PROPERTIES: Final = b"TAGS\x01d\x02"

both_kinds_of_damage = pytest.mark.parametrize(
    "has_entry", [True, False], ids=["damaged body", "blank entry"]
)


def make_unreadable(bench: EscrowBench, record: StoredRecord, *, has_entry: bool = True) -> None:
    """Damage a durable record. Without has_entry, the next start has to rebuild its queue."""
    bench.store.checkpoint()
    file = bench.disk.open(f"commitlog/{0:020d}")
    file.write_at(record.log_offset + BODY_INDEX, bytes([bytes(record.body)[0] ^ 0xFF]))
    file.close()
    if not has_entry:
        directory = f"consumequeue/{record.topic}/{record.queue_id}"
        for name in bench.disk.names(directory):
            bench.disk.remove(f"{directory}/{name}")


def append(bench: EscrowBench, topic: str, body: bytes, properties: bytes = b"") -> None:
    bench.store.append([NewRecord(topic, 0, body, properties)], now_ms=NOW_MS)


def advanced_cursors(bench: EscrowBench) -> tuple[int, int]:
    """Return the cursors after everything is flushed and they have advanced."""
    for _ in range(2):
        bench.tick()
        bench.store.flush()
    return bench.cursors()


# --- ops -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "properties"),
    [
        (b"zero", OP_PROPERTIES),
        (b"0,x", OP_PROPERTIES),
        (b"", OP_PROPERTIES),
        (b"9" * 19, OP_PROPERTIES),
        (b"1", b"TAGS\x01x\x02"),
    ],
    ids=["no number", "one invalid number", "empty", "too large", "another tag"],
)
@pytest.mark.parametrize("is_last", [True, False], ids=["last", "between others"])
def test_an_op_that_names_no_half_decides_nothing(
    body: bytes, properties: bytes, is_last: bool
) -> None:
    bench = EscrowBench()
    committed, still_open, last = (bench.park(key) for key in ("committed", "open", "last"))
    bench.end(committed, COMMIT)
    if is_last:
        bench.end(last, ROLLBACK)
    append(bench, names.OP_TOPIC, body, properties)
    if not is_last:
        bench.end(last, ROLLBACK)
    restarted = bench.killed(with_snapshot=False)
    states = [restarted.state_in_memory(half) for half in (committed, still_open, last)]
    assert states == ["committed", "open", "rolled_back"]
    assert advanced_cursors(restarted) == (1, 1 if is_last else 2)
    assert restarted.end(still_open, ROLLBACK).code == 0
    assert advanced_cursors(restarted) == (3, 4)


def test_the_op_cursor_passes_an_op_that_names_no_half_at_the_end_of_its_queue() -> None:
    bench = EscrowBench()
    bench.end(bench.park("k"), COMMIT)
    append(bench, names.OP_TOPIC, b"zero", OP_PROPERTIES)
    assert advanced_cursors(bench.killed(with_snapshot=False)) == (1, 2)


@both_kinds_of_damage
def test_without_its_op_a_committed_half_is_recognised_by_its_message(has_entry: bool) -> None:
    bench = EscrowBench()
    halves = [bench.park(f"k{number}") for number in range(3)]
    for half in halves:
        bench.end(half, COMMIT)
    make_unreadable(bench, stored_records(bench.store, names.OP_TOPIC)[1], has_entry=has_entry)
    restarted = bench.killed(with_snapshot=False)
    assert [restarted.state_in_memory(half) for half in halves] == ["committed"] * 3
    assert restarted.end(halves[1], ROLLBACK).code == 3701
    assert restarted.bodies() == [b"k0", b"k1", b"k2"]


@both_kinds_of_damage
def test_without_its_op_a_rolled_back_half_is_open_again(has_entry: bool) -> None:
    bench = EscrowBench()
    halves = [bench.park(f"k{number}") for number in range(3)]
    for half in halves:
        bench.end(half, ROLLBACK)
    make_unreadable(bench, stored_records(bench.store, names.OP_TOPIC)[1], has_entry=has_entry)
    restarted = bench.killed(with_snapshot=False)
    states = [restarted.state_in_memory(half) for half in halves]
    assert states == ["rolled_back", "open", "rolled_back"]
    assert restarted.end(halves[1], ROLLBACK).code == 0
    assert restarted.bodies() == []


def test_an_unreadable_record_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    bench = EscrowBench()
    bench.end(bench.park("k"), ROLLBACK)
    bench.park("later")
    make_unreadable(bench, stored_records(bench.store, names.OP_TOPIC)[0])
    with caplog.at_level(logging.ERROR):
        bench.killed(with_snapshot=False)
    assert f"record unreadable topic={names.OP_TOPIC} queue_offset=0" in caplog.text


# --- decisions and checks ------------------------------------------------------------------------


def test_an_invalid_decision_record_is_reported_and_skipped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = EscrowBench()
    append(bench, names.DECISION_TOPIC, b"no decision")
    assert bench.request(decide_batch_request(4, 0, [])).code == 0
    append(bench, names.DECISION_TOPIC, b"")
    with caplog.at_level(logging.ERROR):
        restarted = bench.killed(with_snapshot=False)
    assert caplog.text.count("decision record unreadable") == 2
    assert writer_state(restarted.request(query_writer_request())).batch == 4


@both_kinds_of_damage
def test_the_last_readable_decision_of_a_writer_counts(has_entry: bool) -> None:
    bench = EscrowBench()
    for batch in (4, 5):
        assert bench.request(decide_batch_request(batch, 0, [])).code == 0
    assert bench.request(decide_batch_request(1, 0, [], writer="other")).code == 0
    make_unreadable(
        bench, stored_records(bench.store, names.DECISION_TOPIC)[1], has_entry=has_entry
    )
    restarted = bench.killed(with_snapshot=False)
    assert writer_state(restarted.request(query_writer_request())).batch == 4
    assert writer_state(restarted.request(query_writer_request("other"))).batch == 1


def test_a_check_with_an_unreadable_journal_record_does_not_count() -> None:
    bench = EscrowBench()
    bench.park("k")
    bench.heartbeat(bench.channel, "p")
    bench.tick(ESCROW.immunity_ms)
    bench.tick(ESCROW.check_interval_ms)
    first, second = stored_records(bench.store, names.JOURNAL_TOPIC)
    append(bench, names.JOURNAL_TOPIC, b"no entry")
    make_unreadable(bench, second)
    [half] = bench.killed(with_snapshot=False).coordinator.halves
    assert half.checks == 1
    assert half.due_ms == first.stored_ms + ESCROW.check_interval_ms


# --- halves in a directory of RocketMQ -----------------------------------------------------------


@both_kinds_of_damage
def test_an_unreadable_half_before_the_cursor_of_rocketmq_is_lost_alone(has_entry: bool) -> None:
    rocketmq = RocketMQDirectory()
    passed, unreadable, still_open = (rocketmq.half(key) for key in ("passed", "lost", "open"))
    make_unreadable(rocketmq.bench, unreadable, has_entry=has_entry)
    bench = rocketmq.opened(half_cursor=2)
    assert {b"passed", b"open"} <= {half.key for half in bench.coordinator.halves}
    assert bench.end(record_position(unreadable), COMMIT).code != 0
    for half in (passed, still_open):
        assert bench.end(record_position(half), COMMIT).code == 0
    assert bench.bodies() == [b"passed", b"open"]


@both_kinds_of_damage
def test_an_end_of_an_unreadable_copy_before_the_cursor_decides_nothing(
    has_entry: bool,
) -> None:
    rocketmq = RocketMQDirectory()
    first = rocketmq.half("k")
    unreadable = rocketmq.put_back(first)
    newest = rocketmq.put_back(first, 2)
    make_unreadable(rocketmq.bench, unreadable, has_entry=has_entry)
    bench = rocketmq.opened(half_cursor=2)
    assert bench.end(record_position(unreadable), COMMIT).code != 0
    assert bench.bodies() == []
    assert bench.end(record_position(first), COMMIT).code == 0
    assert bench.end(record_position(newest), COMMIT).code == 0
    assert bench.bodies() == [b"k"]


@both_kinds_of_damage
def test_an_unreadable_half_that_rocketmq_has_decided_counts_as_rolled_back(
    has_entry: bool,
) -> None:
    """Its key is unreadable too, so that a delivered message of the half cannot be found."""
    rocketmq = RocketMQDirectory()
    committed, unreadable, still_open = (rocketmq.half(key) for key in ("c", "lost", "open"))
    rocketmq.deliver(committed)
    rocketmq.op(committed, unreadable)
    make_unreadable(rocketmq.bench, unreadable, has_entry=has_entry)
    bench = rocketmq.opened()
    assert [half.key for half in bench.coordinator.halves] == [b"open"]
    assert bench.state_in_memory(record_position(committed)) == "committed"
    assert bench.state_in_memory(record_position(unreadable)) == "rolled_back"
    assert bench.end(record_position(unreadable), COMMIT).code != 0
    assert bench.end(record_position(still_open), COMMIT).code == 0
    assert bench.bodies() == [b"c", b"open"]
