"""Records that were just appended, and the check of records that are read from the disk."""

from __future__ import annotations

import pytest

from escrowmq.errors import CorruptRecord
from escrowmq.message.record import NewRecord, encode_record
from escrowmq.store.log_reads import RecentAppends, check_record, check_records
from tests.support.stores import HOST, NOW_MS, properties


def encode(count: int, *, is_sealed: bool, born_host: bytes = HOST) -> bytes:
    """Return neighbouring records of queue 1 of topic T, from queue offset 5 on."""
    data = b""
    for number in range(count):
        record = NewRecord("T", 1, b"body %d" % number, properties(KEYS="k"), born_host=born_host)
        data += encode_record(record, 5 + number, len(data), NOW_MS, HOST, is_sealed)
    return data


def is_accepted(data: bytes) -> bool:
    try:
        check_records(data, 0, [(0, len(data), 5)], "T", 1)
    except CorruptRecord:
        return False
    return True


def is_accepted_one_by_one(data: bytes) -> bool:
    position, queue_offset = 0, 5
    try:
        while position < len(data):
            position += check_record(memoryview(data), position, position, queue_offset, "T", 1)
            queue_offset += 1
    except CorruptRecord:
        return False
    return True


@pytest.mark.parametrize("is_sealed", [True, False])
@pytest.mark.parametrize("born_host", [HOST, bytes(20)], ids=["IPv4", "IPv6"])
def test_the_fast_check_agrees_with_the_plain_one_for_every_flipped_bit(
    is_sealed: bool, born_host: bytes
) -> None:
    data = encode(3, is_sealed=is_sealed, born_host=born_host)
    assert is_accepted(data)
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            accepted = is_accepted(bytes(flipped))
            assert not (accepted and is_sealed), (position, bit)
            # The plain check also rejects properties with a zero byte, which no reader minds.
            if not accepted:
                assert not is_accepted_one_by_one(bytes(flipped)), (position, bit)


def test_recent_appends_return_any_range_that_they_have() -> None:
    recent = RecentAppends()
    recent.add(10, b"0123456789")
    recent.add(20, b"abcdef")
    recent.add(100, b"next segment")
    assert b"".join(recent.find(12, 24) or []) == b"23456789abcd"
    assert recent.find(9, 12) is None
    assert recent.find(24, 27) is None
    assert recent.find(26, 101) is None
    assert b"".join(recent.find(100, 104) or []) == b"next"


def test_the_oldest_appends_are_dropped_first() -> None:
    recent = RecentAppends(bytes_max=100)
    for number in range(50):
        recent.add(number * 10, b"%010d" % number)
    assert recent.find(0, 10) is None
    assert b"".join(recent.find(490, 500) or []) == b"%010d" % 49
