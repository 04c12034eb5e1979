"""Many records at once say what each of them says alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import BrokenBody
from escrowmq.message.keys import encode_host
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import LogOffset, NewRecord, decode_record, encode_record
from escrowmq.spark.columns import MessageColumns, PropertyTable
from escrowmq.spark.records import Records
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
    found = encode_block(records, first=5, store_host=store_host)
    data = found.data.tobytes()
    alone = [
        decode_record(data, at, LogOffset(log_offset))
        for at, log_offset in zip(found.positions.tolist(), found.log_offset.tolist(), strict=True)
    ]
    for name in (
        *("size", "queue_id", "flag", "queue_offset", "log_offset", "sys_flag"),
        *("born_ms", "stored_ms", "reconsume_times", "prepared_offset"),
    ):
        assert getattr(found, name).tolist() == [getattr(one, name) for one in alone], name
    for name in ("body", "properties", "born_host", "store_host"):
        assert getattr(found, name).to_pylist() == [getattr(one, name) for one in alone], name
    assert [topic.decode() for topic in found.topic.to_pylist()] == [one.topic for one in alone]
    assert found.valid_mask(1000).all()


def test_what_is_no_record_is_refused() -> None:
    whole = encode_record(NewRecord("T", 0, b"body"), 0, 0, 0, HOST)
    for broken in (whole[:-1], whole + b"\0\0\0\0", whole + whole[:50]):
        with pytest.raises(BrokenBody):
            Records.from_buffer(np.frombuffer(broken, np.uint8))


def test_a_record_at_the_wrong_place_or_with_wrong_lengths_does_not_add_up() -> None:
    found = encode_block([NewRecord("T", 0, b"body"), NewRecord("T", 0, b"more")])
    assert found.valid_mask(1000).tolist() == [True, True]
    assert found.valid_mask(1001).tolist() == [False, False]
    data = found.data.copy()
    data[found.positions[1] + 87] = 200  # the body is longer than the record
    assert Records(data, found.positions).valid_mask(1000).tolist() == [True, False]


@given(st.lists(st.lists(st.sampled_from(b"ab\x01\x02\xff")).map(bytes), min_size=1, max_size=5))
def test_properties_are_read_as_one_by_one(rows: list[bytes]) -> None:
    check_properties(rows)


def check_properties(rows: list[bytes]) -> None:
    table = PropertyTable(encode_block([NewRecord("T", 0, b"", row) for row in rows]).properties)
    alone = [decode_properties(row) for row in rows]
    found = table.as_map().to_pylist()
    assert [sorted(row) for row in found] == [sorted(one.items()) for one in alone]
    for name in ("a", "ab", "b"):
        assert table.values(name).to_pylist() == [one.get(name) for one in alone]


NAMES = [b"a", b"ab", b"b", *(b"n%d" % number for number in range(40))]
ITEMS = st.builds(
    lambda name, value: name + b"\x01" + value + b"\x02",
    st.sampled_from(NAMES),
    st.sampled_from([b"1", b"22", b"\xff"]),
)
ODD = st.sampled_from([b"a\x01\x02", b"\x01b\x02", b"a\x01b\x01c\x02", b"b", b"ab\x01last"])


@given(
    st.lists(st.lists(ITEMS, max_size=5).map(b"".join), min_size=1, max_size=6),
    st.none() | st.tuples(st.integers(0, 5), ODD),
)
def test_properties_as_they_mostly_are_are_read_as_one_by_one(
    rows: list[bytes], odd: tuple[int, bytes] | None
) -> None:
    if odd is not None:
        rows[odd[0] % len(rows)] += odd[1]
    check_properties(rows)


def test_more_names_than_there_are_bits_are_read_too() -> None:
    rows = [b"".join(name + b"\x01v\x02" for name in [*NAMES, b"a"])]
    check_properties(rows)


def test_a_part_of_a_column_is_read_like_the_whole() -> None:
    rows = [b"a\x011\x02", b"a\x012", b"b\x013\x02"]
    column = encode_block([NewRecord("T", 0, b"", row) for row in rows]).properties
    assert PropertyTable(column[1:]).values("a").to_pylist() == ["2", None]


def test_a_property_is_found_with_its_columns() -> None:
    found = MessageColumns(encode_block([NewRecord("T", 0, b"", b"a\x01b\x02")]), None, None)
    assert found.property_values("a").to_pylist() == ["b"]
