"""Every header of every request and answer: round trips, spellings, and fields that do not fit."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.errors import InvalidField
from escrowmq.remoting.headers import Header, decode_header, encode_header
from tests.support.remoting_strategies import fewer_examples, header_types, headers_of, texts


@pytest.mark.parametrize("kind", header_types, ids=lambda kind: kind.__name__)
@fewer_examples
@given(st.data())
def test_round_trip(kind: type[Header], data: st.DataObject) -> None:
    header = data.draw(headers_of(kind))
    written = encode_header(header)
    assert all(isinstance(value, str) for value in written.values())
    assert decode_header(kind, written) == header
    assert decode_header(kind, written | {"AccessKey": "", "ns": "x"}) == header


@given(st.sampled_from(header_types), st.data())
def test_booleans_may_be_numbers_or_in_any_case(kind: type[Header], data: st.DataObject) -> None:
    header = data.draw(headers_of(kind))
    respelt = {
        name: data.draw(st.sampled_from(spellings(header, name, value)))
        for name, value in encode_header(header).items()
    }
    assert decode_header(kind, respelt) == header


def spellings(header: Header, wire_name: str, text: str) -> list[str]:
    field = header.__struct_fields__[header.__struct_encode_fields__.index(wire_name)]
    if not isinstance(getattr(header, field), bool):
        return [text]
    return ["true", "True", "TRUE", "1"] if text == "true" else ["false", "FALSE", "0"]


@given(st.sampled_from(header_types), st.data())
def test_any_text_is_read_or_refused(kind: type[Header], data: st.DataObject) -> None:
    names = st.sampled_from([*kind.__struct_encode_fields__, "other"])
    values = st.one_of(texts, st.integers().map(str), st.sampled_from(["null", "1e9", "-0", ""]))
    with contextlib.suppress(InvalidField):
        decode_header(kind, data.draw(st.dictionaries(names, values, max_size=20)))
