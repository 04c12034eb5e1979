"""A record as whole bytes, in every layout, and every way in which its bytes can be wrong.

The first vector was computed apart from this code and checked against a Java broker's arithmetic.
Corruption is exhaustive where that is cheap: each cut, each bit, each sector.
"""

from __future__ import annotations

import re
from typing import Any
from zlib import crc32

import pytest

from escrowmq.errors import CorruptRecord, RecordRefused
from escrowmq.message.keys import encode_host, tags_and_keys
from escrowmq.message.record import (
    BLANK,
    MAGIC_BLANK,
    MAGIC_V1,
    MAGIC_V2,
    RECORD_BYTES_MIN,
    LogOffset,
    NewRecord,
    QueueOffset,
    StoredRecord,
    decode_record,
    encode_blank,
    encode_record,
    encoded_size,
)
from escrowmq.store.consume_queue import ENTRY

VECTOR = """
00000073 daa320a7 3610a686 00000002 00000000 0000000000000007 0000000000001000 00000000
0000018bcfe56800 0a000002 0000c350 0000018bcfe5687b 0a000001 00002a9f 00000000 0000000000000000
00000005 68656c6c6f 09 546f70696354657374 000a 54414753 01 54616741 02
"""
VECTOR_ENTRY = "0000000000001000 00000073 000000000027a807"
AT = LogOffset(4096)
STORED_MS = 1_700_000_000_123
STORE_V4 = encode_host("10.0.0.1", 10911)
STORE_V6 = encode_host("2001:db8::1", 10911)
BORN_V4 = encode_host("10.0.0.2", 50_000)
BORN_V6 = encode_host("2001:db8::2", 50_000)


def new(**changes: Any) -> NewRecord:
    fields: dict[str, Any] = {
        "topic": "TopicTest",
        "queue_id": 2,
        "body": b"hello",
        "properties": b"TAGS\x01TagA\x02",
        "born_ms": 1_700_000_000_000,
        "born_host": BORN_V4,
    }
    return NewRecord(**{**fields, **changes})


def encoded(record: NewRecord, *, store_host: bytes = STORE_V4, append_crc: bool = False) -> bytes:
    return encode_record(record, 7, AT, STORED_MS, store_host, append_crc)


def decoded(data: bytes) -> StoredRecord:
    return decode_record(data, 0, AT)


def refusal(data: bytes) -> CorruptRecord:
    with pytest.raises(CorruptRecord) as caught:
        decoded(data)
    assert caught.value.log_offset == AT
    assert f"log_offset={AT}" in str(caught.value)
    return caught.value


def patched(data: bytes, position: int, new_bytes: bytes) -> bytes:
    return data[:position] + new_bytes + data[position + len(new_bytes) :]


# --- layouts -------------------------------------------------------------------------------------


def test_the_known_record_byte_by_byte() -> None:
    data = encoded(new())
    assert data == bytes.fromhex(VECTOR)
    assert len(data) == 115


def test_the_known_record_decodes_to_its_fields() -> None:
    assert decoded(bytes.fromhex(VECTOR)) == StoredRecord(
        log_offset=AT,
        size=115,
        topic="TopicTest",
        queue_id=2,
        queue_offset=QueueOffset(7),
        body=b"hello",
        properties=b"TAGS\x01TagA\x02",
        flag=0,
        sys_flag=0,
        born_ms=1_700_000_000_000,
        born_host=BORN_V4,
        stored_ms=STORED_MS,
        store_host=STORE_V4,
        reconsume_times=0,
        prepared_offset=0,
        body_crc=907060870,
        magic=MAGIC_V1,
    )


def test_the_queue_entry_of_the_known_record() -> None:
    record = decoded(bytes.fromhex(VECTOR))
    tags_code, _ = tags_and_keys(record.topic, record.properties)
    entry = ENTRY.pack(record.log_offset, record.size, tags_code)
    assert entry == bytes.fromhex(VECTOR_ENTRY)


def test_every_number_has_its_own_field() -> None:
    record = new(
        queue_id=0x01020304,
        flag=0x05060708,
        born_ms=0x1112131415161718,
        sys_flag=0x0108,
        reconsume_times=0x21222324,
        prepared_offset=0x3132333435363738,
    )
    data = encode_record(record, 0x4142434445464748, AT, 0x5152535455565758, STORE_V4)
    assert data[12:16].hex() == "01020304"
    assert data[16:20].hex() == "05060708"
    assert data[20:28].hex() == "4142434445464748"
    assert data[28:36].hex() == f"{AT:016x}"
    assert data[36:40].hex() == "00000108"
    assert data[40:48].hex() == "1112131415161718"
    assert data[56:64].hex() == "5152535455565758"
    assert data[72:76].hex() == "21222324"
    assert data[76:84].hex() == "3132333435363738"


def test_negative_numbers_survive() -> None:
    record = new(flag=-1, reconsume_times=-2, born_ms=-3, prepared_offset=-4)
    found = decoded(encoded(record))
    numbers = found.flag, found.reconsume_times, found.born_ms, found.prepared_offset
    assert numbers == (-1, -2, -3, -4)


def test_an_empty_record_has_the_least_size_and_a_checksum_of_zero() -> None:
    data = encoded(new(topic="T", body=b"", properties=b""))
    assert len(data) == RECORD_BYTES_MIN + 1
    assert data[8:12] == bytes(4)
    assert decoded(data).body == b""


def test_the_checksum_is_masked_to_31_bits() -> None:
    # CRC-32 of "d" is 0x98dd4acc: with the sign bit set, unlike that of "hello".
    assert encoded(new(body=b"d"))[8:12].hex() == "18dd4acc"
    assert decoded(encoded(new(body=b"d"))).body_crc == 0x18DD4ACC


@pytest.mark.parametrize("length", [1, 127])
def test_a_topic_up_to_127_bytes_has_one_byte_of_length(length: int) -> None:
    data = encoded(new(topic="t" * length))
    assert data[4:8].hex() == "daa320a7"
    assert data[93 : 94 + length] == bytes([length]) + b"t" * length
    assert decoded(data).magic == MAGIC_V1
    assert decoded(data).topic == "t" * length


@pytest.mark.parametrize("length", [128, 255])
def test_a_longer_topic_has_two_bytes_of_length(length: int) -> None:
    data = encoded(new(topic="t" * length))
    assert data[4:8].hex() == "daa320ab"
    assert data[93 : 95 + length] == length.to_bytes(2, "big") + b"t" * length
    assert data[95 + length :] == b"\x00\x0aTAGS\x01TagA\x02"
    assert decoded(data).magic == MAGIC_V2
    assert decoded(data).topic == "t" * length


@pytest.mark.parametrize("topic", ["", "t" * 256, "é" * 128])
def test_a_topic_that_no_layout_holds_is_refused(topic: str) -> None:
    with pytest.raises(RecordRefused, match="the topic has"):
        encoded(new(topic=topic))


@pytest.mark.parametrize("append_crc", [False, True], ids=["plain", "record CRC"])
@pytest.mark.parametrize(
    ("born_host", "store_host", "bits", "size"),
    [
        (BORN_V4, STORE_V4, 0x00, 115),
        (BORN_V6, STORE_V4, 0x10, 127),
        (BORN_V4, STORE_V6, 0x20, 127),
        (BORN_V6, STORE_V6, 0x30, 139),
    ],
    ids=["both 4", "born 6", "store 6", "both 6"],
)
def test_hosts_of_either_kind(
    born_host: bytes, store_host: bytes, bits: int, size: int, append_crc: bool
) -> None:
    record = new(born_host=born_host)
    data = encoded(record, store_host=store_host, append_crc=append_crc)
    assert len(data) == size + 20 * append_crc
    assert data[36:40] == bytes([0, 0, 0, bits])
    assert data[48 : 48 + len(born_host)] == born_host
    stored_at = 48 + len(born_host)
    assert int.from_bytes(data[stored_at : stored_at + 8], "big") == STORED_MS
    assert data[stored_at + 8 : stored_at + 8 + len(store_host)] == store_host
    found = decoded(data)
    assert (found.born_host, found.store_host) == (born_host, store_host)
    assert (found.body, found.topic, found.sys_flag) == (b"hello", "TopicTest", bits)


def test_host_bits_follow_the_hosts_and_not_the_senders_flag() -> None:
    # A sender that says IPv6 of itself and comes through IPv4 must not shift the layout.
    data = encoded(new(sys_flag=0x30 | 1))
    assert data[36:40].hex() == "00000001"
    assert decoded(data).born_host == BORN_V4


def test_the_blank_record_holds_what_remains() -> None:
    assert encode_blank(0x1234).hex() == "00001234cbd43194"
    assert BLANK.unpack(encode_blank(8)) == (8, MAGIC_BLANK)


def test_the_blank_record_is_no_message() -> None:
    error = refusal(encode_blank(200).ljust(200, b"\0"))
    assert "magic 0xcbd43194" in error.reason


def test_a_record_in_a_larger_buffer_and_its_body_is_a_slice_of_it() -> None:
    buffer = memoryview(b"before" + encoded(new()) + b"behind")
    found = decode_record(buffer, 6, AT)
    assert found.size == 115
    assert isinstance(found.body, memoryview)
    assert found.body.obj is buffer.obj
    assert bytes(found.body) == b"hello"


# --- corruption ----------------------------------------------------------------------------------


@pytest.mark.parametrize("append_crc", [False, True], ids=["plain", "record CRC"])
def test_a_record_cut_at_any_byte_is_corrupt(append_crc: bool) -> None:
    data = encoded(new(born_host=BORN_V6), store_host=STORE_V6, append_crc=append_crc)
    for length in range(len(data)):
        refusal(data[:length])


@pytest.mark.parametrize("append_crc", [False, True], ids=["plain", "record CRC"])
def test_a_record_cut_at_any_byte_and_followed_by_zeros_is_corrupt(append_crc: bool) -> None:
    data = encoded(new(), append_crc=append_crc)
    for length in range(len(data)):
        refusal(data[:length].ljust(4096, b"\0"))


@pytest.mark.parametrize(
    ("position", "new_bytes", "why"),
    [
        (0, "00000072", "add up"),
        (0, "00000074", "add up"),
        (0, "0000005a", "size 90"),
        (0, "00000000", "size 0"),
        (0, "ffffffff", "size -1"),
        (0, "7fffffff", "size 2147483647"),
        (4, "00000000", "magic"),
        (4, "daa320a8", "magic"),
        (4, "daa320ab", "topic"),
        (8, "3610a687", "checksum"),
        (8, "b610a686", "checksum"),
        (28, "0000000000001001", "another log offset, 4097"),
        (28, "0000000000000000", "another log offset, 0"),
        (36, "00000010", "."),
        (36, "00000020", "."),
        (36, "00000030", "."),
        (84, "00000004", "."),
        (84, "00000006", "."),
        (84, "ffffffff", "body of -1"),
        (84, "7fffffff", "body of 2147483647"),
        (88, "48", "checksum"),
        (93, "08", "add up"),
        (93, "0a", "."),
        (93, "00", "topic"),
        (93, "ff", "topic"),
        (93, "7f", "topic"),
        (94, "ff", "not valid text"),
        (94, "00", "zero byte"),
        (103, "0009", "add up"),
        (103, "000b", "add up"),
        (103, "fff6", "add up"),
        (110, "00", "zero byte"),
    ],
)
def test_a_wrong_field_is_corrupt(position: int, new_bytes: str, why: str) -> None:
    data = patched(encoded(new()), position, bytes.fromhex(new_bytes))
    assert re.search(why, refusal(data.ljust(200, b"\0")).reason)


def test_any_flipped_bit_of_size_magic_checksum_offset_lengths_and_body_is_corrupt() -> None:
    data = encoded(new())
    covered = [*range(12), *range(28, 36), *range(84, 94), *range(103, 105)]
    for position in covered:
        for bit in range(8):
            refusal(patched(data, position, bytes([data[position] ^ 1 << bit])).ljust(300, b"\0"))


@pytest.mark.parametrize("at", [0, 1, 300, 511])
@pytest.mark.parametrize("append_crc", [False, True], ids=["plain", "record CRC"])
def test_a_sector_that_was_never_written_is_noticed(at: int, append_crc: bool) -> None:
    # The record lies anywhere in its file; a power cut leaves zeros for any run of sectors.
    record = new(body=b"b" * 700, topic="t" * 200, properties=b"KEYS\x01" + b"k" * 900 + b"\x02")
    data = bytes(at) + encoded(record, append_crc=append_crc)
    file = data.ljust(-(-len(data) // 512) * 512, b"\0")
    sectors = len(file) // 512
    for first in range(sectors):
        for last in range(first + 1, sectors + 1):
            torn = patched(file, first * 512, bytes((last - first) * 512))
            if torn == file:
                continue
            with pytest.raises(CorruptRecord) as caught:
                decode_record(torn, at, AT)
            assert caught.value.log_offset == AT


def test_a_record_at_the_wrong_offset_is_corrupt() -> None:
    data = encoded(new())
    with pytest.raises(
        CorruptRecord, match="log_offset=8192: it contains another log offset, 4096"
    ):
        decode_record(data, 0, LogOffset(8192))


def test_zeros_are_no_record() -> None:
    assert "magic 0x00000000" in refusal(bytes(4096)).reason


# --- record CRC ----------------------------------------------------------------------------------


def crc_digits(value: int) -> bytes:
    return "".join(str(value // 10**place % 10) for place in range(10)).encode()


def test_crc_digits_stand_least_significant_first() -> None:
    assert crc_digits(907060870) == b"0780607090"  # the known example
    data = encoded(new(), append_crc=True)
    value = crc32(data[:-20]) & 0x7FFFFFFF
    assert data[-20:] == b"__CRC32#\x01" + crc_digits(value) + b"\x02"
    assert decoded(data).properties == b"TAGS\x01TagA\x02" + data[-20:]


@pytest.mark.parametrize(
    ("properties", "before_the_crc"),
    [
        (b"", b""),
        (b"TAGS\x01TagA\x02", b"TAGS\x01TagA\x02"),
        (b"TAGS\x01TagA", b"TAGS\x01TagA\x02"),
    ],
    ids=["none", "ended", "not ended"],
)
def test_the_record_crc_is_one_more_property(properties: bytes, before_the_crc: bytes) -> None:
    record = new(properties=properties)
    data = encoded(record, append_crc=True)
    assert decoded(data).properties[:-20] == before_the_crc
    assert len(data) == encoded_size(record, store_host=STORE_V4, append_crc=True)
    assert len(data) == len(encoded(new(properties=before_the_crc))) + 20


def test_a_record_with_a_record_crc_and_any_flipped_bit_is_corrupt() -> None:
    data = encoded(new(), append_crc=True)
    passed = []
    for position in range(len(data)):
        for bit in range(8):
            flipped = patched(data, position, bytes([data[position] ^ 1 << bit]))
            try:
                decoded(flipped)
            except CorruptRecord:
                continue
            passed.append((position - len(data), bit))
    assert not passed, f"(position from the end, bit) that went unnoticed: {passed}"


def test_the_record_crc_covers_what_nothing_else_covers() -> None:
    data = encoded(new(), append_crc=True)
    queue_offset = patched(data, 20, (8).to_bytes(8, "big"))
    assert "record CRC" in refusal(queue_offset).reason
