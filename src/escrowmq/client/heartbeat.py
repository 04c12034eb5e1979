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
from escrowmq.client.connection import Asked, Line, Lines
from escrowmq.client.consumer.queue_client import ANSWER_S
from escrowmq.client.filters import SQL92
from escrowmq.client.messages import Queue
from escrowmq.client.routes import Routes
from escrowmq.clock import Clock
from escrowmq.errors import BadSubscription, EscrowError, RequestRefused
from escrowmq.remoting.bodies import (
    CheckClientConfig,
    ConsumerEntry,
    ConsumerList,
    Heartbeat,
    LockBatch,
    LockBatchAnswer,
    ProducerEntry,
    QueueName,
    decode_body,
    encode_body,
)
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.headers import ConsumerGroup, UnregisterClient, WriterName

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 30.0
LOOK_S: Final = (
    1.0  # so often: is a connection lost? And so soon after a failure, it is tried again
)


class Presence:
    def __init__(
        self,
        group: str,
        client_id: str,
        lines: Lines,
        routes: Routes,
        *,
        timeout_s: float,
        heartbeat_s: float,
        has_checkers: Callable[[], bool],
    ) -> None:
        beat = Heartbeat(client_id=client_id, producer_data_set=[ProducerEntry(group_name=group)])
        self._beat = encode_body(beat)
        self._lines = lines
        self._routes = routes
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self._has_checkers = has_checkers
        self._introduced: dict[str, Line] = {}  # by address
        self._introducing: dict[Line, asyncio.Task[None]] = {}
        self._is_ours: WeakKeyDictionary[Line, bool] = WeakKeyDictionary()
        self._wanted = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    # --- lines -----------------------------------------------------------------------------------

    def ready(self, address: str) -> Line | None:
        """A line that needs no waiting."""
        line = self._introduced.get(address)
        return line if line is not None and line.is_open and self._lines.is_usable else None

    async def line(self, address: str) -> Line:
        """Raises TransportError, or RequestRefused if the broker does not want us."""
        line = await self._lines.to(address)
        self.begin()
        if self._introduced.get(address) is not line:
            introducing = self._introducing.get(line)
            if introducing is None:
                introducing = asyncio.ensure_future(self._introduce(line))
                self._introducing[line] = introducing
                introducing.add_done_callback(lambda task: self._met(line, task))
            await asyncio.shield(introducing)
        return line

    async def is_ours(self, line: Line) -> bool:
        """Whether this broker remembers how transactions ended: an end may be repeated, a delay
        counts from the commit. Told by a request that RocketMQ's brokers do not know."""
        known = self._is_ours.get(line)
        if known is None:
            fields = WriterName(writer="-")
            code = RequestCode.QUERY_WRITER
            reply = await line.call(code, fields, timeout_s=self._timeout_s)
            known = reply.code != ResponseCode.REQUEST_CODE_NOT_SUPPORTED
            self._is_ours[line] = known
        return known

    async def _introduce(self, line: Line) -> None:
        await line.ask(RequestCode.HEART_BEAT, body=self._beat, timeout_s=self._timeout_s)
        self._introduced[line.address] = line

    def _met(self, line: Line, introducing: asyncio.Task[None]) -> None:
        del self._introducing[line]
        if not introducing.cancelled():
            introducing.exception()  # those who waited have it

    # --- now and then ----------------------------------------------------------------------------

    def begin(self) -> None:
        if self._keeping is None:
            self._keeping = asyncio.ensure_future(self._keep())

    def want(self) -> None:
        """There is a new checker: all brokers should know of it now."""
        self._wanted.set()

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = look_s = min(LOOK_S, self._heartbeat_s)
        beat_s = loop.time() + self._heartbeat_s
        while True:
            is_well = await self._announce()
            pause_s = self._heartbeat_s if is_well else min(2 * pause_s, self._heartbeat_s)
            await self._wait(pause_s, look_s)
            if loop.time() >= beat_s:  # whether all brokers are there or not
                beat_s = loop.time() + self._heartbeat_s
                await self._routes.refresh()
                await self._beat_all()

    async def _wait(self, seconds: float, look_s: float) -> None:
        """So long, or less if there is a reason to look around at once."""
        for _ in range(round(seconds / look_s)):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(look_s):
                    await self._wanted.wait()
            if self._wanted.is_set():
                self._wanted.clear()
                return
            if self._has_checkers() and not all(one.is_open for one in self._introduced.values()):
                return  # a broker that comes back has questions

    async def _announce(self) -> bool:
        """To all brokers, if they may ask us. False: somebody was not there."""
        self._introduced = {at: line for at, line in self._introduced.items() if line.is_open}
        if not self._has_checkers():
            return True
        is_well = True
        try:
            addresses = await self._routes.all_masters()
        except EscrowError as error:
            log.warning("no name server says which brokers there are: %s", error)
            return False
        for address in addresses:
            try:
                await self.line(address)
            except EscrowError as error:
                is_well = False
                log.warning("not known to a broker yet: %s", error)
        return is_well

    async def _beat_all(self) -> None:
        for line in list(self._introduced.values()):
            try:
                await self._introduce(line)
            except EscrowError as error:
                log.warning("heartbeat not answered address=%s: %s", line.address, error)


class Membership:
    """`entry`: what this member wants just now, for heartbeats."""

    def __init__(
        self,
        servers: str | Iterable[str],
        asked: Asked,
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
        self._lines = Lines(asked, clock, access)
        given = servers if isinstance(servers, str) else list(servers)
        self.routes = Routes(given, self._lines, clock)
        self._introduced: set[Line] = set()

    async def line_to(self, address: str) -> Line:
        """To a broker, which knows us when this returns."""
        line = await self._lines.to(address)
        if line not in self._introduced:
            await self._introduce(line)
        return line

    async def quiet_line_to(self, address: str) -> Line:
        """The same, for who reads and is no member."""
        return await self._lines.to(address)

    async def introduce(self, addresses: Sequence[str]) -> str:
        """Tell them what we want now. The address of one that answered; raises TransportError or
        RequestRefused if none did: a broker that is down is not to hold up the others."""
        answered, failure = "", EscrowError("no broker to be known to")
        for address in addresses:
            try:
                await self._introduce(await self._lines.to(address))
                answered = answered or address
            except EscrowError as error:
                log.warning("not known to broker=%s: %s", address, error)
                failure = error
        if not answered:
            raise failure
        return answered

    async def keep_known(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            self._introduced = {line for line in self._introduced if line.is_open}
            for address in set(self.routes.brokers().values()):
                with contextlib.suppress(EscrowError):
                    await self.introduce([address])

    async def members(self, address: str) -> list[str]:
        fields = ConsumerGroup(consumer_group=self.group)
        line = await self.line_to(address)
        code = RequestCode.GET_CONSUMER_LIST_BY_GROUP
        reply = await line.ask(code, fields, timeout_s=ANSWER_S)
        return decode_body(ConsumerList, reply.body).consumer_id_list

    async def check_filters(self, address: str) -> None:
        """Raises BadSubscription: a broker that cannot filter so says it before the first pull."""
        line = await self._lines.to(address)
        for entry in self._entry().subscription_data_set:
            if entry.expression_type != SQL92:
                continue
            body = CheckClientConfig(
                client_id=self.client_id, group=self.group, subscription_data=entry
            )
            code = RequestCode.CHECK_CLIENT_CONFIG
            try:
                await line.ask(code, body=encode_body(body), timeout_s=ANSWER_S)
            except RequestRefused as error:
                raise BadSubscription(
                    f"the broker does not take Sql({entry.sub_string!r}): {error.remark} "
                    "(RocketMQ needs enablePropertyFilter=true)"
                ) from error

    async def lock(self, queues: Iterable[Queue]) -> dict[Queue, bool]:
        """Which are ours alone now, as far as their brokers answer."""
        answers: dict[Queue, bool] = {}
        for address, theirs in _by_address(queues).items():
            try:
                line = await self.line_to(address)
                code, body = RequestCode.LOCK_BATCH_MQ, self._batch(theirs)
                reply = await line.ask(code, body=body, timeout_s=ANSWER_S)
                locked = decode_body(LockBatchAnswer, reply.body).locked
            except EscrowError as error:
                log.warning("no locks from broker=%s: %s", address, error)
                continue
            names = {(each.topic, each.broker_name, each.queue_id) for each in locked}
            answers |= {queue: queue[:3] in names for queue in theirs}
        return answers

    async def unlock(self, queues: Iterable[Queue]) -> None:
        for address, theirs in _by_address(queues).items():
            with contextlib.suppress(EscrowError):
                line = await self._lines.to(address)
                code, body = RequestCode.UNLOCK_BATCH_MQ, self._batch(theirs)
                await line.ask(code, body=body, timeout_s=ANSWER_S)

    async def leave(self) -> None:
        """The others are told to share out anew."""
        for line in self._introduced:
            if line.is_open:
                with contextlib.suppress(EscrowError):
                    await self._goodbye(line)
        await self._lines.close()

    async def make_group(self, address: str) -> None:
        """Come and go: a broker makes a group when it first hears of it."""
        line = await self._lines.to(address)
        await self._introduce(line)
        await self._goodbye(line)

    async def _goodbye(self, line: Line) -> None:
        fields = UnregisterClient(client_id=self.client_id, consumer_group=self.group)
        await line.ask(RequestCode.UNREGISTER_CLIENT, fields, timeout_s=ANSWER_S)

    async def _introduce(self, line: Line) -> None:
        beat = Heartbeat(client_id=self.client_id, consumer_data_set=[self._entry()])
        await line.ask(RequestCode.HEART_BEAT, body=encode_body(beat), timeout_s=ANSWER_S)
        self._introduced.add(line)

    def _batch(self, queues: Iterable[Queue]) -> bytes:
        names = [
            QueueName(topic=queue.topic, broker_name=queue.broker, queue_id=queue.queue_id)
            for queue in queues
        ]
        batch = LockBatch(consumer_group=self.group, client_id=self.client_id, mq_set=names)
        return encode_body(batch)


def _by_address(queues: Iterable[Queue]) -> dict[str, list[Queue]]:
    found: dict[str, list[Queue]] = {}
    for queue in queues:
        found.setdefault(queue.address, []).append(queue)
    return found
