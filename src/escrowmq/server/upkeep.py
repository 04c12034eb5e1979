"""What a store needs now and then: flushes, checkpoints, expiry. When, not what.

In async mode (RocketMQ's default) this flush is all that makes messages durable: a power cut may
cost the last half second. In sync mode GroupCommit flushes before each answer, and there is
little left to do here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from escrowmq.clock import Clock, local_hour
from escrowmq.errors import StoreError, StoreFull
from escrowmq.message.offsets import LogOffset
from escrowmq.metrics import SECONDS, Distribution
from escrowmq.store.disk import Disk
from escrowmq.store.expire import REMOVED_MAX, has_to_go
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpkeepSettings:
    flush_interval_s: float = 0.5  # flushIntervalCommitLog
    checkpoint_interval_s: float = 1.0
    expire_interval_s: float = 10.0  # cleanResourceInterval


class Upkeep:
    """Runs until it is cancelled, or until the store has failed."""

    def __init__(
        self,
        store: MessageStore,
        disk: Disk,
        clock: Clock,
        settings: UpkeepSettings | None = None,
        *,
        keep_from: Callable[[], LogOffset | None] = lambda: None,
        make_way: Callable[[LogOffset], None] = lambda end: None,
    ) -> None:
        self._store = store
        self._disk = disk
        self._clock = clock
        self._settings = settings or UpkeepSettings()
        self._keep_from = keep_from
        self._make_way = make_way  # whoever keeps the log up to there is asked to let it go
        self.flush_seconds = Distribution(SECONDS)
        self.checkpoint_seconds = Distribution(SECONDS)
        self._checkpointing = (
            asyncio.Lock()
        )  # expiry waits for a checkpoint, and the other way round

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for what, step, interval_s in (
                ("flush", self.flush, self._settings.flush_interval_s),
                ("checkpoint", self.checkpoint, self._settings.checkpoint_interval_s),
                ("expiry", self.expire, self._settings.expire_interval_s),
            ):
                tasks.create_task(self._repeat(what, step, interval_s))

    async def flush(self) -> None:
        if self._store.flushed == self._store.end:
            return
        flush, began_s = self._store.begin_flush(), self._clock.elapsed_s()
        try:
            cancelled = await _to_the_end(flush.run)
        except StoreError as error:
            self._store.fail(error)
            raise
        self._store.finish_flush(flush)
        self.flush_seconds.observe(self._clock.elapsed_s() - began_s)
        if cancelled:
            raise asyncio.CancelledError

    async def checkpoint(self) -> None:
        async with self._checkpointing:
            if self._store.is_checkpointed:
                return
            began_s = self._clock.elapsed_s()
            job = self._store.begin_checkpoint()
            try:
                cancelled = await _to_the_end(job.run)
            except StoreError as error:
                self._store.fail_checkpoint(error)
                raise
            self._store.finish_checkpoint(job)
            self.checkpoint_seconds.observe(self._clock.elapsed_s() - began_s)
        if cancelled:
            raise asyncio.CancelledError

    async def expire(self) -> None:
        async with self._checkpointing:
            removed = 0
            while removed < REMOVED_MAX and self._has_to_go():
                await self._remove_oldest_file()
                removed += 1
        if removed:
            log.info("expired files=%d log_begin=%d", removed, self._store.begin)

    def _has_to_go(self) -> bool:
        now_ms = self._clock.now_ms()
        if not has_to_go(
            self._store, now_ms=now_ms, hour=local_hour(now_ms), usage=self._disk.usage()
        ):
            return False
        end, keep_from = self._store.begin + self._store.settings.segment_bytes, self._keep_from()
        if keep_from is not None and keep_from < end:
            self._make_way(LogOffset(end))  # and the next pass finds nothing kept
            return False
        return True

    async def _remove_oldest_file(self) -> None:
        """Not on the loop: to free a gigabyte can take a file system a while."""
        removal = self._store.begin_removal()
        try:
            cancelled = await _to_the_end(removal.run)
        finally:
            self._store.finish_removal(removal)
        if await _to_the_end(removal.release) or cancelled:
            raise asyncio.CancelledError

    async def _repeat(
        self, what: str, step: Callable[[], Awaitable[None]], interval_s: float
    ) -> None:
        while not self._store.has_failed:
            await asyncio.sleep(interval_s)
            try:
                await step()
            except StoreFull as error:
                log.warning("%s postponed, the disk is full: %s", what, error)
            except StoreError as error:
                # Nothing more can be promised until a restart has looked: take no more messages.
                log.exception("%s failed, the store takes no more writes", what)
                self._store.fail(error)


async def _to_the_end(run: Callable[[], None]) -> bool:
    """Run it in a thread, also if we are cancelled meanwhile: it cannot be stopped half way, and
    the store must hear how it ended. Whether we were."""
    running = asyncio.ensure_future(asyncio.to_thread(run))
    cancelled = False
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError:
            cancelled = True
    running.result()
    return cancelled
