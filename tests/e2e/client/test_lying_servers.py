"""Whatever a server answers: every operation of a client works or raises one of our errors, and
returns. A failure prints its seed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from escrowmq import (
    Consumer,
    LiteConsumer,
    Message,
    MessageQueue,
    Producer,
    PullConsumer,
    Verdict,
)
from escrowmq.admin import messages as admin_messages
from escrowmq.admin import offsets, queries
from escrowmq.admin import transactions as admin_transactions
from escrowmq.admin.cluster import Cluster
from escrowmq.client import callbacks, heartbeat, routes
from escrowmq.client.consumer import queue_client, rebalance
from escrowmq.client.producer import transaction
from escrowmq.errors import EscrowError
from escrowmq.remoting.headers import ListTransactions
from tests.support.brokers import LocalServer
from tests.support.lying_relay import LyingRelay, random_lie

pytestmark = pytest.mark.slow

TOPIC = "lies"
TIMEOUT_S = 0.25  # of a request: a lie may be that there is no response
HANG_S = 60.0
EXAMPLES = settings().max_examples // 6  # of the profile; one takes half a second


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer() as server:
        asyncio.run(fill(server))
        yield server


async def fill(server: LocalServer) -> None:
    """Store messages, so that there is something to lie about."""
    async with Producer(server.namesrv_address, group="honest") as producer:
        await producer.send_batch([Message(TOPIC, b"x" * 200) for _ in range(20)])
        for compression in ("zlib", "lz4", "zstd"):
            async with Producer(
                server.namesrv_address, group="honest", compression=compression
            ) as compressing:
                await compressing.send(Message(TOPIC, b"y" * 20_000))


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (heartbeat, routes, queue_client):
        monkeypatch.setattr(module, "RESPONSE_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(queue_client, "PULL_TIMEOUT_MARGIN_S", TIMEOUT_S)
    monkeypatch.setattr(transaction, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(rebalance, "REBALANCE_RETRY_S", 0.01)
    monkeypatch.setattr(callbacks, "RESTART_PAUSE_S", 0.01)
    logging.getLogger("escrowmq").setLevel(logging.CRITICAL + 1)


@pytest.fixture(autouse=True)
def reset_logging() -> Iterator[None]:
    yield
    logging.getLogger("escrowmq").setLevel(logging.NOTSET)


async def attempt(operation: Awaitable[object]) -> None:
    """Await an operation, which may fail with one of our errors only."""
    try:
        async with asyncio.timeout(HANG_S):
            await operation
    except EscrowError:
        pass


async def send(address: str) -> None:
    producer = Producer(address, group="g", timeout_s=TIMEOUT_S, retries=1)
    producer.checker("*")(lambda message: Verdict.UNKNOWN)
    try:
        await attempt(producer.send(Message(TOPIC, b"a")))
        await attempt(producer.send_batch([Message(TOPIC, b"a"), Message(TOPIC, b"b")]))
        await attempt(producer.send_oneway(Message(TOPIC, b"a")))
        await attempt(producer.queues(TOPIC))
        await attempt(producer.request(Message(TOPIC, b"a"), timeout_s=TIMEOUT_S))
        await attempt(transact(producer))
    finally:
        await attempt(producer.close())


async def transact(producer: Producer) -> None:
    async with producer.transaction(Message(TOPIC, b"a")) as tx:
        await tx.send(Message(TOPIC, b"b"))


async def pull(address: str) -> None:
    puller = PullConsumer(address, group="g")
    queue = MessageQueue(TOPIC, "broker-a", 0)
    try:
        await attempt(puller.queues(TOPIC))
        await attempt(puller.assigned_queues(TOPIC))
        await attempt(puller.pull(queue, 0))
        await attempt(puller.committed(queue))
        await attempt(puller.commit(queue, 1))
        await attempt(puller.earliest_offset(queue))
        await attempt(puller.latest_offset(queue))
        await attempt(puller.offset_at_time(queue, datetime.now(UTC)))
    finally:
        await attempt(puller.close())


async def poll(address: str) -> None:
    consumer = LiteConsumer(address, group="g", subscribe={TOPIC: "*"})
    try:
        await attempt(consumer.__aenter__())
        await attempt(consumer.poll(TIMEOUT_S))
        await attempt(consumer.commit())
    finally:
        await attempt(consumer.close())


async def consume(address: str) -> None:
    consumer = Consumer(address, group="g", subscribe={TOPIC: "*"}, orderly=True)
    try:
        await attempt(consumer.__aenter__())
        await attempt(receive_one(consumer))
    finally:
        await attempt(consumer.close())


async def receive_one(consumer: Consumer) -> None:
    try:
        async with asyncio.timeout(TIMEOUT_S):
            await consumer.receive()
    except TimeoutError:
        return  # it is waiting for better answers, as it should


async def administrate(address: str) -> None:
    await asyncio.to_thread(ask_everything, address)


def ask_everything(address: str) -> None:
    with Cluster(address, timeout_s=TIMEOUT_S) as cluster:
        for question in QUESTIONS:
            try:
                question(cluster)
            except EscrowError:
                continue


QUESTIONS: list[Callable[[Cluster], object]] = [
    Cluster.topics,
    Cluster.info,
    Cluster.server_names,
    lambda cluster: cluster.route(TOPIC, include_replicas=True),
    lambda cluster: cluster.ask_all(queries.topic_configs),
    lambda cluster: cluster.ask_all(queries.system_topics),
    lambda cluster: cluster.ask_all(queries.group_configs),
    lambda cluster: cluster.ask_all(queries.all_progress),
    lambda cluster: cluster.ask_all(queries.broker_runtime),
    lambda cluster: cluster.ask_all(queries.broker_settings),
    lambda cluster: cluster.ask_all(lambda c: queries.topic_offsets(c, [TOPIC])),
    lambda cluster: cluster.ask_all(lambda c: queries.group_progress(c, "g")),
    lambda cluster: cluster.ask_all(lambda c: queries.search_offset(c, TOPIC, 0, 1)),
    lambda cluster: cluster.ask_all(lambda c: queries.consumer_connections(c, ["g"])),
    lambda cluster: admin_messages.find_by_offset(cluster, TOPIC, 0, 0),
    lambda cluster: admin_messages.find_by_unique_key(cluster, "k", TOPIC),
    lambda cluster: admin_messages.MessageTail(
        cluster, admin_messages.TailRequest(TOPIC, offsets.EARLIEST)
    ).poll(),
    lambda cluster: offsets.plan_reset(cluster, "g", TOPIC, offsets.EARLIEST),
    lambda cluster: admin_transactions.transaction_cursors(cluster),
    lambda cluster: list(admin_transactions.list_transactions(cluster, [ListTransactions()])),
    lambda cluster: admin_transactions.transaction_histories(cluster, "t"),
]


@pytest.mark.parametrize("operation", [send, pull, poll, consume, administrate])
@settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32 - 1))
def test_an_operation_works_or_raises_one_of_our_errors(
    server: LocalServer, operation: Callable[[str], Awaitable[None]], seed: int
) -> None:
    unexpected: list[object] = []

    async def run() -> None:
        # What a task of the client raises and nobody awaits is reported here.
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: unexpected.append(context)
        )
        async with LyingRelay(server, random_lie(seed)) as relay:
            await operation(relay.namesrv_address)

    asyncio.run(run())
    assert unexpected == []
