"""The headers of all requests and responses: round trips, spellings and invalid fields."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import InvalidField
from escrowmq.remoting.headers import Header, decode_header, encode_header
from tests.support.remoting_strategies import a_few, header_kinds, headers_of, texts


@pytest.mark.parametrize("header_type", header_kinds, ids=lambda header_type: header_type.__name__)
@a_few
@given(st.data())
def test_an_encoded_header_is_decoded_unchanged(
    header_type: type[Header], data: st.DataObject
) -> None:
    header = data.draw(headers_of(header_type))
    fields = encode_header(header)
    assert all(isinstance(value, str) for value in fields.values())
    assert decode_header(header_type, fields) == header
    assert decode_header(header_type, fields | {"AccessKey": "", "ns": "x"}) == header


@given(st.sampled_from(header_kinds), st.data())
def test_booleans_are_decoded_as_numbers_and_in_any_case(
    header_type: type[Header], data: st.DataObject
) -> None:
    header = data.draw(headers_of(header_type))
    respelled_fields = {
        name: data.draw(st.sampled_from(spellings(header, name, value)))
        for name, value in encode_header(header).items()
    }
    assert decode_header(header_type, respelled_fields) == header


def spellings(header: Header, wire_name: str, text: str) -> list[str]:
    """Return the valid spellings of a field's value: several for a boolean, else the text."""
    field = header.__struct_fields__[header.__struct_encode_fields__.index(wire_name)]
    if not isinstance(getattr(header, field), bool):
        return [text]
    return ["true", "True", "TRUE", "1"] if text == "true" else ["false", "FALSE", "0"]


@given(st.sampled_from(header_kinds), st.data())
def test_any_fields_are_decoded_or_refused(header_type: type[Header], data: st.DataObject) -> None:
    names = st.sampled_from([*header_type.__struct_encode_fields__, "other"])
    values = st.one_of(texts, st.integers().map(str), st.sampled_from(["null", "1e9", "-0", ""]))
    with contextlib.suppress(InvalidField):
        decode_header(header_type, data.draw(st.dictionaries(names, values, max_size=20)))
