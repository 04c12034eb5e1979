"""The native check of records that were read for a pull accepts what the Python check accepts.

It may refuse more: then the Python check looks at the records. It must never accept more.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from escrowmq.errors import CorruptRecord
from escrowmq.message.record import NewRecord, encode_record, encode_topic
from escrowmq.native import load_native
from escrowmq.store.log_reads import check_records
from tests.support.stores import HOST, NOW_MS, properties

NATIVE = load_native({})
pytestmark = pytest.mark.skipif(NATIVE.module is None, reason=NATIVE.reason)
BEGIN, QUEUE_OFFSET, QUEUE_ID = 1_000_000, 77, 3

bodies = st.lists(st.binary(max_size=60), min_size=1, max_size=5)


def encode_records(bodies: list[bytes], *, has_crc: bool, topic: str) -> bytes:
    data = b""
    for number, body in enumerate(bodies):
        record = NewRecord(
            topic, QUEUE_ID, body, properties(TAGS="t", UNIQ_KEY=f"{number}"), born_host=HOST
        )
        log_offset = BEGIN + len(data)
        data += encode_record(record, QUEUE_OFFSET + number, log_offset, NOW_MS, HOST, has_crc)
    return data


def native_accepts(data: bytes, topic: str = "T", queue_offset: int = QUEUE_OFFSET) -> bool:
    assert NATIVE.module is not None
    ranges = [(BEGIN, BEGIN + len(data), queue_offset)]
    result: bool = NATIVE.module.records_are_right(
        data, BEGIN, ranges, *encode_topic(topic), QUEUE_ID
    )
    return result


def python_accepts(data: bytes, topic: str = "T", queue_offset: int = QUEUE_OFFSET) -> bool:
    try:
        check_records(data, BEGIN, [(BEGIN, BEGIN + len(data), queue_offset)], topic, QUEUE_ID)
    except CorruptRecord:
        return False
    return True


@given(bodies, st.booleans(), st.sampled_from(["T", "t" * 127, "t" * 200]))
@settings(deadline=None)
def test_right_records_are_accepted(bodies: list[bytes], has_crc: bool, topic: str) -> None:
    data = encode_records(bodies, has_crc=has_crc, topic=topic)
    assert python_accepts(data, topic)
    assert native_accepts(data, topic)


@given(bodies, st.booleans(), st.data())
@settings(deadline=None)
def test_nothing_is_accepted_that_the_python_check_refuses(
    bodies: list[bytes], has_crc: bool, draw: st.DataObject
) -> None:
    data = bytearray(encode_records(bodies, has_crc=has_crc, topic="T"))
    for _ in range(draw.draw(st.integers(1, 3))):
        kind = draw.draw(st.sampled_from(["flip", "cut", "zeros", "numbers"]))
        position = draw.draw(st.integers(0, len(data) - 1)) if data else 0
        if kind == "flip" and data:
            data[position] ^= 1 << draw.draw(st.integers(0, 7))
        elif kind == "cut":
            del data[position:]
        elif kind == "zeros":
            data[position : position + 8] = bytes(len(data[position : position + 8]))
        else:
            data[position : position + 4] = draw.draw(
                st.sampled_from([b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0"])
            )[: len(data[position : position + 4])]
    changed = bytes(data)
    if native_accepts(changed):
        assert python_accepts(changed)


def test_records_of_another_queue_are_refused() -> None:
    data = encode_records([b"a", b"b"], has_crc=True, topic="T")
    assert not native_accepts(data, topic="U")
    assert not native_accepts(data, queue_offset=QUEUE_OFFSET + 1)
