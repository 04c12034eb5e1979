"""Delivery notes and the table of delivered timers."""

from __future__ import annotations

import pytest

from escrowmq.broker.delivery_progress import (
    DelayedPosition,
    DeliveredTimers,
    DeliveryNote,
    decode_note,
    make_note,
)
from escrowmq.errors import CorruptRecord
from escrowmq.message.record import LogOffset, StoredRecord, decode_record, encode_record
from tests.support.stores import HOST, NOW_MS, sample

CHUNK = 65_536


def stored(note: DeliveryNote) -> StoredRecord:
    encoded = encode_record(make_note(note, NOW_MS), 0, 0, NOW_MS, HOST)
    return decode_record(encoded, 0, LogOffset(0))


@pytest.mark.parametrize(
    ("note", "body"),
    [
        (DeliveryNote([DelayedPosition(3, 17)]), b"3:17"),
        (DeliveryNote([DelayedPosition(3, n) for n in (17, 18, 19)]), b"3:17-19"),
        (
            DeliveryNote([DelayedPosition(0, 9), DelayedPosition(0, 7), DelayedPosition(1, 8)]),
            b"0:9 0:7 1:8",
        ),
        (
            DeliveryNote([DelayedPosition(2, 4)], [DelayedPosition(2, 4), DelayedPosition(2, 5)]),
            b"!2:4-5 2:4",
        ),
    ],
)
def test_a_note_names_messages_in_their_order(note: DeliveryNote, body: bytes) -> None:
    record = stored(note)
    assert bytes(record.body) == body
    assert decode_note(record) == note


@pytest.mark.parametrize("body", [b"3:", b"x", b"3:1-99999999999", b"3:1-\xff", b"3:2 :4"])
def test_a_malformed_note_is_corrupt(body: bytes) -> None:
    encoded = encode_record(sample(body=body), 0, 0, NOW_MS, HOST)
    with pytest.raises(CorruptRecord):
        decode_note(decode_record(encoded, 0, LogOffset(0)))


def test_a_million_timers_behind_one_that_waits_take_no_memory() -> None:
    timers = DeliveredTimers()
    for offset in range(1, 16 * CHUNK):
        timers.add(offset)
    dump = timers.dump()
    assert dump.full_chunks == list(range(1, 16))
    assert sum(map(len, dump.partial_chunks.values())) < 1_000
    assert timers.overtaking_count == 16 * CHUNK - 1
    timers.add(0)
    assert timers.first_waiting == 16 * CHUNK
    assert timers.dump().full_chunks == []
    assert timers.overtaking_count == 0


def test_the_next_waiting_timer_is_found_across_chunks() -> None:
    timers = DeliveredTimers(5)
    for offset in range(CHUNK - 2, 2 * CHUNK + 3):
        timers.add(offset)
    assert timers.next_waiting(0) == 5
    assert timers.next_waiting(CHUNK - 3) == CHUNK - 3
    assert timers.next_waiting(CHUNK - 2) == 2 * CHUNK + 3


@pytest.mark.parametrize("end", [3, CHUNK, CHUNK + 9, 2 * CHUNK, 3 * CHUNK])
def test_offsets_that_the_log_has_lost_are_forgotten(end: int) -> None:
    timers = DeliveredTimers(1)
    for offset in range(2, 3 * CHUNK):
        timers.add(offset)
    timers.cut_to(end)
    assert timers.overtaking_count == end - 2
    assert end not in timers
    assert (end - 1) in timers


def test_a_dump_is_loaded_again() -> None:
    timers = DeliveredTimers(3)
    for offset in (5, 7, CHUNK, *range(2 * CHUNK, 3 * CHUNK)):
        timers.add(offset)
    loaded = DeliveredTimers.load(timers.dump())
    assert loaded.dump() == timers.dump()
    assert loaded.overtaking_count == timers.overtaking_count == 3 + CHUNK
