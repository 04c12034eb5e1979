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
from escrowmq.spark.line import Asked, BlockingLine
from escrowmq.spark.offsets import QueueKey
from escrowmq.spark.records import Bytes

BLOCK_BYTES: Final = 10 << 20
BLOCK_ROWS: Final = 10_000  # Spark's best size of an Arrow batch
UNDER_WAY_BYTES: Final = 4 << 20
WINDOWS_MAX: Final = 16
HAS_SUBSCRIPTION: Final = 4
_EVERYTHING: Final = "*"


class Piece(NamedTuple):
    """A range of one queue, and who has it."""

    queue: QueueKey
    address: str
    begin: int
    end: int


@dataclass(frozen=True)
class Wish:
    """What is wanted of every queue."""

    group: str
    expression: str = _EVERYTHING
    kind: str = "TAG"
    count_max: int = 8_192
    fail_on_data_loss: bool = True

    @property
    def is_everything(self) -> bool:
        return self.expression == _EVERYTHING


@dataclass
class _Window:
    at: int
    end: int
    kept: list[Bytes] = field(default_factory=list)


class _Block:
    def __init__(self, room_bytes: int) -> None:
        self._data = np.empty(room_bytes, np.uint8)
        self._end = 0
        self.rows = 0

    def has_room(self, count: int) -> bool:
        return self.rows < BLOCK_ROWS and self._end + count <= len(self._data)

    def more(self, count: int) -> Bytes:
        """The next bytes of it, to be filled."""
        begin, self._end = self._end, self._end + count
        return self._data[begin : self._end]

    def taken(self) -> Bytes:
        return self._data[: self._end]


class RangePull:
    def __init__(self, line: BlockingLine, piece: Piece, wish: Wish) -> None:
        self._line = line
        self._piece = piece
        self._wish = wish
        self._planned = piece.begin
        self._windows: deque[_Window] = deque()
        self._asked: dict[int, _Window] = {}
        self._width = 0  # until the first answer has told
        self._windows_max = 1

    def blocks(self) -> Iterator[Bytes]:
        """Buffers of whole records, in the order of the queue."""
        block = _Block(BLOCK_BYTES)
        self._ask_more()
        while self._windows:
            head = self._windows[0]
            while head.kept:
                whole = head.kept.pop(0)
                if not block.has_room(len(whole)):
                    yield block.taken()
                    block = _Block(max(BLOCK_BYTES, len(whole)))
                block.more(len(whole))[:] = whole
                block.rows += self._width
            if head.at >= head.end:
                self._windows.popleft()
                self._ask_more()
                continue
            command, size = self._line.receive_head()
            window = self._asked.pop(command.opaque)
            is_first = window is head
            if is_first and not block.has_room(size):
                yield block.taken()
                block = _Block(max(BLOCK_BYTES, size))
            room = block.more(size) if is_first else np.empty(size, np.uint8)
            if size:
                self._line.receive_into(room.data)
            before = window.at
            self._move_on(window, command, size)
            if is_first:
                block.rows += window.at - before
            elif size:
                window.kept.append(room)
        if len(block.taken()):
            yield block.taken()

    def _ask_more(self) -> None:
        while len(self._windows) < self._windows_max and self._planned < self._piece.end:
            width = self._width or self._piece.end - self._planned
            window = _Window(self._planned, min(self._planned + width, self._piece.end))
            self._planned = window.end
            self._windows.append(window)
            self._ask(window)

    def _ask(self, window: _Window) -> None:
        wish, queue = self._wish, self._piece.queue
        fields = PullMessage(
            consumer_group=wish.group,
            topic=queue.topic,
            queue_id=queue.queue_id,
            queue_offset=window.at,
            max_msg_nums=min(wish.count_max, window.end - window.at),
            sys_flag=HAS_SUBSCRIPTION,
            subscription=wish.expression,
            expression_type=wish.kind,
            bulk=True,
        )
        self._asked[self._line.send(Asked(RequestCode.PULL_MESSAGE, fields))] = window

    def _move_on(self, window: _Window, command: Command, size: int) -> None:
        before = window.at
        window.at = self._next(window, command)
        if not self._width and self._wish.is_everything and command.code == ResponseCode.SUCCESS:
            # Now it is known what an answer holds: the rest is asked for in windows of that size.
            self._width = max(1, window.at - before)
            self._windows_max = max(2, min(WINDOWS_MAX, UNDER_WAY_BYTES // max(1, size)))
            window.end = self._planned = min(window.at, window.end)
            self._ask_more()
        elif window.at < window.end:
            self._ask(window)

    def _next(self, window: _Window, command: Command) -> int:
        """Where the window goes on; at its end, or behind it, it is done."""
        if command.code in (ResponseCode.SUCCESS, ResponseCode.PULL_RETRY_IMMEDIATELY):
            following = _number(command, "nextBeginOffset")
            if following <= window.at:
                raise RemoteProtocolError(
                    f"{self._line.address}: a pull of {self._piece.queue} at {window.at} does not "
                    f"get on"
                )
            return following
        if command.code == ResponseCode.PULL_OFFSET_MOVED:
            return self._lost(window, max(window.at, _number(command, "minOffset")))
        if command.code == ResponseCode.PULL_NOT_FOUND:
            return self._lost(window, window.end)
        raise RequestRefused(
            command.code, f"{self._line.address}: pull of {self._piece.queue}: {command.remark}"
        )

    def _lost(self, window: _Window, following: int) -> int:
        if self._wish.fail_on_data_loss:
            raise lost(self._piece.queue, window.at, min(following, window.end))
        return following if following > window.at else window.end


def lost(queue: QueueKey, begin: int, end: int) -> DataLost:
    return DataLost(
        f"{queue}: messages {begin} to {end} are not there any more (expired, or the topic was "
        f"made anew); to go on behind them, option failOnDataLoss=false"
    )


def _number(command: Command, name: str) -> int:
    try:
        return int(command.ext_fields[name])
    except (KeyError, ValueError):
        raise RemoteProtocolError(f"a pull's answer without {name}") from None
