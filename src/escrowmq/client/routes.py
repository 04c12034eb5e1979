"""A cache of routes: which broker has which queues of a topic, as the name servers report it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from escrowmq.client.connection import RESPONSE_TIMEOUT_S, ConnectionPool
from escrowmq.client.messages import MessageQueue
from escrowmq.client.topic_route import MASTER_ID, Route, parse_route
from escrowmq.client.wrong_address import describe_unknown_request
from escrowmq.clock import Clock
from escrowmq.errors import (
    AccessRefused,
    BrokenBody,
    ClientClosed,
    EscrowError,
    NoRoute,
    NotSent,
    RequestRefused,
    TransportError,
    WrongEventLoop,
    WrongProcess,
)
from escrowmq.message.names import TEMPLATE_TOPIC, is_internal_topic
from escrowmq.parsing import did_you_mean, parse_servers
from escrowmq.remoting.bodies import ClusterInfo, TopicList, TopicRoute, decode_body
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.connection import Reply
from escrowmq.remoting.headers import Header
from escrowmq.remoting.headers_admin import GetRoute

log = logging.getLogger(__name__)

T = TypeVar("T")

ROUTE_TTL_S: Final = 60.0  # RocketMQ's clients refresh every 30 s, and so do producers of ours
DEFAULT_QUEUE_COUNT: Final = 4
COMPARED_TOPICS_MAX: Final = 1_000  # with a misspelt one, on the event loop


class Routes:
    """Cache of routes. It asks the name servers in turn, and asks again after ROUTE_TTL_S."""

    def __init__(self, servers: str | Sequence[str], pool: ConnectionPool, clock: Clock) -> None:
        self._servers = parse_servers(servers)
        self._pool = pool
        self._clock = clock
        self._next_server = itertools.count()
        self._routes: dict[str, tuple[float, Route]] = {}  # topic -> (time of the reply, route)
        self._fetching: dict[str, asyncio.Task[Route]] = {}
        # The last known address of every master, by broker name. They outlive the routes they
        # came from: a transaction must be ended, and a message sent back, even if its topic was
        # deleted in the meantime.
        self.master_addresses: dict[str, str] = {}

    async def get(self, topic: str, *, fresh: bool = False) -> Route:
        """Return the route of a topic, from the cache unless `fresh`.

        Raises NoRoute if no broker has the topic, AccessRefused, and TransportError if no name
        server responds and there is no cached route.
        """
        cached = self._routes.get(topic)
        now_s = self._clock.elapsed_s()
        if cached is not None and not fresh and now_s - cached[0] < ROUTE_TTL_S:
            return cached[1]
        try:
            route = await self._fetch_once(topic)
        except NoRoute:
            raise  # a subclass of TransportError, but a definite answer
        except TransportError:
            if cached is None or fresh:
                raise
            log.warning("no name server responds, using the cached route topic=%s", topic)
            route = cached[1]
        self._routes[topic] = now_s, route
        self.master_addresses |= route.broker_addresses
        return route

    async def get_for_writing(self, topic: str, *, fresh: bool = False) -> Route:
        """Return the route of a topic, or of the template if the topic does not exist yet."""
        try:
            return await self.get(topic, fresh=fresh)
        except NoRoute:
            try:
                template = await self.get(TEMPLATE_TOPIC)
            except NoRoute:
                advice = f"; no broker creates topics by itself: `escrowmq topic create {topic}`"
                raise NoRoute(await self.describe_missing(topic, advice)) from None
            queues = tuple(
                queue._replace(topic=topic)
                for queue in template.writable_queues
                if queue.queue_id < DEFAULT_QUEUE_COUNT
            )
            addresses = template.broker_addresses
            return Route(topic, queues, queues, addresses, addresses, is_template=True)

    async def get_existing(self, topic: str) -> Route:
        """Return the current route of a topic. Raises NoRoute, which names a similar topic."""
        try:
            return await self.get(topic, fresh=True)
        except NoRoute:
            raise NoRoute(await self.describe_missing(topic)) from None

    async def describe_missing(self, topic: str, advice: str = "") -> str:
        """Return that no broker has a topic, with a similar one if there is any, and the advice if
        brokers are running."""
        try:
            topics, servers = await asyncio.gather(
                self._topic_names(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER),
                self._topic_names(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS),
            )
        except EscrowError as error:
            log.debug("no list of topics: %s", error)
            return f"no broker has topic {topic}"
        if not topics:
            return f"no broker has topic {topic}: the name server knows no running broker"
        similar = [name for name in topics if not is_internal_topic(name, servers)]
        suggestion = did_you_mean(topic, similar[:COMPARED_TOPICS_MAX])
        return f"no broker has topic {topic}{suggestion}{advice}"

    async def _topic_names(self, code: RequestCode) -> list[str]:
        return await self._call_any(
            code, None, lambda reply: decode_body(TopicList, reply.body).topic_list
        )

    def cached(self, topic: str) -> Route | None:
        """Return the cached route if it has not expired. Sends use this first: it never waits."""
        entry = self._routes.get(topic)
        if entry is None or self._clock.elapsed_s() - entry[0] >= ROUTE_TTL_S:
            return None
        return entry[1]

    async def refresh(self) -> None:
        """Fetch every cached route again; a route stays if no name server responds."""
        for topic in list(self._routes):
            try:
                await self.get(topic, fresh=True)
            except NoRoute:
                self.invalidate(topic)
            except EscrowError as error:
                log.warning("route not refreshed topic=%s: %s", topic, error)

    def invalidate(self, topic: str) -> None:
        self._routes.pop(topic, None)

    # --- addresses of brokers --------------------------------------------------------------------

    async def master_address(self, queue: MessageQueue) -> str:
        """Return the address of the master that has this queue.

        Raises NoRoute if the topic has no queues on that broker.
        """
        if self.cached(queue.topic) is None or queue.broker not in self.master_addresses:
            try:
                await self.get(queue.topic, fresh=queue.broker not in self.master_addresses)
            except EscrowError:
                if queue.broker not in self.master_addresses:
                    raise
        try:
            return self.master_addresses[queue.broker]
        except KeyError:
            raise NoRoute(f"topic {queue.topic} has no queues on broker {queue.broker}") from None

    def addresses_in_use(self) -> set[str]:
        """Return the addresses of the masters of all cached routes."""
        return {
            address
            for _, route in self._routes.values()
            for address in route.broker_addresses.values()
        }

    async def all_master_addresses(self) -> set[str]:
        """Return the addresses of all masters that the name servers know.

        Raises TransportError or RequestRefused if no name server can say.
        """
        return await self._call_any(RequestCode.GET_BROKER_CLUSTER_INFO, None, _masters)

    # --- requests to name servers ----------------------------------------------------------------

    async def _fetch_once(self, topic: str) -> Route:
        """Fetch a route; callers that arrive during the request share its result."""
        task = self._fetching.get(topic)
        if task is None:
            task = self._fetching[topic] = asyncio.ensure_future(self._fetch(topic))
            task.add_done_callback(lambda task: self._fetch_done(topic, task))
        return await asyncio.shield(task)

    def _fetch_done(self, topic: str, task: asyncio.Task[Route]) -> None:
        del self._fetching[topic]
        if not task.cancelled():
            # Mark the exception as retrieved: if all callers were cancelled, asyncio would
            # otherwise log it as never retrieved.
            task.exception()

    async def _fetch(self, topic: str) -> Route:
        fields = GetRoute(topic=topic, accept_standard_json_only=True)
        try:
            return await self._call_any(
                RequestCode.GET_ROUTEINFO_BY_TOPIC,
                fields,
                lambda reply: parse_route(topic, decode_body(TopicRoute, reply.body)),
            )
        except AccessRefused:
            raise
        except RequestRefused:
            raise NoRoute(f"no broker has topic {topic}") from None

    async def _call_any(self, code: int, fields: Header | None, decode: Callable[[Reply], T]) -> T:
        """Call one name server after the other until one responds, starting with the next.

        `decode` reads the response. A name server whose response cannot be read counts as one that
        does not respond.
        """
        first = next(self._next_server)
        failure: EscrowError | None = None
        for number in range(len(self._servers)):
            address = self._servers[(first + number) % len(self._servers)]
            try:
                connection = await self._pool.get(address)
                reply = await connection.call_checked(code, fields, timeout_s=RESPONSE_TIMEOUT_S)
                return decode(reply)
            except RequestRefused as error:
                if error.code == ResponseCode.TOPIC_NOT_EXIST:
                    raise
                if error.code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED:
                    failure = NotSent(describe_unknown_request(address, code))
                elif error.code == ResponseCode.NO_PERMISSION:
                    failure = AccessRefused(error.code, f"{address}: {error.remark}")
                else:
                    failure = NotSent(f"{address}: {error}")
            except (ClientClosed, WrongProcess, WrongEventLoop):
                raise
            except (TransportError, BrokenBody) as error:
                text = str(error)
                failure = NotSent(text if address in text else f"{address}: {text}")
        assert failure is not None
        raise failure


def _masters(reply: Reply) -> set[str]:
    brokers = decode_body(ClusterInfo, reply.body).broker_addr_table.values()
    return {b.broker_addrs[MASTER_ID] for b in brokers if MASTER_ID in b.broker_addrs}
