"""Halves that came just now are committed without being read again."""

from __future__ import annotations

import msgspec
import pytest

from escrowmq.escrow import half_table as freshhalves
from escrowmq.escrow.half_table import CACHED_BODY_BYTES_MAX, FinalCache
from escrowmq.message.record import NewRecord, StoredRecord
from tests.support.escrows import COMMIT, ROLLBACK, EscrowBench, a_half, position_of

FINAL = NewRecord("T", 0, b"")


def test_the_last_ones_are_there_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(freshhalves, "CACHE_GENERATION_SIZE", 3)
    fresh = FinalCache()
    for offset in range(10):
        fresh.put(offset, FINAL)
    found = [offset for offset in range(10) if fresh.take(offset) is not None]
    assert found[-3:] == [7, 8, 9]
    assert len(found) <= 6
    assert all(fresh.take(offset) is None for offset in range(10)), "each is taken once"


def final(*, restarted: bool, body: bytes, **properties: str) -> StoredRecord:
    bench = EscrowBench()
    bench.turn(a_half("k", body=body, **properties))
    position = position_of(bench.channel.answer())
    if restarted:
        bench = bench.restarted()
    assert bench.end(position, COMMIT).code == 0
    (message,) = bench.messages()
    assert bench.store.find_by_key("T", "k") == [message]
    # Its own copy: the log that it is a view of is gone with its bench.
    return msgspec.structs.replace(message, body=bytes(message.body))


@pytest.mark.parametrize("length", [0, 1, CACHED_BODY_BYTES_MAX, CACHED_BODY_BYTES_MAX + 1])
@pytest.mark.parametrize("more", [{}, {"TAGS": "a", "KEYS": "x y"}, {"other": "\u00e9"}])
def test_a_fresh_half_is_committed_as_one_that_is_read(length: int, more: dict[str, str]) -> None:
    told = {
        restarted: final(restarted=restarted, body=b"b" * length, **more)
        for restarted in (False, True)
    }
    fresh, read = told[False], told[True]
    assert fresh == msgspec.structs.replace(
        read, stored_ms=fresh.stored_ms, log_offset=fresh.log_offset
    )


def test_one_that_is_rolled_back_is_not_kept() -> None:
    bench = EscrowBench()
    position = bench.park("k")
    assert bench.end(position, ROLLBACK).code == 0
    assert bench.coordinator.final_cache.take(position[0]) is None
    assert bench.messages() == []


def test_one_that_found_no_room_is_committed_all_the_same_later() -> None:
    bench = EscrowBench()
    position = bench.park("k")
    bench.store.has_disk_space = False
    assert bench.end(position, COMMIT).code != 0
    bench.store.has_disk_space = True
    assert bench.end(position, COMMIT).code == 0
    assert bench.bodies() == [b"k"]
