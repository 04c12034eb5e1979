"""Payloads: from the bytes of a message to the type that a handler takes, and back.

    annotation           bytes of the message
    bytes                as they are
    str                  UTF-8
    pydantic models      JSON, by pydantic; also types that contain a model
    everything else      JSON, by msgspec: msgspec.Struct, dataclasses, TypedDict, NamedTuple, dict,
                         enums, numbers, datetimes, unions of them, …

A type that neither of them knows is refused when the handler is defined, not when a message comes.
pydantic is used only if the application does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, cast, get_args

import msgspec
from msgspec import inspect as msgspec_inspect

from escrowmq.errors import InvalidHandler

_NoneType: Final = type(None)


@dataclass(frozen=True, slots=True)
class PayloadCodec:
    """Converts the payloads of one type. `decode` and `encode` raise what their library raises."""

    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]


def payload_codec(annotation: Any) -> PayloadCodec:
    """Return the codec of a type. Raises InvalidHandler if it cannot be a payload."""
    if annotation is bytes:
        return PayloadCodec(bytes, bytes)
    if annotation is str:
        return PayloadCodec(lambda body: body.decode(), lambda text: cast(bytes, text.encode()))
    if _contains_pydantic(annotation):
        return _pydantic_codec(annotation)
    _require_known_to_msgspec(annotation)
    decoder = msgspec.json.Decoder(annotation)
    return PayloadCodec(decoder.decode, msgspec.json.encode)


def encode_payload(payload: object) -> bytes:
    """Return a payload as the body of a message, which a handler of its type can decode.

    Raises TypeError for an object that is no payload.
    """
    if isinstance(payload, bytes):
        return payload
    if isinstance(payload, str):
        return payload.encode()
    if _is_pydantic(type(payload)):
        return _pydantic_codec(type(payload)).encode(payload)
    return msgspec.json.encode(payload)


def type_name(annotation: Any) -> str:
    """Return a type as its users write it."""
    if isinstance(annotation, type) and not get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


# --- pydantic ------------------------------------------------------------------------------------


def _pydantic_codec(annotation: Any) -> PayloadCodec:
    import pydantic  # an application that has a model has it

    adapter = pydantic.TypeAdapter(annotation)
    return PayloadCodec(adapter.validate_json, adapter.dump_json)


def _is_pydantic(candidate: Any) -> bool:
    """Return whether a type is a model of pydantic, or a dataclass made by it."""
    pydantic = sys.modules.get("pydantic")
    if pydantic is None or not isinstance(candidate, type):
        return False
    return issubclass(candidate, pydantic.BaseModel) or pydantic.dataclasses.is_pydantic_dataclass(
        candidate
    )


def _contains_pydantic(annotation: Any) -> bool:
    return _is_pydantic(annotation) or any(map(_contains_pydantic, get_args(annotation)))


# --- msgspec -------------------------------------------------------------------------------------


def _require_known_to_msgspec(annotation: Any) -> None:
    """Raise InvalidHandler for types that msgspec would refuse when the first message comes."""
    name = type_name(annotation)
    try:
        described = msgspec_inspect.type_info(annotation)
        msgspec.json.Decoder(annotation)
    except (TypeError, NameError) as error:
        raise InvalidHandler(f"{name} cannot be a payload: {error}") from error
    for unknown in _custom_types(described, set()):
        raise InvalidHandler(
            f"{name} cannot be a payload: {type_name(unknown)} is no msgspec.Struct, pydantic "
            "model, dataclass, TypedDict or type of JSON"
        )


def _custom_types(described: object, seen: set[int]) -> Iterator[Any]:
    """Yield the types inside a described type that msgspec knows nothing of."""
    if id(described) in seen:
        return
    seen.add(id(described))
    if isinstance(described, msgspec_inspect.CustomType):
        yield described.cls
    elif isinstance(described, tuple):
        for element in described:
            yield from _custom_types(element, seen)
    elif isinstance(described, msgspec_inspect.Type | msgspec_inspect.Field):
        for field in described.__struct_fields__:
            if field != "cls":
                yield from _custom_types(getattr(described, field), seen)
