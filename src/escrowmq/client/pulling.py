"""One queue of one consumer: pull, hand on, commit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from escrowmq.client.hand import Hand
from escrowmq.client.line import Line, Reply
from escrowmq.client.messages import Queue, ReceivedMessage, received
from escrowmq.errors import BrokenBody, CorruptRecord, EscrowError, RequestRefused
from escrowmq.message.offsets import LogOffset
from escrowmq.message.record import decode_record
from escrowmq.wire.codes import RequestCode, ResponseCode
from escrowmq.wire.fastpath import Body
from escrowmq.wire.headers_consume import (
    PullMessage,
    QueryConsumerOffset,
    QueueOf,
    UpdateConsumerOffset,
)

log = logging.getLogger(__name__)

PULLED: Final = 32
HOLD_S: Final = 15.0
ANSWER_S: Final = 3.0
PAUSE_S: Final = 1.0  # after something went wrong
IN_HAND_MAX: Final = 1_000
MAY_SUSPEND, HAS_SUBSCRIPTION = 2, 4
_LOG_OFFSET_AT: Final = 28

LineTo = Callable[[str], Awaitable[Line]]
Deliver = Callable[["QueuePull", ReceivedMessage], Awaitable[None]]


class QueuePull:
    """Runs until it is cancelled. `deliver` may wait: then nothing more is pulled."""

    def __init__(
        self,
        queue: Queue,
        *,
        group: str,
        expression: str,
        version: int,
        from_first: bool,
        line_to: LineTo,
        deliver: Deliver,
    ) -> None:
        self.queue = queue
        self._group = group
        self._expression = expression
        self._tags = frozenset(tag.strip() for tag in expression.split("||"))
        self._version = version
        self._from_first = from_first
        self._line_to = line_to
        self._deliver = deliver
        self._hand: Hand | None = None
        self._committed = -1
        self._room = asyncio.Event()
        self._room.set()

    async def run(self) -> None:
        offset = -1
        while True:
            try:
                line = await self._line_to(self.queue.address)
                if offset < 0:
                    offset = await self._begin(line)
                    self._hand = Hand(offset)
                await self._room.wait()
                offset = await self._pull(line, offset)
            except EscrowError as error:
                log.warning("pull failed queue=%s: %s", self.queue, error)
                await asyncio.sleep(PAUSE_S)

    def done(self, message: ReceivedMessage) -> None:
        """It is processed, or somebody else's business now."""
        if self._hand is not None:
            self._hand.done(message.queue_offset)
            if len(self._hand) < IN_HAND_MAX:
                self._room.set()

    async def commit(self) -> None:
        """Tell the broker how far the group is here."""
        if self._hand is None or self._hand.committable == self._committed:
            return
        wanted = self._hand.committable
        fields = UpdateConsumerOffset(
            consumer_group=self._group,
            topic=self.queue.topic,
            queue_id=self.queue.queue_id,
            commit_offset=wanted,
        )
        line = await self._line_to(self.queue.address)
        await line.ask(RequestCode.UPDATE_CONSUMER_OFFSET, fields, timeout_s=ANSWER_S)
        self._committed = wanted

    async def _begin(self, line: Line) -> int:
        fields = QueryConsumerOffset(
            consumer_group=self._group, topic=self.queue.topic, queue_id=self.queue.queue_id
        )
        code = RequestCode.QUERY_CONSUMER_OFFSET
        reply = await line.call(code, fields, timeout_s=ANSWER_S)
        if reply.code == ResponseCode.SUCCESS:
            return int(reply.ext_fields["offset"])
        if reply.code != ResponseCode.QUERY_NOT_FOUND:
            raise RequestRefused(reply.code, reply.remark)
        code = RequestCode.GET_MIN_OFFSET if self._from_first else RequestCode.GET_MAX_OFFSET
        place = QueueOf(topic=self.queue.topic, queue_id=self.queue.queue_id)
        return int((await line.ask(code, place, timeout_s=ANSWER_S)).ext_fields["offset"])

    async def _pull(self, line: Line, offset: int) -> int:
        """Where to go on."""
        fields = PullMessage(
            consumer_group=self._group,
            topic=self.queue.topic,
            queue_id=self.queue.queue_id,
            queue_offset=offset,
            max_msg_nums=PULLED,
            sys_flag=MAY_SUSPEND | HAS_SUBSCRIPTION,
            suspend_timeout_millis=int(HOLD_S * 1000),
            subscription=self._expression,
            sub_version=self._version,
            expression_type="TAG",
        )
        code = RequestCode.PULL_MESSAGE
        reply = await line.call(code, fields, timeout_s=HOLD_S + ANSWER_S)
        following = int(reply.ext_fields.get("nextBeginOffset", offset))
        if reply.code == ResponseCode.SUCCESS:
            await self._hand_on(reply)
        elif reply.code not in (
            ResponseCode.PULL_NOT_FOUND,
            ResponseCode.PULL_RETRY_IMMEDIATELY,
            ResponseCode.PULL_OFFSET_MOVED,
        ):
            raise RequestRefused(reply.code, reply.remark)
        assert self._hand is not None
        self._hand.passed(following)
        return following

    async def _hand_on(self, reply: Reply) -> None:
        assert self._hand is not None
        wanted = []
        for message in _messages(reply.body, self.queue.broker):
            # Brokers compare hashes of tags; two tags may share one.
            if "*" in self._tags or message.tags in self._tags:
                self._hand.take(message.queue_offset)
                wanted.append(message)
        if len(self._hand) >= IN_HAND_MAX:
            self._room.clear()
        for message in wanted:
            await self._deliver(self, message)


def _messages(body: Body, broker: str) -> list[ReceivedMessage]:
    """One that cannot be read is reported and passed over: the others are not to wait for it."""
    found = []
    view, at = memoryview(body), 0
    while at < len(view):
        size = int.from_bytes(view[at : at + 4], "big")
        place = at + _LOG_OFFSET_AT
        log_offset = LogOffset(int.from_bytes(view[place : place + 8], "big"))
        try:
            found.append(received(decode_record(view, at, log_offset), broker))
        except (CorruptRecord, BrokenBody) as error:
            log.error("a message that cannot be read broker=%s: %s", broker, error)
            if size <= 0:
                break
        at += size
    return found
