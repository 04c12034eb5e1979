"""Queue locks of orderly consumers."""

from __future__ import annotations

import pytest

from escrowmq.consume.members import LOCK_VALID_MS, QueueLocks

ONE = ("orders", 0)
TWO = ("orders", 1)


@pytest.mark.parametrize(
    ("client_id", "later_ms", "granted"),
    [
        ("a", 0, True),
        ("a", LOCK_VALID_MS + 1, True),
        ("b", 0, False),
        ("b", LOCK_VALID_MS, False),
        ("b", LOCK_VALID_MS + 1, True),
    ],
    ids=["own", "own, expired", "taken", "still valid", "expired"],
)
def test_who_can_lock_a_queue_that_is_locked(client_id: str, later_ms: int, granted: bool) -> None:
    locks = QueueLocks()
    assert locks.lock("g", "a", [ONE], now_ms=1_000) == [ONE]
    assert locks.lock("g", client_id, [ONE], now_ms=1_000 + later_ms) == [ONE] * granted
    assert locks.is_locked_by("g", client_id, ONE, now_ms=1_000 + later_ms) is granted
    assert len(locks) == 1


def test_a_repeated_request_renews_a_lock() -> None:
    locks = QueueLocks()
    locks.lock("g", "a", [ONE], now_ms=0)
    locks.lock("g", "a", [ONE], now_ms=LOCK_VALID_MS)
    assert locks.lock("g", "b", [ONE], now_ms=2 * LOCK_VALID_MS) == []


def test_a_batch_gets_what_is_free() -> None:
    locks = QueueLocks()
    locks.lock("g", "a", [ONE], now_ms=0)
    assert locks.lock("g", "b", [ONE, TWO, TWO], now_ms=0) == [TWO]
    assert locks.lock("another group", "b", [ONE, TWO], now_ms=0) == [ONE, TWO]


def test_only_the_owner_unlocks() -> None:
    locks = QueueLocks()
    locks.lock("g", "a", [ONE, TWO], now_ms=0)
    locks.unlock("g", "b", [ONE])
    assert locks.is_locked_by("g", "a", ONE, now_ms=0)
    locks.unlock("g", "a", [ONE, TWO, ("orders", 9)])
    assert not locks.is_locked_by("g", "a", ONE, now_ms=0)
    assert locks.lock("g", "b", [ONE], now_ms=0) == [ONE]
    locks.unlock("nobody", "a", [ONE])


def test_a_group_has_locks_while_one_is_valid() -> None:
    locks = QueueLocks()
    assert not locks.group_has_locks("g", now_ms=0)
    locks.lock("g", "a", [ONE], now_ms=0)
    locks.lock("g", "a", [TWO], now_ms=10)
    assert locks.group_has_locks("g", now_ms=LOCK_VALID_MS + 10)
    assert not locks.group_has_locks("g", now_ms=LOCK_VALID_MS + 11)


def test_expired_locks_are_removed() -> None:
    locks = QueueLocks()
    locks.lock("g", "a", [ONE], now_ms=0)
    locks.lock("h", "a", [TWO], now_ms=10)
    assert locks.expire(LOCK_VALID_MS + 1) == 1
    assert len(locks) == 1
    assert locks.is_locked_by("h", "a", TWO, now_ms=LOCK_VALID_MS + 1)


def test_above_the_limit_no_lock_is_granted_until_locks_expire() -> None:
    locks = QueueLocks(locks_max=1)
    assert locks.lock("g", "a", [ONE, TWO], now_ms=0) == [ONE]
    assert locks.lock("g", "a", [ONE], now_ms=1) == [ONE]
    assert locks.lock("g", "a", [TWO], now_ms=LOCK_VALID_MS + 1) == []
    assert locks.lock("g", "a", [TWO], now_ms=LOCK_VALID_MS + 2) == [TWO]
    assert len(locks) == 1
