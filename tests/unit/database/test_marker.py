"""Which errors mean a lock, what an id looks like, and what follows from a tombstone."""

from __future__ import annotations

import pytest

from escrowmq.database.marker import Burial, decide, is_lock, new_id, place_of, short_lock_wait
from escrowmq.errors import ConfigError
from escrowmq.message.transaction import Verdict


class _DriverError(Exception):
    """As drivers raise them: with a code somewhere."""

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
def test_only_a_lock_is_a_lock(error: _DriverError | None, expected: bool) -> None:
    assert is_lock(error) is expected


def test_an_id_says_which_database_knows_it() -> None:
    assert place_of(new_id("orders")) == "orders"
    assert place_of(new_id()) == ""
    assert new_id() != new_id()
    with pytest.raises(ConfigError, match="too long"):
        new_id("a" * 40)


@pytest.mark.parametrize(
    ("burial", "second", "expected"),
    [
        (Burial.DONE, None, Verdict.ROLLBACK),
        (Burial.LOCKED, None, Verdict.UNKNOWN),
        (Burial.TAKEN, "committed", Verdict.COMMIT),
        (Burial.TAKEN, "tombstone", Verdict.ROLLBACK),
        (Burial.TAKEN, None, Verdict.UNKNOWN),  # removed in between
    ],
)
def test_what_follows_from_a_tombstone(
    burial: Burial, second: str | None, expected: Verdict
) -> None:
    found = iter([None, second])
    verdict = decide("t", read=lambda: next(found), bury=lambda: burial, may_be_forgotten=False)
    assert verdict is expected


def test_a_database_that_is_not_known_is_named() -> None:
    with pytest.raises(ConfigError, match="oracle"), short_lock_wait("oracle", lambda _: None):
        pass
