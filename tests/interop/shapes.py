"""The shape of a frame: which keys its header and its body have, and of which kind the values are.

    {"code": 0, "header": {"flag": 1, "language": "text", ...}, "extFields": {"offset": "number"},
     "remark": "text", "body": {"consumerIdList": ["text"]}}

Two servers that answer the same request give equal shapes although their times, addresses and
offsets differ. This shares no code with `escrowmq.remoting`.
"""

from __future__ import annotations

import json
import re
import struct
from typing import Any, Final

from tests.interop.records import decode_records

Shape = dict[str, Any]

# The keys of these objects are data: names of topics, numbers of brokers and the like.
_TABLES: Final = re.compile(r"(Table|Map|Addrs|table|data|consumeStatsList)$")
_ANY_KEY: Final = "*"
_TOKEN: Final = re.compile(r'\s*([{}\[\],:]|"(?:[^"\\]|\\.)*"|[^\s{}\[\],:"]+)')
_NUMBER: Final = re.compile(r"-?\d+(\.\d+)?([eE][-+]?\d+)?")


def frame_shape(frame: bytes) -> Shape:
    """Return the shape of a request or response with a JSON header."""
    header_end = 8 + int.from_bytes(frame[5:8], "big")
    header = json.loads(frame[8:header_end])
    shape: Shape = {"code": header.pop("code")}
    fields, remark = header.pop("extFields", None), header.pop("remark", None)
    header.pop("opaque")
    shape["header"] = {
        name: value if name in ("flag", "serializeTypeCurrentRPC") else _kind(value)
        for name, value in sorted(header.items())
    }
    if fields:
        shape["extFields"] = {name: _text_kind(fields[name]) for name in sorted(fields)}
    if remark:
        shape["remark"] = "text"
    if body := frame[header_end:]:
        shape["body"] = _body_shape(body)
    return shape


def _body_shape(body: bytes) -> Any:
    if body[:1] in (b"{", b"["):
        return _value_shape(parse(body.decode()), "")
    try:
        decode_records(body)
    except (ValueError, IndexError, struct.error):
        return "text"
    return "records"


def _value_shape(value: Any, name: str) -> Any:
    if isinstance(value, Table):
        merged = _merge([_value_shape(item, "") for _, item in value.items])
        if _TABLES.search(name) or value.has_object_keys:
            return {_ANY_KEY: merged}
        return {key: _value_shape(item, key) for key, item in sorted(value.items)}
    if isinstance(value, list):
        return [_merge([_value_shape(item, name) for item in value])] if value else []
    return _kind(value)


def _merge(shapes: list[Any]) -> Any:
    """Return one shape for items that are alike; a key that some of them lack is kept."""
    merged: Any = None
    for shape in shapes:
        if isinstance(shape, dict) and isinstance(merged, dict):
            for key in shape:
                merged[key] = _merge([merged[key], shape[key]]) if key in merged else shape[key]
        elif merged in (None, [], "null"):
            merged = shape
    return merged


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, int | float) else "text"


def _text_kind(value: object) -> str:
    if not isinstance(value, str):
        return f"JSON {_kind(value)}"  # C++ clients read only strings
    if value in ("true", "false"):
        return "boolean"
    return "number" if _NUMBER.fullmatch(value) else "text"


# --- JSON as fastjson writes it: keys may be numbers or objects ----------------------------------


class Table:
    """A JSON object. Its keys are texts; an object as a key is written as JSON."""

    def __init__(self, items: list[tuple[str, Any]], *, has_object_keys: bool) -> None:
        self.items = items
        self.has_object_keys = has_object_keys


def parse(text: str) -> Any:
    """Return the value of a JSON text whose keys may be anything. Raises ValueError."""
    tokens = [match[1] for match in _TOKEN.finditer(text)]
    value, end = _parse_value(tokens, 0)
    if end != len(tokens):
        raise ValueError(f"something follows the JSON value in {text[:60]!r}")
    return value


def _parse_value(tokens: list[str], at: int) -> tuple[Any, int]:
    token = tokens[at]
    if token == "{":
        return _parse_table(tokens, at + 1)
    if token == "[":
        items, at = [], at + 1
        while tokens[at] != "]":
            item, at = _parse_value(tokens, at)
            items.append(item)
            at += tokens[at] == ","
        return items, at + 1
    return json.loads(token), at + 1


def _parse_table(tokens: list[str], at: int) -> tuple[Table, int]:
    items: list[tuple[str, Any]] = []
    has_object_keys = False
    while tokens[at] != "}":
        key, at = _parse_value(tokens, at)
        has_object_keys |= isinstance(key, Table)
        if tokens[at] != ":":
            raise ValueError(f"{tokens[at]!r} where a colon is expected")
        value, at = _parse_value(tokens, at + 1)
        items.append((str(key), value))
        at += tokens[at] == ","
    return Table(items, has_object_keys=has_object_keys), at + 1
