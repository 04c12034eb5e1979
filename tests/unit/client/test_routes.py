"""Routes: the name servers know the address of a broker, and a queue has only its name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from escrowmq import MessageQueue, PullConsumer
from escrowmq.client.connection import ConnectionPool
from escrowmq.client.routes import ROUTE_TTL_S, Routes
from escrowmq.clock import ManualClock
from escrowmq.errors import NoRoute
from escrowmq.remoting.codes import RequestCode
from tests.support.fake_cluster import FakeCluster


@asynccontextmanager
async def routes_of(cluster: FakeCluster, clock: ManualClock) -> AsyncIterator[Routes]:
    pool = ConnectionPool(lambda connection, request: None)
    try:
        yield Routes(cluster.address, pool, clock)
    finally:
        await pool.close()


async def test_the_address_of_a_queue_is_looked_up_once() -> None:
    async with FakeCluster("a", "b") as cluster, routes_of(cluster, ManualClock()) as routes:
        for _ in range(2):
            for broker in "ab":
                address = await routes.master_address(MessageQueue("t", broker, 0))
                assert address == cluster[broker].address
        assert cluster.route_request_count == 1


async def test_a_queue_on_an_unknown_broker_has_no_route() -> None:
    async with FakeCluster("a") as cluster, routes_of(cluster, ManualClock()) as routes:
        with pytest.raises(NoRoute, match="no queues on broker c"):
            await routes.master_address(MessageQueue("t", "c", 0))


async def test_the_last_known_address_is_used_when_a_broker_is_no_longer_listed() -> None:
    clock = ManualClock()
    async with FakeCluster("a") as cluster, routes_of(cluster, clock) as routes:
        queue = MessageQueue("t", "a", 0)
        await routes.master_address(queue)
        cluster["a"].is_listed = False
        clock.advance(ms=int(ROUTE_TTL_S * 1000))
        assert await routes.master_address(queue) == cluster["a"].address
        assert routes.addresses_in_use() == set()


async def test_a_consumer_accepts_a_queue_that_the_user_created() -> None:
    async with (
        FakeCluster("a") as cluster,
        PullConsumer(cluster.address, group="g") as consumer,
    ):
        await consumer.commit(MessageQueue("t", "a", 3), 7)
        [request] = cluster["a"].received(RequestCode.UPDATE_CONSUMER_OFFSET)
        fields = request.head.fields
        assert (fields.queue_id, fields.commit_offset) == (3, 7)
