"""Being known to the brokers: heartbeats, who else is in the group, locks, goodbye."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from escrowmq.client.access import Access
from escrowmq.client.calls import ANSWER_S
from escrowmq.client.filters import SQL92
from escrowmq.client.line import Asked, Line
from escrowmq.client.lines import Lines
from escrowmq.client.messages import Queue
from escrowmq.client.routes import Routes
from escrowmq.clock import Clock
from escrowmq.errors import BadSubscription, EscrowError, RequestRefused
from escrowmq.wire.bodies import (
    CheckClientConfig,
    ConsumerEntry,
    ConsumerList,
    Heartbeat,
    LockBatch,
    LockBatchAnswer,
    QueueName,
    decode_body,
    encode_body,
)
from escrowmq.wire.codes import RequestCode
from escrowmq.wire.headers_consume import ConsumerGroup, UnregisterClient

log = logging.getLogger(__name__)

HEARTBEAT_S: Final = 30.0


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
