"""Messages that are delivered later: RocketMQ's delay levels, and timers for any time.

A delayed message is first stored under a topic of the broker's own, with its real topic and queue
in its properties:

    DELAY n                   SCHEDULE_TOPIC_XXXX, queue n - 1     delivered in queue order
    TIMER_DELIVER_MS, …       rmq_sys_wheel_timer, queue 0         delivered by time, from a heap

    redirect() --> stored there --> deliver(), when due --> appended to its real topic, once

The delivered message keeps all its properties, as in RocketMQ: consumers can see its delay level.
Only `redirect()` delays a message, and nothing that is delivered passes through it again. A message
that a client sends with the TIMER_OUT_MS of a delivered one is not delayed.

A level counts from the time the message was stored; a timer names a time. Both use the wall clock.
If the clock is set back, a message with a level would have to wait for the difference as well. It
waits for its level instead, counted from the moment the broker notices.

What is delivered already, after a crash too: `delivery_progress.py`.

A message that cannot be delivered stops no other. It is set aside and tried again every minute; a
log line and a metric say so. A waiting message whose segment expires is appended again as a timer,
as open halves are.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from escrowmq.broker.delivery_progress import (
    BATCH_MESSAGES_MAX,
    TIMER_LEVEL,
    DelayedPosition,
    DeliveryProgress,
    delay_queue,
)
from escrowmq.config import DelayConfig
from escrowmq.errors import CorruptRecord, RecordNotFound, RecordRefused, RequestRefused, StoreError
from escrowmq.limited_log import LimitedLog
from escrowmq.message import names
from escrowmq.message.keys import delay_level
from escrowmq.message.names import (
    TIMER_DELAY_MS,
    TIMER_DELAY_SEC,
    TIMER_DELIVER_MS,
    TIMER_OUT_MS,
    TIMER_TOPIC,
)
from escrowmq.message.properties import change_properties, decode_properties
from escrowmq.message.record import (
    CRC_PROPERTY_BYTES_MAX,
    PROPERTIES_BYTES_MAX,
    LogOffset,
    NewRecord,
    StoredRecord,
    copy_record,
)
from escrowmq.remoting.codes import ResponseCode
from escrowmq.store.commit_log import AppendResult
from escrowmq.store.damage import DamageKind
from escrowmq.store.disk import Disk
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

_TIMER_PROPERTIES: Final = (TIMER_DELIVER_MS, TIMER_DELAY_SEC, TIMER_DELAY_MS)
_QUEUES_MAX: Final = 1 << 31
_BATCH_BYTES_MAX: Final = 4 << 20  # of bodies and properties
_NEW_TIMERS_PER_TURN_MAX: Final = 5_000
RETRY_INTERVAL_MS: Final = 60_000  # of a message that was set aside
_RETRIES_PER_TURN_MAX: Final = 100
_STORED_PROPERTIES_BYTES_MAX: Final = PROPERTIES_BYTES_MAX - CRC_PROPERTY_BYTES_MAX
# Properties that a message can do without, the least important first.
_DISPENSABLE: Final = (("MSG_REGION", "TRACE_ON", "CLUSTER"), (names.DELAY_LEVEL,))

# Called with the records of an append and their positions.
OnAppended = Callable[[Sequence[NewRecord], Sequence[AppendResult]], None]
# Called with a message that the store refuses, the reason and the time.
_OnRefused = Callable[[DelayedPosition, Exception, int], None]


class DueMessage(NamedTuple):
    position: DelayedPosition
    record: NewRecord


@dataclass(slots=True)
class DueMessages:
    """Messages to deliver now, and those that could not be read."""

    deliveries: list[DueMessage] = field(default_factory=list)
    failures: list[tuple[DelayedPosition, Exception]] = field(default_factory=list)
    passed: list[DelayedPosition] = field(default_factory=list)  # positions without a message
    size: int = 0

    @property
    def records(self) -> list[NewRecord]:
        return [delivery.record for delivery in self.deliveries]

    @property
    def is_full(self) -> bool:
        return len(self.deliveries) >= BATCH_MESSAGES_MAX or self.size >= _BATCH_BYTES_MAX

    def add(self, position: DelayedPosition, record: NewRecord) -> None:
        self.deliveries.append(DueMessage(position, record))
        self.size += len(record.body) + len(record.properties)


@dataclass(slots=True)
class DelayCounters:
    delivered: int = 0
    moved: int = 0  # appended again because their segment expired
    failed_attempts: int = 0
    lost: int = 0  # expired or unreadable before they could be delivered


class DelayedMessages:
    def __init__(
        self,
        store: MessageStore,
        disk: Disk,
        config: DelayConfig,
        wall_ms: Callable[[int], int] = lambda now_ms: now_ms,
        *,
        on_appended: OnAppended = lambda records, results: None,
        queue_count: Callable[[str], int | None] = lambda topic: _QUEUES_MAX,
    ) -> None:
        """Find out what is delivered already.

        queue_count: returns the number of queues of a topic; None if there is no such topic.
        """
        self._store = store
        self._wall_ms = wall_ms
        self._config = config
        self._on_appended = on_appended
        self._queue_count = queue_count
        self._limited_log = LimitedLog(log)
        self.counters = DelayCounters()
        self.progress = DeliveryProgress(store, disk)
        # A heap of due time and queue offset. It may have timers that were delivered or moved
        # since; `progress` knows.
        self._timers: list[tuple[int, int]] = []
        self._timers_read_offset = self.progress.timers.first_waiting
        # Messages may wait in levels that are no longer configured.
        self._level_max = max(
            len(config.delay_levels_ms),
            *(queue_id + 1 for topic, queue_id in store.queues() if topic == names.SCHEDULE_TOPIC),
            1,
        )
        for level in range(1, self._level_max + 1):
            self.progress.level(level)  # from now on the progress knows all of them
        self._first_level = 1  # the level to begin with in the next turn
        # A heap of the messages that were set aside, by the time of the next attempt.
        self._retries: list[tuple[int, DelayedPosition]] = [
            (0, position) for position in self.progress.set_aside_positions()
        ]
        self._damaged: set[DelayedPosition] = set()  # reported already; each is tried again
        # By level, after the clock was set back: the end of the messages that were stored "later
        # than now", and the time at which they are delivered.
        self._clock_set_back: dict[int, tuple[int, int]] = {}
        # When the first message of each level is due, by the wall clock, as far as that is known.
        self._level_due_ms: dict[int, int] = {}
        self._is_more_due = True  # the last batch was full
        self._must_retry = False  # messages could not be delivered
        # The end of the log when the last message was redirected. It is stored at the end of the
        # turn, and is in its queue as soon as the log is longer.
        self._redirected_log_end: int | None = None
        self._move_below_offset = 0  # waiting messages below this log offset are to be moved
        self._moved_log_end = 0  # the end of the log after the last move

    # --- when a message is sent ------------------------------------------------------------------

    def redirect(self, record: NewRecord, now_ms: int) -> NewRecord:
        """Return the record to store first for a record with delay properties.

        Return the record itself if it is not delayed. Raise RequestRefused for a delay that is
        invalid, too long or not served.
        """
        now_ms = self._wall_ms(now_ms)
        properties = decode_properties(record.properties)
        text = properties.get(names.DELAY_LEVEL, "").encode()
        level = delay_level(text, len(self._config.delay_levels_ms))
        if level > 0:
            self._redirected_log_end = self._store.end
            changes = {names.DELAY_LEVEL: str(level)}
            queue = names.SCHEDULE_TOPIC, level - 1
            return _redirected_record(record, changes, queue, remove=_TIMER_PROPERTIES)
        if TIMER_OUT_MS in properties:
            return record
        due_ms = self._timer_due_ms(properties, now_ms)
        if due_ms is None or due_ms <= now_ms:
            return record
        if not self._config.timer_enabled:
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL,
                "timers are disabled on this broker (timerWheelEnable)",
            )
        limit_ms = self._config.timer_delay_max_ms
        if due_ms - now_ms > limit_ms:
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"the delay is {due_ms - now_ms} ms, the limit is {limit_ms} ms (timerMaxDelaySec)",
            )
        self._redirected_log_end = self._store.end
        return _redirected_record(record, {TIMER_OUT_MS: str(due_ms)}, (TIMER_TOPIC, 0))

    def _timer_due_ms(self, properties: dict[str, str], now_ms: int) -> int | None:
        for name, begin_ms, unit_ms in (
            (TIMER_DELIVER_MS, 0, 1),
            (TIMER_DELAY_SEC, now_ms, 1000),
            (TIMER_DELAY_MS, now_ms, 1),
        ):
            text = properties.get(name)
            if text is not None:
                if not text.isdecimal() or len(text) > 18:
                    raise RequestRefused(
                        ResponseCode.MESSAGE_ILLEGAL, f"{name}={text[:40]!r} is not a number"
                    )
                return begin_ms + int(text) * unit_ms
        return None

    def is_waiting(self, record: StoredRecord) -> bool:
        """Return whether a record is a delayed message that is not delivered yet."""
        level = TIMER_LEVEL if record.topic == TIMER_TOPIC else record.queue_id + 1
        position = DelayedPosition(level, record.queue_offset)
        is_delayed = position.queue == (record.topic, record.queue_id)
        return is_delayed and not self.progress.is_delivered(position)

    # --- when it is due --------------------------------------------------------------------------

    def deliver(self, now_ms: int) -> None:
        """Append the messages that are due to their topics. `next_due_ms` says when to call it.

        Never raises for a message that cannot be delivered, nor for a store that refuses writes:
        then the messages stay due.
        """
        self._must_retry = True
        if not self._store.is_writable:
            return
        if self._has_new_messages:
            self._redirected_log_end = None
        if self._move_below_offset:
            self._move_some(now_ms)
        due = self.find_due(now_ms)
        try:
            self.counters.delivered += self._append_batch(due.deliveries, self._set_aside, now_ms)
        except StoreError as error:
            self._limited_log.warning(now_ms, "delayed messages not delivered yet: %s", error)
            self._put_back(due)
            return
        for position in due.passed:
            self.progress.mark_delivered(position)
        for position, failure in due.failures:
            self._handle_unreadable(position, failure, now_ms)
        self._is_more_due, self._must_retry = due.is_full, bool(self._move_below_offset)

    def next_due_ms(self, now_ms: int, retry_ms: int) -> int | None:
        """Return when `deliver` has something to do; None if no message waits.

        `retry_ms` is the time for what was not possible.
        """
        if self._must_retry:
            return retry_ms
        if self._is_more_due or self._has_new_messages or self._has_new_timers:
            return now_ms  # `deliver` finds out when new ones are due
        due_times: list[int] = []
        wall_due_times = [*self._level_due_ms.values()]
        if self._timers:
            wall_due_times.append(self._timers[0][0])
        if wall_due_times:
            due_times.append(now_ms + min(wall_due_times) - self._wall_ms(now_ms))
        if self._retries:
            due_times.append(self._retries[0][0])
        due_times += [release_ms for _, release_ms in self._clock_set_back.values()]
        return min(due_times, default=None)

    @property
    def _has_new_messages(self) -> bool:
        """Whether messages were redirected and stored since the last delivery."""
        end = self._redirected_log_end
        return end is not None and self._store.end > end

    @property
    def _has_new_timers(self) -> bool:
        return self._timers_read_offset < self._store.max_offset(TIMER_TOPIC, 0)

    def find_due(self, now_ms: int) -> DueMessages:
        """Return the messages to deliver now. A timer or retry is returned only once."""
        due = DueMessages()
        self._level_due_ms.clear()
        level_count = self._level_max + 1
        # The level that fills a batch comes last in the next one, so that it delays no other.
        for index in range(level_count):
            level = (self._first_level + index) % level_count
            if level == TIMER_LEVEL:
                self._find_due_timers(self._wall_ms(now_ms), due)
            else:
                self._find_due_in_level(level, now_ms, due)
            if due.is_full:
                self._first_level = (level + 1) % level_count
                break
        self._find_due_retries(now_ms, due)
        return due

    def _find_due_in_level(self, level: int, now_ms: int, due: DueMessages) -> None:
        topic, queue_id = delay_queue(level)
        end = self._store.max_offset(topic, queue_id)
        self._report_expired(self.progress.skip_expired(level), level, now_ms)
        offset = self.progress.level(level).next_offset
        level_ms, wall_ms = self._level_ms(level), self._wall_ms(now_ms)
        released = self._released_offset(level, now_ms)
        while offset < end and not due.is_full:
            position = DelayedPosition(level, offset)
            record = self._read(position, due)
            if record is not None:
                if offset >= released and record.stored_ms + level_ms > wall_ms:
                    if record.stored_ms > wall_ms and level not in self._clock_set_back:
                        self._clock_set_back[level] = end, now_ms + level_ms
                    self._level_due_ms[level] = record.stored_ms + level_ms
                    return
                self._add_delivery(position, record, due, now_ms)
            offset += 1

    def _level_ms(self, level: int) -> int:
        levels_ms = self._config.delay_levels_ms
        return levels_ms[min(level, len(levels_ms)) - 1]

    def _released_offset(self, level: int, now_ms: int) -> int:
        """Return the end of the messages to deliver although the clock, set back, says later."""
        end, release_ms = self._clock_set_back.get(level, (0, 0))
        if now_ms < release_ms:
            return 0
        if self.progress.level(level).next_offset >= end:
            self._clock_set_back.pop(level, None)
        return end

    def _find_due_timers(self, now_ms: int, due: DueMessages) -> None:
        self._read_new_timers()
        while self._timers and self._timers[0][0] <= now_ms and not due.is_full:
            _, queue_offset = heapq.heappop(self._timers)
            position = DelayedPosition(TIMER_LEVEL, queue_offset)
            if not self.progress.is_delivered(position):
                record = self._read(position, due)
                if record is not None:
                    self._add_delivery(position, record, due, now_ms)

    def _read_new_timers(self) -> None:
        timers = self.progress.timers
        end = self._store.max_offset(TIMER_TOPIC, 0)
        first = max(self._timers_read_offset, self._store.min_offset(TIMER_TOPIC, 0))
        offset = timers.next_waiting(first)
        for _ in range(_NEW_TIMERS_PER_TURN_MAX):
            if offset >= end:
                break
            due_ms = 0  # a record that cannot be read is due at once, and then set aside
            log_offset = self._store.log_offset_of(TIMER_TOPIC, 0, offset)
            if log_offset is not None:
                with contextlib.suppress(RecordNotFound, CorruptRecord):
                    due_ms = _timer_due_ms(self._store.record_at(log_offset))
            heapq.heappush(self._timers, (due_ms, offset))
            offset = timers.next_waiting(offset + 1)
        self._timers_read_offset = offset

    def _find_due_retries(self, now_ms: int, due: DueMessages) -> None:
        for _ in range(_RETRIES_PER_TURN_MAX):
            if not self._retries or self._retries[0][0] > now_ms or due.is_full:
                return
            _, position = heapq.heappop(self._retries)
            if not self.progress.is_delivered(position):
                record = self._read(position, due)
                if record is not None:
                    self._add_delivery(position, record, due, now_ms)

    def _read(self, position: DelayedPosition, due: DueMessages) -> StoredRecord | None:
        """Return a delayed message. Note in `due` if there is none, or if it is unreadable."""
        log_offset = self._store.log_offset_of(*position.queue, position.queue_offset)
        if log_offset is None:
            due.passed.append(position)
            return None
        try:
            return self._store.record_at(log_offset)
        except Exception as error:  # whatever is wrong with it, the others are delivered
            due.failures.append((position, error))
            return None

    def _add_delivery(
        self, position: DelayedPosition, record: StoredRecord, due: DueMessages, now_ms: int
    ) -> None:
        try:
            due.add(position, self._delivery_record(record, now_ms))
        except Exception as error:
            due.failures.append((position, error))

    def _delivery_record(self, record: StoredRecord, now_ms: int) -> NewRecord:
        """Return the message for its real topic. Raises RecordRefused."""
        properties = decode_properties(record.properties)
        topic = properties.get(names.REAL_TOPIC)
        if not topic or topic in names.BROKER_ONLY_TOPICS:
            raise RecordRefused(f"it names no topic to deliver it to, {names.REAL_TOPIC}={topic}")
        queue_id = _parse_number(properties.get(names.REAL_QUEUE_ID))
        queue_count = self._queue_count(topic)
        if queue_count is None:
            # It is stored all the same: consumers see it when the topic is created again.
            self._limited_log.warning(
                now_ms, "delayed message delivered to a deleted topic topic=%s", topic
            )
        if queue_count and queue_id >= queue_count:
            queue_id %= queue_count  # the topic has fewer queues than when the message was sent
        return copy_record(
            record, topic=topic, queue_id=queue_id, properties=_fitting(bytes(record.properties))
        )

    def _append_batch(
        self, deliveries: list[DueMessage], on_refused: _OnRefused, now_ms: int
    ) -> int:
        """Append messages behind their note, and return how many.

        If the store refuses one of them, halve the batch until it is found, and go on without it.
        Raises StoreError if the store accepts nothing now.
        """
        if not deliveries:
            return 0
        positions = [delivery.position for delivery in deliveries]
        stored_ms = self._wall_ms(now_ms)
        records = [self.progress.make_note(positions, stored_ms)]
        records += [delivery.record for delivery in deliveries]
        try:
            results = self._store.append(records, now_ms=stored_ms)
        except Exception as error:
            if isinstance(error, StoreError) and not isinstance(error, RecordRefused):
                raise
            if len(deliveries) == 1:
                on_refused(positions[0], error, now_ms)
                return 0
            middle = len(deliveries) // 2
            return self._append_batch(deliveries[:middle], on_refused, now_ms) + self._append_batch(
                deliveries[middle:], on_refused, now_ms
            )
        self.progress.batch_stored(positions)
        self._on_appended(records, results)
        return len(positions)

    def _put_back(self, due: DueMessages) -> None:
        """Let messages be due again that could not be handled now."""
        positions = [delivery.position for delivery in due.deliveries]
        positions += due.passed
        positions += [position for position, _ in due.failures]
        for position in positions:
            level, queue_offset = position
            if self.progress.is_delivered(position):
                continue
            if level == TIMER_LEVEL:
                heapq.heappush(self._timers, (0, queue_offset))
            elif queue_offset in self.progress.level(level).set_aside:
                heapq.heappush(self._retries, (0, position))

    # --- when it cannot be delivered -------------------------------------------------------------

    @property
    def set_aside_count(self) -> int:
        """The number of messages that could not be delivered and are tried again."""
        return sum(not self.progress.is_delivered(position) for _, position in self._retries)

    @property
    def waiting_count(self) -> int:
        """The number of messages that are not delivered yet."""
        store, timers = self._store, self.progress.timers
        count = store.max_offset(TIMER_TOPIC, 0) - timers.first_waiting - timers.overtaking_count
        for level in range(1, self._level_max + 1):
            progress = self.progress.level(level)
            count += store.max_offset(*delay_queue(level)) - progress.next_offset
            count += len(progress.set_aside)
        return max(0, count)

    def _set_aside(self, position: DelayedPosition, error: Exception, now_ms: int) -> None:
        self.progress.set_aside(position)
        self.counters.failed_attempts += 1
        heapq.heappush(self._retries, (now_ms + RETRY_INTERVAL_MS, position))
        self._limited_log.warning(
            now_ms,
            "delayed message set aside, tried again in %d s %s: %s",
            RETRY_INTERVAL_MS // 1000,
            position,
            error,
        )

    def _handle_unreadable(self, position: DelayedPosition, error: Exception, now_ms: int) -> None:
        if isinstance(error, CorruptRecord) and position not in self._damaged:
            self._damaged.add(position)
            description = f"delayed message {position} cannot be read: {error}"
            self._store.damage.add(
                DamageKind.LOG, f"log_offset={error.log_offset}", description, is_repaired=False
            )
        log_offset = self._store.log_offset_of(*position.queue, position.queue_offset)
        if log_offset is not None and log_offset < self._store.begin:
            self._give_up(position, error, now_ms)
        else:
            self._set_aside(position, error, now_ms)

    def _give_up(self, position: DelayedPosition, error: Exception, now_ms: int) -> None:
        self.progress.mark_delivered(position)
        self.counters.lost += 1
        self._limited_log.warning(now_ms, "delayed message lost %s: %s", position, error)

    def _report_expired(self, count: int, level: int, now_ms: int) -> None:
        if count:
            self.counters.lost += count
            topic, queue_id = delay_queue(level)
            self._limited_log.warning(
                now_ms,
                "delayed messages lost: their segment was deleted topic=%s queue_id=%d count=%d",
                topic,
                queue_id,
                count,
            )

    # --- segments that expire --------------------------------------------------------------------

    def oldest_needed_offset(self) -> LogOffset | None:
        """Return the log offset below which no message waits for its delivery; None: none waits."""
        if self._store.flushed_offset < self._moved_log_end:
            return self._store.begin  # the copies of moved messages are not durable yet
        log_offsets = [
            log_offset
            for position in self.progress.first_waiting_positions()
            if (log_offset := self._store.log_offset_of(*position.queue, position.queue_offset))
            is not None
        ]
        return min(log_offsets, default=None)

    def move_below(self, log_offset: int, now_ms: int) -> None:
        """Append waiting messages below a log offset again, so that their segment can be deleted.

        Up to 1,000 are moved at once and the others by `deliver()`. A message that is unreadable,
        or that the store refuses, is given up: to keep its segment would fill the disk.
        """
        self._move_below_offset = max(self._move_below_offset, log_offset)
        if self._store.is_writable:
            self._move_some(now_ms)

    def _move_some(self, now_ms: int) -> None:
        due = DueMessages()
        for position in self.progress.first_waiting_positions():
            self._find_moves(position, due)
        try:
            self.counters.moved += self._append_batch(due.deliveries, self._give_up, now_ms)
        except StoreError as error:
            self._limited_log.warning(now_ms, "delayed messages not moved yet: %s", error)
            return
        self._moved_log_end = self._store.end
        for position in due.passed:
            self.progress.mark_delivered(position)
        for position, failure in due.failures:
            self._give_up(position, failure, now_ms)
        if not due.is_full:
            self._move_below_offset = 0

    def _find_moves(self, first: DelayedPosition, due: DueMessages) -> None:
        """Add the waiting messages of a queue from a position on that have to move."""
        level, offset = first
        is_set_aside = level != TIMER_LEVEL and offset < self.progress.level(level).next_offset
        end = offset + 1 if is_set_aside else self._store.max_offset(*delay_queue(level))
        while offset < end and not due.is_full:
            position = DelayedPosition(level, offset)
            log_offset = self._store.log_offset_of(*position.queue, offset)
            if log_offset is not None and log_offset >= self._move_below_offset:
                return
            record = self._read(position, due)
            if record is not None:
                due.add(position, self._timer_copy(level, record))
            offset += 1
            if level == TIMER_LEVEL:
                offset = self.progress.timers.next_waiting(offset)

    def _timer_copy(self, level: int, record: StoredRecord) -> NewRecord:
        """Return a record that waits for the same time as this one, as a timer."""
        changes = {}
        if level != TIMER_LEVEL:
            changes[TIMER_OUT_MS] = str(record.stored_ms + self._level_ms(level))
        properties = change_properties(bytes(record.properties), update=changes)
        return copy_record(record, topic=TIMER_TOPIC, queue_id=0, properties=_fitting(properties))

    # --- files -----------------------------------------------------------------------------------

    @property
    def needs_save(self) -> bool:
        return self.progress.needs_save

    def save(self) -> None:
        """Save which messages are delivered, as of the last flush. Raises StoreError."""
        self.progress.save()


def _redirected_record(
    record: NewRecord,
    changes: dict[str, str],
    queue: tuple[str, int],
    *,
    remove: tuple[str, ...] = (),
) -> NewRecord:
    topic, queue_id = queue
    changes |= {names.REAL_TOPIC: record.topic, names.REAL_QUEUE_ID: str(record.queue_id)}
    properties = change_properties(record.properties, update=changes, remove=remove)
    return copy_record(record, topic=topic, queue_id=queue_id, properties=properties)


def _fitting(properties: bytes) -> bytes:
    """Return properties that the store accepts, without the record CRC of the first record.

    A message that RocketMQ stored may fill all the room, and we add a record CRC.
    """
    if names.RECORD_CRC.encode() in properties:
        properties = change_properties(properties, remove=(names.RECORD_CRC,))
    for dispensable in _DISPENSABLE:
        if len(properties) > _STORED_PROPERTIES_BYTES_MAX:
            properties = change_properties(properties, remove=dispensable)
    return properties


def _timer_due_ms(record: StoredRecord) -> int:
    return _parse_number(decode_properties(record.properties).get(TIMER_OUT_MS))


def _parse_number(text: str | None) -> int:
    """Return the number, or 0 if the text is not a number or is absurdly long."""
    return int(text) if text is not None and text.isdecimal() and len(text) <= 18 else 0
