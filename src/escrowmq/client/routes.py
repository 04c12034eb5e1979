"""Which broker has which queue of a topic. Asked of the name servers, kept for a minute at most."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from escrowmq.client.connection import ConnectionPool
from escrowmq.client.messages import MessageQueue
from escrowmq.clock import Clock
from escrowmq.errors import (
    BrokenBody,
    ClientClosed,
    NoRoute,
    NotSent,
    RequestRefused,
    TransportError,
    WrongProcess,
)
from escrowmq.message.names import TEMPLATE_TOPIC
from escrowmq.parsing import parse_servers
from escrowmq.remoting.bodies import ClusterInfo, TopicRoute, decode_body
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.connection import Reply
from escrowmq.remoting.headers import Header
from escrowmq.remoting.headers_admin import GetRoute

log = logging.getLogger(__name__)

ROUTE_TTL_S: Final = 60.0  # for a client that does not refresh them by itself, every half minute
REQUEST_TIMEOUT_S: Final = 3.0
DEFAULT_QUEUE_COUNT: Final = 4
READ, WRITE, MASTER = 4, 2, 0


@dataclass(frozen=True, slots=True)
class Route:
    topic: str
    writable_queues: tuple[MessageQueue, ...]
    readable_queues: tuple[MessageQueue, ...]
    broker_addresses: dict[str, str]  # of the brokers' masters, by name
    is_template: bool = False  # the topic is not there yet


class Routes:
    """`servers`: addresses of name servers, as `parse_servers` reads them."""

    def __init__(self, servers: str | Sequence[str], pool: ConnectionPool, clock: Clock) -> None:
        self._servers = parse_servers(servers)
        self._pool = pool
        self._clock = clock
        self._next_server = itertools.count()
        self._routes: dict[str, tuple[float, Route]] = {}
        self._fetching: dict[str, asyncio.Task[Route]] = {}

    async def get(self, topic: str, *, fresh: bool = False) -> Route:
        """Raises NoRoute, or TransportError if no name server answers."""
        known = self._routes.get(topic)
        now_s = self._clock.elapsed_s()
        if known is not None and not fresh and now_s - known[0] < ROUTE_TTL_S:
            return known[1]
        try:
            route = await self._fetch_once(topic)
        except NoRoute:
            raise  # the topic is gone, or not there yet
        except TransportError:
            if known is None or fresh:
                raise
            log.warning("no name server answers, the old route stays topic=%s", topic)
            route = known[1]
        self._routes[topic] = now_s, route
        return route

    async def get_for_writing(self, topic: str, *, fresh: bool = False) -> Route:
        """As `of`; of a topic that is not there yet, where it may be made."""
        try:
            return await self.get(topic, fresh=fresh)
        except NoRoute:
            template = await self.get(TEMPLATE_TOPIC)
            queues = [
                queue for queue in template.writable_queues if queue.queue_id < DEFAULT_QUEUE_COUNT
            ]
            made = tuple(queue._replace(topic=topic) for queue in queues)
            return Route(topic, made, made, template.broker_addresses, is_template=True)

    def cached(self, topic: str) -> Route | None:
        """If it is fresh: the short way for those who send."""
        found = self._routes.get(topic)
        if found is None or self._clock.elapsed_s() - found[0] >= ROUTE_TTL_S:
            return None
        return found[1]

    async def refresh(self) -> None:
        """Ask again for all that were asked for. What nobody answers for stays as it is."""
        for topic in list(self._routes):
            try:
                await self.get(topic, fresh=True)
            except NoRoute:
                self.invalidate(topic)
            except TransportError as error:
                log.warning("route not refreshed topic=%s: %s", topic, error)

    def invalidate(self, topic: str) -> None:
        self._routes.pop(topic, None)

    def broker_addresses(self) -> dict[str, str]:
        """The masters of all topics that were asked for: name and address."""
        return {
            name: address
            for _, route in self._routes.values()
            for name, address in route.broker_addresses.items()
        }

    async def _fetch_once(self, topic: str) -> Route:
        """Whoever asks while somebody asks waits for the same answer."""
        asking = self._fetching.get(topic)
        if asking is None:
            asking = self._fetching[topic] = asyncio.ensure_future(self._fetch(topic))
            asking.add_done_callback(lambda task: self._fetch_done(topic, task))
        return await asyncio.shield(asking)

    def _fetch_done(self, topic: str, task: asyncio.Task[Route]) -> None:
        del self._fetching[topic]
        if not task.cancelled():
            task.exception()  # those who waited have it; if all of them left, nobody has to

    async def all_master_addresses(self) -> set[str]:
        """The addresses of all brokers that the name servers know."""
        reply = await self._call_any(RequestCode.GET_BROKER_CLUSTER_INFO, None)
        brokers = decode_body(ClusterInfo, reply.body).broker_addr_table.values()
        return {b.broker_addrs[MASTER] for b in brokers if MASTER in b.broker_addrs}

    async def _fetch(self, topic: str) -> Route:
        fields = GetRoute(topic=topic, accept_standard_json_only=True)
        try:
            reply = await self._call_any(RequestCode.GET_ROUTEINFO_BY_TOPIC, fields)
        except RequestRefused as error:
            raise NoRoute(f"no broker has a topic {topic}") from error
        return parse_route(topic, decode_body(TopicRoute, reply.body))

    async def _call_any(self, code: int, fields: Header | None) -> Reply:
        """One name server after the other, until one answers."""
        first = next(self._next_server)
        failure: NotSent | None = None
        for number in range(len(self._servers)):
            address = self._servers[(first + number) % len(self._servers)]
            try:
                line = await self._pool.get(address)
                return await line.call_checked(code, fields, timeout_s=REQUEST_TIMEOUT_S)
            except RequestRefused as error:
                if error.code == ResponseCode.TOPIC_NOT_EXIST:
                    raise
                failure = NotSent(f"{address}: {error}")
            except (ClientClosed, WrongProcess):
                raise
            except (TransportError, BrokenBody) as error:
                failure = NotSent(str(error))
        assert failure is not None
        raise failure


def parse_route(topic: str, topic_route: TopicRoute, *, include_replicas: bool = False) -> Route:
    """Return the queues that a name server lists for a topic, sorted by broker.

    A broker without a master is left out, because it takes no sends. With `include_replicas` its
    queues can be read from the replica with the lowest number.
    """
    masters = {
        broker.broker_name: broker.broker_addrs[MASTER]
        for broker in topic_route.broker_datas
        if MASTER in broker.broker_addrs
    }
    readers = masters
    if include_replicas:
        readers = {
            broker.broker_name: broker.broker_addrs[min(broker.broker_addrs)]
            for broker in topic_route.broker_datas
            if broker.broker_addrs
        }
    writable: list[MessageQueue] = []
    readable: list[MessageQueue] = []
    for entry in sorted(topic_route.queue_datas, key=lambda entry: entry.broker_name):
        for permission, count, addresses, queues in (
            (WRITE, entry.write_queue_nums, masters, writable),
            (READ, entry.read_queue_nums, readers, readable),
        ):
            address = addresses.get(entry.broker_name)
            if entry.perm & permission and address is not None:
                queues += (
                    MessageQueue(topic, entry.broker_name, queue_id, address)
                    for queue_id in range(count)
                )
    return Route(topic, tuple(writable), tuple(readable), masters)
