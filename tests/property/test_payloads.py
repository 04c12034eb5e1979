"""Payloads: whatever a sender encodes, a handler of the same type gets the same; garbage is refused
and never an object of another type."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pydantic
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.app import InvalidPayload, Retry, encode_payload
from escrowmq.app.handlers import AppHandler
from escrowmq.app.payloads import payload_codec
from tests.support.sql_bank import received_message


@dataclass
class Line:
    item: str
    count: int


@dataclass
class Order:
    name: str
    lines: list[Line] = field(default_factory=list)
    due: datetime.date | None = None


class StructOrder(msgspec.Struct):
    name: str
    lines: list[Line] = []
    note: str | None = None


class ModelLine(pydantic.BaseModel):
    item: str
    count: int


class ModelOrder(pydantic.BaseModel):
    name: str
    lines: list[ModelLine] = []
    due: datetime.date | None = None


# Lone surrogates are no text that UTF-8 can carry.
texts = st.text(st.characters(exclude_categories=["Cs"]))
counts = st.integers(-(2**63), 2**63 - 1)
lines = st.lists(st.builds(Line, texts, counts), max_size=3)
dates = st.none() | st.dates()
PAYLOADS: Sequence[tuple[Any, st.SearchStrategy[Any]]] = [
    (bytes, st.binary()),
    (str, texts),
    (dict[str, int | None], st.dictionaries(texts, st.none() | counts, max_size=3)),
    (Order, st.builds(Order, texts, lines, dates)),
    (StructOrder, st.builds(StructOrder, texts, lines, st.none() | texts)),
    (
        ModelOrder,
        st.builds(
            ModelOrder,
            name=texts,
            lines=st.lists(st.builds(ModelLine, item=texts, count=counts), max_size=3),
            due=dates,
        ),
    ),
]
typed_payloads = st.sampled_from(PAYLOADS).flatmap(
    lambda pair: st.tuples(st.just(pair[0]), pair[1])
)


@given(typed_payloads)
def test_what_is_encoded_is_decoded_to_the_same(typed: tuple[Any, Any]) -> None:
    annotation, payload = typed
    codec = payload_codec(annotation)
    body = codec.encode(payload)
    assert codec.decode(body) == payload
    assert codec.decode(encode_payload(payload)) == payload


def take_order(order: Order) -> None: ...
def take_model(order: ModelOrder) -> None: ...
def take_text(text: str) -> None: ...


HANDLERS = [
    AppHandler(
        function,
        topic="t",
        expression="*",
        retry=Retry(),
        concurrency=1,
        ordered=False,
        batch_size=1,
        send_to="",
    )
    for function in (take_order, take_model, take_text)
]


@given(st.sampled_from(HANDLERS), st.binary() | typed_payloads.map(lambda t: encode_payload(t[1])))
def test_any_body_is_decoded_to_the_type_of_the_handler_or_refused(
    handler: AppHandler, body: bytes
) -> None:
    with contextlib.suppress(InvalidPayload):
        payload = handler.decode(received_message("m", body))
        assert isinstance(payload, (Order, ModelOrder, str))
        assert type(payload).__name__ == handler.signature.payload_name
