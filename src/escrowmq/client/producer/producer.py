"""The producer: send messages alone, in batches, as requests, and in transactions."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from types import TracebackType
from typing import Any, TypedDict, TypeVar

from escrowmq.client.access import Access
from escrowmq.client.connection import ClientConnection, ConnectionPool
from escrowmq.client.heartbeat import (
    HEARTBEAT_S,
    ProducerHeartbeat,
    local_address,
    new_client_id,
)
from escrowmq.client.messages import (
    Message,
    MessageQueue,
    Namespace,
    ReceivedMessage,
    SendResult,
    check_is_message,
)
from escrowmq.client.mistakes import (
    AsyncioClient,
    check_callable,
    check_group,
    check_seconds,
    check_topic_argument,
    short_traceback,
)
from escrowmq.client.producer.checker import (
    CHECK_REQUEST_HOLD_MAX,
    DEFAULT_CONCURRENCY,
    CheckerRegistry,
    CheckerT,
    CheckResultCounts,
)
from escrowmq.client.producer.request_reply import PendingReplies
from escrowmq.client.producer.sender import (
    BATCH_BYTES_MAX,
    DEFAULT_BODY_BYTES_MAX,
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
from escrowmq.client.producer.transaction import Transaction, TransactionEnder, check_half
from escrowmq.client.routes import Routes
from escrowmq.client.telemetry import Span, Telemetry
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import EscrowError, LocalProtocolError, PartialSend
from escrowmq.message import names
from escrowmq.message.keys import UniqueKeyGenerator
from escrowmq.message.names import INSTANCE_ID
from escrowmq.message.record import TRANSACTION_PREPARED
from escrowmq.message.transaction import Verdict
from escrowmq.parsing import suggest_arguments
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.requests import Request

log = logging.getLogger(__name__)

# Chooses one of a topic's queues for a message: `lambda queues, message: queues[0]`.
QueueSelector = Callable[[Sequence[MessageQueue], Message], MessageQueue]
P = TypeVar("P", bound="Producer")


class ProducerOptions(TypedDict, total=False):
    """The options of Producer, for what creates one and passes them on."""

    namespace: str
    timeout_s: float
    retries: int
    compress_above_bytes: int | None
    compression: str
    body_bytes_max: int
    batch_bytes_max: int
    check_concurrency: int
    check_request_hold_max: int
    check_executor: Executor | None
    heartbeat_s: float
    telemetry: Any
    access: Access | None


@suggest_arguments
class Producer(AsyncioClient):
    """Sends messages.

        async with Producer("127.0.0.1:9876", group="orders") as producer:
            await producer.send(Message("orders", b"o-17"))
            async with producer.transaction(Message("orders", b"o-18")):
                ...                            # local work; leaving the block commits

    `servers`: addresses of name servers, "127.0.0.1:9876" or several.
    `group`: the producer group. A broker sends a transaction check to any producer of the group.
    `timeout_s`: timeout of one attempt; `retries`: further attempts after one that failed.
    `compress_above_bytes`: compress longer bodies by `compression` ("zlib", "lz4" or "zstd");
    None compresses none.
    `body_bytes_max`: limit of a body before it is compressed, RocketMQ's maxMessageSize.
    `batch_bytes_max`: size of one request of `send_batch`.
    `check_concurrency`: how many checkers run at the same time.
    `check_request_hold_max`: how many checks wait for a free checker.
    `check_executor`: an executor for checkers that are plain functions. The producer does not shut
    it down. By default they run in threads of the producer.
    `heartbeat_s`: interval of heartbeats and of refreshing routes.
    `telemetry`: True or a TracerProvider, to send spans and their context.

    Raises ValueError for invalid arguments. Nothing is connected before the first use.
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
        body_bytes_max: int = DEFAULT_BODY_BYTES_MAX,
        batch_bytes_max: int = BATCH_BYTES_MAX,
        check_concurrency: int = DEFAULT_CONCURRENCY,
        check_request_hold_max: int = CHECK_REQUEST_HOLD_MAX,
        check_executor: Executor | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        telemetry: Any = None,
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        check_group(group)
        check_seconds("timeout_s", timeout_s)
        self.group = group
        self.namespace = Namespace(namespace)
        self._clock = clock or SystemClock()
        self._encoder = MessageEncoder(
            compress_above_bytes=compress_above_bytes,
            compression=compression,
            body_bytes_max=body_bytes_max,
        )
        self._batch_bytes_max = batch_bytes_max
        self._telemetry = Telemetry.from_option(telemetry)
        self._wrapped_group = self.namespace.wrap(group)
        self._base_properties = {INSTANCE_ID: namespace} if namespace else {}
        self._pool = ConnectionPool(self._on_request, access)
        self._routes = Routes(servers, self._pool, self._clock)
        self._checkers = CheckerRegistry(
            self._wrapped_group,
            namespace=self.namespace,
            telemetry=self._telemetry,
            concurrency=check_concurrency,
            request_hold_max=check_request_hold_max,
            executor=check_executor,
        )
        self._create_parts(timeout_s=timeout_s, retries=retries, heartbeat_s=heartbeat_s)

    def _create_parts(self, *, timeout_s: float, retries: int, heartbeat_s: float) -> None:
        self._keys = UniqueKeyGenerator(
            address=local_address(), process_id=os.getpid(), salt=secrets.randbits(32)
        )
        client_id = new_client_id()
        self._pending_replies = PendingReplies(client_id)
        self._heartbeat = ProducerHeartbeat(
            self._wrapped_group,
            client_id,
            self._pool,
            self._routes,
            timeout_s=timeout_s,
            heartbeat_s=heartbeat_s,
            has_checkers=self._checkers.has_checkers,
        )
        self._sender = MessageSender(
            self._wrapped_group,
            self._routes,
            self._heartbeat,
            self._clock,
            timeout_s=timeout_s,
            retries=retries,
            first_index=secrets.randbelow(1 << 16),
        )
        self._ender = TransactionEnder(
            self._wrapped_group,
            self.namespace,
            connect=self._connect,
            is_escrowmq=self._heartbeat.is_escrowmq,
            timeout_s=timeout_s,
        )

    async def __aenter__(self: P) -> P:
        self._pool.check_usable()
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
        """Wait up to 3 s for running checkers, and disconnect."""
        await self._heartbeat.close()
        await self._checkers.close()
        await self._pool.close()

    # --- sending ---------------------------------------------------------------------------------

    @short_traceback
    async def send(
        self, message: Message, *, queue: MessageQueue | QueueSelector | None = None
    ) -> SendResult:
        """Send a message and wait until it is stored, as safely as the result's `status` says.

        `queue` is a queue of the topic, or a function that chooses one from a list.

        Raises RequestRefused or TransportError; their attributes `retriable` and
        `may_have_happened` say whether to try again, and whether the message may be stored. Raises
        LocalProtocolError for a message that RocketMQ's clients refuse too (an empty or too long
        body, an impossible topic), invalid properties, or a queue that the topic does not have.
        """
        choose_queue = None if queue is None else self._queue_chooser(queue, message)
        return await self._send(message, self._base_properties, choose_queue=choose_queue)

    @short_traceback
    async def send_oneway(
        self, message: Message, *, queue: MessageQueue | QueueSelector | None = None
    ) -> None:
        """Send a message without waiting for a response: it may be lost unnoticed.

        Raises NotSent or NoRoute if it could not be written to a connection.
        """
        check_is_message(message)
        encoded = self._encode(message, self._base_properties)
        choose_queue = None if queue is None else self._queue_chooser(queue, message)
        await self._sender.send_oneway(encoded, choose_queue)

    @short_traceback
    async def send_batch(
        self, messages: Sequence[Message], *, queue: MessageQueue | QueueSelector | None = None
    ) -> list[SendResult]:
        """Send messages of one topic in as few requests as `batch_bytes_max` allows.

        Return a result for each message, in order. Each request is stored as a whole or not at
        all. Raises what `send` raises if nothing was stored, PartialSend if only the first
        requests were, and LocalProtocolError if the messages cannot be one batch.
        """
        messages = list(messages)
        check_batch(messages)
        first = messages[0]
        topic = self.namespace.wrap(first.topic)
        for message in messages:
            self._encoder.check(message, topic)
        span, properties = None, self._base_properties
        if self._telemetry is not None:
            span, trace_properties = self._telemetry.start_send(first.topic, count=len(messages))
            properties = {**self._base_properties, **trace_properties}
        entries = batch_entries(messages, self._unique_keys(), properties)
        choose_queue = None if queue is None else self._queue_chooser(queue, first)
        results: list[SendResult] = []
        failure: EscrowError | None = None
        try:
            for chunk in split_batch(entries, self._batch_bytes_max):
                encoded = encode_batch_message(topic, chunk, first.sharding_key)
                result = self._without_namespace(await self._sender.send(encoded, choose_queue))
                results += split_result(result, [message_id for message_id, _ in chunk])
        except EscrowError as error:
            failure = error
            if not results:
                raise
            raise PartialSend(results, len(messages), error) from error
        finally:
            if span is not None:
                span.end({}, failure)
        return results

    @short_traceback
    async def request(self, message: Message, timeout_s: float = 3.0) -> ReceivedMessage:
        """Send a message and wait for the reply of a consumer (`consumer.reply`).

        Raises what `send` raises, and OutcomeUnknown if no reply came within `timeout_s`.
        """
        return await self._pending_replies.request(
            lambda properties: self._send(message, {**self._base_properties, **properties}),
            timeout_s,
        )

    @short_traceback
    async def queues(self, topic: str) -> list[MessageQueue]:
        """Return the writable queues of a topic. Raises NoRoute if there are none."""
        route = await self._sender.writable_route(self.namespace.wrap(topic))
        return [queue._replace(topic=topic) for queue in route.writable_queues]

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
        check_is_message(message)
        if self._telemetry is None:
            encoded = self._encode(message, extra_properties, sys_flag, with_delay)
            return self._without_namespace(await self._sender.send(encoded, choose_queue))
        span, trace_properties = self._telemetry.start_send(message.topic, parent=parent)
        failure: BaseException | None = None
        try:
            properties = {**extra_properties, **trace_properties}
            encoded = self._encode(message, properties, sys_flag, with_delay)
            return self._without_namespace(await self._sender.send(encoded, choose_queue))
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
        def choose(queues: Sequence[MessageQueue]) -> MessageQueue:
            if isinstance(queue_or_selector, MessageQueue):
                chosen = queue_or_selector
            else:
                chosen = queue_or_selector(
                    [queue._replace(topic=message.topic) for queue in queues], message
                )
            for queue in queues:  # users see the topic without its namespace
                if (queue.broker, queue.queue_id) == (chosen.broker, chosen.queue_id):
                    return queue
            raise LocalProtocolError(
                f"topic {message.topic} has no writable queue {chosen.queue_id} on broker "
                f"{chosen.broker}"
            )

        return choose

    def _without_namespace(self, result: SendResult) -> SendResult:
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
        """Return a transaction, to be used with `async with`; see Transaction.

        `message` is parked before the block runs. `id` is the transaction's id, by default that
        of its first message; a checker receives it as `message.transaction_id`. `name` is the kind
        of transaction, for which `checker(name=...)` registers a checker. `on_error` is the
        verdict if the block raises an exception other than Rollback; UNKNOWN leaves the
        transaction open, and a checker decides it.
        """
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
    ) -> Callable[[CheckerT], CheckerT]:
        """Register a function that decides open transactions; a decorator.

            @producer.checker("orders")
            def check(message):
                return Verdict.COMMIT if order_exists(message.transaction_id) else Verdict.ROLLBACK

        It is called with a message of the transaction, for transactions of any process of the
        group, also after a crash. A coroutine function runs on the event loop, a plain function in
        a thread. None and Verdict.UNKNOWN leave the transaction open, as does an exception; the
        broker checks again later.

        Register it for a topic, a topic and a tag, all topics ("*"), or the transactions with a
        name. Raises ValueError for any other combination, and TypeError if the function does not
        take one message.
        """
        check_topic_argument(topic, "@producer.checker('orders')")

        def register(checker: CheckerT) -> CheckerT:
            check_callable(checker, "a checker of transactions", ("message",))
            self._checkers.register(checker, topic=topic, tag=tag, name=name)
            self._heartbeat.register_soon()
            return checker

        return register

    @property
    def check_counts(self) -> CheckResultCounts:
        """How many checks arrived, and how they were answered."""
        return self._checkers.counts

    async def _park(
        self, message: Message, extra_properties: dict[str, str], parent: Span | None = None
    ) -> SendResult:
        """Send a message as a half message, which no consumer reads.

        Raises BrokenResponse if the broker does not say where it is: it could not be ended.
        """
        properties = {
            **self._base_properties,
            names.TRANSACTIONAL: "true",
            names.PRODUCER_GROUP: self._wrapped_group,
            **extra_properties,
        }
        check_is_message(message)
        with_delay = not message.is_delayed or await self._can_delay_halves(message.topic)
        result = await self._send(
            message,
            properties,
            sys_flag=TRANSACTION_PREPARED,
            with_delay=with_delay,
            parent=parent,
        )
        check_half(result)
        return result

    async def _can_delay_halves(self, topic: str) -> bool:
        """Return whether all brokers of a topic support a delay in a transaction.

        A RocketMQ broker would lose a half message that has a delay. An EscrowMQ broker counts
        the delay from the commit.
        """
        route = await self._sender.writable_route(self.namespace.wrap(topic))
        for broker in {queue.broker for queue in route.writable_queues}:
            connection = await self._heartbeat.connect(route.broker_addresses[broker])
            if not await self._heartbeat.is_escrowmq(connection):
                log.warning(
                    "delay ignored topic=%s: RocketMQ supports no delay in a transaction",
                    topic,
                )
                return False
        return True

    async def _connect(self, queue: MessageQueue, refresh_route: bool) -> ClientConnection:
        queue = queue._replace(topic=self.namespace.wrap(queue.topic))
        if refresh_route:
            with contextlib.suppress(EscrowError):
                await self._routes.get(queue.topic, fresh=True)
        # The address is known, because this producer sent the halves. Do not ask a name server
        # whether it is still right: an end must not wait for one that is down.
        address = self._routes.master_addresses.get(queue.broker)
        if address is None:
            address = await self._routes.master_address(queue)
        return self._heartbeat.ready_connection(address) or await self._heartbeat.connect(address)

    def _on_request(self, connection: ClientConnection, request: Request[Any]) -> None:
        if request.head.code == RequestCode.CHECK_TRANSACTION_STATE:
            self._checkers.on_check(connection, request)
        elif request.head.code == RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
            self._pending_replies.on_reply(connection, request)
