"""Records byte by byte in every layout, and corrupt records.

VECTOR was computed independently of this code and compared with that of a Java broker. Corruption
is tested exhaustively where that is cheap: every length, every bit, every run of sectors.
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
LOG_OFFSET = LogOffset(4096)
STORED_MS = 1_700_000_000_123
STORE_V4 = encode_host("10.0.0.1", 10911)
STORE_V6 = encode_host("2001:db8::1", 10911)
BORN_V4 = encode_host("10.0.0.2", 50_000)
BORN_V6 = encode_host("2001:db8::2", 50_000)


def new_record(**changes: Any) -> NewRecord:
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
    return encode_record(record, 7, LOG_OFFSET, STORED_MS, store_host, append_crc)


def decoded(data: bytes) -> StoredRecord:
    return decode_record(data, 0, LOG_OFFSET)


def refusal(data: bytes) -> CorruptRecord:
    """Assert that a record is refused, and return the error."""
    with pytest.raises(CorruptRecord) as refused:
        decoded(data)
    assert refused.value.log_offset == LOG_OFFSET
    assert f"log_offset={LOG_OFFSET}" in str(refused.value)
    return refused.value


def patched(data: bytes, position: int, new_bytes: bytes) -> bytes:
    return data[:position] + new_bytes + data[position + len(new_bytes) :]


# --- layouts -------------------------------------------------------------------------------------


def test_a_record_has_the_known_bytes() -> None:
    data = encoded(new_record())
    assert data == bytes.fromhex(VECTOR)
    assert len(data) == 115


def test_the_known_bytes_are_decoded_to_their_fields() -> None:
    assert decoded(bytes.fromhex(VECTOR)) == StoredRecord(
        log_offset=LOG_OFFSET,
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


def test_the_queue_entry_of_a_record_has_the_known_bytes() -> None:
    record = decoded(bytes.fromhex(VECTOR))
    tags_code, _ = tags_and_keys(record.topic, record.properties)
    entry = ENTRY.pack(record.log_offset, record.size, tags_code)
    assert entry == bytes.fromhex(VECTOR_ENTRY)


def test_every_number_is_at_its_own_position() -> None:
    record = new_record(
        queue_id=0x01020304,
        flag=0x05060708,
        born_ms=0x1112131415161718,
        sys_flag=0x0108,
        reconsume_times=0x21222324,
        prepared_offset=0x3132333435363738,
    )
    data = encode_record(record, 0x4142434445464748, LOG_OFFSET, 0x5152535455565758, STORE_V4)
    assert data[12:16].hex() == "01020304"
    assert data[16:20].hex() == "05060708"
    assert data[20:28].hex() == "4142434445464748"
    assert data[28:36].hex() == f"{LOG_OFFSET:016x}"
    assert data[36:40].hex() == "00000108"
    assert data[40:48].hex() == "1112131415161718"
    assert data[56:64].hex() == "5152535455565758"
    assert data[72:76].hex() == "21222324"
    assert data[76:84].hex() == "3132333435363738"


def test_negative_numbers_are_encoded_and_decoded() -> None:
    record = new_record(flag=-1, reconsume_times=-2, born_ms=-3, prepared_offset=-4)
    stored = decoded(encoded(record))
    numbers = stored.flag, stored.reconsume_times, stored.born_ms, stored.prepared_offset
    assert numbers == (-1, -2, -3, -4)


def test_an_empty_record_has_the_smallest_size_and_a_checksum_of_zero() -> None:
    data = encoded(new_record(topic="T", body=b"", properties=b""))
    assert len(data) == RECORD_BYTES_MIN + 1
    assert data[8:12] == bytes(4)
    assert decoded(data).body == b""


def test_the_checksum_is_masked_to_31_bits() -> None:
    # The CRC-32 of "d" is 0x98dd4acc, which has the sign bit, unlike that of "hello".
    assert encoded(new_record(body=b"d"))[8:12].hex() == "18dd4acc"
    assert decoded(encoded(new_record(body=b"d"))).body_crc == 0x18DD4ACC


@pytest.mark.parametrize("length", [1, 127])
def test_a_topic_up_to_127_bytes_has_one_byte_of_length(length: int) -> None:
    data = encoded(new_record(topic="t" * length))
    assert data[4:8].hex() == "daa320a7"
    assert data[93 : 94 + length] == bytes([length]) + b"t" * length
    assert decoded(data).magic == MAGIC_V1
    assert decoded(data).topic == "t" * length


@pytest.mark.parametrize("length", [128, 255])
def test_a_longer_topic_has_two_bytes_of_length(length: int) -> None:
    data = encoded(new_record(topic="t" * length))
    assert data[4:8].hex() == "daa320ab"
    assert data[93 : 95 + length] == length.to_bytes(2, "big") + b"t" * length
    assert data[95 + length :] == b"\x00\x0aTAGS\x01TagA\x02"
    assert decoded(data).magic == MAGIC_V2
    assert decoded(data).topic == "t" * length


@pytest.mark.parametrize("topic", ["", "t" * 256, "é" * 128])
def test_an_empty_topic_or_one_of_more_than_255_bytes_is_refused(topic: str) -> None:
    with pytest.raises(RecordRefused, match="the topic has"):
        encoded(new_record(topic=topic))


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
def test_hosts_are_ipv4_or_ipv6_addresses(
    born_host: bytes, store_host: bytes, bits: int, size: int, append_crc: bool
) -> None:
    record = new_record(born_host=born_host)
    data = encoded(record, store_host=store_host, append_crc=append_crc)
    assert len(data) == size + 20 * append_crc
    assert data[36:40] == bytes([0, 0, 0, bits])
    assert data[48 : 48 + len(born_host)] == born_host
    index = 48 + len(born_host)
    assert int.from_bytes(data[index : index + 8], "big") == STORED_MS
    assert data[index + 8 : index + 8 + len(store_host)] == store_host
    stored = decoded(data)
    assert (stored.born_host, stored.store_host) == (born_host, store_host)
    assert (stored.body, stored.topic, stored.sys_flag) == (b"hello", "TopicTest", bits)


def test_the_host_bits_are_those_of_the_hosts_and_not_of_the_sender() -> None:
    # A sender that sets the IPv6 bits and connects through IPv4 must not change the layout.
    data = encoded(new_record(sys_flag=0x30 | 1))
    assert data[36:40].hex() == "00000001"
    assert decoded(data).born_host == BORN_V4


def test_a_blank_record_has_the_size_of_what_remains() -> None:
    assert encode_blank(0x1234).hex() == "00001234cbd43194"
    assert BLANK.unpack(encode_blank(8)) == (8, MAGIC_BLANK)


def test_a_blank_record_is_not_decoded_as_a_message() -> None:
    error = refusal(encode_blank(200).ljust(200, b"\0"))
    assert "magic 0xcbd43194" in error.reason


def test_the_body_of_a_record_is_a_slice_of_the_buffer() -> None:
    buffer = memoryview(b"before" + encoded(new_record()) + b"after")
    record = decode_record(buffer, 6, LOG_OFFSET)
    assert record.size == 115
    assert isinstance(record.body, memoryview)
    assert record.body.obj is buffer.obj
    assert bytes(record.body) == b"hello"


# --- corruption ----------------------------------------------------------------------------------


@pytest.mark.parametrize("append_crc", [False, True], ids=["plain", "record CRC"])
def test_a_record_truncated_at_any_byte_is_corrupt(append_crc: bool) -> None:
    data = encoded(new_record(born_host=BORN_V6), store_host=STORE_V6, append_crc=append_crc)
    for length in range(len(data)):
        refusal(data[:length])


@pytest.mark.parametrize("append_crc", [False, True], ids=["plain", "record CRC"])
def test_a_record_truncated_at_any_byte_and_followed_by_zeros_is_corrupt(append_crc: bool) -> None:
    data = encoded(new_record(), append_crc=append_crc)
    for length in range(len(data)):
        refusal(data[:length].ljust(4096, b"\0"))


@pytest.mark.parametrize(
    ("position", "new_bytes", "reason"),
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
def test_a_record_with_a_wrong_field_is_corrupt(position: int, new_bytes: str, reason: str) -> None:
    data = patched(encoded(new_record()), position, bytes.fromhex(new_bytes))
    assert re.search(reason, refusal(data.ljust(200, b"\0")).reason)


def test_a_flipped_bit_in_size_magic_checksum_offset_lengths_or_body_is_noticed() -> None:
    data = encoded(new_record())
    covered = [*range(12), *range(28, 36), *range(84, 94), *range(103, 105)]
    for position in covered:
        for bit in range(8):
            refusal(patched(data, position, bytes([data[position] ^ 1 << bit])).ljust(300, b"\0"))


@pytest.mark.parametrize("position", [0, 1, 300, 511])
@pytest.mark.parametrize("append_crc", [False, True], ids=["plain", "record CRC"])
def test_a_sector_that_was_never_written_is_noticed(position: int, append_crc: bool) -> None:
    # A record may be at any position in its file, and a power cut may leave zeros in any run of
    # sectors.
    record = new_record(
        body=b"b" * 700, topic="t" * 200, properties=b"KEYS\x01" + b"k" * 900 + b"\x02"
    )
    data = bytes(position) + encoded(record, append_crc=append_crc)
    file = data.ljust(-(-len(data) // 512) * 512, b"\0")
    sectors = len(file) // 512
    for first in range(sectors):
        for last in range(first + 1, sectors + 1):
            torn = patched(file, first * 512, bytes((last - first) * 512))
            if torn == file:
                continue
            with pytest.raises(CorruptRecord) as refused:
                decode_record(torn, position, LOG_OFFSET)
            assert refused.value.log_offset == LOG_OFFSET


def test_a_record_at_the_wrong_offset_is_corrupt() -> None:
    data = encoded(new_record())
    with pytest.raises(
        CorruptRecord, match="log_offset=8192: it contains another log offset, 4096"
    ):
        decode_record(data, 0, LogOffset(8192))


def test_zeros_are_not_a_record() -> None:
    assert "magic 0x00000000" in refusal(bytes(4096)).reason


# --- record CRC ----------------------------------------------------------------------------------


def crc_digits(value: int) -> bytes:
    """Return ten decimal digits, the least significant first."""
    return str(value).zfill(10)[::-1].encode()


def test_the_record_crc_has_its_least_significant_digit_first() -> None:
    assert crc_digits(907060870) == b"0780607090"
    data = encoded(new_record(), append_crc=True)
    value = crc32(data[:-20]) & 0x7FFFFFFF
    assert data[-20:] == b"__CRC32#\x01" + crc_digits(value) + b"\x02"
    assert decoded(data).properties == b"TAGS\x01TagA\x02"


@pytest.mark.parametrize(
    ("properties", "without_crc"),
    [
        (b"", b""),
        (b"TAGS\x01TagA\x02", b"TAGS\x01TagA\x02"),
        (b"TAGS\x01TagA", b"TAGS\x01TagA\x02"),
    ],
    ids=["none", "with end", "without end"],
)
def test_the_record_crc_is_the_last_property(properties: bytes, without_crc: bytes) -> None:
    record = new_record(properties=properties)
    data = encoded(record, append_crc=True)
    assert data[-20:].startswith(b"__CRC32#\x01")
    assert decoded(data).properties == without_crc
    assert len(data) == encoded_size(record, store_host=STORE_V4, append_crc=True)
    assert len(data) == len(encoded(new_record(properties=without_crc))) + 20


@pytest.mark.parametrize("append_crc", [False, True], ids=["plain", "record CRC"])
@pytest.mark.parametrize(
    "copied",
    [
        b"__CRC32#\x010123456789\x02",
        b"__CRC32#\x010123456789",
        b"more__CRC32#\x010123456789\x02",
        b"a\x01b__CRC32#\x010123456789\x02",
    ],
    ids=["copied", "without end", "part of a name", "part of a value"],
)
def test_a_record_crc_that_a_sender_has_copied_is_not_stored(
    copied: bytes, append_crc: bool
) -> None:
    for properties in (copied, b"TAGS\x01TagA\x02" + copied):
        record = new_record(properties=properties)
        data = encoded(record, append_crc=append_crc)
        assert decoded(data).properties == properties.removesuffix(copied)
        assert len(data) == encoded_size(record, store_host=STORE_V4, append_crc=append_crc)


def test_with_a_record_crc_any_flipped_bit_is_noticed() -> None:
    data = encoded(new_record(), append_crc=True)
    unnoticed = []
    for position in range(len(data)):
        for bit in range(8):
            flipped = patched(data, position, bytes([data[position] ^ 1 << bit]))
            try:
                decoded(flipped)
            except CorruptRecord:
                continue
            unnoticed.append((position - len(data), bit))
    assert not unnoticed, f"(position from the end, bit): {unnoticed}"


def test_only_the_record_crc_covers_the_queue_offset() -> None:
    data = encoded(new_record(), append_crc=True)
    changed = patched(data, 20, (8).to_bytes(8, "big"))
    assert "record CRC" in refusal(changed).reason
