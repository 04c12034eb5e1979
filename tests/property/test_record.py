"""Every record is decoded as it was encoded; other bytes raise CorruptRecord and nothing else.

Topics and properties have no zero bytes here: no broker writes them, and the decoder treats them
as a sector that was never written.
"""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import CorruptRecord
from escrowmq.message.record import LogOffset, NewRecord, decode_record, encode_record, encoded_size
from tests.property.damage import damaged

INT = st.integers(-(1 << 31), (1 << 31) - 1)
LONG = st.integers(-(1 << 63), (1 << 63) - 1)
OFFSETS = st.integers(0, (1 << 63) - 1)
HOSTS = st.binary(min_size=8, max_size=8) | st.binary(min_size=20, max_size=20)
TEXT = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
TOPICS = (
    st.text(TEXT, min_size=1, max_size=300) | st.integers(100, 255).map(lambda length: "t" * length)
).filter(lambda topic: len(topic.encode()) <= 255)
PROPERTIES = (
    st.binary(max_size=200)
    | st.dictionaries(st.text(TEXT, max_size=9), st.text(TEXT, max_size=9), max_size=4).map(
        lambda pairs: "".join(f"{name}\x01{value}\x02" for name, value in pairs.items()).encode()
    )
).map(lambda content: content.replace(b"\0", b"0"))

# Fields that a stored record takes from the new record without a change.
UNCHANGED_FIELDS = (
    *("topic", "queue_id", "body", "flag", "born_ms"),
    *("born_host", "reconsume_times", "prepared_offset"),
)

records = st.builds(
    NewRecord,
    topic=TOPICS,
    queue_id=INT,
    body=st.binary(max_size=300),
    properties=PROPERTIES,
    flag=INT,
    sys_flag=INT,
    born_ms=LONG,
    born_host=HOSTS,
    reconsume_times=INT,
    prepared_offset=LONG,
)


@given(records, LONG, OFFSETS, LONG, HOSTS, st.booleans())
def test_every_field_is_decoded_unchanged(
    record: NewRecord,
    queue_offset: int,
    log_offset: int,
    stored_ms: int,
    store_host: bytes,
    sealed: bool,
) -> None:
    data = encode_record(record, queue_offset, log_offset, stored_ms, store_host, sealed)
    decoded = decode_record(data, 0, LogOffset(log_offset))

    assert decoded.size == len(data)
    assert (decoded.log_offset, decoded.queue_offset) == (log_offset, queue_offset)
    assert (decoded.stored_ms, decoded.store_host) == (stored_ms, store_host)
    assert decoded.sys_flag & ~0x30 == record.sys_flag & ~0x30
    assert bool(decoded.sys_flag & 0x10) == (len(record.born_host) == 20)
    assert bool(decoded.sys_flag & 0x20) == (len(store_host) == 20)
    if sealed:
        assert decoded.properties.removesuffix(b"\x02") == record.properties.removesuffix(b"\x02")
    else:
        assert decoded.properties == record.properties
    for name in UNCHANGED_FIELDS:
        assert getattr(decoded, name) == getattr(record, name)


@given(records, HOSTS, st.booleans())
def test_encoded_size_equals_the_size_of_the_encoded_record(
    record: NewRecord, store_host: bytes, sealed: bool
) -> None:
    data = encode_record(record, 0, 0, 0, store_host, sealed)
    assert encoded_size(record, store_host=store_host, append_crc=sealed) == len(data)


@given(records, HOSTS, st.booleans(), st.binary(max_size=200), st.binary(max_size=200))
def test_the_bytes_around_a_record_do_not_matter(
    record: NewRecord, store_host: bytes, sealed: bool, before: bytes, after: bytes
) -> None:
    data = encode_record(record, 1, 2, 3, store_host, sealed)
    alone = decode_record(data, 0, LogOffset(2))
    embedded = decode_record(before + data + after, len(before), LogOffset(2))
    viewed = decode_record(memoryview(before + data + after), len(before), LogOffset(2))
    assert alone == embedded == viewed


@given(st.binary(max_size=400), st.integers(0, 50), st.integers(0, 1 << 40))
def test_garbage_raises_corrupt_record_and_nothing_else(
    garbage: bytes, position: int, log_offset: int
) -> None:
    with contextlib.suppress(CorruptRecord):
        decode_record(garbage, position, LogOffset(log_offset))


@given(records, HOSTS, st.booleans(), st.data())
def test_a_damaged_record_is_decoded_or_raises_corrupt_record(
    record: NewRecord, store_host: bytes, sealed: bool, data: st.DataObject
) -> None:
    content = data.draw(damaged(encode_record(record, 1, 2, 3, store_host, sealed)))
    length = data.draw(st.integers(0, len(content)) | st.just(len(content)), label="length")
    with contextlib.suppress(CorruptRecord):
        decoded = decode_record(content[:length], 0, LogOffset(2))
        assert decoded.size <= length
        assert decoded.log_offset == 2
