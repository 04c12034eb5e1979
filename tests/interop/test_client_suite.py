"""Run the tests of our client, which `tests/e2e` runs against our broker, against Apache RocketMQ.

Additional tests here cover SQL filters, and requests of an operator that the broker forwards to its
consumers. CI runs a few of the tests: see `test_client_short.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from escrowmq import Consumer, Message, Producer, PullConsumer, ReceivedMessage, SqlFilter
from escrowmq.client.consumer.broker_requests import decode_queue_offsets
from escrowmq.errors import InvalidSubscription
from tests.e2e.client import (
    test_broadcast,
    test_consumer,
    test_lite_consumer,
    test_orderly,
    test_producer,
    test_push_consumer,
    test_request_reply,
)
from tests.interop import jars
from tests.interop.apache import ApacheRocketMQ
from tests.interop.remoting import Client
from tests.interop.skipping import call_or_skip
from tests.support.clients import CONF, WAIT_S, Broker, numbered_bodies, receive, send
from tests.support.waiting import wait_until_async

pytestmark = [pytest.mark.apache, pytest.mark.nightly]

SETTINGS = {**CONF, "enablePropertyFilter": True, "autoCreateTopicEnable": True}
# Requests of an operator's tool to a broker.
GET_RUNNING_INFO, CONSUME_DIRECTLY, RESET_OFFSETS, GET_CONSUMER_STATUS = 307, 309, 222, 223


class Apache(ApacheRocketMQ):
    """A broker with the methods that the tests of our client use."""

    def client(self) -> Client:
        return Client(self.address)


def new_broker(version: str, directory: Path) -> Apache:
    """Return a broker that is not started yet. Skips the test if it cannot run here."""
    call_or_skip(f"RocketMQ {version}", lambda: jars.fetch(version))
    return Apache(version, directory, SETTINGS)


@pytest.fixture(scope="module", params=jars.VERSIONS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Apache]:
    apache = new_broker(request.param, tmp_path_factory.mktemp("apache"))
    with apache:
        yield apache


def include_tests(module: ModuleType, names: Collection[str] = ()) -> None:
    """Add tests of a module to this one, all of them or those with these names.

    They use the fixture `server` of this module, which has the name of theirs.
    """
    for name, test in list(vars(module).items()):
        if not name.startswith("test_") or not callable(test) or (names and name not in names):
            continue
        if "server" in test.__code__.co_varnames[: test.__code__.co_argcount]:
            assert name not in globals(), f"there are two tests named {name}"
            globals()[name] = test


for module in (
    test_broadcast,
    test_consumer,
    test_lite_consumer,
    test_orderly,
    test_push_consumer,
):
    include_tests(module)
include_tests(
    test_request_reply,
    {
        "test_each_request_gets_its_own_reply",
        "test_a_missing_reply_raises_and_a_late_one_is_dropped",
    },
)
include_tests(
    test_producer,
    {
        "test_a_message_is_received_as_it_was_sent",
        "test_messages_with_one_sharding_key_go_to_one_queue",
        "test_rollback_is_not_raised_outside_the_block",
    },
)


async def test_the_broker_applies_an_sql_filter(server: Broker) -> None:
    async with Producer(server.namesrv_address, group="p") as producer:
        for price in range(8):
            message = Message("priced", b"%d" % price, properties={"price": str(price)})
            await producer.send(message)
    subscribe = {"priced": SqlFilter("price BETWEEN 3 AND 5")}
    consumer = Consumer(server.namesrv_address, group="g-sql", subscribe=subscribe)
    async with consumer:
        assert sorted(await receive(consumer, 3)) == [b"3", b"4", b"5"]
    async with PullConsumer(server.namesrv_address, group="g-sql") as puller:
        messages = []
        for queue in await puller.queues("priced"):
            messages += (await puller.pull(queue, 0, SqlFilter("price > 6"))).messages
        assert [message.body for message in messages] == [b"7"]
    with_bad_filter = Consumer(
        server.namesrv_address, group="g-bad", subscribe={"priced": SqlFilter("price >")}
    )
    with pytest.raises(InvalidSubscription, match="price >"):
        async with with_bad_filter:
            pass


async def test_requests_of_an_operator_reach_the_consumer_through_the_broker(
    server: Broker,
) -> None:
    await send(server, "operated", *numbered_bodies(8))
    consumer = Consumer(server.namesrv_address, group="g-operated")
    received: list[ReceivedMessage] = []

    @consumer.on("operated")
    async def handle(message: ReceivedMessage) -> None:
        received.append(message)

    running = asyncio.create_task(consumer.run())
    await wait_until_async(lambda: len(received) == 8)
    # Private: the state of a member has no public view.
    await consumer._rebalancer.commit()
    # Private: the state of a member has no public view.
    client_id = consumer._rebalancer.heartbeat.client_id

    def request(code: int, **fields: object) -> bytes:
        with Client(server.address, timeout_s=WAIT_S) as client:
            return client.expect(code, fields).body

    running_info = await asyncio.to_thread(
        request, GET_RUNNING_INFO, consumerGroup="g-operated", clientId=client_id
    )
    assert b"PROP_CONSUME_TYPE" in running_info
    assert b'"topic": "operated"' in running_info

    status = await asyncio.to_thread(
        request, GET_CONSUMER_STATUS, topic="operated", group="g-operated"
    )
    table = status[status.index(b"consumerTable") :]
    assert sum(decode_queue_offsets(table).values()) == 8

    result = await asyncio.to_thread(
        request,
        CONSUME_DIRECTLY,
        consumerGroup="g-operated",
        clientId=client_id,
        msgId=received[0].offset_id,
        brokerName=received[0].broker,
    )
    assert json.loads(result)["consumeResult"] == "CR_SUCCESS"
    assert len(received) == 9

    await asyncio.to_thread(
        request, RESET_OFFSETS, topic="operated", group="g-operated", timestamp=0, isForce=True
    )
    await wait_until_async(lambda: len(received) == 17)
    await consumer.close()
    await running
