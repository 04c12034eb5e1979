"""Requests of a broker to a consumer: state, offsets, a reset, processing one message."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, cast

import pytest

from escrowmq import Consumer, ReceivedMessage
from escrowmq.client.connection import ClientConnection
from escrowmq.client.consumer.broker_requests import decode_queue_offsets, encode_queue_map
from escrowmq.client.messages import MessageQueue
from escrowmq.errors import RequestRefused
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.connection import Connection, Response
from escrowmq.remoting.headers import (
    ConsumeMessageDirectly,
    GetConsumerRunningInfo,
    GetConsumerStatus,
    Header,
    PullMessage,
    ResetConsumerOffset,
)
from escrowmq.remoting.requests import Request
from tests.support.brokers import LocalServer
from tests.support.clients import CONF, WAIT_S, Broker, numbered_bodies, send
from tests.support.waiting import wait_until_async

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[Broker]:
    with LocalServer(CONF) as server:
        yield server


class _BrokerSide:
    """The broker's end of a connection: sends a request and waits for the response."""

    def __init__(self) -> None:
        self._connection = Connection()
        self._response = asyncio.get_running_loop().create_future()

    def write(self, data: bytes) -> None:
        self._connection.receive(data)
        self._response.set_result(next(iter(self._connection.events())))

    async def request(
        self, consumer: Consumer, code: RequestCode, fields: Header, body: bytes = b""
    ) -> Response:
        client_side = Connection()
        client_side.receive(self._connection.call(code, fields, body, deadline_s=WAIT_S)[1])
        request = cast("Request[Any]", next(iter(client_side.events())))
        # The private handler: a broker sends these requests only for an operator.
        consumer._broker_requests.on_request(cast("ClientConnection", self), request)
        async with asyncio.timeout(WAIT_S):
            return cast("Response", await self._response)


async def test_a_consumer_reports_its_state_and_resets_its_offsets(server: Broker) -> None:
    await send(server, "inspected", *numbered_bodies(8))
    consumer = Consumer(server.namesrv_address, group="g-inspected")
    seen: list[bytes] = []

    @consumer.on("inspected")
    async def handle(message: ReceivedMessage) -> None:
        seen.append(message.body)

    running = asyncio.create_task(consumer.run())
    await wait_until_async(lambda: len(seen) == 8)
    # Private: the state of a member has no public view.
    client_id = consumer._rebalancer.heartbeat.client_id

    response = await _BrokerSide().request(
        consumer,
        RequestCode.GET_CONSUMER_RUNNING_INFO,
        GetConsumerRunningInfo(consumer_group="g-inspected", client_id=client_id),
    )
    assert response.command.code == 0
    assert b'"PROP_CONSUME_TYPE": "CONSUME_PASSIVELY"' in bytes(response.body)
    assert bytes(response.body).count(b'"cachedMsgCount"') == len(consumer.assigned_queues)

    status = GetConsumerStatus(topic="inspected", group="g-inspected")
    code = RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT
    response = await _BrokerSide().request(consumer, code, status)
    offsets = decode_queue_offsets(bytes(response.body))
    assert sum(offsets.values()) == 8

    reset = ResetConsumerOffset(topic="inspected", group="g-inspected", timestamp=0)
    queues = [queue for queue in consumer.assigned_queues if queue.topic == "inspected"]
    body = b'{"offsetTable":%b}' % encode_queue_map([(queue, "0") for queue in queues])
    response = await _BrokerSide().request(
        consumer, RequestCode.RESET_CONSUMER_CLIENT_OFFSET, reset, body
    )
    assert response.command.code == 0
    await wait_until_async(lambda: len(seen) == 16)
    assert sorted(seen) == sorted(numbered_bodies(8) * 2)

    other_group = GetConsumerStatus(topic="inspected", group="another")
    assert (await _BrokerSide().request(consumer, code, other_group)).command.code == 1
    await consumer.close()
    await running


async def test_an_operator_can_have_one_message_processed(server: Broker) -> None:
    await send(server, "direct", b"x")
    consumer = Consumer(server.namesrv_address, group="g-direct")
    seen: list[bytes] = []

    @consumer.on("direct")
    async def handle(message: ReceivedMessage) -> None:
        seen.append(message.body)
        if len(seen) == 3:
            raise OSError("planted")

    running = asyncio.create_task(consumer.run())
    await wait_until_async(lambda: len(seen) == 1)
    # Private: the state of a member has no public view.
    fetchers = consumer._rebalancer.fetchers.values()
    fetcher = next(fetcher for fetcher in fetchers if fetcher.commit_offset)
    # Private: the test needs the connection that the consumer uses.
    connection = await consumer._rebalancer.heartbeat.connect(fetcher.queue)
    record = await _pull_record(connection, fetcher.queue)
    fields = ConsumeMessageDirectly(consumer_group="g-direct", broker_name=fetcher.queue.broker)
    results = []
    for _ in range(2):
        response = await _BrokerSide().request(
            consumer, RequestCode.CONSUME_MESSAGE_DIRECTLY, fields, record
        )
        results.append(json.loads(bytes(response.body))["consumeResult"])
    assert results == ["CR_SUCCESS", "CR_THROW_EXCEPTION"]
    assert seen == [b"x"] * 3
    await consumer.close()
    await running


async def _pull_record(connection: ClientConnection, queue: MessageQueue) -> bytes:
    """Return the first record of a queue as the broker stores it."""
    fields = PullMessage(
        consumer_group="any",
        topic=queue.topic,
        queue_id=queue.queue_id,
        queue_offset=0,
        max_msg_nums=1,
        sys_flag=4,
        subscription="*",
    )
    return bytes(
        (await connection.call_checked(RequestCode.PULL_MESSAGE, fields, timeout_s=WAIT_S)).body
    )


def test_offsets_are_decoded_in_the_forms_for_java_and_for_cpp_clients() -> None:
    java = b'{"offsetTable":{{"brokerName":"b","queueId":1,"topic":"t"}:12}}'
    cpp = b'{"offsetTable":[{"brokerName":"b","queueId":1,"topic":"t","offset":12}]}'
    assert decode_queue_offsets(java) == decode_queue_offsets(cpp) == {("t", "b", 1): 12}
    assert decode_queue_offsets(b'{"offsetTable":{}}') == {}
    for malformed in (b"", b"{", b'{"offsetTable":[{}]}', b"\xff"):
        with pytest.raises(RequestRefused):
            decode_queue_offsets(malformed)
