"""Pull a range of one queue, as fast as its broker can send it.

Several windows of the range are requested at a time, and their messages are handed on in order. The
broker decides how many messages a response holds (RocketMQ sends 32 by default, EscrowMQ about a
megabyte), so the first response tells how wide a window should be.

    socket ── receive_into() ──> block (10 MiB) ──> decoded as one Arrow batch

A response is read from the socket directly into the block that will be decoded. Only a response
that overtook an earlier one is buffered and copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from escrowmq.client.messages import MessageQueue
from escrowmq.client.sync_connection import SyncConnection
from escrowmq.errors import BrokenResponse, DataLost, RemoteProtocolError, RequestRefused
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.connection import parse_int_field
from escrowmq.remoting.headers import PullMessage
from escrowmq.spark.queues import PULL_SUBSCRIPTION_FLAG
from escrowmq.spark.records import ByteArray

BLOCK_BYTES: Final = 10 << 20
BLOCK_ROWS: Final = 10_000  # the size of an Arrow batch that Spark recommends
IN_FLIGHT_TARGET_BYTES: Final = 4 << 20
MAX_WINDOWS: Final = 16
_MATCH_ALL: Final = "*"


class QueueRange(NamedTuple):
    """The messages `begin` to before `end` of one queue, and the address of its broker."""

    queue: MessageQueue
    address: str
    begin: int
    end: int


@dataclass(frozen=True)
class PullRequest:
    """What all pulls of a query have in common."""

    group: str
    expression: str = _MATCH_ALL
    expression_type: str = "TAG"
    max_messages: int = 8_192
    fail_on_data_loss: bool = True

    @property
    def is_match_all(self) -> bool:
        return self.expression == _MATCH_ALL


@dataclass
class _Window:
    """A part of the range with at most one pull in flight."""

    next_offset: int
    end_offset: int
    buffered: list[ByteArray] = field(default_factory=list)  # responses before their turn


class _Block:
    """A buffer that is filled with whole responses."""

    def __init__(self, capacity_bytes: int) -> None:
        self._data = np.empty(capacity_bytes, np.uint8)
        self._end = 0
        self.rows = 0

    def has_room(self, byte_count: int) -> bool:
        return self.rows < BLOCK_ROWS and self._end + byte_count <= len(self._data)

    def reserve(self, byte_count: int) -> ByteArray:
        """Return the next bytes, to be filled by the caller."""
        begin, self._end = self._end, self._end + byte_count
        return self._data[begin : self._end]

    def contents(self) -> ByteArray:
        return self._data[: self._end]


class RangePull:
    """Reads one range over a connection that nothing else uses meanwhile."""

    def __init__(
        self, connection: SyncConnection, queue_range: QueueRange, request: PullRequest
    ) -> None:
        self._connection = connection
        self._queue_range = queue_range
        self._request = request
        self._planned_offset = queue_range.begin  # windows cover the range up to here
        self._windows: deque[_Window] = deque()
        self._windows_by_opaque: dict[int, _Window] = {}
        self._window_messages = 0  # unknown until the first response
        self._max_windows = 1

    def blocks(self) -> Iterator[ByteArray]:
        """Yield buffers of whole records, in the order of the queue.

        Raises DataLost if messages of the range are gone, unless `fail_on_data_loss` is false;
        RequestRefused; TransportError.
        """
        block = _Block(BLOCK_BYTES)
        self._fill_windows()
        while self._windows:
            head = self._windows[0]
            while head.buffered:
                response = head.buffered.pop(0)
                if not block.has_room(len(response)):
                    yield block.contents()
                    block = _Block(max(BLOCK_BYTES, len(response)))
                block.reserve(len(response))[:] = response
                block.rows += self._window_messages
            if head.next_offset >= head.end_offset:
                self._windows.popleft()
                self._fill_windows()
                continue
            command, body_bytes = self._connection.receive_head()
            window = self._windows_by_opaque.pop(command.opaque, None)
            if window is None:
                raise BrokenResponse(f"{self._connection.address} answers what it was not asked")
            is_head = window is head
            if is_head and not block.has_room(body_bytes):
                yield block.contents()
                block = _Block(max(BLOCK_BYTES, body_bytes))
            target = block.reserve(body_bytes) if is_head else np.empty(body_bytes, np.uint8)
            if body_bytes:
                self._connection.receive_into(target.data)
            previous_offset = window.next_offset
            self._advance(window, command, body_bytes)
            if is_head:
                block.rows += window.next_offset - previous_offset
            elif body_bytes:
                window.buffered.append(target)
        if len(block.contents()):
            yield block.contents()

    def _fill_windows(self) -> None:
        """Open windows up to the limit, and send a pull for each."""
        range_end = self._queue_range.end
        while len(self._windows) < self._max_windows and self._planned_offset < range_end:
            width = self._window_messages or range_end - self._planned_offset
            window = _Window(self._planned_offset, min(self._planned_offset + width, range_end))
            self._planned_offset = window.end_offset
            self._windows.append(window)
            self._send_pull(window)

    def _send_pull(self, window: _Window) -> None:
        request, queue = self._request, self._queue_range.queue
        header = PullMessage(
            consumer_group=request.group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=window.next_offset,
            max_msg_nums=min(request.max_messages, window.end_offset - window.next_offset),
            sys_flag=PULL_SUBSCRIPTION_FLAG,
            subscription=request.expression,
            expression_type=request.expression_type,
            bulk=True,
        )
        opaque = self._connection.send(RequestCode.PULL_MESSAGE, header)
        self._windows_by_opaque[opaque] = window

    def _advance(self, window: _Window, command: Command, body_bytes: int) -> None:
        """Move a window behind a response, and send its next pull if it is not complete."""
        previous_offset = window.next_offset
        window.next_offset = self._next_offset(window, command)
        if (
            not self._window_messages
            and self._request.is_match_all
            and command.code == ResponseCode.SUCCESS
        ):
            # The first response, so its window is the whole range. Now the size of a response is
            # known: end this window here, and request the remaining range in windows of that size.
            # With a filter, the number of messages in a response says nothing about the next one.
            self._window_messages = max(1, window.next_offset - previous_offset)
            window_count = IN_FLIGHT_TARGET_BYTES // max(1, body_bytes)
            self._max_windows = max(2, min(MAX_WINDOWS, window_count))
            window.end_offset = self._planned_offset = min(window.next_offset, window.end_offset)
            self._fill_windows()
        elif window.next_offset < window.end_offset:
            self._send_pull(window)

    def _next_offset(self, window: _Window, command: Command) -> int:
        """Return where a window continues; at or behind its end, it is complete."""
        if command.code in (ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY):
            next_offset = parse_int_field(command.ext_fields, "nextBeginOffset")
            if next_offset <= window.next_offset:
                raise RemoteProtocolError(
                    f"{self._connection.address}: a pull of {self._queue_range.queue} at "
                    f"{window.next_offset} made no progress"
                )
            return next_offset
        if command.code == ResponseCode.PULL_OFFSET_MOVED:
            first_offset = parse_int_field(command.ext_fields, "minOffset")
            return self._skip_lost(window, max(window.next_offset, first_offset))
        if command.code == ResponseCode.PULL_NOT_FOUND:
            return self._skip_lost(window, window.end_offset)
        raise RequestRefused(
            command.code,
            f"{self._connection.address}: pull of {self._queue_range.queue}: {command.remark}",
        )

    def _skip_lost(self, window: _Window, next_offset: int) -> int:
        """Return where to continue behind lost messages. Raises DataLost."""
        if self._request.fail_on_data_loss:
            raise data_lost(
                self._queue_range.queue, window.next_offset, min(next_offset, window.end_offset)
            )
        return next_offset if next_offset > window.next_offset else window.end_offset


def data_lost(queue: MessageQueue, begin: int, end: int) -> DataLost:
    return DataLost(
        f"{queue}: messages {begin} to {end} are not there any more (they expired, or the topic "
        f"was created again); to continue behind them, set option failOnDataLoss=false"
    )
