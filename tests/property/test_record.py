"""Any record comes back as it was, and any other bytes are refused, never misread.

Zero bytes in topics and properties are left out: no broker writes them, and a reader takes them
for a sector that was never written.
"""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import CorruptRecord
from escrowmq.message.record import LogOffset, NewRecord, decode_record, encode_record, encoded_size

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
        lambda pairs: "".join(f"{k}\x01{v}\x02" for k, v in pairs.items()).encode()
    )
).map(lambda raw: raw.replace(b"\0", b"0"))

# What a stored record has from the new one, unchanged.
SAME = (
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
def test_every_field_comes_back(
    record: NewRecord,
    queue_offset: int,
    log_offset: int,
    stored_ms: int,
    store_host: bytes,
    sealed: bool,
) -> None:
    data = encode_record(record, queue_offset, log_offset, stored_ms, store_host, sealed)
    found = decode_record(data, 0, LogOffset(log_offset))

    assert found.size == len(data)
    assert (found.log_offset, found.queue_offset) == (log_offset, queue_offset)
    assert (found.stored_ms, found.store_host) == (stored_ms, store_host)
    assert found.sys_flag & ~0x30 == record.sys_flag & ~0x30
    assert bool(found.sys_flag & 0x10) == (len(record.born_host) == 20)
    assert bool(found.sys_flag & 0x20) == (len(store_host) == 20)
    if sealed:
        assert found.properties[:-20].removesuffix(b"\x02") == record.properties.removesuffix(
            b"\x02"
        )
    else:
        assert found.properties == record.properties
    for name in SAME:
        assert getattr(found, name) == getattr(record, name)


@given(records, HOSTS, st.booleans())
def test_the_size_is_known_before_it_is_encoded(
    record: NewRecord, store_host: bytes, sealed: bool
) -> None:
    data = encode_record(record, 0, 0, 0, store_host, sealed)
    assert encoded_size(record, store_host=store_host, append_crc=sealed) == len(data)


@given(records, HOSTS, st.booleans(), st.binary(max_size=200), st.binary(max_size=200))
def test_the_bytes_around_a_record_do_not_matter(
    record: NewRecord, store_host: bytes, sealed: bool, before: bytes, behind: bytes
) -> None:
    data = encode_record(record, 1, 2, 3, store_host, sealed)
    alone = decode_record(data, 0, LogOffset(2))
    among = decode_record(before + data + behind, len(before), LogOffset(2))
    viewed = decode_record(memoryview(before + data + behind), len(before), LogOffset(2))
    assert alone == among == viewed


@given(st.binary(max_size=400), st.integers(0, 50), st.integers(0, 1 << 40))
def test_garbage_is_corrupt_and_nothing_else(garbage: bytes, at: int, log_offset: int) -> None:
    with contextlib.suppress(CorruptRecord):
        decode_record(garbage, at, LogOffset(log_offset))


@given(records, HOSTS, st.booleans(), st.data())
def test_a_mutated_record_decodes_or_is_corrupt_and_nothing_else(
    record: NewRecord, store_host: bytes, sealed: bool, data: st.DataObject
) -> None:
    mutated = bytearray(encode_record(record, 1, 2, 3, store_host, sealed))
    for _ in range(data.draw(st.integers(1, 4), label="changes")):
        position = data.draw(st.integers(0, len(mutated) - 1), label="position")
        mutated[position] = data.draw(st.integers(0, 255), label="byte")
    length = data.draw(st.integers(0, len(mutated)) | st.just(len(mutated)), label="length")
    with contextlib.suppress(CorruptRecord):
        found = decode_record(bytes(mutated[:length]), 0, LogOffset(2))
        assert found.size <= length
        assert found.log_offset == 2
