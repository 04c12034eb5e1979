"""Payloads by annotation: which library decodes what, and what is refused."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple, TypedDict

import msgspec
import pydantic
import pytest

from escrowmq.app import InvalidHandler, encode_payload
from escrowmq.app.payloads import payload_codec, type_name


class Struct(msgspec.Struct):
    cents: int


class Tree(msgspec.Struct):
    children: list[Tree] = []


class Model(pydantic.BaseModel):
    cents: int = pydantic.Field(gt=0)


@dataclass
class Plain:
    cents: int


@pydantic.dataclasses.dataclass
class Checked:
    cents: int


class Typed(TypedDict):
    cents: int


class Pair(NamedTuple):
    name: str
    cents: int


class Colour(enum.Enum):
    RED = "red"


@pytest.mark.parametrize(
    ("annotation", "body", "payload"),
    [
        (bytes, b"\xff\x00", b"\xff\x00"),
        (str, "für".encode(), "für"),
        (dict, b'{"a":[1]}', {"a": [1]}),
        (dict[str, int], b'{"a":1}', {"a": 1}),
        (int, b"7", 7),
        (Struct, b'{"cents":1}', Struct(1)),
        (Tree, b'{"children":[{"children":[]}]}', Tree([Tree()])),
        (Plain, b'{"cents":1}', Plain(1)),
        (Typed, b'{"cents":1}', {"cents": 1}),
        (Pair, b'["a",1]', Pair("a", 1)),
        (Colour, b'"red"', Colour.RED),
        (Plain | None, b"null", None),
        (Model, b'{"cents":1}', Model(cents=1)),
        (dict[str, Model], b'{"a":{"cents":1}}', {"a": Model(cents=1)}),
        (Checked, b'{"cents":1}', Checked(1)),
    ],
)
def test_a_payload_is_decoded_by_its_annotation_and_encoded_again(
    annotation: Any, body: bytes, payload: object
) -> None:
    codec = payload_codec(annotation)
    assert codec.decode(body) == payload
    assert codec.encode(payload) == body
    if annotation != dict[str, Model]:  # what is inside a dict is not looked at
        assert encode_payload(payload) == body


@pytest.mark.parametrize(
    ("annotation", "body"),
    [
        (str, b"\xff"),
        (dict, b"[]"),
        (Struct, b'{"cents":"1"}'),
        (Plain, b"{}"),
        (Plain, b"no JSON"),
        (Model, b'{"cents":0}'),
        (Model, b"\xff"),
    ],
)
def test_a_body_of_another_type_is_refused(annotation: Any, body: bytes) -> None:
    with pytest.raises((ValueError, msgspec.DecodeError)):
        payload_codec(annotation).decode(body)


class Unknown:
    """A type that no codec knows."""


@dataclass
class Wrapper:
    inner: list[Unknown]


@pytest.mark.parametrize("annotation", [Unknown, Wrapper, dict[str, Unknown], type, object])
def test_a_type_that_no_codec_knows_is_refused_at_once(annotation: Any) -> None:
    with pytest.raises(InvalidHandler, match="cannot be a payload"):
        payload_codec(annotation)


def test_an_object_that_is_no_payload_cannot_be_encoded() -> None:
    with pytest.raises(TypeError):
        encode_payload(Unknown())


def test_types_are_named_as_they_are_written() -> None:
    assert type_name(Struct) == "Struct"
    assert type_name(dict[str, int]) == "dict[str, int]"
