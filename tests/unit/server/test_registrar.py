"""The registration of a broker with a name server that refuses, disconnects and comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from escrowmq.message.topic_config import TopicConfig
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_response, encode_success
from escrowmq.server.namesrv import Registrar
from tests.support.namesrv_requests import A, data_version, topic_config
from tests.support.scripted_server import ScriptedServer
from tests.support.waiting import wait_until_async

REGISTER = RequestCode.REGISTER_BROKER
UNREGISTER = RequestCode.UNREGISTER_BROKER


@contextlib.asynccontextmanager
async def running(address: str, topics: list[TopicConfig]) -> AsyncIterator[Registrar]:
    """Run a registrar that does not repeat its registration by itself, and cancel it at the end."""
    registrar = Registrar(address, A, lambda: (topics, data_version()), interval_s=3600)
    task = asyncio.create_task(registrar.run())
    try:
        yield registrar
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def codes(server: ScriptedServer) -> list[int]:
    return [request.head.code for request in server.requests]


async def test_a_broker_registers_again_when_its_topics_change_and_unregisters_at_the_end() -> None:
    topics = [topic_config("orders")]
    with ScriptedServer(encode_success) as server:
        async with running(server.address, topics) as registrar:
            await registrar.registered.wait()
            topics.append(topic_config("bills"))
            registrar.topics_changed()
            await wait_until_async(lambda: len(server.requests) == 2, "a second registration")
    assert codes(server) == [REGISTER, REGISTER, UNREGISTER]
    first, second, _ = server.requests
    assert b"orders" in first.body
    assert b"bills" not in first.body
    assert b"bills" in second.body
    assert server.connection_count == 1


async def test_a_refused_registration_is_logged_and_repeated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse_first(request: Request[Any]) -> bytes:
        code = ResponseCode.SYSTEM_ERROR if len(server.requests) == 1 else ResponseCode.SUCCESS
        return encode_response(request, code=code, remark="too few topics")

    with ScriptedServer(refuse_first) as server:
        async with running(server.address, []) as registrar:
            await registrar.registered.wait()
    assert codes(server) == [REGISTER, REGISTER, UNREGISTER]
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert f"will retry name_server={server.address}" in warning
    assert "too few topics" in warning


async def test_a_registrar_reconnects_after_the_name_server_closed_the_connection() -> None:
    with ScriptedServer(encode_success) as server:
        async with running(server.address, []) as registrar:
            await registrar.registered.wait()
            server.disconnect_all()
            registrar.topics_changed()
            await wait_until_async(lambda: server.connection_count == 2, "a second connection")
            await wait_until_async(lambda: codes(server)[1:] == [REGISTER], "a second registration")
