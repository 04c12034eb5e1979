"""The slow path decodes every header that the fast path accepts, to the same value.

The headers are variations of valid ones: keys in any order, missing, repeated or unknown; numbers
as numbers or as text; booleans in every spelling; nested values; white space; damaged bytes.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import event, example, given
from hypothesis import strategies as st

from escrowmq.errors import BrokenHeader, RequestRefused
from escrowmq.remoting.codes import JSON, RequestCode
from escrowmq.remoting.command import decode_command
from escrowmq.remoting.headers import encode_header
from escrowmq.remoting.requests import REQUESTS, decode_request_head, request_head_from_command
from tests.property.damage import damaged
from tests.support.remoting_strategies import headers_of, texts

common_codes = [
    RequestCode.SEND_MESSAGE_V2,
    RequestCode.SEND_MESSAGE,
    RequestCode.PULL_MESSAGE,
    RequestCode.END_TRANSACTION,
    RequestCode.POP_MESSAGE,
    RequestCode.GET_ROUTEINFO_BY_TOPIC,
    RequestCode.HEART_BEAT,
]
codes = st.one_of(
    st.sampled_from(common_codes), st.sampled_from(sorted(REQUESTS)), st.integers(0, 999)
)
odd_strings = st.sampled_from(
    ["true", "TRUE", "1", "0", "null", "", "1.0", "1e3", "-0", "01", " 1", "9" * 30, "x"]
).map(json.dumps)
odd_literals = st.sampled_from(
    ["true", "false", "null", "1", "0", "1.0", "1e3", "-0", "9" * 30, "1e400", "{}", "[[1]]"]
)
values = st.one_of(texts.map(json.dumps), odd_strings, odd_literals, st.integers().map(str))


@st.composite
def encoded_headers(draw: st.DrawFn) -> bytes:
    """Draw a JSON header that is valid, or almost valid, for its request code."""
    code = draw(codes)
    fields: list[tuple[str, str]] = []
    if code in REQUESTS:
        header = draw(headers_of(REQUESTS[code].request))
        for name, text in encode_header(header).items():
            as_number = text.lstrip("-").isdecimal() and text.isascii() and draw(st.booleans())
            fields.append((name, text if as_number else json.dumps(text)))
    fields = draw(st.permutations(fields))
    names = st.sampled_from([*(name for name, _ in fields), "other", "ns"])
    for _ in range(draw(st.integers(0, 2))):
        fields.append((draw(names), draw(values)))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1]))):
        fields = fields[1:]
    space = draw(st.sampled_from(["", "", " ", "\n"]))
    ext_fields = "{" + ",".join(f"{json.dumps(name)}:{space}{text}" for name, text in fields) + "}"
    parts = [
        ("opaque", str(draw(st.integers(-(2**31), 2**31)))),
        ("flag", draw(st.sampled_from(["0", "0", "1", "2", '"0"']))),
        ("version", draw(st.sampled_from(["453", '"317"', "0", "null"]))),
        ("language", draw(st.sampled_from(['"JAVA"', '"KLINGON"', "3", "null", "{}"]))),
        ("remark", draw(st.one_of(st.just('""'), values))),
        ("extFields", ext_fields),
        ("code", draw(values)),
    ]
    parts = parts[: draw(st.sampled_from([6, 6, 6, 7]))]
    parts = draw(st.permutations(parts))[: draw(st.sampled_from([4, 7, 7, 7, 7]))]
    code_position = draw(st.sampled_from([0, 0, 0, len(parts)]))
    parts.insert(
        code_position, ("code", draw(st.sampled_from([str(code), str(code), f'"{code}"'])))
    )
    return ("{" + ",".join(f'"{name}":{space}{text}' for name, text in parts) + "}").encode()


def decode_slowly(header: bytes) -> Any:
    """Decode a header without the fast path. Return None if it is not a valid request."""
    try:
        command = decode_command(JSON, header)
        return None if command.is_response else request_head_from_command(command)
    except (BrokenHeader, RequestRefused):
        return None


def check_fast_path(header: bytes) -> None:
    """Assert that the slow path decodes the same value if the fast path accepts the header."""
    fast = decode_request_head(header)
    event("fast" if fast is not None else "slow")
    if fast is not None:
        assert fast == decode_slowly(header)


@given(encoded_headers())
@example(b'{"code":310,"extFields":{"a":"g","b":"t","e":1},"code":11}')
@example(b'{"code":11,"code":310,"extFields":{"a":"g","b":"t","e":1}}')
@example(b'{"code":310,"extFields":{"a":"g","b":"t","e":1,"z":"\xff"}}')
@example(b'{"code":310,"extFields":{"a":"g","b":"t","e":1,"z":{"y":[]}}}')
@example(b'{"code":310,"extFields":{"a":"g","b":"t","e":1},"flag":1}')
@example(b'{"code":310,"extFields":{"a":"g","b":"t","e":1,"k":"1","m":0},"remark":""}')
def test_the_fast_path_agrees_with_the_slow_path(header: bytes) -> None:
    check_fast_path(header)


@given(encoded_headers(), st.data())
def test_the_fast_path_agrees_with_the_slow_path_on_damaged_headers(
    header: bytes, data: st.DataObject
) -> None:
    new_bytes = st.one_of(st.integers(0, 255), st.sampled_from(b'"{}[],:0\\'))
    check_fast_path(data.draw(damaged(header, changes_max=3, new_bytes=new_bytes)))


@given(st.sampled_from(sorted(REQUESTS)), st.data())
def test_encoded_requests_take_the_fast_path(code: int, data: st.DataObject) -> None:
    fields = data.draw(headers_of(REQUESTS[code].request))
    header = json.dumps(
        {"code": code, "extFields": encode_header(fields), "opaque": 5}, separators=(",", ":")
    )
    head = decode_request_head(header.encode())
    assert head is not None
    assert (head.code, head.opaque, head.fields) == (code, 5, fields)
