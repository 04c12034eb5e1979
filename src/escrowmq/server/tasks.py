"""Group commit: one fsync answers everyone who waited for it.

Whoever needs an append to be durable waits here for its end: a send, a decision, a batch, all
alike. While one flush runs in a thread the next group gathers; when it is done the next begins.
A disk twice as slow makes groups twice as large, not queues twice as long.

What a store needs now and then: flushes, checkpoints, expiry. When, not what.

In async mode (RocketMQ's default) this flush is all that makes messages durable: a power cut may
cost the last half second. In sync mode GroupCommit flushes before each answer, and there is
little left to do here.

Tasks that run as long as a server does; one that fails stops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from escrowmq.clock import Clock, local_hour
from escrowmq.config import StoreConfig
from escrowmq.errors import FlushTimeout, StoreError, StoreFailed, StoreFull
from escrowmq.message.record import LogOffset
from escrowmq.metrics import LATENCY_BOUNDS_S, Distribution
from escrowmq.store.commit_log import LogFlush
from escrowmq.store.disk import Disk
from escrowmq.store.retention import SEGMENTS_PER_PASS_MAX, is_expired
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 5.0  # syncFlushTimeout


class _Waiter(NamedTuple):
    log_offset: int
    deadline_s: float
    callback: Callable[[StoreError | None], None]


class GroupCommit:
    """Belongs to the running event loop, like the store it flushes."""

    def __init__(self, store: MessageStore, *, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._waiting: deque[_Waiter] = deque()
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="escrowmq-flush")
        self._running: asyncio.Future[None] | None = None
        self._is_scheduled = False
        self._timeout_handle: asyncio.TimerHandle | None = None
        self._began_s = 0.0  # the flush that runs
        self.flush_count = 0
        self.flush_seconds = Distribution(LATENCY_BOUNDS_S)

    def when_flushed(self, log_offset: int, callback: Callable[[StoreError | None], None]) -> None:
        """Call `callback` with None once all below `log_offset` is durable, or with an error.

        Called at once if it is durable already. Offsets are asked for in rising order: by
        whoever has just appended.
        """
        if log_offset <= self._store.flushed_offset:
            callback(None)
            return
        deadline_s = self._loop.time() + self._timeout_s
        self._waiting.append(_Waiter(log_offset, deadline_s, callback))
        if self._running is None and not self._is_scheduled:
            # At the end of this turn of the loop: whoever else appends in it goes along.
            self._is_scheduled = True
            self._loop.call_soon(self._start_flush)
        if self._timeout_handle is None:
            self._timeout_handle = self._loop.call_at(deadline_s, self._expire)

    async def wait_flushed(self, log_offset: int) -> StoreError | None:
        answered: asyncio.Future[StoreError | None] = self._loop.create_future()

        def answer(error: StoreError | None) -> None:
            if not answered.done():  # the caller may have been cancelled
                answered.set_result(error)

        self.when_flushed(log_offset, answer)
        return await answered

    @property
    def waiting_count(self) -> int:
        """Appends that wait to be durable."""
        return len(self._waiting)

    async def close(self) -> None:
        """Wait for the flushes that somebody waits for."""
        while self._waiting or self._running is not None:
            if self._running is not None:
                await asyncio.wait([self._running])
            await asyncio.sleep(0)  # the next flush begins, or those who waited are answered
        if self._timeout_handle is not None:
            self._timeout_handle.cancel()
        self._thread.shutdown()

    def _start_flush(self) -> None:
        self._is_scheduled = False
        try:
            flush = self._store.begin_flush()
        except StoreError as error:
            self._fail(error)
            return
        self._began_s = self._loop.time()
        self._running = self._loop.run_in_executor(self._thread, flush.run)
        self._running.add_done_callback(lambda done: self._flush_done(flush, done))

    def _flush_done(self, flush: LogFlush, done: asyncio.Future[None]) -> None:
        self._running = None
        self.flush_count += 1
        self.flush_seconds.observe(self._loop.time() - self._began_s)
        error = done.exception()
        if error is not None:
            self._fail(error)
            return
        flushed = self._store.finish_flush(flush)
        while self._waiting and self._waiting[0].log_offset <= flushed:
            self._waiting.popleft().callback(None)
        if self._waiting:
            self._start_flush()

    def _fail(self, error: BaseException) -> None:
        log.error("flush failed, the store takes no more writes: %s", error)
        cause = error if isinstance(error, StoreError) else StoreFailed(str(error))
        self._store.fail(cause)
        # Not `cause`: a StoreFull would tell the client that nothing was stored.
        failure = StoreFailed(f"the log is not flushed: {error}")
        while self._waiting:
            self._waiting.popleft().callback(failure)

    def _expire(self) -> None:
        self._timeout_handle = None
        now_s = self._loop.time()
        while self._waiting and self._waiting[0].deadline_s <= now_s:
            self._waiting.popleft().callback(
                FlushTimeout(f"not flushed within {self._timeout_s:g} s (syncFlushTimeout)")
            )
        if self._waiting:
            self._timeout_handle = self._loop.call_at(self._waiting[0].deadline_s, self._expire)


class StoreMaintenance:
    """Runs until it is cancelled, or until the store has failed."""

    def __init__(
        self,
        store: MessageStore,
        disk: Disk,
        clock: Clock,
        config: StoreConfig,
        *,
        oldest_needed_offset: Callable[[], LogOffset | None] = lambda: None,
        move_halves_below: Callable[[LogOffset], None] = lambda end: None,
    ) -> None:
        self._store = store
        self._disk = disk
        self._clock = clock
        self._config = config
        self._oldest_needed_offset = oldest_needed_offset
        self._move_halves_below = (
            move_halves_below  # whoever keeps the log up to there is asked to let it go
        )
        self.flush_seconds = Distribution(LATENCY_BOUNDS_S)
        self.checkpoint_seconds = Distribution(LATENCY_BOUNDS_S)
        self._checkpoint_lock = (
            asyncio.Lock()
        )  # expiry waits for a checkpoint, and the other way round

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for what, step, interval_s in (
                ("flush", self.flush, self._config.flush_interval_s),
                ("checkpoint", self.checkpoint, self._config.checkpoint_interval_s),
                ("expiry", self.expire, self._config.expire_interval_s),
            ):
                tasks.create_task(self._repeat(what, step, interval_s))

    async def flush(self) -> None:
        if self._store.flushed_offset == self._store.end:
            return
        flush, began_s = self._store.begin_flush(), self._clock.elapsed_s()
        try:
            cancelled = await _run_to_completion(flush.run)
        except StoreError as error:
            self._store.fail(error)
            raise
        self._store.finish_flush(flush)
        self.flush_seconds.observe(self._clock.elapsed_s() - began_s)
        if cancelled:
            raise asyncio.CancelledError

    async def checkpoint(self) -> None:
        async with self._checkpoint_lock:
            if self._store.is_checkpointed:
                return
            began_s = self._clock.elapsed_s()
            job = self._store.begin_checkpoint()
            try:
                cancelled = await _run_to_completion(job.run)
            except StoreError as error:
                self._store.fail_checkpoint(error)
                raise
            self._store.finish_checkpoint(job)
            self.checkpoint_seconds.observe(self._clock.elapsed_s() - began_s)
        if cancelled:
            raise asyncio.CancelledError

    async def expire(self) -> None:
        async with self._checkpoint_lock:
            removed = 0
            while removed < SEGMENTS_PER_PASS_MAX and self._is_oldest_segment_expired():
                await self._remove_oldest_segment()
                removed += 1
        if removed:
            log.info("expired files=%d log_begin=%d", removed, self._store.begin)

    def _is_oldest_segment_expired(self) -> bool:
        now_ms = self._clock.now_ms()
        if not is_expired(
            self._store, now_ms=now_ms, hour=local_hour(now_ms), usage=self._disk.usage()
        ):
            return False
        end, keep_from = (
            self._store.begin + self._store.config.segment_bytes,
            self._oldest_needed_offset(),
        )
        if keep_from is not None and keep_from < end:
            self._move_halves_below(LogOffset(end))  # and the next pass finds nothing kept
            return False
        return True

    async def _remove_oldest_segment(self) -> None:
        """Not on the loop: to free a gigabyte can take a file system a while."""
        removal = self._store.begin_removal()
        try:
            cancelled = await _run_to_completion(removal.run)
        finally:
            self._store.finish_removal(removal)
        if await _run_to_completion(removal.release) or cancelled:
            raise asyncio.CancelledError

    async def _repeat(
        self, name: str, step: Callable[[], Awaitable[None]], interval_s: float
    ) -> None:
        while not self._store.has_failed:
            await asyncio.sleep(interval_s)
            try:
                await step()
            except StoreFull as error:
                log.warning("%s postponed, the disk is full: %s", name, error)
            except StoreError as error:
                # Nothing more can be promised until a restart has looked: take no more messages.
                log.exception("%s failed, the store takes no more writes", name)
                self._store.fail(error)


async def _run_to_completion(function: Callable[[], None]) -> bool:
    """Run it in a thread, also if we are cancelled meanwhile: it cannot be stopped half way, and
    the store must hear how it ended. Whether we were."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    cancelled = False
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            cancelled = True
    running.result()
    return cancelled


@contextlib.asynccontextmanager
async def background_tasks(*coroutines: Any) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(loop) for loop in coroutines]
    for task in tasks:
        task.add_done_callback(_stop_if_failed)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _stop_if_failed(task: asyncio.Task[None]) -> None:
    """A broker without one of its loops would only look alive: better none at all."""
    if not task.cancelled() and task.exception() is not None:
        log.error("a loop failed, stopping", exc_info=task.exception())
        os.kill(os.getpid(), signal.SIGTERM)
