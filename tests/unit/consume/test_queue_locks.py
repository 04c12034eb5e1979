"""Queue locks of orderly consumers."""

from __future__ import annotations

import pytest

from escrowmq.consume.members import LOCK_VALID_MS, QueueLocks

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
