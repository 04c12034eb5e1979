"""SendPipeline over real sockets: which sends wait, are repeated, or raise an error."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from escrowmq.client.access import NO_ACCESS
from escrowmq.errors import OutcomeUnknown, RequestRefused
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import SendMessageV2
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_response
from escrowmq.spark.send_pipeline import SendPipeline
from tests.support.scripted_server import ScriptedServer

HEADER = SendMessageV2(producer_group="g", topic="orders", queue_id=0)
KIB = 1024


def open_pipeline(server: ScriptedServer, *, timeout_s: float = 30.0) -> closing[SendPipeline]:
    """Return a pipeline that allows 100 KiB in flight."""
    return closing(
        SendPipeline(server.address, NO_ACCESS, timeout_s=timeout_s, in_flight_bytes=100 * KIB)
    )


def send(pipeline: SendPipeline, body: bytes) -> None:
    pipeline.send(RequestCode.SEND_BATCH_MESSAGE, HEADER, [body], len(body))


def bodies(server: ScriptedServer) -> list[bytes]:
    return [bytes(request.body) for request in server.requests]


def respond_in_turn(*responses: Callable[[Request[Any]], bytes | None]) -> Any:
    """Return a responder that uses the given ones in turn, and then repeats the last one."""
    remaining = list(responses)

    def respond(request: Request[Any]) -> bytes | None:
        response = remaining.pop(0) if len(remaining) > 1 else remaining[0]
        return response(request)

    return respond


def store(request: Request[Any]) -> bytes:
    return encode_response(request)


def ignore(request: Request[Any]) -> bytes:
    return b""


def disconnect(request: Request[Any]) -> None:
    return None


def refuse_with(code: int) -> Callable[[Request[Any]], bytes]:
    return lambda request: encode_response(request, code=code, remark="not now")


def test_a_send_waits_only_while_too_many_bytes_are_in_flight() -> None:
    with ScriptedServer(ignore) as server, open_pipeline(server, timeout_s=0.1) as pipeline:
        for _ in range(3):
            send(pipeline, bytes(30 * KIB))
        with pytest.raises(OutcomeUnknown):
            send(pipeline, bytes(30 * KIB))


def test_sends_without_a_response_are_repeated_in_order() -> None:
    respond = respond_in_turn(store, ignore, disconnect, store)
    with ScriptedServer(respond) as server, open_pipeline(server) as pipeline:
        for body in (b"1", b"2", b"3"):
            send(pipeline, body)
        pipeline.flush()
    assert bodies(server) == [b"1", b"2", b"3", b"2", b"3"]


@pytest.mark.parametrize("code", [ResponseCode.SYSTEM_BUSY, ResponseCode.SERVICE_NOT_AVAILABLE])
def test_a_send_that_is_refused_temporarily_is_repeated(code: int) -> None:
    respond = respond_in_turn(refuse_with(code), store)
    with ScriptedServer(respond) as server, open_pipeline(server) as pipeline:
        send(pipeline, b"1")
        pipeline.flush()
    assert bodies(server) == [b"1", b"1"]


def test_a_send_whose_flush_was_slow_counts_as_stored() -> None:
    respond = refuse_with(ResponseCode.FLUSH_DISK_TIMEOUT)
    with ScriptedServer(respond) as server, open_pipeline(server) as pipeline:
        send(pipeline, b"1")
        pipeline.flush()
    assert bodies(server) == [b"1"]


def test_a_refusal_is_raised_with_the_address_of_the_broker() -> None:
    respond = refuse_with(ResponseCode.NO_PERMISSION)
    with ScriptedServer(respond) as server, open_pipeline(server) as pipeline:
        send(pipeline, b"1")
        with pytest.raises(RequestRefused, match=f"{server.address}: not now"):
            pipeline.flush()
