"""A request's JSON body, or a refusal that says what is wrong with it."""

from __future__ import annotations

from typing import Any, TypeVar

from escrowmq.errors import BrokenBody, RequestRefused
from escrowmq.wire.bodies import JsonBody, decode_body
from escrowmq.wire.codes import ResponseCode
from escrowmq.wire.fastpath import Request

B = TypeVar("B", bound=JsonBody)


def body_of(kind: type[B], request: Request[Any]) -> B:
    try:
        return decode_body(kind, request.body)
    except BrokenBody as error:
        raise RequestRefused(ResponseCode.SYSTEM_ERROR, str(error)) from error
