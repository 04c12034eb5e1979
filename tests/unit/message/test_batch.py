"""A batch body byte by byte, and invalid batches."""

from __future__ import annotations

import pytest

from escrowmq.errors import BrokenBody, LocalProtocolError
from escrowmq.message.batch import BatchItem, decode_batch, encode_batch

FIRST = "0000001e 00000000 00000000 00000007 00000003 616263 0005 5401782e02"
SECOND = "00000016 00000000 00000000 00000000 00000000 0000"
ITEMS = [BatchItem(7, b"abc", b"T\x01x.\x02"), BatchItem(0, b"")]


def test_a_batch_of_two_messages_has_the_known_bytes() -> None:
    assert encode_batch(ITEMS) == bytes.fromhex(FIRST + SECOND)
    assert decode_batch(bytes.fromhex(FIRST + SECOND)) == ITEMS


def test_an_empty_body_is_an_empty_batch() -> None:
    assert encode_batch([]) == b""
    assert decode_batch(b"") == []


def test_the_bodies_are_views_of_the_batch() -> None:
    body = bytes.fromhex(FIRST)
    (item,) = decode_batch(body)
    assert isinstance(item.body, memoryview)
    assert item.body.obj is body


def test_magic_and_crc_are_ignored() -> None:
    assert decode_batch(bytes.fromhex(SECOND.replace("00000000 00000000", "daa320a7 ffffffff", 1)))


@pytest.mark.parametrize(
    "body",
    [
        "00",
        FIRST[:-2],
        FIRST + "00",
        "00000015 00000000 00000000 00000000 00000000 0000",
        "00000017 00000000 00000000 00000000 00000000 0000",
        "00000000 00000000 00000000 00000000 00000000 0000",
        "ffffffff 00000000 00000000 00000000 00000000 0000",
        "00000016 00000000 00000000 00000000 00000001 0000",
        "00000016 00000000 00000000 00000000 ffffffff 0000",
        "00000016 00000000 00000000 00000000 7fffffff 0000",
        "00000016 00000000 00000000 00000000 ffffff00 0000",
        "00000016 00000000 00000000 00000000 80000000 0000",
        "00000016 00000000 00000000 00000000 00000000 0001",
        "00000016 00000000 00000000 00000000 00000000 ffff",
        "00000018 00000000 00000000 00000000 00000000 0001 4141",
    ],
)
def test_an_invalid_batch_is_refused(body: str) -> None:
    with pytest.raises(BrokenBody, match=r"message [01] of a batch: "):
        decode_batch(bytes.fromhex(body))


def test_properties_that_are_too_long_are_a_local_error() -> None:
    encode_batch([BatchItem(0, b"", b"p" * 32_767)])
    with pytest.raises(LocalProtocolError):
        encode_batch([BatchItem(0, b"", b"p" * 32_768)])
