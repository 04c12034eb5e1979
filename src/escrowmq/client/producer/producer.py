"""Send messages: one, many, in order, later, and in a transaction."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, TypeVar

from escrowmq.client.access import Access
from escrowmq.client.connection import ClientConnection, ConnectionPool
from escrowmq.client.heartbeat import HEARTBEAT_S, ProducerHeartbeat
from escrowmq.client.messages import Message, MessageQueue, Namespace, ReceivedMessage, SendResult
from escrowmq.client.producer.checker import (
    DEFAULT_CONCURRENCY,
    Checker,
    CheckerRegistry,
    CheckResultCounts,
)
from escrowmq.client.producer.request_reply import PendingReplies
from escrowmq.client.producer.sender import (
    BATCH_BYTES_MAX,
    DEFAULT_COMPRESS_ABOVE_BYTES,
    ChooseQueue,
    EncodedMessage,
    MessageEncoder,
    MessageSender,
    batch_entries,
    check_batch,
    encode_batch_message,
    split_batch,
    split_result,
)
from escrowmq.client.producer.transaction import Transaction, TransactionEnder
from escrowmq.client.routes import Routes
from escrowmq.client.telemetry import Span, Telemetry
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import EscrowError, LocalProtocolError, PartialSend
from escrowmq.message import names
from escrowmq.message.keys import UniqueKeyGenerator
from escrowmq.message.names import INSTANCE_ID
from escrowmq.message.record import TRANSACTION_PREPARED
from escrowmq.message.transaction import Verdict
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.requests import Request

log = logging.getLogger(__name__)

QueueSelector = Callable[[Sequence[MessageQueue], Message], MessageQueue]
P = TypeVar("P", bound="Producer")


class Producer:
    """`servers`: name servers, "127.0.0.1:9876" or several with semicolons between them.

    `timeout_s` is for one attempt, `retries` how many follow a first one that failed. Bodies over
    `compress_over` bytes (None: none) go out compressed by `compression`: zlib, lz4 or zstd. Every
    `heartbeat_s` the brokers hear from it, and routes are asked for anew.
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        namespace: str = "",
        timeout_s: float = 3.0,
        retries: int = 2,
        compress_above_bytes: int | None = DEFAULT_COMPRESS_ABOVE_BYTES,
        compression: str = "zlib",
        batch_bytes_max: int = BATCH_BYTES_MAX,
        check_concurrency: int = DEFAULT_CONCURRENCY,
        heartbeat_s: float = HEARTBEAT_S,
        telemetry: Any = None,
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        self.group = group
        self.namespace = Namespace(namespace)
        self._clock = clock or SystemClock()
        self._encoder = MessageEncoder(
            compress_above_bytes=compress_above_bytes, compression=compression
        )
        self._batch_bytes_max = batch_bytes_max
        self._telemetry = Telemetry.from_option(telemetry)
        self._wrapped_group = wrapped = self.namespace.wrap(group)
        self._base_properties = {INSTANCE_ID: namespace} if namespace else {}
        self._pool = ConnectionPool(self._on_request, self._clock, access)
        self._routes = Routes(servers, self._pool, self._clock)
        self._checkers = CheckerRegistry(
            wrapped,
            namespace=self.namespace,
            telemetry=self._telemetry,
            concurrency=check_concurrency,
        )
        self._create_parts(timeout_s=timeout_s, retries=retries, heartbeat_s=heartbeat_s)

    def _create_parts(self, *, timeout_s: float, retries: int, heartbeat_s: float) -> None:
        wrapped, address, process_id = self._wrapped_group, local_address(), os.getpid()
        self._keys = UniqueKeyGenerator(
            address=address, process_id=process_id, salt=secrets.randbits(32)
        )
        client_id = f"{address}@{process_id}#{secrets.token_hex(4)}"
        self._pending_replies = PendingReplies(client_id)
        self._heartbeat = ProducerHeartbeat(
            wrapped,
            client_id,
            self._pool,
            self._routes,
            timeout_s=timeout_s,
            heartbeat_s=heartbeat_s,
            has_checkers=self._checkers.has_checkers,
        )
        self._sender = MessageSender(
            wrapped,
            self._routes,
            self._heartbeat,
            self._clock,
            timeout_s=timeout_s,
            retries=retries,
            first_index=secrets.randbelow(1 << 16),
        )
        self._ender = TransactionEnder(
            wrapped,
            self.namespace,
            connect=self._connect,
            is_escrowmq=self._heartbeat.is_escrowmq,
            timeout_s=timeout_s,
        )

    async def __aenter__(self: P) -> P:
        self._heartbeat.start()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._heartbeat.close()
        await self._checkers.close()
        await self._pool.close()

    # --- sending ---------------------------------------------------------------------------------

    async def send(
        self, message: Message, *, queue: MessageQueue | QueueSelector | None = None
    ) -> SendResult:
        """Stored, as safely as the result's status says. Raises RequestRefused or TransportError,
        which say whether it may be tried again, and whether it may have happened.

        `queue`: this one, or a function that chooses from the topic's queues."""
        pick = None if queue is None else self._queue_chooser(queue, message)
        return await self._send(message, self._base_properties, choose_queue=pick)

    async def send_oneway(
        self, message: Message, *, queue: MessageQueue | QueueSelector | None = None
    ) -> None:
        """Nobody knows whether it arrived."""
        packed = self._encode(message, self._base_properties)
        await self._sender.send_oneway(
            packed, None if queue is None else self._queue_chooser(queue, message)
        )

    async def send_batch(
        self, messages: Sequence[Message], *, queue: MessageQueue | QueueSelector | None = None
    ) -> list[SendResult]:
        """Messages of one topic in as few requests as the size allows; a result for each, in order.

        Each request is stored as a whole or not at all. Raises what `send` raises if nothing is
        stored, and PartlySent if only the first requests are."""
        messages = list(messages)
        check_batch(messages)
        first = messages[0]
        span, carried = None, self._base_properties
        if self._telemetry is not None:
            span, carried = self._telemetry.start_send(first.topic, count=len(messages))
            carried = {**self._base_properties, **carried}
        items = batch_entries(messages, self._unique_keys(), carried)
        pick = None if queue is None else self._queue_chooser(queue, first)
        topic = self.namespace.wrap(first.topic)
        results: list[SendResult] = []
        failure: EscrowError | None = None
        try:
            for chunk in split_batch(items, self._batch_bytes_max):
                packed = encode_batch_message(topic, chunk, first.sharding_key)
                stored = self._without_namespace(await self._sender.send(packed, pick))
                results += split_result(stored, [message_id for message_id, _ in chunk])
        except EscrowError as error:
            failure = error
            if not results:
                raise
            raise PartialSend(results, len(messages), error) from error
        finally:
            if span is not None:
                span.end({}, failure)
        return results

    async def request(self, message: Message, timeout_s: float = 3.0) -> ReceivedMessage:
        """Send it, and wait for what a consumer of its topic replies. Raises what `send` raises,
        and OutcomeUnknown if no reply came in time."""
        return await self._pending_replies.request(
            lambda marks: self._send(message, {**self._base_properties, **marks}), timeout_s
        )

    async def queues(self, topic: str) -> list[MessageQueue]:
        """Those of a topic that can be written to. Raises NoRoute."""
        queues = await self._sender.queues(self.namespace.wrap(topic))
        return [queue._replace(topic=topic) for queue in queues]

    async def _send(
        self,
        message: Message,
        extra_properties: dict[str, str],
        *,
        choose_queue: ChooseQueue | None = None,
        sys_flag: int = 0,
        with_delay: bool = True,
        parent: Span | None = None,
    ) -> SendResult:
        if self._telemetry is None:
            packed = self._encode(message, extra_properties, sys_flag, with_delay)
            return self._without_namespace(await self._sender.send(packed, choose_queue))
        span, carried = self._telemetry.start_send(message.topic, parent=parent)
        failure: BaseException | None = None
        try:
            packed = self._encode(message, {**extra_properties, **carried}, sys_flag, with_delay)
            return self._without_namespace(await self._sender.send(packed, choose_queue))
        except BaseException as error:
            failure = error
            raise
        finally:
            span.end({}, failure)

    def _encode(
        self,
        message: Message,
        extra_properties: dict[str, str],
        sys_flag: int = 0,
        with_delay: bool = True,
    ) -> EncodedMessage:
        return self._encoder.encode(
            message,
            self.namespace.wrap(message.topic),
            self._unique_key(),
            extra_properties=extra_properties,
            sys_flag=sys_flag,
            with_delay=with_delay,
        )

    def _queue_chooser(
        self, queue_or_selector: MessageQueue | QueueSelector, message: Message
    ) -> ChooseQueue:
        def pick(queues: Sequence[MessageQueue]) -> MessageQueue:
            if isinstance(queue_or_selector, MessageQueue):
                chosen = queue_or_selector
            else:
                chosen = queue_or_selector(
                    [queue._replace(topic=message.topic) for queue in queues], message
                )
            place = chosen.broker, chosen.queue_id
            for queue in queues:
                if (queue.broker, queue.queue_id) == place:
                    return queue
            raise LocalProtocolError(
                f"{message.topic} has no queue {place[1]} on {place[0]} that can be written to"
            )

        return pick

    def _without_namespace(self, result: SendResult) -> SendResult:
        """As the user knows it: without the namespace."""
        if not self.namespace.name:
            return result
        topic = self.namespace.unwrap(result.queue.topic)
        return replace(result, queue=result.queue._replace(topic=topic))

    def _unique_key(self) -> str:
        return self._keys.next(now_ms=self._clock.now_ms(), month_start_ms=0)

    def _unique_keys(self) -> Iterator[str]:
        while True:
            yield self._unique_key()

    # --- transactions ----------------------------------------------------------------------------

    def transaction(
        self,
        message: Message | None = None,
        *,
        id: str = "",
        name: str = "",
        on_error: Verdict = Verdict.UNKNOWN,
    ) -> Transaction:
        """`on_error`: the verdict if the block is left by an exception other than Rollback.
        `id`: what its messages carry as TX_ID, so that a checker knows what they belong to.
        `name`: what kind of transaction it is; `checker(name=…)` answers for it."""
        span = self._telemetry.start_transaction(name) if self._telemetry is not None else None
        return Transaction(
            message,
            park=self._park,
            ender=self._ender,
            id=id,
            name=name,
            on_error=on_error,
            span=span,
        )

    def checker(
        self, topic: str = "", *, tag: str = "", name: str = ""
    ) -> Callable[[Checker], Checker]:
        """Register a function that says what became of a transaction: for a topic, "*" for all of
        them, or for the transactions of a name."""

        def register(checker: Checker) -> Checker:
            self._checkers.register(checker, topic=topic, tag=tag, name=name)
            self._heartbeat.register_soon()
            return checker

        return register

    @property
    def check_counts(self) -> CheckResultCounts:
        """How many checks came, and how they were answered."""
        return self._checkers.counts

    async def _park(
        self, message: Message, extra_properties: dict[str, str], parent: Span | None = None
    ) -> SendResult:
        marks = {names.TRANSACTIONAL: "true", names.PRODUCER_GROUP: self._wrapped_group}
        extra_properties = {**self._base_properties, **marks, **extra_properties}
        delays = not message.is_delayed or await self._can_delay_halves(message.topic)
        return await self._send(
            message,
            extra_properties,
            sys_flag=TRANSACTION_PREPARED,
            with_delay=delays,
            parent=parent,
        )

    async def _can_delay_halves(self, topic: str) -> bool:
        """RocketMQ loses a half that has a delay, so it goes there without; ours counts it from
        the commit."""
        queues = await self._sender.queues(self.namespace.wrap(topic))
        for address in {queue.address for queue in queues}:
            if not await self._heartbeat.is_escrowmq(await self._heartbeat.connect(address)):
                log.warning("a delay is left out of a transaction topic=%s: RocketMQ's", topic)
                return False
        return True

    async def _connect(self, queue: MessageQueue, refresh_route: bool) -> ClientConnection:
        if refresh_route:
            with contextlib.suppress(EscrowError):
                await self._routes.get(self.namespace.wrap(queue.topic), fresh=True)
        address = self._routes.broker_addresses().get(queue.broker) or queue.address
        return self._heartbeat.ready_connection(address) or await self._heartbeat.connect(address)

    def _on_request(self, connection: ClientConnection, request: Request[Any]) -> None:
        if request.head.code == RequestCode.CHECK_TRANSACTION_STATE:
            self._checkers.on_check(connection, request)
        elif request.head.code == RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
            self._pending_replies.on_reply(connection, request)


def local_address() -> str:
    """The address that this machine has for others; nothing is sent to find out."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address for documentation
        return str(probe.getsockname()[0])
    return "127.0.0.1"
