"""Be known to the brokers: a broker can ask only those producers that it knows.

A line is introduced before anything is sent by it, and again every half minute. Whoever has
checkers is introduced to every broker there is, although it has nothing to send, and to one that
comes back at once: an earlier process of its group may have left a transaction open there.

Being known to the brokers: heartbeats, who else is in the group, locks, goodbye.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final
from weakref import WeakKeyDictionary

from escrowmq.client.access import Access
from escrowmq.client.connection import ClientConnection, ConnectionPool, RequestCallback
from escrowmq.client.consumer.queue_client import RESPONSE_TIMEOUT_S
from escrowmq.client.messages import MessageQueue
from escrowmq.client.routes import Routes
from escrowmq.clock import Clock
from escrowmq.errors import EscrowError, InvalidSubscription, RequestRefused
from escrowmq.message.filter import SQL92, FilterExpression
from escrowmq.message.keys import java_hash
from escrowmq.remoting.bodies import (
    CheckClientConfig,
    ConsumerEntry,
    ConsumerList,
    Heartbeat,
    LockBatch,
    LockBatchResponse,
    ProducerEntry,
    QueueName,
    SubscriptionEntry,
    decode_body,
    encode_body,
)
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import ConsumerGroupHeader, UnregisterClient, WriterHeader

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 30.0
POLL_INTERVAL_S: Final = (
    1.0  # so often: is a connection lost? And so soon after a failure, it is tried again
)


class ProducerHeartbeat:
    def __init__(
        self,
        group: str,
        client_id: str,
        pool: ConnectionPool,
        routes: Routes,
        *,
        timeout_s: float,
        heartbeat_s: float,
        has_checkers: Callable[[], bool],
    ) -> None:
        beat = Heartbeat(client_id=client_id, producer_data_set=[ProducerEntry(group_name=group)])
        self._heartbeat_body = encode_body(beat)
        self._pool = pool
        self._routes = routes
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self._has_checkers = has_checkers
        self._registered: dict[str, ClientConnection] = {}  # by address
        self._registering: dict[ClientConnection, asyncio.Task[None]] = {}
        self._escrowmq_connections: WeakKeyDictionary[ClientConnection, bool] = WeakKeyDictionary()
        self._wake_up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # --- lines -----------------------------------------------------------------------------------

    def ready_connection(self, address: str) -> ClientConnection | None:
        """A line that needs no waiting."""
        line = self._registered.get(address)
        return line if line is not None and line.is_open and self._pool.is_usable else None

    async def connect(self, address: str) -> ClientConnection:
        """Raises TransportError, or RequestRefused if the broker does not want us."""
        line = await self._pool.get(address)
        self.start()
        if self._registered.get(address) is not line:
            introducing = self._registering.get(line)
            if introducing is None:
                introducing = asyncio.ensure_future(self._send_heartbeat(line))
                self._registering[line] = introducing
                introducing.add_done_callback(lambda task: self._registration_done(line, task))
            await asyncio.shield(introducing)
        return line

    async def is_escrowmq(self, connection: ClientConnection) -> bool:
        """Whether this broker remembers how transactions ended: an end may be repeated, a delay
        counts from the commit. Told by a request that RocketMQ's brokers do not know."""
        known = self._escrowmq_connections.get(connection)
        if known is None:
            fields = WriterHeader(writer="-")
            code = RequestCode.QUERY_WRITER
            reply = await connection.call(code, fields, timeout_s=self._timeout_s)
            known = reply.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED
            self._escrowmq_connections[connection] = known
        return known

    async def _send_heartbeat(self, connection: ClientConnection) -> None:
        await connection.call_checked(
            RequestCode.HEART_BEAT, body=self._heartbeat_body, timeout_s=self._timeout_s
        )
        self._registered[connection.address] = connection

    def _registration_done(self, connection: ClientConnection, task: asyncio.Task[None]) -> None:
        del self._registering[connection]
        if not task.cancelled():
            task.exception()  # those who waited have it

    # --- now and then ----------------------------------------------------------------------------

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    def register_soon(self) -> None:
        """There is a new checker: all brokers should know of it now."""
        self._wake_up.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = look_s = min(POLL_INTERVAL_S, self._heartbeat_s)
        beat_s = loop.time() + self._heartbeat_s
        while True:
            is_well = await self._register_with_all()
            pause_s = self._heartbeat_s if is_well else min(2 * pause_s, self._heartbeat_s)
            await self._wait(pause_s, look_s)
            if loop.time() >= beat_s:  # whether all brokers are there or not
                beat_s = loop.time() + self._heartbeat_s
                await self._routes.refresh()
                await self._send_heartbeats()

    async def _wait(self, pause_s: float, poll_s: float) -> None:
        """So long, or less if there is a reason to look around at once."""
        for _ in range(round(pause_s / poll_s)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(poll_s):
                    await self._wake_up.wait()
            if self._wake_up.is_set():
                self._wake_up.clear()
                return
            if self._has_checkers() and not all(one.is_open for one in self._registered.values()):
                return  # a broker that comes back has questions

    async def _register_with_all(self) -> bool:
        """To all brokers, if they may ask us. False: somebody was not there."""
        self._registered = {at: line for at, line in self._registered.items() if line.is_open}
        if not self._has_checkers():
            return True
        is_well = True
        try:
            addresses = await self._routes.all_master_addresses()
        except EscrowError as error:
            log.warning("no name server says which brokers there are: %s", error)
            return False
        for address in addresses:
            try:
                await self.connect(address)
            except EscrowError as error:
                is_well = False
                log.warning("not known to a broker yet: %s", error)
        return is_well

    async def _send_heartbeats(self) -> None:
        for line in list(self._registered.values()):
            try:
                await self._send_heartbeat(line)
            except EscrowError as error:
                log.warning("heartbeat not answered address=%s: %s", line.address, error)


class ConsumerHeartbeat:
    """`entry`: what this member wants just now, for heartbeats."""

    def __init__(
        self,
        servers: str | Iterable[str],
        on_request: RequestCallback,
        *,
        group: str,
        client_id: str,
        entry: Callable[[], ConsumerEntry],
        clock: Clock,
        access: Access | None = None,
    ) -> None:
        self.group = group
        self.client_id = client_id
        self._entry = entry
        self._pool = ConnectionPool(on_request, clock, access)
        given = servers if isinstance(servers, str) else list(servers)
        self.routes = Routes(given, self._pool, clock)
        self._registered: set[ClientConnection] = set()

    async def connect(self, address: str) -> ClientConnection:
        """To a broker, which knows us when this returns."""
        line = await self._pool.get(address)
        if line not in self._registered:
            await self._send_heartbeat(line)
        return line

    async def connect_without_heartbeat(self, address: str) -> ClientConnection:
        """The same, for who reads and is no member."""
        return await self._pool.get(address)

    async def send_heartbeats(self, addresses: Sequence[str]) -> str:
        """Tell them what we want now. The address of one that answered; raises TransportError or
        RequestRefused if none did: a broker that is down is not to hold up the others."""
        answered, failure = "", EscrowError("no broker to be known to")
        for address in addresses:
            try:
                await self._send_heartbeat(await self._pool.get(address))
                answered = answered or address
            except EscrowError as error:
                log.warning("not known to broker=%s: %s", address, error)
                failure = error
        if not answered:
            raise failure
        return answered

    async def run(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._registered = {line for line in self._registered if line.is_open}
            for address in set(self.routes.broker_addresses().values()):
                with contextlib.suppress(EscrowError):
                    await self.send_heartbeats([address])

    async def members(self, address: str) -> list[str]:
        fields = ConsumerGroupHeader(consumer_group=self.group)
        line = await self.connect(address)
        code = RequestCode.GET_CONSUMER_LIST_BY_GROUP
        reply = await line.call_checked(code, fields, timeout_s=RESPONSE_TIMEOUT_S)
        return decode_body(ConsumerList, reply.body).consumer_id_list

    async def check_filters(self, address: str) -> None:
        """Raises BadSubscription: a broker that cannot filter so says it before the first pull."""
        line = await self._pool.get(address)
        for entry in self._entry().subscription_data_set:
            if entry.expression_type != SQL92:
                continue
            body = CheckClientConfig(
                client_id=self.client_id, group=self.group, subscription_data=entry
            )
            code = RequestCode.CHECK_CLIENT_CONFIG
            try:
                await line.call_checked(code, body=encode_body(body), timeout_s=RESPONSE_TIMEOUT_S)
            except RequestRefused as error:
                raise InvalidSubscription(
                    f"the broker does not take Sql({entry.sub_string!r}): {error.remark} "
                    "(RocketMQ needs enablePropertyFilter=true)"
                ) from error

    async def lock(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, bool]:
        """Which are ours alone now, as far as their brokers answer."""
        answers: dict[MessageQueue, bool] = {}
        for address, theirs in _by_address(queues).items():
            try:
                line = await self.connect(address)
                code, body = RequestCode.LOCK_BATCH_MQ, self._lock_body(theirs)
                reply = await line.call_checked(code, body=body, timeout_s=RESPONSE_TIMEOUT_S)
                locked = decode_body(LockBatchResponse, reply.body).locked
            except EscrowError as error:
                log.warning("no locks from broker=%s: %s", address, error)
                continue
            names = {(each.topic, each.broker_name, each.queue_id) for each in locked}
            answers |= {queue: queue[:3] in names for queue in theirs}
        return answers

    async def unlock(self, queues: Iterable[MessageQueue]) -> None:
        for address, theirs in _by_address(queues).items():
            with contextlib.suppress(EscrowError):
                line = await self._pool.get(address)
                code, body = RequestCode.UNLOCK_BATCH_MQ, self._lock_body(theirs)
                await line.call_checked(code, body=body, timeout_s=RESPONSE_TIMEOUT_S)

    async def leave(self) -> None:
        """The others are told to share out anew."""
        for line in self._registered:
            if line.is_open:
                with contextlib.suppress(EscrowError):
                    await self._unregister(line)
        await self._pool.close()

    async def create_group(self, address: str) -> None:
        """Come and go: a broker makes a group when it first hears of it."""
        line = await self._pool.get(address)
        await self._send_heartbeat(line)
        await self._unregister(line)

    async def _unregister(self, connection: ClientConnection) -> None:
        fields = UnregisterClient(client_id=self.client_id, consumer_group=self.group)
        await connection.call_checked(
            RequestCode.UNREGISTER_CLIENT, fields, timeout_s=RESPONSE_TIMEOUT_S
        )

    async def _send_heartbeat(self, connection: ClientConnection) -> None:
        beat = Heartbeat(client_id=self.client_id, consumer_data_set=[self._entry()])
        await connection.call_checked(
            RequestCode.HEART_BEAT, body=encode_body(beat), timeout_s=RESPONSE_TIMEOUT_S
        )
        self._registered.add(connection)

    def _lock_body(self, queues: Iterable[MessageQueue]) -> bytes:
        names = [
            QueueName(topic=queue.topic, broker_name=queue.broker, queue_id=queue.queue_id)
            for queue in queues
        ]
        batch = LockBatch(consumer_group=self.group, client_id=self.client_id, mq_set=names)
        return encode_body(batch)


def _by_address(queues: Iterable[MessageQueue]) -> dict[str, list[MessageQueue]]:
    found: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        found.setdefault(queue.address, []).append(queue)
    return found


def subscription_entry(topic: str, filter: FilterExpression, version: int) -> SubscriptionEntry:
    """Return a subscription as a heartbeat carries it. `version` grows with every change of it."""
    tags = sorted(filter.tags)
    return SubscriptionEntry(
        topic=topic,
        sub_string=filter.expression,
        tags_set=tags,
        code_set=[java_hash(tag) for tag in tags],
        sub_version=version,
        expression_type=filter.expression_type,
    )
