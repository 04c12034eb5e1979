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
from escrowmq.client.connection import Line, Lines
from escrowmq.client.heartbeat import HEARTBEAT_S, Presence
from escrowmq.client.messages import (
    INSTANCE_ID,
    Message,
    Namespace,
    Queue,
    ReceivedMessage,
    SendResult,
)
from escrowmq.client.producer.checker import AT_ONCE, CheckCounts, Checker, Checkers
from escrowmq.client.producer.request_reply import Replies
from escrowmq.client.producer.sender import (
    BATCH_BYTES_MAX,
    COMPRESS_OVER,
    Packed,
    Packer,
    Pick,
    Sender,
    cut,
    items_of,
    pack_batch,
    refuse_mixed,
    results_of,
)
from escrowmq.client.producer.transaction import Ends, Transaction
from escrowmq.client.routes import Routes
from escrowmq.client.telemetry import Span, Telemetry
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import EscrowError, LocalProtocolError, PartlySent
from escrowmq.message import names
from escrowmq.message.keys import UniqueKeys
from escrowmq.message.record import TRANSACTION_PREPARED
from escrowmq.message.transaction import Verdict
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.requests import Request

log = logging.getLogger(__name__)

Selector = Callable[[Sequence[Queue], Message], Queue]
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
        compress_over: int | None = COMPRESS_OVER,
        compression: str = "zlib",
        batch_bytes_max: int = BATCH_BYTES_MAX,
        checkers_at_once: int = AT_ONCE,
        heartbeat_s: float = HEARTBEAT_S,
        telemetry: Any = None,
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        self.group = group
        self.namespace = Namespace(namespace)
        self._clock = clock or SystemClock()
        self._packer = Packer(over=compress_over, kind=compression)
        self._batch_bytes_max = batch_bytes_max
        self._telemetry = Telemetry.of(telemetry)
        self._wrapped_group = wrapped = self.namespace.wrap(group)
        self._marks = {INSTANCE_ID: namespace} if namespace else {}
        self._lines = Lines(self._asked, self._clock, access)
        self._routes = Routes(servers, self._lines, self._clock)
        self._checkers = Checkers(
            wrapped,
            namespace=self.namespace,
            telemetry=self._telemetry,
            at_once=checkers_at_once,
        )
        self._open(timeout_s=timeout_s, retries=retries, heartbeat_s=heartbeat_s)

    def _open(self, *, timeout_s: float, retries: int, heartbeat_s: float) -> None:
        wrapped, address, process_id = self._wrapped_group, own_address(), os.getpid()
        self._keys = UniqueKeys(address=address, process_id=process_id, salt=secrets.randbits(32))
        client_id = f"{address}@{process_id}#{secrets.token_hex(4)}"
        self._replies = Replies(client_id)
        self._presence = Presence(
            wrapped,
            client_id,
            self._lines,
            self._routes,
            timeout_s=timeout_s,
            heartbeat_s=heartbeat_s,
            has_checkers=self._checkers.are_there,
        )
        self._sender = Sender(
            wrapped,
            self._routes,
            self._presence,
            self._clock,
            timeout_s=timeout_s,
            retries=retries,
            first_turn=secrets.randbelow(1 << 16),
        )
        self._ends = Ends(
            wrapped,
            self.namespace,
            line_to=self._line_to,
            is_ours=self._presence.is_ours,
            timeout_s=timeout_s,
        )

    async def __aenter__(self: P) -> P:
        self._presence.begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._presence.close()
        await self._checkers.close()
        await self._lines.close()

    # --- sending ---------------------------------------------------------------------------------

    async def send(self, message: Message, *, queue: Queue | Selector | None = None) -> SendResult:
        """Stored, as safely as the result's status says. Raises RequestRefused or TransportError,
        which say whether it may be tried again, and whether it may have happened.

        `queue`: this one, or a function that chooses from the topic's queues."""
        pick = None if queue is None else self._pick(queue, message)
        return await self._send(message, self._marks, pick=pick)

    async def send_one_way(
        self, message: Message, *, queue: Queue | Selector | None = None
    ) -> None:
        """Nobody knows whether it arrived."""
        packed = self._packed(message, self._marks)
        await self._sender.post(packed, None if queue is None else self._pick(queue, message))

    async def send_batch(
        self, messages: Sequence[Message], *, queue: Queue | Selector | None = None
    ) -> list[SendResult]:
        """Messages of one topic in as few requests as the size allows; a result for each, in order.

        Each request is stored as a whole or not at all. Raises what `send` raises if nothing is
        stored, and PartlySent if only the first requests are."""
        messages = list(messages)
        refuse_mixed(messages)
        first = messages[0]
        span, carried = None, self._marks
        if self._telemetry is not None:
            span, carried = self._telemetry.sending(first.topic, count=len(messages))
            carried = {**self._marks, **carried}
        items = items_of(messages, self._unique_keys(), carried)
        pick = None if queue is None else self._pick(queue, first)
        topic = self.namespace.wrap(first.topic)
        results: list[SendResult] = []
        failure: EscrowError | None = None
        try:
            for chunk in cut(items, self._batch_bytes_max):
                packed = pack_batch(topic, chunk, first.sharding_key)
                stored = self._seen(await self._sender.send(packed, pick))
                results += results_of(stored, [message_id for message_id, _ in chunk])
        except EscrowError as error:
            failure = error
            if not results:
                raise
            raise PartlySent(results, len(messages), error) from error
        finally:
            if span is not None:
                span.end({}, failure)
        return results

    async def request(self, message: Message, timeout_s: float = 3.0) -> ReceivedMessage:
        """Send it, and wait for what a consumer of its topic replies. Raises what `send` raises,
        and OutcomeUnknown if no reply came in time."""
        return await self._replies.ask(
            lambda marks: self._send(message, {**self._marks, **marks}), timeout_s
        )

    async def queues(self, topic: str) -> list[Queue]:
        """Those of a topic that can be written to. Raises NoRoute."""
        queues = await self._sender.queues(self.namespace.wrap(topic))
        return [queue._replace(topic=topic) for queue in queues]

    async def _send(
        self,
        message: Message,
        more: dict[str, str],
        *,
        pick: Pick | None = None,
        sys_flag: int = 0,
        delays: bool = True,
        parent: Span | None = None,
    ) -> SendResult:
        if self._telemetry is None:
            packed = self._packed(message, more, sys_flag, delays)
            return self._seen(await self._sender.send(packed, pick))
        span, carried = self._telemetry.sending(message.topic, parent=parent)
        failure: BaseException | None = None
        try:
            packed = self._packed(message, {**more, **carried}, sys_flag, delays)
            return self._seen(await self._sender.send(packed, pick))
        except BaseException as error:
            failure = error
            raise
        finally:
            span.end({}, failure)

    def _packed(
        self, message: Message, more: dict[str, str], sys_flag: int = 0, delays: bool = True
    ) -> Packed:
        return self._packer.pack(
            message,
            self.namespace.wrap(message.topic),
            self._unique_key(),
            more=more,
            sys_flag=sys_flag,
            delays=delays,
        )

    def _pick(self, wanted: Queue | Selector, message: Message) -> Pick:
        def pick(queues: Sequence[Queue]) -> Queue:
            if isinstance(wanted, Queue):
                chosen = wanted
            else:
                chosen = wanted([queue._replace(topic=message.topic) for queue in queues], message)
            place = chosen.broker, chosen.queue_id
            for queue in queues:
                if (queue.broker, queue.queue_id) == place:
                    return queue
            raise LocalProtocolError(
                f"{message.topic} has no queue {place[1]} on {place[0]} that can be written to"
            )

        return pick

    def _seen(self, result: SendResult) -> SendResult:
        """As the user knows it: without the namespace."""
        if not self.namespace.name:
            return result
        topic = self.namespace.unwrap(result.queue.topic)
        return replace(result, queue=result.queue._replace(topic=topic))

    def _unique_key(self) -> str:
        return self._keys.next(now_ms=self._clock.now_ms(), month_began_ms=0)

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
        span = self._telemetry.transaction(name) if self._telemetry is not None else None
        return Transaction(
            message,
            park=self._park,
            ends=self._ends,
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
            self._presence.want()
            return checker

        return register

    @property
    def check_counts(self) -> CheckCounts:
        """How many checks came, and how they were answered."""
        return self._checkers.counts

    async def _park(
        self, message: Message, more: dict[str, str], parent: Span | None = None
    ) -> SendResult:
        marks = {names.TRANSACTIONAL: "true", names.PRODUCER_GROUP: self._wrapped_group}
        more = {**self._marks, **marks, **more}
        delays = not message.is_delayed or await self._may_delay_halves(message.topic)
        return await self._send(
            message, more, sys_flag=TRANSACTION_PREPARED, delays=delays, parent=parent
        )

    async def _may_delay_halves(self, topic: str) -> bool:
        """RocketMQ loses a half that has a delay, so it goes there without; ours counts it from
        the commit."""
        queues = await self._sender.queues(self.namespace.wrap(topic))
        for address in {queue.address for queue in queues}:
            if not await self._presence.is_ours(await self._presence.line(address)):
                log.warning("a delay is left out of a transaction topic=%s: RocketMQ's", topic)
                return False
        return True

    async def _line_to(self, queue: Queue, anew: bool) -> Line:
        if anew:
            with contextlib.suppress(EscrowError):
                await self._routes.of(self.namespace.wrap(queue.topic), fresh=True)
        address = self._routes.brokers().get(queue.broker) or queue.address
        return self._presence.ready(address) or await self._presence.line(address)

    def _asked(self, line: Line, request: Request[Any]) -> None:
        if request.head.code == RequestCode.CHECK_TRANSACTION_STATE:
            self._checkers.asked(line, request)
        elif request.head.code == RequestCode.PUSH_REPLY_MESSAGE_TO_CLIENT:
            self._replies.arrived(line, request)


def own_address() -> str:
    """The address that this machine has for others; nothing is sent to find out."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address for documentation
        return str(probe.getsockname()[0])
    return "127.0.0.1"
