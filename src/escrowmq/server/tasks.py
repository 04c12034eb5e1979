"""Background work of a server: group commit, flushes, checkpoints, expiry.

    GroupCommit        one flush for all requests that wait for one (SYNC_FLUSH)
    StoreMaintenance   flush, checkpoint and expire at their intervals
    Ticker             call the broker when something is due
    background_tasks   run tasks as long as the server; stop it if one of them fails
    repeat             call a function at an interval, whatever it raises now and then

A process that has nothing to do sleeps. Flushes and checkpoints wait until the store changes, the
broker says when it has something to do, and the rest wakes up together, once a second.

Under ASYNC_FLUSH, RocketMQ's default, only the flush of StoreMaintenance makes messages durable: a
power cut can cost the last half second. Under SYNC_FLUSH, GroupCommit flushes before each response,
and little is left for StoreMaintenance to flush.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from escrowmq.clock import ClockReport, JumpDetector, SteadyClock, local_hour
from escrowmq.config import StoreConfig
from escrowmq.errors import FlushTimeout, StoreError, StoreFailed, StoreFull, StoreUnavailable
from escrowmq.message.record import LogOffset
from escrowmq.metrics import LATENCY_BOUNDS_S, Distribution
from escrowmq.store.commit_log import LogFlush
from escrowmq.store.disk import Disk
from escrowmq.store.log_ages import MARK_INTERVAL_MS, LogAges, PastTimes, save_ages
from escrowmq.store.retention import SEGMENTS_PER_PASS_MAX, is_expired
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

FLUSH_TIMEOUT_S = 5.0  # syncFlushTimeout
# A start after a kill reads the log from the last checkpoint on, some ten microseconds per record.
# So under load the next checkpoint does not wait for its time once this much has been appended.
CHECKPOINT_BACKLOG_BYTES = 16 << 20
CHECKPOINT_PAUSE_S = 0.05  # before a checkpoint, however much has been appended
RETRY_INTERVAL_S = 0.05  # before a flush that could not begin is tried again
MARK_INTERVAL_S = MARK_INTERVAL_MS / 1000
AGES_SAVE_INTERVAL_S = 60.0
IDLE_TICK_S = 1.0  # what is not urgent, such as the expiry of members, waits so long
PLAN_INTERVAL_S = 0.01  # between two questions when something is due; a turn may take less
FAILURES_MAX = 10  # errors of a repeated step in a row, other than errors of the disk


class _Waiter(NamedTuple):
    log_offset: int
    deadline_s: float
    callback: Callable[[StoreError | None], None]

    def finish(self, error: StoreError | None) -> None:
        """Call the callback. If it raises, the other waiters are still called."""
        try:
            self.callback(error)
        except Exception:
            log.exception("result of a flush not handled")


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
            # The next flush begins, or the callbacks are called.
            await asyncio.sleep(RETRY_INTERVAL_S if self._is_scheduled else 0)
        if self._timeout_handle is not None:
            self._timeout_handle.cancel()
        self._thread.shutdown()

    def _start_flush(self) -> None:
        self._is_scheduled = False
        if not self._waiting:
            return  # all of them have timed out before this attempt
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
        if isinstance(error, StoreUnavailable):
            # Nothing was flushed and nothing failed. Who waits too long gets a FlushTimeout.
            log.warning("flush postponed: %s", error)
            self._is_scheduled = True
            self._loop.call_later(RETRY_INTERVAL_S, self._start_flush)
            return
        if error is not None:
            self._fail(error)
            return
        flushed = self._store.finish_flush(flush)
        while self._waiting and self._waiting[0].log_offset <= flushed:
            self._waiting.popleft().finish(None)
        if self._waiting:
            self._start_flush()

    def _fail(self, error: BaseException) -> None:
        log.error("flush failed, the store accepts no more writes: %s", error)
        cause = error if isinstance(error, StoreError) else StoreFailed(str(error))
        self._store.fail(cause)
        # Not `cause`: a StoreFull would tell the client that nothing was stored.
        failure = StoreFailed(f"the log is not flushed: {error}")
        while self._waiting:
            self._waiting.popleft().finish(failure)

    def _expire(self) -> None:
        self._timeout_handle = None
        now_s = self._loop.time()
        while self._waiting and self._waiting[0].deadline_s <= now_s:
            self._waiting.popleft().finish(
                FlushTimeout(f"not flushed within {self._timeout_s:g} s (syncFlushTimeout)")
            )
        if self._waiting:
            self._timeout_handle = self._loop.call_at(self._waiting[0].deadline_s, self._expire)


class StoreMaintenance:
    """Flush, checkpoint and expire a store at the configured intervals; watch the clock.

    Create it when the store was just opened: the ages of the log are measured from then on.
    """

    def __init__(
        self,
        store: MessageStore,
        disk: Disk,
        clock: SteadyClock,
        config: StoreConfig,
    ) -> None:
        self._store = store
        self._disk = disk
        self._clock = clock
        self._config = config
        self.jump_detector = JumpDetector(clock)
        self.clock_change_at_start_ms = 0  # how much the clock was set since the broker ran last
        self._ages = self._load_ages()
        self._next_save_s = 0.0
        self.keep_needed_segments(lambda: None, lambda end: None)
        self.flush_seconds = Distribution(LATENCY_BOUNDS_S)
        self.checkpoint_seconds = Distribution(LATENCY_BOUNDS_S)
        self._checkpoint_lock = asyncio.Lock()  # a checkpoint and expiry exclude each other
        self.store_failed = asyncio.Event()
        # What the loops sleep on. An event may be set although nothing is to be done any more.
        self._flush_needed = asyncio.Event()
        self._checkpoint_needed = asyncio.Event()
        self._checkpoint_overdue = asyncio.Event()
        store.watch_changes(self._store_changed)
        self._store_changed()

    def keep_needed_segments(
        self,
        oldest_needed_offset: Callable[[], LogOffset | None],
        move_messages_below: Callable[[LogOffset], None],
    ) -> None:
        """Do not delete what the transaction coordinator needs.

        `oldest_needed_offset` returns the log offset below which segments may be deleted; None
        means all. `move_messages_below` is called with the end of a segment that is due but still
        needed.
        """
        self._oldest_needed_offset = oldest_needed_offset
        self._move_messages_below = move_messages_below

    async def run(self) -> None:
        """Run until cancelled, or until the store has failed."""
        expire_pause = partial(sleep_to_multiple, self._config.expire_interval_s)
        ages_pause = partial(sleep_to_multiple, MARK_INTERVAL_S)
        async with asyncio.TaskGroup() as tasks:
            loops = [
                tasks.create_task(self._repeat(name, step, pause))
                for name, step, pause in (
                    ("flush", self.flush, self._sleep_until_flush),
                    ("checkpoint", self.checkpoint, self._sleep_until_checkpoint),
                    ("expiry", self.expire, expire_pause),
                    ("measuring ages", self.measure_ages, ages_pause),
                )
            ]
            await self.store_failed.wait()
            for loop in loops:
                loop.cancel()

    def _store_changed(self) -> None:
        self._flush_needed.set()
        self._checkpoint_needed.set()
        if self._has_long_backlog():
            self._checkpoint_overdue.set()
        if self._store.has_failed:
            self.store_failed.set()

    async def flush(self) -> None:
        if not self._needs_flush():
            return
        # Group commits write their marks without a sync. After a power cut the newest of them are
        # missing, and this bounds how many.
        flush, began_s = self._store.begin_flush(syncs_marks=True), self._clock.elapsed_s()
        try:
            cancelled = await _run_to_completion(flush.run)
        except StoreUnavailable:
            raise
        except StoreError as error:
            self._store.fail(error)
            raise
        self._store.finish_flush(flush)
        self.flush_seconds.observe(self._clock.elapsed_s() - began_s)
        if cancelled:
            raise asyncio.CancelledError

    async def checkpoint(self) -> None:
        async with self._checkpoint_lock:
            if self._store.is_checkpointed or self._store.is_removing_files:
                return  # not now: the files of a deleted topic go first
            began_s = self._clock.elapsed_s()
            job = self._store.begin_checkpoint()
            try:
                cancelled = await _run_to_completion(job.run)
            except Exception as error:
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

    async def measure_ages(self) -> None:
        """Note how far the log is, and save that once a minute. Report a clock that was set."""
        change_ms = self.jump_detector.check()
        if change_ms:
            report_clock_change("while the broker runs", change_ms)
        self._ages.add_mark(
            self._store.flushed_offset,
            elapsed_ms=self._elapsed_ms(),
            broker_ms=self._clock.now_ms(),
        )
        if self._clock.elapsed_s() >= self._next_save_s:
            self._next_save_s = self._clock.elapsed_s() + AGES_SAVE_INTERVAL_S
            if await _run_to_completion(partial(save_ages, self._disk, self._encode_ages())):
                raise asyncio.CancelledError

    def past_times(self) -> PastTimes:
        """Return what converts times that an earlier process recorded to the time of this one."""
        now_ms = self._clock.now_ms()
        return self._ages.past_times(elapsed_ms=self._elapsed_ms(), now_ms=now_ms)

    def clock_report(self) -> ClockReport:
        """Return what an operator should know about the wall clock."""
        return ClockReport(
            jumps=self.jump_detector.jumps,
            change_at_start_ms=self.clock_change_at_start_ms,
            stored_ahead_ms=self.stored_ahead_ms(),
        )

    def stored_ahead_ms(self) -> int:
        """Return how far the newest message was stored in the future."""
        return max(0, self._store.last_stored_ms - self._wall_ms())

    def _load_ages(self) -> LogAges:
        """Load how old the parts of the log are, and report a clock that was or is wrong."""
        store, elapsed_ms = self._store, self._elapsed_ms()
        ages = LogAges.load(
            self._disk,
            boot_id=self._clock.boot_id(),
            log_end=store.end,
            elapsed_ms=elapsed_ms,
            wall_ms=self._wall_ms(),
            damage=store.damage,
        )
        ages.start(store.end, elapsed_ms=elapsed_ms, broker_ms=self._clock.now_ms())
        if abs(ages.wall_change_ms) >= JumpDetector.JUMP_MS:
            self.jump_detector.jumps += 1
            self.clock_change_at_start_ms = ages.wall_change_ms
            report_clock_change("since the broker ran last", ages.wall_change_ms)
        if self.stored_ahead_ms() >= JumpDetector.JUMP_MS:
            log.warning(
                "the newest message was stored %.0f s in the future: the clock was wrong then, or "
                "is wrong now",
                self.stored_ahead_ms() / 1000,
            )
        return ages

    def save_ages(self) -> None:
        """Save how old the parts of the log are, in this thread. Raises StoreError."""
        save_ages(self._disk, self._encode_ages())

    def _encode_ages(self) -> bytes:
        return self._ages.encode(
            log_begin=self._store.begin,
            elapsed_ms=self._elapsed_ms(),
            wall_ms=self._wall_ms(),
        )

    def _wall_ms(self) -> int:
        return self._clock.now_ms() + self._clock.offset_ms()

    def _elapsed_ms(self) -> int:
        return round(self._clock.elapsed_s() * 1000)

    def _age_of(self, log_offset: int) -> int:
        return self._ages.age_ms(log_offset, elapsed_ms=self._elapsed_ms())

    def _is_oldest_segment_expired(self) -> bool:
        hour, usage = local_hour(self._clock.now_ms()), self._disk.usage()
        if not is_expired(self._store, age_of=self._age_of, hour=hour, usage=usage):
            return False
        end = self._store.begin + self._store.config.segment_bytes
        needed_from = self._oldest_needed_offset()
        if needed_from is not None and needed_from < end:
            # Open halves and delayed messages are appended again, so that a later pass can delete
            # the segment.
            self._move_messages_below(LogOffset(end))
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
        pause: Callable[[], Awaitable[None]],
    ) -> None:
        """Run a step after each pause."""
        while not self._store.has_failed:
            await pause()
            try:
                await step()
            except (StoreFull, StoreUnavailable) as error:
                log.warning("%s postponed: %s", name, error)
            except Exception as error:
                # What is on the disk is uncertain until recovery has checked it at a restart. After
                # a MemoryError, it is uncertain what the store has noted of it.
                trace = None if isinstance(error, StoreError) else error
                log.error(
                    "%s failed, the store accepts no more writes: %s", name, error, exc_info=trace
                )
                self._store.fail(error)

    async def _sleep_until_flush(self) -> None:
        """Sleep until there is something to flush, and then for the interval of flushes."""
        await _wait_until(self._needs_flush, self._flush_needed)
        await asyncio.sleep(self._config.flush_interval_s)

    async def _sleep_until_checkpoint(self) -> None:
        """Do the same for checkpoints, but not for the whole interval if the backlog is long."""
        await _wait_until(lambda: not self._store.is_checkpointed, self._checkpoint_needed)
        # A checkpoint that has to wait for something else must not be tried in a busy loop.
        pause_s = min(CHECKPOINT_PAUSE_S, self._config.checkpoint_interval_s)
        await asyncio.sleep(pause_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.checkpoint_interval_s - pause_s):
                await _wait_until(self._has_long_backlog, self._checkpoint_overdue)

    def _needs_flush(self) -> bool:
        store = self._store
        return store.flushed_offset != store.end or store.has_unsynced_marks


async def _wait_until(is_true: Callable[[], bool], changed: asyncio.Event) -> None:
    """Wait until something is true. `changed` is set whenever it may have become so."""
    while not is_true():
        changed.clear()
        await changed.wait()


def report_clock_change(when: str, change_ms: int) -> None:
    direction = "forwards" if change_ms > 0 else "back"
    log.warning(
        "the wall clock was set %s by %.0f s %s; nothing expires because of that",
        direction,
        abs(change_ms) / 1000,
        when,
    )


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


async def sleep_to_multiple(interval_s: float) -> None:
    """Sleep for about an interval, until the time of the event loop is a multiple of it.

    So work with equal intervals wakes the process up once, and not once for each.
    """
    now_s = asyncio.get_running_loop().time()
    await asyncio.sleep(_next_multiple(now_s, interval_s) - now_s)


def _next_multiple(now_s: float, interval_s: float) -> float:
    # A timer may be a moment early. Then the multiple that it was meant for is the last one.
    return (math.floor(now_s / interval_s + 0.5) + 1) * interval_s


class Ticker:
    """Lets the broker tick when something is due, and about once a second if nothing is.

    Use it only in the event loop that was running when it was created.
    """

    def __init__(self, next_tick_ms: Callable[[], int | None]) -> None:
        """`next_tick_ms` returns how long to wait for what is due next; None: nothing is."""
        self._next_tick_ms = next_tick_ms
        self._loop = asyncio.get_running_loop()
        self._is_due = asyncio.Event()
        self._is_pausing = False
        self._tick_timer: asyncio.TimerHandle | None = None
        self._plan_timer: asyncio.TimerHandle | None = None

    async def pause(self) -> None:
        """Sleep until the next tick. What becomes due meanwhile shortens it, see `turn_ended`."""
        await asyncio.sleep(0)  # the turn that follows the last tick comes first
        self._is_due.clear()
        self._is_pausing = True
        try:
            self._plan()
            await self._is_due.wait()
        finally:
            self._is_pausing = False
            for timer in (self._tick_timer, self._plan_timer):
                if timer is not None:
                    timer.cancel()
            self._tick_timer = self._plan_timer = None

    def turn_ended(self) -> None:
        """Find out soon whether a turn has made something due before the next tick.

        This is called thousands of times a second and costs next to nothing if a plan is pending.
        """
        # Not while it ticks, because the next pause begins with a plan, nor when it has ended.
        if self._is_pausing and self._plan_timer is None:
            self._plan_timer = self._loop.call_later(PLAN_INTERVAL_S, self._plan)

    def _plan(self) -> None:
        if self._plan_timer is not None:
            self._plan_timer.cancel()
            self._plan_timer = None
        now_s, delay_ms = self._loop.time(), self._next_tick_ms()
        due_s = _next_multiple(now_s, IDLE_TICK_S)
        if delay_ms is not None:
            due_s = min(due_s, now_s + delay_ms / 1000)
        if self._tick_timer is None or due_s < self._tick_timer.when():
            if self._tick_timer is not None:
                self._tick_timer.cancel()
            self._tick_timer = self._loop.call_at(due_s, self._is_due.set)


async def repeat(
    name: str,
    step: Callable[[], None],
    pause: float | Callable[[], Awaitable[None]],
    *,
    failures_max: int = FAILURES_MAX,
) -> None:
    """Call `step` after each pause: an interval in seconds, or a function that sleeps.

    An error is logged and passes; many in a row are raised.

    A StoreError passes however often it comes: a file that cannot be saved now is saved later, and
    a store that has failed stops the server in another way.
    """
    failures = 0
    while True:
        await (sleep_to_multiple(pause) if isinstance(pause, float | int) else pause())
        try:
            step()
        except StoreError as error:
            log.warning("%s postponed: %s", name, error)
        except Exception:
            failures += 1
            if failures >= failures_max:
                raise
            log.exception("%s failed, trying again", name)
        else:
            failures = 0


@contextlib.asynccontextmanager
async def background_tasks(failed: asyncio.Event, *coroutines: Any) -> AsyncIterator[None]:
    """Run coroutines until the block ends. If one raises, `failed` is set: stop the process."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    for task in tasks:
        task.add_done_callback(partial(_report_failure, failed))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _report_failure(failed: asyncio.Event, task: asyncio.Task[None]) -> None:
    """Report a task that raised: the process would look healthy while its work is not done."""
    if not task.cancelled() and task.exception() is not None:
        log.error("background task failed, stopping", exc_info=task.exception())
        failed.set()
