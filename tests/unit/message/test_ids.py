"""Message ids and hosts as text and as bytes: known values, and what is refused."""

from __future__ import annotations

import pytest

from escrowmq.errors import LocalProtocolError, RemoteProtocolError
from escrowmq.message.keys import (
    UniqueKeyGenerator,
    decode_host,
    decode_offset_id,
    encode_host,
    encode_offset_id,
    encode_offset_ids,
)

MONTH_START_MS = 1_698_796_800_000


def test_an_offset_id_has_the_known_text() -> None:
    host = encode_host("10.0.0.1", 10911)
    assert encode_offset_id(host, 123_456_789) == "0A00000100002A9F00000000075BCD15"
    assert decode_offset_id("0A00000100002A9F00000000075BCD15") == (host, 123_456_789)


def test_an_offset_id_with_an_ipv6_address_has_the_known_text() -> None:
    host = encode_host("2001:db8::1", 10911)
    text = encode_offset_id(host, 7)
    assert encode_offset_ids(host, [7, 8]) == [text, encode_offset_id(host, 8)]
    assert text == "20010DB8000000000000000000000001" + "00002A9F" + "0000000000000007"
    assert decode_offset_id(text) == (host, 7)


def test_an_offset_id_in_lower_case_is_decoded() -> None:
    assert decode_offset_id("0a00000100002a9f00000000075bcd15")[1] == 123_456_789


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "0 bytes"),
        ("0A", "1 bytes"),
        ("0A00000100002A9F00000000075BCD", "15 bytes"),
        ("0A00000100002A9F00000000075BCD1500", "17 bytes"),
        ("0A00000100002A9F00000000075BCD1", "not hexadecimal"),
        ("0A00000100002A9F00000000075BCDXY", "not hexadecimal"),
        ("é" * 32, "not hexadecimal"),
    ],
)
def test_an_invalid_offset_id_is_a_remote_error(text: str, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        decode_offset_id(text)


@pytest.mark.parametrize(
    ("address", "port", "encoded"),
    [
        ("10.0.0.1", 10911, "0a00000100002a9f"),
        ("255.255.255.255", 65535, "ffffffff0000ffff"),
        ("::1", 80, "00000000000000000000000000000001" + "00000050"),
    ],
)
def test_a_host_has_the_known_bytes(address: str, port: int, encoded: str) -> None:
    assert encode_host(address, port).hex() == encoded
    assert decode_host(bytes.fromhex(encoded)) == (address, port)


@pytest.mark.parametrize(
    ("address", "port"), [("localhost", 1), ("", 1), ("10.0.0.256", 1), ("10.0.0.1", 1 << 31)]
)
def test_an_invalid_address_is_refused(address: str, port: int) -> None:
    with pytest.raises(LocalProtocolError, match="not an IP address"):
        encode_host(address, port)


@pytest.mark.parametrize("length", [0, 4, 7, 9, 16, 21])
def test_a_host_of_another_length_is_a_remote_error(length: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"host has {length} bytes"):
        decode_host(bytes(length))


def test_a_unique_key_consists_of_address_process_salt_time_and_counter() -> None:
    keys = UniqueKeyGenerator(address="10.0.0.2", process_id=0x12345, salt=0xCAFEBABE)
    assert keys.next(now_ms=MONTH_START_MS + 0x01020304, month_start_ms=MONTH_START_MS) == (
        "0A000002" + "2345" + "CAFEBABE" + "01020304" + "0000"
    )
    assert keys.next(now_ms=MONTH_START_MS, month_start_ms=MONTH_START_MS).endswith("000000000001")


@pytest.mark.parametrize(("address", "length"), [("10.0.0.2", 32), ("2001:db8::2", 56)])
def test_the_length_of_a_unique_key_depends_on_its_address(address: str, length: int) -> None:
    key = UniqueKeyGenerator(address=address, process_id=1, salt=2).next(now_ms=1, month_start_ms=0)
    assert len(key) == length
    assert key == key.upper()


def test_the_keys_of_one_process_differ_while_the_counter_lasts() -> None:
    keys = UniqueKeyGenerator(address="10.0.0.2", process_id=1, salt=2)
    same_ms = {keys.next(now_ms=5, month_start_ms=0) for _ in range(65_536)}
    assert len(same_ms) == 65_536
    next_ms = {keys.next(now_ms=6, month_start_ms=0) for _ in range(100)}
    assert not next_ms & same_ms


def test_a_clock_before_the_start_of_its_month_still_gives_a_key() -> None:
    keys = UniqueKeyGenerator(address="10.0.0.2", process_id=-1, salt=-1)
    assert keys.next(now_ms=0, month_start_ms=1) == "0A000002" + "FFFF" + "F" * 8 + "F" * 8 + "0000"
