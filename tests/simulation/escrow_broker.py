"""A broker process on the simulated network. It does what `server/` does, but step by step.

It has turns, ticks, group commit, checkpoints, snapshots and expiry. Work that the server does in a
thread has two steps here, a beginning and an end, and other steps may happen in between.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from escrowmq.broker.broker import Broker
from escrowmq.clock import ManualClock, SteadyClock
from escrowmq.config import BrokerConfig, Config, StoreConfig, TransactionConfig
from escrowmq.errors import FlushTimeout, StoreError, StoreFailed
from escrowmq.message.keys import UniqueKeyGenerator, encode_host
from escrowmq.message.record import LogOffset
from escrowmq.remoting.connection import InvalidRequest
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_error
from escrowmq.store.checkpoint import CheckpointJob
from escrowmq.store.commit_log import LogFlush
from escrowmq.store.disk import DiskUsage
from escrowmq.store.log_ages import LogAges, save_ages
from escrowmq.store.retention import is_expired
from escrowmq.store.store import MessageStore
from escrowmq.testing.disks import FaultyDisk
from escrowmq.testing.network import Endpoint
from tests.support.sliced import finish

HOST = encode_host("10.0.0.1", 10911)
FULL_DISK = DiskUsage(total_bytes=100, free_bytes=13)  # above force_expire_ratio
TICK_MS = 100  # before the broker tries again what was not possible
IDLE_TICK_MS = 1_000

STORE = StoreConfig(
    segment_bytes=8192,
    queue_file_bytes=400,
    index_slots=31,
    index_entries=200,
    message_bytes_max=2048,
)
ESCROW = TransactionConfig(immunity_ms=400, check_interval_ms=300, checks_max=4)
AGE_MAX_MS = 60_000  # shorter than any retention time of a store
DECISION_PIECE_BYTES = 700


class TracebackCollector(logging.Handler):
    """Collects log records with a traceback. They are bugs even if the broker survives them."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.tracebacks: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.tracebacks.append(logging.Formatter().format(record))


class BrokerProcess:
    """A run of a broker, from its start to its end."""

    def __init__(
        self,
        disk: FaultyDisk,
        clock: ManualClock,
        *,
        settings: StoreConfig = STORE,
        config: TransactionConfig = ESCROW,
    ) -> None:
        self.disk = disk
        self.clock = clock
        self.settings = settings
        self.endpoints: dict[Endpoint, None] = {}
        self._chunks: dict[Endpoint, bytes] = {}  # received in this turn, for the native path
        self._flush_waiters: deque[tuple[int, Callable[[StoreError | None], None]]] = deque()
        self._flush: LogFlush | None = None
        self._checkpoint: CheckpointJob | None = None
        self._tick_ms = 0
        self._steady = SteadyClock(clock)
        self.store = MessageStore.open(disk, settings, store_host=HOST)
        self._ages = LogAges.load(
            disk,
            boot_id=clock.boot_id(),
            log_end=self.store.end,
            elapsed_ms=self._elapsed_ms(),
            wall_ms=clock.now_ms(),
        )
        self._ages.start(self.store.end, elapsed_ms=self._elapsed_ms(), broker_ms=self.now_ms())
        self.broker = Broker(
            disk,
            self.store,
            Config(
                broker=BrokerConfig(cluster_name="C"),
                store=settings,
                transaction=config,
            ),
            UniqueKeyGenerator(address="10.0.0.1", process_id=1, salt=1),
            store_host=HOST,
            when_flushed=self._when_flushed,
            wall_ms=lambda now_ms: clock.now_ms(),
            past_times=self._ages.past_times(elapsed_ms=self._elapsed_ms(), now_ms=self.now_ms()),
            decision_piece_bytes=DECISION_PIECE_BYTES,
        )
        self.broker.transactions.coordinator.age_max_ms = AGE_MAX_MS

    def now_ms(self) -> int:
        """Return the time of the broker, which does not jump."""
        return self._steady.now_ms()

    def _elapsed_ms(self) -> int:
        return round(self.clock.elapsed_s() * 1000)

    # --- connections -----------------------------------------------------------------------------

    def received(self, end: Endpoint, data: bytes) -> None:
        self.endpoints[end] = None
        if self.broker.native_requests is None:
            self._handle(end, data)
        else:
            self._chunks[end] = self._chunks.get(end, b"") + data

    def _handle_chunks(self) -> None:
        """Let the native path handle what it can, as the server does at the end of a turn."""
        if self.broker.native_requests is None:
            return
        received, self._chunks = self._chunks, {}
        endpoints = list(received)
        # The network delivers whole frames, so no frame is incomplete.
        chunks = [(end, end.peer_host, b"", data) for end, data in received.items()]
        for index, rest, _ in self.broker.native_requests.handle(list(chunks), self.now_ms()):
            self._handle(endpoints[index], rest)

    def _handle(self, end: Endpoint, data: bytes) -> None:
        for event in end.events(data):
            if isinstance(event, Request):
                finish(self.broker.handle(end, event, self.now_ms()))
            elif isinstance(event, InvalidRequest):
                end.write(encode_error(event.request, event.error))

    def closed(self, end: Endpoint) -> None:
        self.endpoints.pop(end, None)
        self.broker.channel_closed(end)

    def end_turn(self) -> None:
        self._handle_chunks()
        self.broker.end_turn(self.now_ms())
        self._flush_endpoints()

    def tick(self) -> None:
        """Tick when the broker has something to do, by the clock that does not jump."""
        now_ms = self._elapsed_ms()
        delay_ms = self.broker.next_tick_ms(self.now_ms(), TICK_MS)
        if delay_ms is not None:
            self._tick_ms = min(self._tick_ms, now_ms + delay_ms)
        if now_ms >= self._tick_ms:
            self._tick_ms = now_ms + IDLE_TICK_MS
            self.broker.tick(self.now_ms())
            self.end_turn()
            self._ages.add_mark(
                self.store.flushed_offset, elapsed_ms=self._elapsed_ms(), broker_ms=self.now_ms()
            )

    def _flush_endpoints(self) -> None:
        for end in list(self.endpoints):
            end.flush()

    # --- group commit ----------------------------------------------------------------------------

    def _when_flushed(self, log_offset: int, callback: Callable[[StoreError | None], None]) -> None:
        if log_offset <= self.store.flushed_offset:
            callback(None)
        else:
            self._flush_waiters.append((log_offset, callback))

    def begin_flush(self) -> None:
        if self._flush is None and self.store.flushed_offset < self.store.end:
            self._flush = self.store.begin_flush()

    def finish_flush(self) -> None:
        flush, self._flush = self._flush, None
        if flush is None:
            return
        try:
            flush.run()
        except StoreError as error:
            self.store.fail(error)
            while self._flush_waiters:
                self._flush_waiters.popleft()[1](StoreFailed("the flush failed"))
        else:
            self.store.finish_flush(flush)
            self._notify_flush_waiters()
        self._flush_endpoints()

    def flush(self) -> None:
        self.finish_flush()
        self.begin_flush()
        self.finish_flush()

    def time_out_flush_waiters(self) -> None:
        """Let requests that wait for a flush time out (syncFlushTimeout). Their records stay."""
        while self._flush_waiters:
            self._flush_waiters.popleft()[1](FlushTimeout("not flushed in time"))
        self._flush_endpoints()

    def _notify_flush_waiters(self) -> None:
        while self._flush_waiters and self._flush_waiters[0][0] <= self.store.flushed_offset:
            self._flush_waiters.popleft()[1](None)

    # --- maintenance -----------------------------------------------------------------------------

    def begin_checkpoint(self) -> None:
        if self._checkpoint is None and self.store.checkpointed_offset < self.store.end:
            self._checkpoint = self.store.begin_checkpoint()

    def finish_checkpoint(self) -> None:
        job, self._checkpoint = self._checkpoint, None
        if job is not None:
            job.run()
            self.store.finish_checkpoint(job)

    def save_snapshot(self) -> None:
        """Save a snapshot, which the server does only once per 64 MB of log."""
        self.broker.transactions.save(force=True)

    def save(self) -> None:
        self.broker.save()
        self._save_ages()

    def _save_ages(self) -> None:
        save_ages(
            self.disk,
            self._ages.encode(
                log_begin=self.store.begin,
                elapsed_ms=self._elapsed_ms(),
                wall_ms=self.clock.now_ms(),
            ),
        )

    def expire(self) -> None:
        """Expire segments as the server does on a full disk, while no checkpoint runs."""
        self.finish_checkpoint()
        broker, store = self.broker, self.store
        if not is_expired(store, age_of=lambda _: 0, hour=12, usage=FULL_DISK):
            return
        end = store.begin + self.settings.segment_bytes
        oldest_needed = broker.oldest_needed_offset()
        if oldest_needed is not None and oldest_needed < end:
            broker.move_messages_below(LogOffset(end), self.now_ms())
            self.end_turn()
            return
        store.remove_oldest_file()

    # --- end -------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop like `serve`: respond to requests in progress, then make everything durable."""
        self.finish_checkpoint()
        self.broker.pull_processor.release_all()
        self.end_turn()
        self.flush()
        self.end_turn()
        self.store.flush()
        self.broker.save()
        self.broker.transactions.save(force=True)
        self._save_ages()
        self.store.close()

    def kill(self) -> None:
        self.store.abandon()
