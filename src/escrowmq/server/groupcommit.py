"""Group commit: one fsync answers everyone who waited for it.

Whoever needs an append to be durable waits here for its end: a send, a decision, a batch, all
alike. While one flush runs in a thread the next group gathers; when it is done the next begins.
A disk twice as slow makes groups twice as large, not queues twice as long.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from escrowmq.errors import StoreError, StoreFailed
from escrowmq.metrics import SECONDS, Distribution
from escrowmq.store.commitlog import Flush
from escrowmq.store.status import PutStatus
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

FLUSH_WAIT_S = 5.0  # syncFlushTimeout


class _Waiter(NamedTuple):
    log_offset: int
    deadline_s: float
    answer: Callable[[PutStatus], None]


class GroupCommit:
    """Belongs to the running event loop, like the store it flushes."""

    def __init__(self, store: MessageStore, *, wait_s: float = FLUSH_WAIT_S) -> None:
        self._store = store
        self._wait_s = wait_s
        self._waiting: deque[_Waiter] = deque()
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="escrowmq-flush")
        self._running: asyncio.Future[None] | None = None
        self._scheduled = False
        self._alarm: asyncio.TimerHandle | None = None
        self._began_s = 0.0  # the flush that runs
        self.flushes = 0
        self.flush_seconds = Distribution(SECONDS)

    def when_flushed(self, log_offset: int, answer: Callable[[PutStatus], None]) -> None:
        """Call `answer` once everything below `log_offset` is durable, or is not in time.

        Called at once if it is durable already. Offsets are asked for in rising order: by
        whoever has just appended.
        """
        if log_offset <= self._store.flushed:
            answer(PutStatus.PUT_OK)
            return
        deadline_s = self._loop.time() + self._wait_s
        self._waiting.append(_Waiter(log_offset, deadline_s, answer))
        if self._running is None and not self._scheduled:
            # At the end of this turn of the loop: whoever else appends in it goes along.
            self._scheduled = True
            self._loop.call_soon(self._begin)
        if self._alarm is None:
            self._alarm = self._loop.call_at(deadline_s, self._expire)

    async def flushed(self, log_offset: int) -> PutStatus:
        answered: asyncio.Future[PutStatus] = self._loop.create_future()

        def answer(status: PutStatus) -> None:
            if not answered.done():  # the caller may have been cancelled
                answered.set_result(status)

        self.when_flushed(log_offset, answer)
        return await answered

    @property
    def waiting(self) -> int:
        """Appends that wait to be durable."""
        return len(self._waiting)

    async def close(self) -> None:
        """Wait for the flushes that somebody waits for."""
        while self._waiting or self._running is not None:
            if self._running is not None:
                await asyncio.wait([self._running])
            await asyncio.sleep(0)  # the next flush begins, or those who waited are answered
        if self._alarm is not None:
            self._alarm.cancel()
        self._thread.shutdown()

    def _begin(self) -> None:
        self._scheduled = False
        try:
            flush = self._store.begin_flush()
        except StoreError as error:
            self._fail(error)
            return
        self._began_s = self._loop.time()
        self._running = self._loop.run_in_executor(self._thread, flush.run)
        self._running.add_done_callback(lambda done: self._finish(flush, done))

    def _finish(self, flush: Flush, done: asyncio.Future[None]) -> None:
        self._running = None
        self.flushes += 1
        self.flush_seconds.observe(self._loop.time() - self._began_s)
        error = done.exception()
        if error is not None:
            self._fail(error)
            return
        flushed = self._store.finish_flush(flush)
        while self._waiting and self._waiting[0].log_offset <= flushed:
            self._waiting.popleft().answer(PutStatus.PUT_OK)
        if self._waiting:
            self._begin()

    def _fail(self, error: BaseException) -> None:
        log.error("flush failed, the store takes no more writes: %s", error)
        cause = error if isinstance(error, StoreError) else StoreFailed(str(error))
        self._store.fail(cause)
        while self._waiting:
            self._waiting.popleft().answer(PutStatus.UNKNOWN_ERROR)

    def _expire(self) -> None:
        self._alarm = None
        now_s = self._loop.time()
        while self._waiting and self._waiting[0].deadline_s <= now_s:
            self._waiting.popleft().answer(PutStatus.FLUSH_DISK_TIMEOUT)
        if self._waiting:
            self._alarm = self._loop.call_at(self._waiting[0].deadline_s, self._expire)
