"""Encoded properties: what is encoded, decoded, skipped and refused."""

from __future__ import annotations

import pytest

from escrowmq.errors import LocalProtocolError
from escrowmq.message.properties import decode_properties, encode_properties, find_property


def test_properties_are_encoded_in_order_each_with_a_separator_at_its_end() -> None:
    encoded = encode_properties({"TAGS": "TagA", "KEYS": "a b", "ünï": "côdé"})
    assert encoded == "TAGS\x01TagA\x02KEYS\x01a b\x02ünï\x01côdé\x02".encode()


def test_no_properties_are_an_empty_text() -> None:
    assert encode_properties({}) == b""
    assert decode_properties(b"") == {}
    assert find_property(b"", b"TAGS") is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("", "v"), ("n", ""), ("a\x01b", "v"), ("n", "a\x01b"), ("a\x02b", "v"), ("n", "a\x02")],
)
def test_properties_that_cannot_be_decoded_are_not_encoded(name: str, value: str) -> None:
    with pytest.raises(LocalProtocolError, match="property"):
        encode_properties({"fine": "fine", name: value})


@pytest.mark.parametrize("pair", [("n", "\ud800"), ("\udfff", "v")])
def test_half_a_surrogate_pair_is_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(LocalProtocolError, match="not valid text"):
        encode_properties(dict([pair]))


@pytest.mark.parametrize(
    ("encoded", "expected"),
    [
        (b"a\x011\x02", {"a": "1"}),
        (b"a\x011", {"a": "1"}),
        (b"a\x011\x02b\x012", {"a": "1", "b": "2"}),
        (b"a\x01\x02b\x012\x02", {"b": "2"}),
        (b"\x011\x02b\x012\x02", {"b": "2"}),
        (b"a\x02b\x012\x02", {"b": "2"}),
        (b"\x02\x02b\x012\x02\x02", {"b": "2"}),
        (b"a\x011\x012\x02", {"a": "1\x012"}),
        (b"a\x01\xff\x02", {"a": "\ufffd"}),
        (b"\x01", {}),
        (b"\x02", {}),
    ],
    ids=[
        "with end",
        "without end",
        "last without end",
        "no value",
        "no name",
        "no separator",
        "empty items",
        "separator in the value",
        "not UTF-8",
        "only a separator",
        "only an end",
    ],
)
def test_malformed_properties_are_skipped_and_the_others_decoded(
    encoded: bytes, expected: dict[str, str]
) -> None:
    assert decode_properties(encoded) == expected
    assert decode_properties(memoryview(encoded)) == expected


@pytest.mark.parametrize(
    ("encoded", "value"),
    [
        (b"TAGS\x01TagA\x02", b"TagA"),
        (b"TAGS\x01TagA", b"TagA"),
        (b"a\x011\x02TAGS\x01TagA\x02b\x012\x02", b"TagA"),
        (b"MYTAGS\x01no\x02", None),
        (b"MYTAGS\x01no\x02TAGS\x01yes\x02", b"yes"),
        (b"TAGSX\x01no\x02", None),
        (b"a\x01TAGS\x02", None),
        (b"a\x01TAGS\x01no\x02", None),
        (b"TAGS\x01\x02", None),
        (b"TAGS\x01", None),
        (b"TAGS", None),
        (b"TAGS\x02", None),
    ],
)
def test_one_property_is_found_in_the_encoded_properties(
    encoded: bytes, value: bytes | None
) -> None:
    assert find_property(encoded, b"TAGS") == value
