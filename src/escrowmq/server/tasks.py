"""Background work of a server: group commit, flushes, checkpoints, expiry.

    GroupCommit        one flush for all requests that wait for one (SYNC_FLUSH)
    StoreMaintenance   flush, checkpoint and expire at their intervals
    background_tasks   run tasks as long as the server; stop it if one of them fails

Under ASYNC_FLUSH, RocketMQ's default, only the flush of StoreMaintenance makes messages durable: a
power cut can cost the last half second. Under SYNC_FLUSH, GroupCommit flushes before each response,
and little is left for StoreMaintenance to flush.
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
# A start after a kill reads the log from the last checkpoint on, some ten microseconds per record.
# So under load the next checkpoint does not wait for its time once this much has been appended.
CHECKPOINT_BACKLOG_BYTES = 16 << 20
BACKLOG_POLL_S = 0.05


class _Waiter(NamedTuple):
    log_offset: int
    deadline_s: float
    callback: Callable[[StoreError | None], None]


class GroupCommit:
    """Flush the log for all waiting requests in one fsync.

    While a flush runs in a thread, further requests gather; when it is done, the next flush serves
    all of them. A disk that is twice as slow makes the groups twice as large, not the queue twice
    as long. Use it only in the event loop that was running when it was created.
    """

    def __init__(self, store: MessageStore, *, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._waiting: deque[_Waiter] = deque()
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="escrowmq-flush")
        self._running: asyncio.Future[None] | None = None
        self._is_scheduled = False
        self._timeout_handle: asyncio.TimerHandle | None = None
        self._began_s = 0.0  # start of the running flush
        self.flush_count = 0
        self.flush_seconds = Distribution(LATENCY_BOUNDS_S)

    def when_flushed(self, log_offset: int, callback: Callable[[StoreError | None], None]) -> None:
        """Call `callback` with None once the log below `log_offset` is durable, or with an error.

        It is called at once if that is durable already. Offsets must not decrease from call to
        call: they are the ends of appends.
        """
        if log_offset <= self._store.flushed_offset:
            callback(None)
            return
        deadline_s = self._loop.time() + self._timeout_s
        self._waiting.append(_Waiter(log_offset, deadline_s, callback))
        if self._running is None and not self._is_scheduled:
            # Later in this iteration of the loop, so that other appends of it are included.
            self._is_scheduled = True
            self._loop.call_soon(self._start_flush)
        if self._timeout_handle is None:
            self._timeout_handle = self._loop.call_at(deadline_s, self._expire)

    async def wait_flushed(self, log_offset: int) -> StoreError | None:
        flushed: asyncio.Future[StoreError | None] = self._loop.create_future()

        def set_result(error: StoreError | None) -> None:
            if not flushed.done():  # the caller may have been cancelled
                flushed.set_result(error)

        self.when_flushed(log_offset, set_result)
        return await flushed

    @property
    def waiting_count(self) -> int:
        """Number of callbacks that wait for a flush."""
        return len(self._waiting)

    async def close(self) -> None:
        """Complete the flushes that have been requested, and end the thread."""
        while self._waiting or self._running is not None:
            if self._running is not None:
                await asyncio.wait([self._running])
            await asyncio.sleep(0)  # the next flush begins, or the callbacks are called
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
        log.error("flush failed, the store accepts no more writes: %s", error)
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
    """Flush, checkpoint and expire a store at the configured intervals.

    `oldest_needed_offset` returns the log offset below which segments may be deleted; None means
    all. `move_halves_below` is called with the end of a segment that is due but still needed.
    """

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
        self._move_halves_below = move_halves_below
        self.flush_seconds = Distribution(LATENCY_BOUNDS_S)
        self.checkpoint_seconds = Distribution(LATENCY_BOUNDS_S)
        self._checkpoint_lock = asyncio.Lock()  # a checkpoint and expiry exclude each other

    async def run(self) -> None:
        """Run until cancelled, or until the store has failed."""
        async with asyncio.TaskGroup() as tasks:
            for name, step, interval_s, is_early in (
                ("flush", self.flush, self._config.flush_interval_s, None),
                (
                    "checkpoint",
                    self.checkpoint,
                    self._config.checkpoint_interval_s,
                    self._has_long_backlog,
                ),
                ("expiry", self.expire, self._config.expire_interval_s, None),
            ):
                tasks.create_task(self._repeat(name, step, interval_s, is_early))

    async def flush(self) -> None:
        is_flushed = self._store.flushed_offset == self._store.end
        if is_flushed and not self._store.has_unsynced_marks:
            return
        # Group commits write their marks without a sync. After a power cut the newest of them are
        # missing, and this bounds how many.
        flush, began_s = self._store.begin_flush(syncs_marks=True), self._clock.elapsed_s()
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
            log.info("deleted expired segments count=%d log_begin=%d", removed, self._store.begin)

    def _is_oldest_segment_expired(self) -> bool:
        now_ms = self._clock.now_ms()
        if not is_expired(
            self._store, now_ms=now_ms, hour=local_hour(now_ms), usage=self._disk.usage()
        ):
            return False
        end = self._store.begin + self._store.config.segment_bytes
        needed_from = self._oldest_needed_offset()
        if needed_from is not None and needed_from < end:
            # Open halves are appended again, so that a later pass can delete the segment.
            self._move_halves_below(LogOffset(end))
            return False
        return True

    async def _remove_oldest_segment(self) -> None:
        """Delete the oldest segment in a thread: freeing a gigabyte can take a while."""
        removal = self._store.begin_removal()
        try:
            cancelled = await _run_to_completion(removal.run)
        finally:
            self._store.finish_removal(removal)
        if await _run_to_completion(removal.release) or cancelled:
            raise asyncio.CancelledError

    def _has_long_backlog(self) -> bool:
        """Return whether a checkpoint should not wait: a start would have to read too much."""
        return self._store.end - self._store.checkpointed_offset >= CHECKPOINT_BACKLOG_BYTES

    async def _repeat(
        self,
        name: str,
        step: Callable[[], Awaitable[None]],
        interval_s: float,
        is_early: Callable[[], bool] | None,
    ) -> None:
        """Run a step at intervals, and earlier if `is_early` says so."""
        while not self._store.has_failed:
            if is_early is None:
                await asyncio.sleep(interval_s)
            else:
                await self._sleep_unless(is_early, interval_s)
            try:
                await step()
            except StoreFull as error:
                log.warning("%s postponed, the disk is full: %s", name, error)
            except StoreError as error:
                # What is on the disk is uncertain until recovery has checked it at a restart.
                log.exception("%s failed, the store accepts no more writes", name)
                self._store.fail(error)

    async def _sleep_unless(self, is_early: Callable[[], bool], interval_s: float) -> None:
        remaining_s = interval_s
        while remaining_s > 0 and not is_early():
            await asyncio.sleep(min(BACKLOG_POLL_S, remaining_s))
            remaining_s -= BACKLOG_POLL_S


async def _run_to_completion(function: Callable[[], None]) -> bool:
    """Run a function in a thread and wait for its end even if cancelled meanwhile.

    A thread cannot be stopped, and the store must learn how the work ended. Return whether the
    caller was cancelled and should raise CancelledError.
    """
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
    """Run coroutines until the block ends. If one fails, the process is stopped cleanly."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    for task in tasks:
        task.add_done_callback(_stop_if_failed)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _stop_if_failed(task: asyncio.Task[None]) -> None:
    """Stop the process, which would otherwise look healthy while part of its work is not done."""
    if not task.cancelled() and task.exception() is not None:
        log.error("background task failed, stopping", exc_info=task.exception())
        os.kill(os.getpid(), signal.SIGTERM)
