"""Directories that RocketMQ has written: a decision about one copy of a half holds for all."""

from __future__ import annotations

import pytest

from escrowmq.message.record import StoredRecord
from tests.support.escrows import COMMIT, ESCROW, ROLLBACK, EscrowBench, sent_checks
from tests.support.rocketmq_directories import RocketMQDirectory, record_position
from tests.support.stores import sample


def parked_by_escrowmq(rocketmq: RocketMQDirectory, key: str) -> StoredRecord:
    """Park a half with EscrowMQ and save a snapshot, before RocketMQ uses the directory."""
    half = rocketmq.bench.park(key)
    rocketmq.bench.save_snapshot()
    return rocketmq.store.record_at(half.log_offset)


def checked_keys(bench: EscrowBench) -> list[str]:
    """Return the keys of the halves that are checked when the immunity ends."""
    bench.tick(ESCROW.immunity_ms)
    return [key for key, _ in sent_checks(bench.channel)]


@pytest.mark.parametrize(
    "has_snapshot", [False, True], ids=["without a snapshot", "with a snapshot"]
)
@pytest.mark.parametrize("verdict", [COMMIT, ROLLBACK])
def test_a_half_decided_by_its_second_copy_is_decided_if_the_cursor_was_lost(
    verdict: int, has_snapshot: bool
) -> None:
    rocketmq = RocketMQDirectory()
    first = parked_by_escrowmq(rocketmq, "k") if has_snapshot else rocketmq.half("k")
    second = rocketmq.put_back(first)
    if verdict == COMMIT:
        rocketmq.deliver(second)
    rocketmq.op(second)
    rocketmq.half("another")
    bench = rocketmq.opened()
    assert checked_keys(bench) == ["another"]
    opposite = ROLLBACK if verdict == COMMIT else COMMIT
    assert bench.end(record_position(first), verdict).code == 0
    assert bench.end(record_position(first), opposite).code == 3701
    assert bench.bodies() == ([b"k"] if verdict == COMMIT else [])
    restarted = bench.killed(with_snapshot=False)
    assert [half.key for half in restarted.coordinator.halves] == [b"another"]


@pytest.mark.parametrize("verdict", [COMMIT, ROLLBACK])
def test_a_decision_about_an_older_copy_holds_for_the_newest(verdict: int) -> None:
    rocketmq = RocketMQDirectory()
    first = rocketmq.half("k")
    second = rocketmq.put_back(first)
    if verdict == COMMIT:
        rocketmq.deliver(first)
    rocketmq.op(first)
    third = rocketmq.put_back(second, 2)
    bench = rocketmq.opened(half_cursor=2)
    assert checked_keys(bench) == []
    assert bench.end(record_position(third), verdict).code == 0
    assert bench.bodies() == ([b"k"] if verdict == COMMIT else [])


@pytest.mark.parametrize(
    "has_snapshot", [False, True], ids=["without a snapshot", "with a snapshot"]
)
def test_a_half_that_rocketmq_delivered_is_committed_although_its_op_is_lost(
    has_snapshot: bool,
) -> None:
    rocketmq = RocketMQDirectory()
    half = parked_by_escrowmq(rocketmq, "k") if has_snapshot else rocketmq.half("k")
    rocketmq.deliver(half)
    rocketmq.append(sample(topic="T", queue_id=1))
    bench = rocketmq.opened()
    assert checked_keys(bench) == []
    assert bench.end(record_position(half), COMMIT).code == 0
    assert bench.bodies() == [b"k"]


def test_a_half_that_rocketmq_discarded_waits_for_an_operator() -> None:
    rocketmq = RocketMQDirectory()
    half = rocketmq.half("k")
    rocketmq.discard(half)
    rocketmq.half("another")
    bench = rocketmq.opened()
    assert checked_keys(bench) == ["another"]
    assert [half.is_stranded for half in bench.coordinator.halves] == [True, False]
    assert (
        bench.end(record_position(half), COMMIT).code == 0
    )  # a late verdict of its producer decides too
    assert bench.bodies() == [b"k"]


def test_a_half_that_was_resumed_in_rocketmq_is_checked() -> None:
    rocketmq = RocketMQDirectory()
    half = rocketmq.half("k")
    rocketmq.discard(half)
    rocketmq.put_back(half, 0)
    assert checked_keys(rocketmq.opened(half_cursor=1)) == ["k"]


def test_the_same_key_of_another_group_is_another_transaction() -> None:
    rocketmq = RocketMQDirectory()
    rocketmq.deliver(rocketmq.half("k", PGROUP="others"))
    rocketmq.half("k")
    assert checked_keys(rocketmq.opened(half_cursor=1)) == ["k"]
