"""Send messages: to a queue that works, again if it may help, and in a transaction."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final

from escrowmq.client.access import Access
from escrowmq.client.checkers import Checker, Checkers
from escrowmq.client.line import Line
from escrowmq.client.lines import Lines
from escrowmq.client.messages import Message, Queue, SendResult
from escrowmq.client.routes import Routes
from escrowmq.client.sending import RETRIED, result_of, send_header
from escrowmq.client.transaction import Transaction
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import EscrowError, NoRoute, NotSent, RequestRefused, TransportError
from escrowmq.message import names
from escrowmq.message.ids import UniqueKeys
from escrowmq.message.javahash import java_hash
from escrowmq.message.sysflag import TRANSACTION_PREPARED
from escrowmq.message.verdict import Verdict
from escrowmq.wire.bodies import Heartbeat, ProducerEntry, encode_body
from escrowmq.wire.codes import RequestCode
from escrowmq.wire.fastpath import Request

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 30.0
AVOIDED_S: Final = 5.0  # a broker that failed is passed over for so long, if there is another


class Producer:
    """`servers`: name servers, "127.0.0.1:9876" or several with semicolons between them."""

    def __init__(
        self,
        servers: str | Sequence[str],
        *,
        group: str,
        timeout_s: float = 3.0,
        retries: int = 2,
        clock: Clock | None = None,
        access: Access | None = None,
    ) -> None:
        self.group = group
        self._timeout_s = timeout_s
        self._retries = retries
        self._clock = clock or SystemClock()
        self._lines = Lines(self._asked, self._clock, access)
        self._routes = Routes(servers, self._lines, self._clock)
        self._checkers = Checkers(group)
        address = own_address()
        self._client_id = f"{address}@{os.getpid()}#{secrets.token_hex(4)}"
        self._keys = UniqueKeys(address=address, process_id=os.getpid(), salt=secrets.randbits(32))
        self._turn = itertools.count(secrets.randbelow(1 << 16))
        self._avoided: dict[str, float] = {}  # broker: until when
        self._introduced: set[Line] = set()
        self._heartbeat: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Producer:
        self._heartbeat = asyncio.create_task(self._keep_known())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
            await asyncio.gather(self._heartbeat, return_exceptions=True)
        await self._checkers.close()
        await self._lines.close()

    # --- sending ---------------------------------------------------------------------------------

    async def send(self, message: Message, *, queue: Queue | None = None) -> SendResult:
        """Stored, as safely as the result's status says. Raises RequestRefused or TransportError,
        which say whether it may be tried again, and whether it may have happened."""
        return await self._send(message, {}, queue=queue)

    async def send_one_way(self, message: Message) -> None:
        """Nobody knows whether it arrived."""
        queue = await self._choose(message, set())
        properties = message.all_properties(self._unique_key())
        line = await self._line(queue.address)
        fields = send_header(
            message, queue, properties, group=self.group, now_ms=self._clock.now_ms()
        )
        line.post(RequestCode.SEND_MESSAGE_V2, fields, message.body)

    async def _send(
        self,
        message: Message,
        more: dict[str, str],
        *,
        queue: Queue | None = None,
        sys_flag: int = 0,
    ) -> SendResult:
        # The same key for every attempt: a broker that has it already says so.
        properties = message.all_properties(self._unique_key()) | more
        message_id = properties[names.UNIQUE_KEY]
        tried: set[str] = set()
        for attempt in itertools.count():
            chosen = queue or await self._choose(message, tried)
            try:
                line = await self._line(chosen.address)
                fields = send_header(
                    message,
                    chosen,
                    properties,
                    group=self.group,
                    now_ms=self._clock.now_ms(),
                    sys_flag=sys_flag,
                )
                code = RequestCode.SEND_MESSAGE_V2
                reply = await line.call(code, fields, message.body, timeout_s=self._timeout_s)
                return result_of(reply, chosen, message_id)
            except (TransportError, RequestRefused) as error:
                self._passed_over(chosen, error)
                tried.add(chosen.broker)
                if attempt >= self._retries or not _may_retry(error):
                    raise
                log.info("send tried again broker=%s: %s", chosen.broker, error)
        raise AssertionError("the loop ends with a result or an error")

    async def _choose(self, message: Message, tried: set[str]) -> Queue:
        route = await self._routes.to_write(message.topic, fresh=bool(tried))
        queues = route.writable
        if not queues:
            raise NoRoute(f"no queue of {message.topic} can be written to")
        if message.sharding_key:
            return queues[java_hash(message.sharding_key) % len(queues)]
        now_s = self._clock.elapsed_s()
        untried = [queue for queue in queues if queue.broker not in tried] or queues
        well = [queue for queue in untried if self._avoided.get(queue.broker, 0) <= now_s]
        fit = well or untried
        return fit[next(self._turn) % len(fit)]

    def _passed_over(self, queue: Queue, error: EscrowError) -> None:
        self._avoided[queue.broker] = self._clock.elapsed_s() + AVOIDED_S
        if isinstance(error, RequestRefused):
            self._routes.forget(queue.topic)

    def _unique_key(self) -> str:
        return self._keys.next(now_ms=self._clock.now_ms(), month_began_ms=0)

    # --- transactions ----------------------------------------------------------------------------

    def transaction(
        self,
        message: Message | None = None,
        *,
        id: str = "",
        on_error: Verdict = Verdict.UNKNOWN,
    ) -> Transaction:
        """`on_error`: the verdict if the block is left by an exception other than Rollback.
        `id`: what its messages carry as TX_ID, so that a checker knows what they belong to."""
        return Transaction(
            message,
            group=self.group,
            id=id,
            park=self._park,
            line_to=self._line_to_broker,
            on_error=on_error,
        )

    def checker(self, topic: str, *, tag: str = "") -> Callable[[Checker], Checker]:
        """Register a function that says what became of a transaction; "*" for every topic."""

        def register(checker: Checker) -> Checker:
            self._checkers.register(topic, tag, checker)
            return checker

        return register

    async def _park(self, message: Message, more: dict[str, str]) -> SendResult:
        marks = {names.TRANSACTIONAL: "true", names.PRODUCER_GROUP: self.group}
        return await self._send(message, {**marks, **more}, sys_flag=TRANSACTION_PREPARED)

    async def _line_to_broker(self, broker: str) -> Line:
        address = self._routes.brokers().get(broker)
        if address is None:
            raise NotSent(f"no name server knows a broker {broker}")
        return await self._line(address)

    # --- being known -----------------------------------------------------------------------------

    async def _line(self, address: str) -> Line:
        line = await self._lines.to(address)
        if line not in self._introduced:
            await self._introduce(line)
        return line

    async def _introduce(self, line: Line) -> None:
        """Before the first send: a broker can ask only those that it knows."""
        beat = Heartbeat(
            client_id=self._client_id, producer_data_set=[ProducerEntry(group_name=self.group)]
        )
        body = encode_body(beat)
        await line.ask(RequestCode.HEART_BEAT, body=body, timeout_s=self._timeout_s)
        self._introduced.add(line)

    async def _keep_known(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._introduced = {line for line in self._introduced if line.is_open}
            for line in list(self._introduced):
                with contextlib.suppress(EscrowError):
                    await self._introduce(line)

    def _asked(self, line: Line, request: Request[Any]) -> None:
        if request.head.code == RequestCode.CHECK_TRANSACTION_STATE:
            self._checkers.asked(line, request)


def _may_retry(error: EscrowError) -> bool:
    if isinstance(error, RequestRefused):
        return error.code in RETRIED
    return error.retriable


def own_address() -> str:
    """The address that this machine has for others; nothing is sent to find out."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # an address for documentation
        return str(probe.getsockname()[0])
    return "127.0.0.1"
