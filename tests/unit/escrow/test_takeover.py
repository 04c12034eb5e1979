"""A directory that RocketMQ had before us: what it settled in one copy is settled in all."""

from __future__ import annotations

import pytest

from escrowmq.message import names
from escrowmq.message.record import StoredRecord, copy_record
from tests.support.escrows import COMMIT, ESCROW, ROLLBACK, EscrowBench, sent_checks
from tests.support.stores import sample
from tests.unit.escrow.test_recovery import Theirs, noted, position


def ours_first(theirs: Theirs, key: str) -> StoredRecord:
    """Parked by us, and in our note; then RocketMQ came."""
    half = theirs.bench.park(key)
    noted(theirs.bench)
    return theirs.store.record_at(half.log_offset)


def asked(bench: EscrowBench) -> list[str]:
    bench.tick(ESCROW.immunity_ms)
    return [key for key, _ in sent_checks(bench.channel)]


@pytest.mark.parametrize("is_noted", [False, True], ids=["without a note", "noted"])
@pytest.mark.parametrize("verdict", [COMMIT, ROLLBACK])
def test_its_crash_forgot_that_it_passed_the_first_copy(verdict: int, is_noted: bool) -> None:
    theirs = Theirs()
    first = ours_first(theirs, "k") if is_noted else theirs.half("k")
    second = theirs.put_back(first)
    if verdict == COMMIT:
        theirs.deliver(second)
    theirs.op(second)
    theirs.half("another")
    bench = theirs.opened()
    assert asked(bench) == ["another"]
    other = ROLLBACK if verdict == COMMIT else COMMIT
    assert bench.end(position(first), verdict).code == 0
    assert bench.end(position(first), other).code == 3701
    assert bench.bodies() == ([b"k"] if verdict == COMMIT else [])
    again = bench.killed(with_snapshot=False)
    assert [half.key for half in again.coordinator.halves] == [b"another"]


@pytest.mark.parametrize("verdict", [COMMIT, ROLLBACK])
def test_an_end_that_named_an_older_copy_settles_the_newest(verdict: int) -> None:
    theirs = Theirs()
    first = theirs.half("k")
    second = theirs.put_back(first)
    if verdict == COMMIT:
        theirs.deliver(first)
    theirs.op(first)
    third = theirs.put_back(second, 2)
    bench = theirs.opened(half_cursor=2)
    assert asked(bench) == []
    assert bench.end(position(third), verdict).code == 0
    assert bench.bodies() == ([b"k"] if verdict == COMMIT else [])


@pytest.mark.parametrize("is_noted", [False, True], ids=["without a note", "noted"])
def test_it_delivered_what_we_had_parked_and_lost_the_op(is_noted: bool) -> None:
    theirs = Theirs()
    half = ours_first(theirs, "k") if is_noted else theirs.half("k")
    theirs.deliver(half)
    theirs._append(sample(topic="T", queue_id=1))
    bench = theirs.opened()
    assert asked(bench) == []
    assert bench.end(position(half), COMMIT).code == 0
    assert bench.bodies() == [b"k"]


def test_what_it_discarded_waits_for_an_operator() -> None:
    theirs = Theirs()
    half = theirs.half("k")
    theirs._append(
        copy_record(half, topic=names.STRANDED_TOPIC, queue_id=0, properties=half.properties)
    )
    theirs.half("another")
    bench = theirs.opened()
    assert asked(bench) == ["another"]
    assert [half.is_stranded for half in bench.coordinator.halves] == [True, False]
    assert bench.end(position(half), COMMIT).code == 0  # or for its producer, after all
    assert bench.bodies() == [b"k"]


def test_what_was_resumed_there_is_asked_about() -> None:
    theirs = Theirs()
    half = theirs.half("k")
    theirs._append(
        copy_record(half, topic=names.STRANDED_TOPIC, queue_id=0, properties=half.properties)
    )
    theirs.put_back(half, 0)
    assert asked(theirs.opened(half_cursor=1)) == ["k"]


def test_the_same_key_of_another_group_is_another_transaction() -> None:
    theirs = Theirs()
    theirs.deliver(theirs.half("k", PGROUP="others"))
    theirs.half("k")
    assert asked(theirs.opened(half_cursor=1)) == ["k"]
