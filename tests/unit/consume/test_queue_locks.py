"""Queue locks of orderly consumers."""

from __future__ import annotations

import gc
import weakref

import pytest

from escrowmq.client_memory import ClientMemory, MemoryLimits, MemoryUse
from escrowmq.consume.members import FEW_LOCKS, LOCK_VALID_MS, QueueLocks
from escrowmq.peer import DISCONNECTED
from tests.support.broker_requests import FakeChannel
from tests.support.fake_peers import FakePeer

QUEUE_0 = ("orders", 0)
QUEUE_1 = ("orders", 1)


@pytest.mark.parametrize(
    ("client_id", "later_ms", "is_granted"),
    [
        ("a", 0, True),
        ("a", LOCK_VALID_MS + 1, True),
        ("b", 0, False),
        ("b", LOCK_VALID_MS, False),
        ("b", LOCK_VALID_MS + 1, True),
    ],
    ids=["own", "own, expired", "taken", "still valid", "expired"],
)
def test_a_locked_queue_is_locked_by_its_owner_or_after_it_expired(
    client_id: str, later_ms: int, is_granted: bool
) -> None:
    locks = QueueLocks()
    assert locks.lock("g", "a", [QUEUE_0], now_ms=1_000) == [QUEUE_0]
    granted = locks.lock("g", client_id, [QUEUE_0], now_ms=1_000 + later_ms)
    assert granted == ([QUEUE_0] if is_granted else [])
    assert locks.is_locked_by("g", client_id, QUEUE_0, now_ms=1_000 + later_ms) is is_granted
    assert len(locks) == 1


def test_a_repeated_request_renews_a_lock() -> None:
    locks = QueueLocks()
    locks.lock("g", "a", [QUEUE_0], now_ms=0)
    locks.lock("g", "a", [QUEUE_0], now_ms=LOCK_VALID_MS)
    assert locks.lock("g", "b", [QUEUE_0], now_ms=2 * LOCK_VALID_MS) == []


def test_a_batch_locks_the_queues_that_are_free() -> None:
    locks = QueueLocks()
    locks.lock("g", "a", [QUEUE_0], now_ms=0)
    assert locks.lock("g", "b", [QUEUE_0, QUEUE_1, QUEUE_1], now_ms=0) == [QUEUE_1]
    assert locks.lock("another group", "b", [QUEUE_0, QUEUE_1], now_ms=0) == [QUEUE_0, QUEUE_1]


def test_only_the_owner_unlocks() -> None:
    locks = QueueLocks()
    locks.lock("g", "a", [QUEUE_0, QUEUE_1], now_ms=0)
    locks.unlock("g", "b", [QUEUE_0])
    assert locks.is_locked_by("g", "a", QUEUE_0, now_ms=0)
    locks.unlock("g", "a", [QUEUE_0, QUEUE_1, ("orders", 9)])
    assert not locks.is_locked_by("g", "a", QUEUE_0, now_ms=0)
    assert locks.lock("g", "b", [QUEUE_0], now_ms=0) == [QUEUE_0]
    locks.unlock("unknown", "a", [QUEUE_0])  # harmless


def test_a_group_has_locks_while_one_is_valid() -> None:
    locks = QueueLocks()
    assert not locks.group_has_locks("g", now_ms=0)
    locks.lock("g", "a", [QUEUE_0], now_ms=0)
    locks.lock("g", "a", [QUEUE_1], now_ms=10)
    assert locks.group_has_locks("g", now_ms=LOCK_VALID_MS + 10)
    assert not locks.group_has_locks("g", now_ms=LOCK_VALID_MS + 11)


def test_expired_locks_are_removed() -> None:
    locks = QueueLocks()
    locks.lock("g", "a", [QUEUE_0], now_ms=0)
    locks.lock("h", "a", [QUEUE_1], now_ms=10)
    assert locks.expire(LOCK_VALID_MS + 1) == 1
    assert len(locks) == 1
    assert locks.is_locked_by("h", "a", QUEUE_1, now_ms=LOCK_VALID_MS + 1)


def test_above_the_limit_no_lock_is_granted_until_locks_expire() -> None:
    locks = QueueLocks(locks_max=1)
    assert locks.lock("g", "a", [QUEUE_0, QUEUE_1], now_ms=0) == [QUEUE_0]
    assert locks.lock("g", "a", [QUEUE_0], now_ms=1) == [QUEUE_0]
    assert locks.lock("g", "a", [QUEUE_1], now_ms=LOCK_VALID_MS + 1) == []
    # Looking at all locks for each request would take long, so it is done once a second.
    assert locks.lock("g", "a", [QUEUE_1], now_ms=LOCK_VALID_MS + 2) == []
    assert locks.lock("g", "a", [QUEUE_1], now_ms=LOCK_VALID_MS + 1_001) == [QUEUE_1]
    assert len(locks) == 1


# --- shares --------------------------------------------------------------------------------------


def queues(topic: str, count: int = FEW_LOCKS) -> list[tuple[str, int]]:
    return [(topic, number) for number in range(count)]


@pytest.mark.parametrize("closes", [False, True], ids=["stay open", "close and come back"])
def test_the_connections_of_one_host_do_not_take_all_locks(closes: bool) -> None:
    locks = QueueLocks(locks_max=8 * FEW_LOCKS)
    for number in range(20):
        greedy = FakePeer(f"10.0.0.1:{number}")
        locks.lock("g", f"greedy{number}", queues(f"t{number}"), now_ms=0, channel=greedy)
        if closes:
            locks.channel_closed(greedy)
    assert len(locks) == 6 * FEW_LOCKS
    for number in range(2):
        other = FakePeer(f"10.0.0.{number + 2}:1")
        granted = locks.lock("g", f"other{number}", queues(f"o{number}"), now_ms=0, channel=other)
        assert len(granted) == FEW_LOCKS
    assert len(locks) == 8 * FEW_LOCKS


def test_a_connection_with_many_locks_leaves_some_for_others_of_its_host() -> None:
    locks = QueueLocks(locks_max=8 * FEW_LOCKS)
    greedy, other = FakePeer("10.0.0.1:1"), FakePeer("10.0.0.1:2")
    granted = locks.lock("g", "a", queues("t", 8 * FEW_LOCKS), now_ms=0, channel=greedy)
    assert len(granted) == 4 * FEW_LOCKS
    assert len(locks.lock("g", "b", queues("o"), now_ms=0, channel=other)) == FEW_LOCKS


def test_a_host_gets_locks_again_when_its_own_are_released() -> None:
    locks = QueueLocks(locks_max=8 * FEW_LOCKS)
    for number in range(6):
        channel = FakePeer(f"10.0.0.1:{number}")
        locks.lock("g", f"c{number}", queues(f"t{number}"), now_ms=0, channel=channel)
    newcomer = FakePeer("10.0.0.1:9")
    assert locks.lock("g", "new", queues("n"), now_ms=0, channel=newcomer) == []
    locks.unlock("g", "c0", queues("t0"))
    assert len(locks.lock("g", "new", queues("n"), now_ms=0, channel=newcomer)) == FEW_LOCKS


# --- memory --------------------------------------------------------------------------------------

USE = MemoryUse.QUEUE_LOCKS


def test_locks_are_counted_for_their_channel_until_they_are_released() -> None:
    memory, channel = ClientMemory(), FakePeer("a")
    locks = QueueLocks(memory=memory)
    locks.lock("g", "a", [QUEUE_0, QUEUE_1], now_ms=0, channel=channel)
    both = memory.bytes_of(channel)
    assert both == memory.bytes_for(USE) > 0
    locks.lock("g", "a", [QUEUE_0, QUEUE_1], now_ms=1, channel=channel)
    assert memory.bytes_of(channel) == both
    locks.unlock("g", "a", [QUEUE_0])
    assert memory.bytes_of(channel) == both // 2
    locks.expire(LOCK_VALID_MS + 2)
    assert memory.total == 0


def test_a_channel_that_keeps_too_much_gets_no_new_lock_and_loses_none() -> None:
    memory, channel = ClientMemory(), FakePeer("a")
    locks = QueueLocks(memory=memory)
    locks.lock("g", "a", [QUEUE_0], now_ms=0, channel=channel)
    memory.limits = MemoryLimits(connection_max=memory.total, hard_max=1 << 30)
    assert locks.lock("g", "a", [QUEUE_0, QUEUE_1], now_ms=1, channel=channel) == [QUEUE_0]
    assert locks.is_locked_by("g", "a", QUEUE_0, now_ms=LOCK_VALID_MS + 1)


def test_a_lock_that_comes_back_on_another_channel_is_counted_there() -> None:
    memory, old, new = ClientMemory(), FakePeer("old"), FakePeer("new")
    locks = QueueLocks(memory=memory)
    locks.lock("g", "a", [QUEUE_0], now_ms=0, channel=old)
    locks.lock("g", "a", [QUEUE_0], now_ms=1, channel=new)
    assert memory.bytes_of(old) == 0
    assert memory.bytes_of(new) == memory.total


def test_locks_of_a_closed_channel_stay_valid_and_counted_and_do_not_keep_the_channel() -> None:
    memory, channel = ClientMemory(), FakeChannel("127.0.0.1:1")
    locks, closed = QueueLocks(memory=memory), weakref.ref(channel)
    locks.lock("g", "a", [QUEUE_0], now_ms=0, channel=channel)
    counted = memory.total
    locks.channel_closed(channel)
    memory.forget(channel)
    assert locks.is_locked_by("g", "a", QUEUE_0, now_ms=1)
    assert memory.bytes_of(DISCONNECTED) == memory.total == counted
    del channel
    gc.collect()
    assert closed() is None
    locks.expire(LOCK_VALID_MS + 1)
    assert memory.total == 0
