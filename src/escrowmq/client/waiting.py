"""Messages that are pulled and not handed out yet: the queues in turn, so none waits for another.

Of an orderly consumer's queue one message is out at a time; the next follows when it is released.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Q = TypeVar("Q", bound=Hashable)  # whose messages they are
M = TypeVar("M")


class Waiting(Generic[Q, M]):
    def __init__(self, *, orderly: bool = False) -> None:
        self._orderly = orderly
        self._messages: dict[Q, deque[M]] = {}
        self._turns: asyncio.Queue[Q | None] = asyncio.Queue()  # None: it is closed
        self._in_line: set[Q] = set()  # those that have a turn coming
        self._out: set[Q] = set()  # orderly: those with a message out
        self._paused: set[Q] = set()
        self._came_back = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        return sum(map(len, self._messages.values()))

    def put(self, queue: Q, messages: Iterable[M]) -> None:
        self._messages.setdefault(queue, deque()).extend(messages)
        self._line_up(queue)

    def put_first(self, queue: Q, message: M) -> None:
        """Back to where it came from."""
        self._messages.setdefault(queue, deque()).appendleft(message)
        self._line_up(queue)

    async def get(self) -> tuple[Q, M] | None:
        """None once it is closed."""
        while True:
            queue = await self._turns.get()
            if queue is None:
                self._turns.put_nowait(None)  # for the next who asks
                return None
            if (message := self._take(queue)) is not None:
                return queue, message

    def get_nowait(self) -> tuple[Q, M] | None:
        """None if there is nothing."""
        while not self._turns.empty() and not self._is_closed:
            queue = self._turns.get_nowait()
            if queue is not None and (message := self._take(queue)) is not None:
                return queue, message
        return None

    def release(self, queue: Q) -> None:
        """The message that is out is done with."""
        self._out.discard(queue)
        self._came_back.set()
        self._line_up(queue)

    async def until_back(self, queue: Q) -> None:
        """Orderly: until no message of it is out."""
        while queue in self._out:
            self._came_back.clear()
            await self._came_back.wait()

    def pause(self, queue: Q) -> None:
        self._paused.add(queue)

    def resume(self, queue: Q) -> None:
        self._paused.discard(queue)
        self._line_up(queue)

    def drop(self, queue: Q) -> None:
        """What waits of it is not to be handed out."""
        self._messages.pop(queue, None)

    def forget(self, queue: Q) -> None:
        """It is somebody else's now."""
        self.drop(queue)
        self._paused.discard(queue)
        self._out.discard(queue)

    def close(self) -> None:
        """Nothing more is handed out."""
        if not self._is_closed:
            self._is_closed = True
            self._messages.clear()
            self._turns.put_nowait(None)

    def _take(self, queue: Q) -> M | None:
        self._in_line.discard(queue)
        messages = self._messages.get(queue)
        if not messages or queue in self._paused:
            return None
        message = messages.popleft()
        if self._orderly:
            self._out.add(queue)
        else:
            self._line_up(queue)
        return message

    def _line_up(self, queue: Q) -> None:
        if self._is_closed or queue in self._in_line or queue in self._out:
            return
        if queue not in self._paused and self._messages.get(queue):
            self._in_line.add(queue)
            self._turns.put_nowait(queue)
