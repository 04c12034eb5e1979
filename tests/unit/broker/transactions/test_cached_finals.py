"""Cached finals: recently parked halves are committed without reading them from the log."""

from __future__ import annotations

import msgspec
import pytest

from escrowmq.escrow import half_table
from escrowmq.escrow.half_table import CACHED_BODY_BYTES_MAX, FinalCache
from escrowmq.message.record import NewRecord, StoredRecord
from tests.support.escrows import COMMIT, ROLLBACK, EscrowBench, half_request, position_of

FINAL = NewRecord("T", 0, b"")


def test_the_cache_holds_the_last_finals_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_table, "CACHE_GENERATION_SIZE", 3)
    cache = FinalCache()
    for offset in range(10):
        cache.put(offset, FINAL)
    cached = [offset for offset in range(10) if cache.take(offset) is not None]
    assert cached[-3:] == [7, 8, 9]
    assert len(cached) <= 6
    assert all(cache.take(offset) is None for offset in range(10)), "taking a final removes it"


def final(*, restarted: bool, body: bytes, **properties: str) -> StoredRecord:
    """Park and commit a message and return its final. A restart empties the cache."""
    bench = EscrowBench()
    bench.turn(half_request("k", body=body, **properties))
    position = position_of(bench.channel.response())
    if restarted:
        bench = bench.restarted()
    assert bench.end(position, COMMIT).code == 0
    (message,) = bench.messages()
    assert bench.store.find_by_key("T", "k") == [message]
    # Copy the body, which is a view of the log of this bench.
    return msgspec.structs.replace(message, body=bytes(message.body))


@pytest.mark.parametrize("length", [0, 1, CACHED_BODY_BYTES_MAX, CACHED_BODY_BYTES_MAX + 1])
@pytest.mark.parametrize("properties", [{}, {"TAGS": "a", "KEYS": "x y"}, {"other": "\u00e9"}])
def test_a_cached_final_equals_one_that_is_read_from_the_log(
    length: int, properties: dict[str, str]
) -> None:
    body = b"b" * length
    cached = final(restarted=False, body=body, **properties)
    read = final(restarted=True, body=body, **properties)
    assert cached == msgspec.structs.replace(
        read, stored_ms=cached.stored_ms, log_offset=cached.log_offset
    )


def test_the_final_of_a_rolled_back_half_is_not_cached() -> None:
    bench = EscrowBench()
    position = bench.park("k")
    assert bench.end(position, ROLLBACK).code == 0
    assert bench.coordinator.final_cache.take(position[0]) is None
    assert bench.messages() == []


def test_a_commit_without_disk_space_succeeds_later() -> None:
    bench = EscrowBench()
    position = bench.park("k")
    bench.store.has_disk_space = False
    assert bench.end(position, COMMIT).code != 0
    bench.store.has_disk_space = True
    assert bench.end(position, COMMIT).code == 0
    assert bench.bodies() == [b"k"]
