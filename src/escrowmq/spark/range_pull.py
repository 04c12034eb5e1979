"""Pull a range of one queue as fast as its broker gives it.

Several windows of the range are asked for at once, and handed on in their order. How many messages
an answer holds is the broker's to say (32 from RocketMQ as it comes, a mebibyte from ours), so
the first answer tells how wide a window is. An answer goes from the socket into the block that
will be decoded; only one that overtook another is kept aside until it is its turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np

from escrowmq.errors import DataLost, RemoteProtocolError, RequestRefused
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.headers import PullMessage
from escrowmq.spark.line import BlockingConnection, OutgoingRequest
from escrowmq.spark.offsets import QueueKey
from escrowmq.spark.records import ByteArray

BLOCK_BYTES: Final = 10 << 20
BLOCK_ROWS: Final = 10_000  # Spark's best size of an Arrow batch
IN_FLIGHT_TARGET_BYTES: Final = 4 << 20
MAX_WINDOWS: Final = 16
PULL_SUBSCRIPTION_FLAG: Final = 4
_MATCH_ALL: Final = "*"


class QueueRange(NamedTuple):
    """A range of one queue, and who has it."""

    queue: QueueKey
    address: str
    begin: int
    end: int


@dataclass(frozen=True)
class PullRequest:
    """What is wanted of every queue."""

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
    next_offset: int
    end_offset: int
    buffered: list[ByteArray] = field(default_factory=list)


class _Block:
    def __init__(self, capacity_bytes: int) -> None:
        self._data = np.empty(capacity_bytes, np.uint8)
        self._end = 0
        self.rows = 0

    def has_room(self, byte_count: int) -> bool:
        return self.rows < BLOCK_ROWS and self._end + byte_count <= len(self._data)

    def reserve(self, byte_count: int) -> ByteArray:
        """The next bytes of it, to be filled."""
        begin, self._end = self._end, self._end + byte_count
        return self._data[begin : self._end]

    def contents(self) -> ByteArray:
        return self._data[: self._end]


class RangePull:
    def __init__(
        self, connection: BlockingConnection, queue_range: QueueRange, request: PullRequest
    ) -> None:
        self._connection = connection
        self._queue_range = queue_range
        self._request = request
        self._planned_offset = queue_range.begin
        self._windows: deque[_Window] = deque()
        self._windows_by_opaque: dict[int, _Window] = {}
        self._window_messages = 0  # until the first answer has told
        self._max_windows = 1

    def blocks(self) -> Iterator[ByteArray]:
        """Buffers of whole records, in the order of the queue."""
        block = _Block(BLOCK_BYTES)
        self._fill_windows()
        while self._windows:
            head = self._windows[0]
            while head.buffered:
                whole = head.buffered.pop(0)
                if not block.has_room(len(whole)):
                    yield block.contents()
                    block = _Block(max(BLOCK_BYTES, len(whole)))
                block.reserve(len(whole))[:] = whole
                block.rows += self._window_messages
            if head.next_offset >= head.end_offset:
                self._windows.popleft()
                self._fill_windows()
                continue
            command, size = self._connection.receive_head()
            window = self._windows_by_opaque.pop(command.opaque)
            is_first = window is head
            if is_first and not block.has_room(size):
                yield block.contents()
                block = _Block(max(BLOCK_BYTES, size))
            room = block.reserve(size) if is_first else np.empty(size, np.uint8)
            if size:
                self._connection.receive_into(room.data)
            before = window.next_offset
            self._advance(window, command, size)
            if is_first:
                block.rows += window.next_offset - before
            elif size:
                window.buffered.append(room)
        if len(block.contents()):
            yield block.contents()

    def _fill_windows(self) -> None:
        while (
            len(self._windows) < self._max_windows and self._planned_offset < self._queue_range.end
        ):
            width = self._window_messages or self._queue_range.end - self._planned_offset
            window = _Window(
                self._planned_offset, min(self._planned_offset + width, self._queue_range.end)
            )
            self._planned_offset = window.end_offset
            self._windows.append(window)
            self._send_pull(window)

    def _send_pull(self, window: _Window) -> None:
        wish, queue = self._request, self._queue_range.queue
        fields = PullMessage(
            consumer_group=wish.group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=window.next_offset,
            max_msg_nums=min(wish.max_messages, window.end_offset - window.next_offset),
            sys_flag=PULL_SUBSCRIPTION_FLAG,
            subscription=wish.expression,
            expression_type=wish.expression_type,
            bulk=True,
        )
        self._windows_by_opaque[
            self._connection.send(OutgoingRequest(RequestCode.PULL_MESSAGE, fields))
        ] = window

    def _advance(self, window: _Window, command: Command, size: int) -> None:
        before = window.next_offset
        window.next_offset = self._next_offset(window, command)
        if (
            not self._window_messages
            and self._request.is_match_all
            and command.code == ResponseCode.SUCCESS
        ):
            # Now it is known what an answer holds: the rest is asked for in windows of that size.
            self._window_messages = max(1, window.next_offset - before)
            self._max_windows = max(2, min(MAX_WINDOWS, IN_FLIGHT_TARGET_BYTES // max(1, size)))
            window.end_offset = self._planned_offset = min(window.next_offset, window.end_offset)
            self._fill_windows()
        elif window.next_offset < window.end_offset:
            self._send_pull(window)

    def _next_offset(self, window: _Window, command: Command) -> int:
        """Where the window goes on; at its end, or behind it, it is done."""
        if command.code in (ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY):
            following = _number(command, "nextBeginOffset")
            if following <= window.next_offset:
                raise RemoteProtocolError(
                    f"{self._connection.address}: a pull of {self._queue_range.queue} at "
                    f"{window.next_offset} does not "
                    f"get on"
                )
            return following
        if command.code == ResponseCode.PULL_OFFSET_MOVED:
            return self._skip_lost(window, max(window.next_offset, _number(command, "minOffset")))
        if command.code == ResponseCode.PULL_NOT_FOUND:
            return self._skip_lost(window, window.end_offset)
        raise RequestRefused(
            command.code,
            f"{self._connection.address}: pull of {self._queue_range.queue}: {command.remark}",
        )

    def _skip_lost(self, window: _Window, following: int) -> int:
        if self._request.fail_on_data_loss:
            raise data_lost(
                self._queue_range.queue, window.next_offset, min(following, window.end_offset)
            )
        return following if following > window.next_offset else window.end_offset


def data_lost(queue: QueueKey, begin: int, end: int) -> DataLost:
    return DataLost(
        f"{queue}: messages {begin} to {end} are not there any more (expired, or the topic was "
        f"made anew); to go on behind them, option failOnDataLoss=false"
    )


def _number(command: Command, name: str) -> int:
    try:
        return int(command.ext_fields[name])
    except (KeyError, ValueError):
        raise RemoteProtocolError(f"a pull's answer without {name}") from None
