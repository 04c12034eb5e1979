"""Which broker has which queue of a topic. Asked of the name servers, kept for a minute at most."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from escrowmq.client.connection import Lines, Reply
from escrowmq.client.messages import Queue
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
from escrowmq.remoting.bodies import ClusterInfo, TopicRoute, decode_body
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import Header
from escrowmq.remoting.headers_admin import GetRoute

log = logging.getLogger(__name__)

FRESH_S: Final = 60.0  # for a client that does not refresh them by itself, every half minute
ASK_S: Final = 3.0
TEMPLATE: Final = "TBW102"  # an unknown topic is made from it by the first send
QUEUES_MADE: Final = 4
READ, WRITE, MASTER = 4, 2, 0


@dataclass(frozen=True, slots=True)
class Route:
    topic: str
    writable: tuple[Queue, ...]
    readable: tuple[Queue, ...]
    addresses: dict[str, str]  # of the brokers' masters, by name
    is_template: bool = False  # the topic is not there yet


class Routes:
    """`servers`: addresses with semicolons between them, or several."""

    def __init__(self, servers: str | Sequence[str], lines: Lines, clock: Clock) -> None:
        given = servers.split(";") if isinstance(servers, str) else servers
        self._servers = [address.strip() for address in given if address.strip()]
        if not self._servers:
            raise ValueError("a client needs the address of a name server, like 127.0.0.1:9876")
        self._lines = lines
        self._clock = clock
        self._next = itertools.count()
        self._routes: dict[str, tuple[float, Route]] = {}
        self._asking: dict[str, asyncio.Task[Route]] = {}

    async def of(self, topic: str, *, fresh: bool = False) -> Route:
        """Raises NoRoute, or TransportError if no name server answers."""
        known = self._routes.get(topic)
        now_s = self._clock.elapsed_s()
        if known is not None and not fresh and now_s - known[0] < FRESH_S:
            return known[1]
        try:
            route = await self._ask_once(topic)
        except NoRoute:
            raise  # the topic is gone, or not there yet
        except TransportError:
            if known is None or fresh:
                raise
            log.warning("no name server answers, the old route stays topic=%s", topic)
            route = known[1]
        self._routes[topic] = now_s, route
        return route

    async def to_write(self, topic: str, *, fresh: bool = False) -> Route:
        """As `of`; of a topic that is not there yet, where it may be made."""
        try:
            return await self.of(topic, fresh=fresh)
        except NoRoute:
            template = await self.of(TEMPLATE)
            queues = [queue for queue in template.writable if queue.queue_id < QUEUES_MADE]
            made = tuple(queue._replace(topic=topic) for queue in queues)
            return Route(topic, made, made, template.addresses, is_template=True)

    def known(self, topic: str) -> Route | None:
        """If it is fresh: the short way for those who send."""
        found = self._routes.get(topic)
        if found is None or self._clock.elapsed_s() - found[0] >= FRESH_S:
            return None
        return found[1]

    async def refresh(self) -> None:
        """Ask again for all that were asked for. What nobody answers for stays as it is."""
        for topic in list(self._routes):
            try:
                await self.of(topic, fresh=True)
            except NoRoute:
                self.forget(topic)
            except TransportError as error:
                log.warning("route not refreshed topic=%s: %s", topic, error)

    def forget(self, topic: str) -> None:
        self._routes.pop(topic, None)

    def brokers(self) -> dict[str, str]:
        """The masters of all topics that were asked for: name and address."""
        return {
            name: address
            for _, route in self._routes.values()
            for name, address in route.addresses.items()
        }

    async def _ask_once(self, topic: str) -> Route:
        """Whoever asks while somebody asks waits for the same answer."""
        asking = self._asking.get(topic)
        if asking is None:
            asking = self._asking[topic] = asyncio.ensure_future(self._ask(topic))
            asking.add_done_callback(lambda task: self._answered(topic, task))
        return await asyncio.shield(asking)

    def _answered(self, topic: str, asking: asyncio.Task[Route]) -> None:
        del self._asking[topic]
        if not asking.cancelled():
            asking.exception()  # those who waited have it; if all of them left, nobody has to

    async def all_masters(self) -> set[str]:
        """The addresses of all brokers that the name servers know."""
        reply = await self._ask_any(RequestCode.GET_BROKER_CLUSTER_INFO, None)
        brokers = decode_body(ClusterInfo, reply.body).broker_addr_table.values()
        return {b.broker_addrs[MASTER] for b in brokers if MASTER in b.broker_addrs}

    async def _ask(self, topic: str) -> Route:
        fields = GetRoute(topic=topic, accept_standard_json_only=True)
        try:
            reply = await self._ask_any(RequestCode.GET_ROUTEINFO_BY_TOPIC, fields)
        except RequestRefused as error:
            raise NoRoute(f"no broker has a topic {topic}") from error
        return _route(topic, decode_body(TopicRoute, reply.body))

    async def _ask_any(self, code: int, fields: Header | None) -> Reply:
        """One name server after the other, until one answers."""
        first = next(self._next)
        failure: NotSent | None = None
        for number in range(len(self._servers)):
            address = self._servers[(first + number) % len(self._servers)]
            try:
                line = await self._lines.to(address)
                return await line.ask(code, fields, timeout_s=ASK_S)
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


def _route(topic: str, told: TopicRoute) -> Route:
    addresses = {
        broker.broker_name: broker.broker_addrs[MASTER]
        for broker in told.broker_datas
        if MASTER in broker.broker_addrs
    }
    writable: list[Queue] = []
    readable: list[Queue] = []
    for entry in sorted(told.queue_datas, key=lambda entry: entry.broker_name):
        address = addresses.get(entry.broker_name)
        if address is None:
            continue  # no master: it can neither be written nor read here
        for perm, count, queues in (
            (WRITE, entry.write_queue_nums, writable),
            (READ, entry.read_queue_nums, readable),
        ):
            if entry.perm & perm:
                queues += (Queue(topic, entry.broker_name, at, address) for at in range(count))
    return Route(topic, tuple(writable), tuple(readable), addresses)
