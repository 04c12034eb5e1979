"""Heartbeats: register a client with the brokers, so that they can send it requests.

A broker can send a transaction check only to producers that it knows, and it assigns a consumer
group's messages only to members that it knows. Both register by a heartbeat on each connection
before anything else is sent on it, and repeat it every 30 seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from escrowmq.client.access import Access
from escrowmq.client.callbacks import keep_running
from escrowmq.client.connection import (
    RESPONSE_TIMEOUT_S,
    ClientConnection,
    ConnectionPool,
    RequestCallback,
)
from escrowmq.client.messages import MessageQueue
from escrowmq.client.routes import Routes
from escrowmq.clock import Clock
from escrowmq.errors import EscrowError, InvalidSubscription, RequestRefused
from escrowmq.limited_log import RepeatedLog
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
# How often a producer looks for lost connections, and its first pause after a failed heartbeat.
POLL_INTERVAL_S: Final = 1.0


async def is_escrowmq(
    connection: ClientConnection, *, timeout_s: float = RESPONSE_TIMEOUT_S
) -> bool:
    """Return whether the broker is an EscrowMQ broker, asking it once for each connection.

    An Apache RocketMQ broker does not know the request that is sent to it. Raises TransportError.
    """
    if connection.is_escrowmq is None:
        reply = await connection.call(
            RequestCode.QUERY_WRITER, WriterHeader(writer="-"), timeout_s=timeout_s
        )
        connection.is_escrowmq = reply.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    return connection.is_escrowmq


class ProducerHeartbeat:
    """Keeps a producer registered with brokers.

    A producer without checkers registers with the brokers it sends to. One with checkers registers
    with every broker, even if it sends nothing, and with a broker that comes back as soon as it
    does: an earlier process of its group may have left a transaction open there.
    """

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
        heartbeat = Heartbeat(
            client_id=client_id, producer_data_set=[ProducerEntry(group_name=group)]
        )
        self._heartbeat_body = encode_body(heartbeat)
        self._pool = pool
        self._routes = routes
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self._has_checkers = has_checkers
        self._registered: dict[str, ClientConnection] = {}  # by address
        self._registering: dict[ClientConnection, asyncio.Task[None]] = {}
        self._wake_up = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # --- connections -----------------------------------------------------------------------------

    def ready_connection(self, address: str) -> ClientConnection | None:
        """Return a registered open connection without waiting; None if there is none."""
        connection = self._registered.get(address)
        if connection is not None and connection.is_open and self._pool.is_usable:
            return connection
        return None

    async def connect(self, address: str) -> ClientConnection:
        """Return a connection on which the broker knows this producer.

        Raises TransportError, or RequestRefused if the broker refuses the heartbeat.
        """
        connection = await self._pool.get(address)
        self.start()
        if self._registered.get(address) is not connection:
            task = self._registering.get(connection)
            if task is None:
                task = asyncio.ensure_future(self._send_heartbeat(connection))
                self._registering[connection] = task
                task.add_done_callback(lambda task: self._registration_done(connection, task))
            await asyncio.shield(task)  # callers share it; cancelling one does not cancel it
        return connection

    async def is_escrowmq(self, connection: ClientConnection) -> bool:
        """Return whether the broker is an EscrowMQ broker.

        Such a broker remembers how transactions ended, so an end may be repeated, and it counts
        a delay from the commit. A RocketMQ broker does not know the request that is sent to it.
        """
        return await is_escrowmq(connection, timeout_s=self._timeout_s)

    async def _send_heartbeat(self, connection: ClientConnection) -> None:
        await connection.call_checked(
            RequestCode.HEART_BEAT, body=self._heartbeat_body, timeout_s=self._timeout_s
        )
        self._registered[connection.address] = connection

    def _registration_done(self, connection: ClientConnection, task: asyncio.Task[None]) -> None:
        del self._registering[connection]
        if not task.cancelled():
            task.exception()  # mark it as retrieved; the callers have it

    # --- background task -------------------------------------------------------------------------

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.ensure_future(keep_running("heartbeat", self._run))

    def register_soon(self) -> None:
        """Register with all brokers now, because a checker was added."""
        self._wake_up.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = poll_s = min(POLL_INTERVAL_S, self._heartbeat_s)
        next_heartbeat_s = loop.time() + self._heartbeat_s
        while True:
            all_registered = await self._register_with_all()
            pause_s = self._heartbeat_s if all_registered else min(2 * pause_s, self._heartbeat_s)
            await self._wait(pause_s, poll_s)
            # Heartbeats keep their interval even while some broker cannot be reached.
            if loop.time() >= next_heartbeat_s:
                next_heartbeat_s = loop.time() + self._heartbeat_s
                await self._routes.refresh()
                await self._send_heartbeats()

    async def _wait(self, pause_s: float, poll_s: float) -> None:
        """Wait for `pause_s`, or until a checker was added or a connection was lost."""
        for _ in range(round(pause_s / poll_s)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(poll_s):
                    await self._wake_up.wait()
            if self._wake_up.is_set():
                self._wake_up.clear()
                return
            if self._has_checkers() and not all(c.is_open for c in self._registered.values()):
                return  # the broker may be back soon, with checks to send

    async def _register_with_all(self) -> bool:
        """Register with every broker if there are checkers. Return False if one failed."""
        self._registered = {
            address: connection
            for address, connection in self._registered.items()
            if connection.is_open
        }
        if not self._has_checkers():
            return True
        all_registered = True
        try:
            addresses = await self._routes.all_master_addresses()
        except EscrowError as error:
            log.warning("cannot get the list of brokers, will retry: %s", error)
            return False
        for address in addresses:
            try:
                await self.connect(address)
            except EscrowError as error:
                all_registered = False
                log.warning("heartbeat failed, will retry: %s", error)
        return all_registered

    async def _send_heartbeats(self) -> None:
        for connection in list(self._registered.values()):
            try:
                await self._send_heartbeat(connection)
            except EscrowError as error:
                log.warning("heartbeat failed address=%s: %s", connection.address, error)


class ConsumerHeartbeat:
    """Membership of one consumer in its group: heartbeats, the list of members, queue locks.

    `entry` returns the consumer's current subscriptions, which go into each heartbeat. Methods
    raise TransportError or RequestRefused unless they say otherwise.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
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
        self._pool = ConnectionPool(on_request, access)
        self.routes = Routes(servers, self._pool, clock)
        self._clock = clock
        self._failure_log = RepeatedLog(log)
        self._registered: set[ClientConnection] = set()

    def check_usable(self) -> None:
        """Raise ClientClosed, WrongProcess or WrongEventLoop if the client cannot be used here."""
        self._pool.check_usable()

    def check_owner(self) -> None:
        """Raise WrongProcess or WrongEventLoop if the client belongs to another one."""
        self._pool.check_owner()

    async def connect(self, queue: MessageQueue) -> ClientConnection:
        """Return a connection to a queue's broker, registered as a member of the group."""
        return await self._connect(await self.routes.master_address(queue))

    async def connect_without_heartbeat(self, queue: MessageQueue) -> ClientConnection:
        """Return a connection to a queue's broker, for a reader that is not a member."""
        return await self._pool.get(await self.routes.master_address(queue))

    async def send_heartbeats(self, addresses: Iterable[str]) -> str:
        """Send the current subscriptions to these brokers.

        Return the address of one that accepted them. Raises only if none did, so that one broker
        that is down does not stop the consumer.
        """
        accepted, failure = "", EscrowError("there is no broker to register with")
        for address in addresses:
            try:
                await self._send_heartbeat(await self._pool.get(address))
                accepted = accepted or address
                self._failure_log.ended(address)
            except EscrowError as error:
                self._failure_log.warning(
                    self._clock.elapsed_s(),
                    address,
                    "heartbeat failed group=%s broker=%s: %s",
                    self.group,
                    address,
                    error,
                )
                failure = error
        if not accepted:
            raise failure
        return accepted

    async def run(self) -> None:
        """Send a heartbeat to all brokers in use, every HEARTBEAT_S, until cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._registered = {c for c in self._registered if c.is_open}
            for address in self.routes.addresses_in_use():
                with contextlib.suppress(EscrowError):  # logged; the next round tries again
                    await self.send_heartbeats([address])

    async def members(self, address: str) -> list[str]:
        """Return the client ids of all members of the group, as this broker knows them."""
        connection = await self._connect(address)
        reply = await connection.call_checked(
            RequestCode.GET_CONSUMER_LIST_BY_GROUP,
            ConsumerGroupHeader(consumer_group=self.group),
            timeout_s=RESPONSE_TIMEOUT_S,
        )
        return decode_body(ConsumerList, reply.body).consumer_id_list

    async def check_filters(self, address: str) -> None:
        """Let a broker check the SQL92 filters, so that a bad one fails before the first pull.

        Raises InvalidSubscription.
        """
        connection = await self._pool.get(address)
        for entry in self._entry().subscription_data_set:
            if entry.expression_type != SQL92:
                continue
            body = CheckClientConfig(
                client_id=self.client_id, group=self.group, subscription_data=entry
            )
            try:
                await connection.call_checked(
                    RequestCode.CHECK_CLIENT_CONFIG,
                    body=encode_body(body),
                    timeout_s=RESPONSE_TIMEOUT_S,
                )
            except RequestRefused as error:
                raise InvalidSubscription(
                    f"the broker refused SqlFilter({entry.sub_string!r}): {error.remark} "
                    "(RocketMQ needs enablePropertyFilter=true)"
                ) from error

    async def lock(self, queues: Iterable[MessageQueue]) -> dict[MessageQueue, bool]:
        """Lock queues for this member alone, or extend its locks.

        Return whether each queue is locked by this member; queues of a broker that does not
        respond are left out.
        """
        locked_by_us: dict[MessageQueue, bool] = {}
        for broker_queues in _group_by_broker(queues):
            try:
                connection = await self.connect(broker_queues[0])
                reply = await connection.call_checked(
                    RequestCode.LOCK_BATCH_MQ,
                    body=self._lock_body(broker_queues),
                    timeout_s=RESPONSE_TIMEOUT_S,
                )
                entries = decode_body(LockBatchResponse, reply.body).locked
            except EscrowError as error:
                log.warning("cannot lock queues broker=%s: %s", broker_queues[0].broker, error)
                continue
            locked = {(entry.topic, entry.broker_name, entry.queue_id) for entry in entries}
            locked_by_us |= {queue: queue in locked for queue in broker_queues}
        return locked_by_us

    async def unlock(self, queues: Iterable[MessageQueue]) -> None:
        """Unlock queues. Errors are ignored: a lock expires by itself."""
        for broker_queues in _group_by_broker(queues):
            with contextlib.suppress(EscrowError):
                connection = await self.connect_without_heartbeat(broker_queues[0])
                await connection.call_checked(
                    RequestCode.UNLOCK_BATCH_MQ,
                    body=self._lock_body(broker_queues),
                    timeout_s=RESPONSE_TIMEOUT_S,
                )

    async def leave(self) -> None:
        """Leave the group, so that its other members rebalance at once, and disconnect."""
        for connection in self._registered:
            if connection.is_open:
                with contextlib.suppress(EscrowError):
                    await self._unregister(connection)
        await self._pool.close()

    async def create_group(self, queue: MessageQueue) -> None:
        """Create the group on a queue's broker: join, which creates it, and leave again."""
        connection = await self.connect_without_heartbeat(queue)
        await self._send_heartbeat(connection)
        await self._unregister(connection)

    async def _connect(self, address: str) -> ClientConnection:
        connection = await self._pool.get(address)
        if connection not in self._registered:
            await self._send_heartbeat(connection)
        return connection

    async def _send_heartbeat(self, connection: ClientConnection) -> None:
        heartbeat = Heartbeat(client_id=self.client_id, consumer_data_set=[self._entry()])
        reply = await connection.call_checked(
            RequestCode.HEART_BEAT, body=encode_body(heartbeat), timeout_s=RESPONSE_TIMEOUT_S
        )
        if reply.remark:  # EscrowMQ warns about members with different subscriptions
            now_s = self._clock.elapsed_s()
            self._failure_log.warning(now_s, f"remark of {connection.address}", "%s", reply.remark)
        self._registered.add(connection)

    async def _unregister(self, connection: ClientConnection) -> None:
        fields = UnregisterClient(client_id=self.client_id, consumer_group=self.group)
        await connection.call_checked(
            RequestCode.UNREGISTER_CLIENT, fields, timeout_s=RESPONSE_TIMEOUT_S
        )

    def _lock_body(self, queues: Iterable[MessageQueue]) -> bytes:
        names = [
            QueueName(topic=queue.topic, broker_name=queue.broker, queue_id=queue.queue_id)
            for queue in queues
        ]
        batch = LockBatch(consumer_group=self.group, client_id=self.client_id, mq_set=names)
        return encode_body(batch)


def _group_by_broker(queues: Iterable[MessageQueue]) -> list[list[MessageQueue]]:
    by_broker: dict[str, list[MessageQueue]] = {}
    for queue in queues:
        by_broker.setdefault(queue.broker, []).append(queue)
    return list(by_broker.values())


def subscription_entry(topic: str, expression: FilterExpression, version: int) -> SubscriptionEntry:
    """Return a subscription for a heartbeat. A higher `version` replaces an earlier one."""
    tags = sorted(expression.tags)
    return SubscriptionEntry(
        topic=topic,
        sub_string=expression.expression,
        tags_set=tags,
        code_set=[java_hash(tag) for tag in tags],
        sub_version=version,
        expression_type=expression.expression_type,
    )


def new_client_id() -> str:
    """Return an id for one client of this process, in RocketMQ's form address@process#random."""
    return f"{local_address()}@{os.getpid()}#{secrets.token_hex(4)}"


def local_address() -> str:
    """Return the address that this machine uses for others; 127.0.0.1 without a network."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket sends nothing. The address is reserved for documentation.
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"
