"""Records decoded many at a time have the same fields as records decoded one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import BrokenBody
from escrowmq.message.compression import compress_body
from escrowmq.message.keys import encode_host
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import (
    COMPRESSION_ZSTD,
    LogOffset,
    NewRecord,
    decode_record,
    encode_record,
    with_compression,
)
from escrowmq.spark.columns import (
    MAX_BATCH_BODY_BYTES,
    MessageColumns,
    PropertyTable,
    message_batches,
)
from escrowmq.spark.records import MAGIC_POSITION, SYS_FLAG_POSITION, Records
from escrowmq.spark.schema import MESSAGE_COLUMNS
from tests.support.record_blocks import encode_block
from tests.support.stores import HOST, NOW_MS

HOSTS = st.sampled_from([HOST, encode_host("::1", 99), encode_host("10.1.2.3", 65_535)])
RECORDS = st.builds(
    NewRecord,
    topic=st.sampled_from(["T", "t" * 200, "orders"]),
    queue_id=st.integers(0, 9),
    body=st.binary(max_size=40),
    properties=st.sampled_from([b"", b"TAGS\x01a\x02", b"KEYS\x01k\x02UNIQ_KEY\x01u"]),
    flag=st.integers(0, 99),
    sys_flag=st.sampled_from([0, 8]),
    born_ms=st.integers(0, NOW_MS),
    born_host=HOSTS,
    reconsume_times=st.integers(0, 16),
    prepared_offset=st.integers(0, 1 << 40),
)


@given(records=st.lists(RECORDS, min_size=1, max_size=8), store_host=HOSTS)
def test_every_field_is_that_of_the_single_record(
    records: list[NewRecord], store_host: bytes
) -> None:
    block = encode_block(records, first=5, store_host=store_host)
    data = block.data.tobytes()
    positions = zip(block.positions.tolist(), block.log_offset.tolist(), strict=True)
    singles = [
        decode_record(data, position, LogOffset(log_offset)) for position, log_offset in positions
    ]
    for name in (
        *("size", "queue_id", "flag", "queue_offset", "log_offset", "sys_flag"),
        *("born_ms", "stored_ms", "reconsume_times", "prepared_offset"),
    ):
        assert getattr(block, name).tolist() == [getattr(record, name) for record in singles], name
    for name in ("body", "properties", "born_host", "store_host"):
        values = getattr(block, name).to_pylist()
        assert values == [getattr(record, name) for record in singles], name
    topics = [topic.decode() for topic in block.topic.to_pylist()]
    assert topics == [record.topic for record in singles]
    assert block.valid_mask(1000).all()


def test_an_incomplete_record_is_refused() -> None:
    complete = encode_record(NewRecord("T", 0, b"body"), 0, 0, 0, HOST)
    for broken in (complete[:-1], complete + b"\0\0\0\0", complete + complete[:50]):
        with pytest.raises(BrokenBody):
            Records.from_buffer(np.frombuffer(broken, np.uint8))


def test_a_record_with_a_wrong_log_offset_or_a_wrong_length_is_invalid() -> None:
    records = encode_block([NewRecord("T", 0, b"body"), NewRecord("T", 0, b"more")])
    assert records.valid_mask(1000).tolist() == [True, True]
    assert records.valid_mask(1001).tolist() == [False, False]
    data = records.data.copy()
    data[records.positions[1] + 87] = 200  # the body is longer than the record
    assert Records(data, records.positions).valid_mask(1000).tolist() == [True, False]


@given(st.lists(st.lists(st.sampled_from(b"ab\x01\x02\xff")).map(bytes), min_size=1, max_size=5))
def test_any_properties_are_parsed_as_if_one_by_one(rows: list[bytes]) -> None:
    check_properties(rows)


def check_properties(rows: list[bytes]) -> None:
    table = PropertyTable(encode_block([NewRecord("T", 0, b"", row) for row in rows]).properties)
    expected = [decode_properties(row) for row in rows]
    maps = table.as_map().to_pylist()
    assert [sorted(row) for row in maps] == [sorted(values.items()) for values in expected]
    for name in ("a", "ab", "b"):
        assert table.values(name).to_pylist() == [values.get(name) for values in expected]


NAMES = [b"a", b"ab", b"b", *(b"n%d" % number for number in range(40))]
ITEMS = st.builds(
    lambda name, value: name + b"\x01" + value + b"\x02",
    st.sampled_from(NAMES),
    st.sampled_from([b"1", b"22", b"\xff"]),
)
MALFORMED = st.sampled_from([b"a\x01\x02", b"\x01b\x02", b"a\x01b\x01c\x02", b"b", b"ab\x01last"])


@given(
    st.lists(st.lists(ITEMS, max_size=5).map(b"".join), min_size=1, max_size=6),
    st.none() | st.tuples(st.integers(0, 5), MALFORMED),
)
def test_common_properties_are_parsed_as_if_one_by_one(
    rows: list[bytes], malformed: tuple[int, bytes] | None
) -> None:
    if malformed is not None:
        number, item = malformed
        rows[number % len(rows)] += item
    check_properties(rows)


def test_more_names_than_a_mask_has_bits_are_parsed() -> None:
    rows = [b"".join(name + b"\x01v\x02" for name in [*NAMES, b"a"])]
    check_properties(rows)


def test_a_slice_of_a_column_is_parsed() -> None:
    rows = [b"a\x011\x02", b"a\x012", b"b\x013\x02"]
    column = encode_block([NewRecord("T", 0, b"", row) for row in rows]).properties
    assert PropertyTable(column[1:]).values("a").to_pylist() == ["2", None]


def test_columns_have_the_values_of_a_property() -> None:
    columns = MessageColumns(encode_block([NewRecord("T", 0, b"", b"a\x01b\x02")]), None, None)
    assert columns.property_values("a").to_pylist() == ["b"]


# --- lies ----------------------------------------------------------------------------------------

POSITIONS = [MAGIC_POSITION, SYS_FLAG_POSITION, SYS_FLAG_POSITION + 3, 84, 87, 92, 94]


@given(
    records=st.lists(RECORDS, min_size=1, max_size=4),
    position=st.sampled_from(POSITIONS) | st.integers(4, 200),
    value=st.integers(0, 255),
)
def test_a_record_that_lies_is_refused_or_read_within_the_buffer(
    records: list[NewRecord], position: int, value: int
) -> None:
    """Arrow would read outside of the buffer, or the process would crash."""
    data = encode_block(records).data.copy()
    position = min(position, len(data) - 1)
    data[position] = value
    try:
        block = Records.from_buffer(data)
    except BrokenBody:
        return
    ends = block.positions + block.size
    for column in (block.body, block.topic, block.properties):
        column.validate(full=True)
        assert sum(len(text) for text in column.to_pylist()) <= len(data)
    assert (ends <= len(data)).all()


def test_the_bodies_of_a_batch_are_limited() -> None:
    body = compress_body(bytes(32 << 20), COMPRESSION_ZSTD)
    compressed = NewRecord(
        topic="T", queue_id=0, body=body, sys_flag=with_compression(0, COMPRESSION_ZSTD)
    )
    plain = NewRecord(topic="T", queue_id=0, body=b"plain")
    records = [plain, *[compressed, plain] * 10]
    batches = message_batches(
        encode_block(records), "T", "b", MESSAGE_COLUMNS.select(["body", "queue_offset"])
    )
    offsets: list[int] = []
    for batch in batches:
        bodies = batch.column("body").to_pylist()
        assert sum(map(len, bodies)) <= MAX_BATCH_BODY_BYTES + (32 << 20)
        assert {len(text) for text in bodies} <= {5, 32 << 20}
        offsets += batch.column("queue_offset").to_pylist()
    assert offsets == list(range(len(records)))
