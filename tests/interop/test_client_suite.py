"""The client's own tests once more, against Apache RocketMQ: the same functions, another broker.

`tests/e2e` runs them against ours. What RocketMQ alone can do is here: SQL filters, and operators'
questions that a broker passes on to its consumers. A few of them all run in CI, too: see
`test_client_short.py`.
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
from tests.support.clients import CONF, WAIT_S, Broker, numbered_bodies, receive, send
from tests.support.waiting import wait_until_async

pytestmark = [pytest.mark.apache, pytest.mark.nightly]

SETTINGS = {**CONF, "enablePropertyFilter": True, "autoCreateTopicEnable": True}
RUNNING, DIRECTLY, RESET, STATUS = 307, 309, 222, 223  # as an operator's tool asks a broker


class Apache(ApacheRocketMQ):
    """With what tests of the client ask of ours."""

    def client(self) -> Client:
        return Client(self.address)


def start(version: str, directory: Path) -> Apache:
    if reason := jars.find():
        pytest.skip(reason)
    try:
        jars.fetch(version)
    except jars.Unavailable as error:
        pytest.skip(str(error))
    return Apache(version, directory, SETTINGS)


@pytest.fixture(scope="module", params=jars.VERSIONS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Apache]:
    apache = start(request.param, tmp_path_factory.mktemp("apache"))
    with apache:
        yield apache


def take_over(module: ModuleType, names: Collection[str] = ()) -> None:
    """Its tests are tests here too; they find the broker of this file under the same name."""
    for name, test in list(vars(module).items()):
        if not name.startswith("test_") or not callable(test) or (names and name not in names):
            continue
        if "served" in test.__code__.co_varnames[: test.__code__.co_argcount]:
            assert name not in globals(), f"{name} is there twice"
            globals()[name] = test


for each in (
    test_broadcast,
    test_consumer,
    test_lite_consumer,
    test_orderly,
    test_push_consumer,
):
    take_over(each)
take_over(
    test_request_reply,
    {
        "test_each_request_gets_its_own_reply",
        "test_a_missing_reply_raises_and_a_late_one_is_dropped",
    },
)
take_over(
    test_producer,
    {
        "test_a_message_is_received_as_it_was_sent",
        "test_messages_with_one_sharding_key_go_to_one_queue",
        "test_rollback_is_not_raised_outside_the_block",
    },
)


async def test_an_sql_filter_is_the_broker_s(served: Broker) -> None:
    async with Producer(served.namesrv_address, group="p") as producer:
        for price in range(8):
            message = Message("priced", b"%d" % price, properties={"price": str(price)})
            await producer.send(message)
    subscribe = {"priced": SqlFilter("price BETWEEN 3 AND 5")}
    one = Consumer(served.namesrv_address, group="g-sql", subscribe=subscribe)
    async with one:
        assert sorted(await receive(one, 3)) == [b"3", b"4", b"5"]
    async with PullConsumer(served.namesrv_address, group="g-sql") as puller:
        found = []
        for queue in await puller.queues("priced"):
            found += (await puller.pull(queue, 0, SqlFilter("price > 6"))).messages
        assert [message.body for message in found] == [b"7"]
    bad = Consumer(
        served.namesrv_address, group="g-bad", subscribe={"priced": SqlFilter("price >")}
    )
    with pytest.raises(InvalidSubscription, match="price >"):
        async with bad:
            pass


async def test_an_operator_asks_through_the_broker(served: Broker) -> None:
    await send(served, "operated", *numbered_bodies(8))
    consumer = Consumer(served.namesrv_address, group="g-operated")
    seen: list[ReceivedMessage] = []

    @consumer.on("operated")
    async def handle(message: ReceivedMessage) -> None:
        seen.append(message)

    running = asyncio.create_task(consumer.run())
    await wait_until_async(lambda: len(seen) == 8)
    # Private: the state of a member has no public view.
    await consumer._rebalancer.commit()
    # Private: the state of a member has no public view.
    client_id = consumer._rebalancer.heartbeat.client_id

    def ask(code: int, **fields: object) -> bytes:
        with Client(served.address, timeout_s=WAIT_S) as client:
            return client.expect(code, fields).body

    told = await asyncio.to_thread(ask, RUNNING, consumerGroup="g-operated", clientId=client_id)
    assert b"PROP_CONSUME_TYPE" in told
    assert b'"topic": "operated"' in told

    told = await asyncio.to_thread(ask, STATUS, topic="operated", group="g-operated")
    table = told[told.index(b"consumerTable") :]
    assert sum(decode_queue_offsets(table).values()) == 8

    told = await asyncio.to_thread(
        ask,
        DIRECTLY,
        consumerGroup="g-operated",
        clientId=client_id,
        msgId=seen[0].offset_id,
        brokerName=seen[0].broker,
    )
    assert json.loads(told)["consumeResult"] == "CR_SUCCESS"
    assert len(seen) == 9

    await asyncio.to_thread(
        ask, RESET, topic="operated", group="g-operated", timestamp=0, isForce=True
    )
    await wait_until_async(lambda: len(seen) == 17)
    await consumer.close()
    await running
