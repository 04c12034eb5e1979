"""A directory in which RocketMQ has run: what it decided in one copy is decided in all."""

from __future__ import annotations

import pytest

from escrowmq.message import names
from escrowmq.message.record import StoredRecord, copy_record
from tests.support.escrows import COMMIT, ESCROW, ROLLBACK, EscrowBench, sent_checks
from tests.support.stores import sample
from tests.unit.escrow.test_recovery import RocketMQDirectory, position, save_snapshot


def parked_by_us(rocketmq: RocketMQDirectory, key: str) -> StoredRecord:
    """Park a half ourselves and save a snapshot, before RocketMQ takes over."""
    half = rocketmq.bench.park(key)
    save_snapshot(rocketmq.bench)
    return rocketmq.store.record_at(half.log_offset)


def checked_keys(bench: EscrowBench) -> list[str]:
    bench.tick(ESCROW.immunity_ms)
    return [key for key, _ in sent_checks(bench.channel)]


@pytest.mark.parametrize(
    "has_snapshot", [False, True], ids=["without a snapshot", "with a snapshot"]
)
@pytest.mark.parametrize("verdict", [COMMIT, ROLLBACK])
def test_a_crash_of_rocketmq_lost_the_cursor_past_the_first_copy(
    verdict: int, has_snapshot: bool
) -> None:
    rocketmq = RocketMQDirectory()
    first = parked_by_us(rocketmq, "k") if has_snapshot else rocketmq.half("k")
    second = rocketmq.put_back(first)
    if verdict == COMMIT:
        rocketmq.deliver(second)
    rocketmq.op(second)
    rocketmq.half("another")
    bench = rocketmq.opened()
    assert checked_keys(bench) == ["another"]
    other = ROLLBACK if verdict == COMMIT else COMMIT
    assert bench.end(position(first), verdict).code == 0
    assert bench.end(position(first), other).code == 3701
    assert bench.bodies() == ([b"k"] if verdict == COMMIT else [])
    again = bench.killed(with_snapshot=False)
    assert [half.key for half in again.coordinator.halves] == [b"another"]


@pytest.mark.parametrize("verdict", [COMMIT, ROLLBACK])
def test_an_end_of_an_older_copy_decides_the_newest(verdict: int) -> None:
    rocketmq = RocketMQDirectory()
    first = rocketmq.half("k")
    second = rocketmq.put_back(first)
    if verdict == COMMIT:
        rocketmq.deliver(first)
    rocketmq.op(first)
    third = rocketmq.put_back(second, 2)
    bench = rocketmq.opened(half_cursor=2)
    assert checked_keys(bench) == []
    assert bench.end(position(third), verdict).code == 0
    assert bench.bodies() == ([b"k"] if verdict == COMMIT else [])


@pytest.mark.parametrize(
    "has_snapshot", [False, True], ids=["without a snapshot", "with a snapshot"]
)
def test_rocketmq_delivered_our_half_and_lost_the_op(has_snapshot: bool) -> None:
    rocketmq = RocketMQDirectory()
    half = parked_by_us(rocketmq, "k") if has_snapshot else rocketmq.half("k")
    rocketmq.deliver(half)
    # A helper of the fake broker in this folder.
    rocketmq._append(sample(topic="T", queue_id=1))
    bench = rocketmq.opened()
    assert checked_keys(bench) == []
    assert bench.end(position(half), COMMIT).code == 0
    assert bench.bodies() == [b"k"]


def test_a_half_that_rocketmq_discarded_waits_for_an_operator() -> None:
    rocketmq = RocketMQDirectory()
    half = rocketmq.half("k")
    # A helper of the fake broker in this folder.
    rocketmq._append(
        copy_record(half, topic=names.STRANDED_TOPIC, queue_id=0, properties=half.properties)
    )
    rocketmq.half("another")
    bench = rocketmq.opened()
    assert checked_keys(bench) == ["another"]
    assert [half.is_stranded for half in bench.coordinator.halves] == [True, False]
    assert bench.end(position(half), COMMIT).code == 0  # or for a late verdict of its producer
    assert bench.bodies() == [b"k"]


def test_a_half_that_was_resumed_in_rocketmq_is_checked() -> None:
    rocketmq = RocketMQDirectory()
    half = rocketmq.half("k")
    # A helper of the fake broker in this folder.
    rocketmq._append(
        copy_record(half, topic=names.STRANDED_TOPIC, queue_id=0, properties=half.properties)
    )
    rocketmq.put_back(half, 0)
    assert checked_keys(rocketmq.opened(half_cursor=1)) == ["k"]


def test_the_same_key_of_another_group_is_another_transaction() -> None:
    rocketmq = RocketMQDirectory()
    rocketmq.deliver(rocketmq.half("k", PGROUP="others"))
    rocketmq.half("k")
    assert checked_keys(rocketmq.opened(half_cursor=1)) == ["k"]
