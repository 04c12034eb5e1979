"""Lock errors, transaction ids, and the verdict for each result of a tombstone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from escrowmq.clock import ManualClock
from escrowmq.database.marker import (
    HOUR_MS,
    DatabaseTime,
    TombstoneResult,
    began_ms,
    database_of,
    is_lock_error,
    new_transaction_id,
    resolve_marker,
    short_lock_wait,
)
from escrowmq.errors import ConfigError
from escrowmq.message.transaction import Verdict
from tests.support.sql_bank import received_message


class _DriverError(Exception):
    """An error as drivers raise it, with its code in one of several attributes."""

    def __init__(self, *args: object, **codes: object) -> None:
        super().__init__(*args)
        self.__dict__.update(codes)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (_DriverError("database is locked", sqlite_errorcode=5), True),
        (_DriverError("snapshot", sqlite_errorcode=517), True),
        (_DriverError("no such table", sqlite_errorcode=1), False),
        (_DriverError("lock not available", sqlstate="55P03"), True),
        (_DriverError("connection lost", sqlstate="57P01"), False),
        (_DriverError("no table", pgcode="42P01"), False),
        (_DriverError(1205, "lock wait timeout", sqlstate="HY000"), True),
        (_DriverError(2013, "lost connection"), False),
        (_DriverError(), False),
        (None, False),
    ],
)
def test_lock_errors_are_distinguished_from_other_errors(
    error: _DriverError | None, expected: bool
) -> None:
    assert is_lock_error(error) is expected


def test_a_transaction_id_contains_its_database() -> None:
    assert database_of(new_transaction_id("orders")) == "orders"
    assert database_of(new_transaction_id()) == ""
    assert new_transaction_id() != new_transaction_id()
    with pytest.raises(ConfigError, match="too long"):
        new_transaction_id("a" * 40)


@pytest.mark.parametrize(
    ("result", "second_read", "expected"),
    [
        (TombstoneResult.INSERTED, None, Verdict.ROLLBACK),
        (TombstoneResult.LOCKED, None, Verdict.UNKNOWN),
        (TombstoneResult.EXISTS, "committed", Verdict.COMMIT),
        (TombstoneResult.EXISTS, "tombstone", Verdict.ROLLBACK),
        (TombstoneResult.EXISTS, None, Verdict.UNKNOWN),  # purged between the two statements
    ],
)
def test_the_result_of_a_tombstone_decides_the_verdict(
    result: TombstoneResult, second_read: str | None, expected: Verdict
) -> None:
    reads = iter([None, second_read])
    verdict = resolve_marker(
        "t", read=lambda: next(reads), insert_tombstone=lambda: result, may_be_purged=lambda: False
    )
    assert verdict is expected


def test_an_unsupported_database_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="oracle"), short_lock_wait("oracle", lambda _: None):
        pass


def test_the_time_of_a_database_runs_without_the_wall_clock_of_the_process() -> None:
    clock = ManualClock()
    database_time = DatabaseTime(clock)
    assert database_time.now_ms() is None
    assert database_time.observe(1_000) == 1_000
    clock.advance(ms=5_000)
    clock.step_wall_clock(ms=97 * HOUR_MS)
    assert database_time.now_ms() == 6_000


def test_a_database_clock_is_followed_back_and_not_forward() -> None:
    clock = ManualClock()
    database_time = DatabaseTime(clock)
    database_time.observe(97 * HOUR_MS)
    assert database_time.observe(200 * HOUR_MS) == 97 * HOUR_MS
    assert database_time.observe(1 * HOUR_MS) == 1 * HOUR_MS
    clock.advance(ms=HOUR_MS)
    assert database_time.observe(2 * HOUR_MS) == 2 * HOUR_MS


@pytest.mark.parametrize(
    ("properties", "expected"),
    [({"TX_TIME": "123"}, 123), ({}, 7), ({"TX_TIME": "soon"}, 7), ({"TX_TIME": "9" * 5000}, 7)],
)
def test_a_message_says_when_its_marker_was_inserted(
    properties: dict[str, str], expected: int
) -> None:
    message = replace(received_message("m"), born_ms=7, properties=properties)
    assert began_ms(message) == expected
