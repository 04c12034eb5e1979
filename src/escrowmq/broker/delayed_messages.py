"""Messages that are delivered later: RocketMQ's delay levels, and timers for any time.

A delayed message is first stored under a topic of the broker's own, with its real topic and queue
in its properties:

    DELAY n                   SCHEDULE_TOPIC_XXXX, queue n - 1     delivered in queue order
    TIMER_DELIVER_MS, …       rmq_sys_wheel_timer, queue 0         delivered by time, from a heap

    redirect() --> stored there --> find_due() --> appended to its real topic --> mark_delivered()

The delivered message keeps all its properties, as in RocketMQ: consumers can see its delay level.
Only `redirect()` delays a message, and nothing that is delivered passes through it again. A message
that a client sends with the TIMER_OUT_MS of a delivered one is not delayed.

A level counts from the time the message was stored; a timer names a time. Both use the wall clock.
If the clock is set back, a message with a level would have to wait for the difference as well. It
waits for its level instead, counted from the moment the broker notices.

How far each queue was delivered is saved in delayOffset.json. After a crash, messages that were
delivered since the last save are delivered again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from escrowmq.config import DelayConfig
from escrowmq.errors import CorruptRecord, RecordNotFound, RequestRefused
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
from escrowmq.message.record import NewRecord, StoredRecord, copy_record
from escrowmq.remoting.codes import ResponseCode
from escrowmq.store.config_files import ConfigFile
from escrowmq.store.store import MessageStore

_TIMER_PROPERTIES: Final = (TIMER_DELIVER_MS, TIMER_DELAY_SEC, TIMER_DELAY_MS)
# In delayOffset.json. RocketMQ ignores the first key; its levels begin at 1.
_DELIVERED_TIMERS_KEY: Final = "escrowDeliveredTimers"
_TIMER_LEVEL: Final = 0
DELIVERED_PER_TURN_MAX: Final = 1000


@dataclass(slots=True)
class DueMessages:
    """Messages to deliver now, and what `mark_delivered()` will remember of them."""

    records: list[NewRecord] = field(default_factory=list)
    next_offsets: dict[int, int] = field(default_factory=dict)  # by level
    timers: list[tuple[int, int, int]] = field(default_factory=list)


class DelayedMessages:
    def __init__(
        self,
        store: MessageStore,
        file: ConfigFile,
        config: DelayConfig,
        wall_ms: Callable[[int], int] = lambda now_ms: now_ms,
    ) -> None:
        self._store = store
        self._wall_ms = wall_ms
        self._file = file
        self._config = config
        # By level: the queue offset to deliver next.
        self._next_offsets: dict[int, int] = file.int_keys()
        self._timers_read_offset = self._next_offsets.get(_TIMER_LEVEL, 0)
        # Queue offsets of timers that were delivered before an earlier one of their queue.
        self._delivered_timers = {
            int(offset) for offset in file.content.get(_DELIVERED_TIMERS_KEY, [])
        }
        self._timers: list[tuple[int, int, int]] = []  # a heap: due_ms, queue offset, log offset
        self._undelivered: set[int] = set()  # queue offsets of timers
        # By level, after the clock was set back: the end of the messages that were stored "later
        # than now", and the time at which they are delivered.
        self._clock_set_back: dict[int, tuple[int, int]] = {}
        self._delivered_log_end = 0  # the end of the log after the last delivery
        self.is_dirty = False

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

    # --- when it is due --------------------------------------------------------------------------

    def find_due(self, now_ms: int) -> DueMessages:
        """Return the messages to deliver now. Call `mark_delivered()` when they are in the log."""
        due = DueMessages()
        for level in range(1, len(self._config.delay_levels_ms) + 1):
            self._find_due_in_level(level, now_ms, due)
        self._find_due_timers(self._wall_ms(now_ms), due)
        return due

    def mark_delivered(self, due: DueMessages) -> None:
        """Remember that these messages are in the log now."""
        self._next_offsets.update(due.next_offsets)
        for _, queue_offset, _ in due.timers:
            self._undelivered.discard(queue_offset)
            self._delivered_timers.add(queue_offset)
        delivered = set(due.timers)
        self._timers = [timer for timer in self._timers if timer not in delivered]
        heapq.heapify(self._timers)
        self._delivered_log_end = self._store.end
        self.is_dirty = True

    def _find_due_in_level(self, level: int, now_ms: int, due: DueMessages) -> None:
        topic, queue_id = names.SCHEDULE_TOPIC, level - 1
        end = self._store.max_offset(topic, queue_id)
        offset = max(self._next_offsets.get(level, 0), self._store.min_offset(topic, queue_id))
        level_ms, wall_ms = self._config.delay_levels_ms[level - 1], self._wall_ms(now_ms)
        released = self._released_offset(level, now_ms)
        while offset < end and len(due.records) < DELIVERED_PER_TURN_MAX:
            record = self._read_record(topic, queue_id, offset)
            if record is not None:
                if offset >= released and record.stored_ms + level_ms > wall_ms:
                    if record.stored_ms > wall_ms and level not in self._clock_set_back:
                        self._clock_set_back[level] = end, now_ms + level_ms
                    return
                due.records.append(_delivery_record(record))
            offset += 1
            due.next_offsets[level] = offset

    def _released_offset(self, level: int, now_ms: int) -> int:
        """Return the end of the messages to deliver although the clock, set back, says later."""
        end, release_ms = self._clock_set_back.get(level, (0, 0))
        if now_ms < release_ms:
            return 0
        if self._next_offsets.get(level, 0) >= end:
            self._clock_set_back.pop(level, None)
        return end

    def _find_due_timers(self, now_ms: int, due: DueMessages) -> None:
        self._read_new_timers()
        if not self._timers or self._timers[0][0] > now_ms:
            return
        for timer in sorted(timer for timer in self._timers if timer[0] <= now_ms):
            if len(due.records) >= DELIVERED_PER_TURN_MAX:
                return
            due.timers.append(timer)
            try:
                due.records.append(_delivery_record(self._store.record_at(timer[2])))
            except (RecordNotFound, CorruptRecord):
                continue  # it cannot be delivered; do not try again

    def _read_new_timers(self) -> None:
        end = self._store.max_offset(TIMER_TOPIC, 0)
        offset = max(self._timers_read_offset, self._store.min_offset(TIMER_TOPIC, 0))
        while offset < end:
            record = self._read_record(TIMER_TOPIC, 0, offset)
            if record is not None and offset not in self._delivered_timers:
                due_ms = _parse_number(decode_properties(record.properties).get(TIMER_OUT_MS))
                heapq.heappush(self._timers, (due_ms, offset, record.log_offset))
                self._undelivered.add(offset)
            offset += 1
        self._timers_read_offset = offset

    def _read_record(self, topic: str, queue_id: int, queue_offset: int) -> StoredRecord | None:
        log_offset = self._store.log_offset_of(topic, queue_id, queue_offset)
        if log_offset is None:
            return None
        try:
            return self._store.record_at(log_offset)
        except (RecordNotFound, CorruptRecord):
            return None

    def save(self) -> None:
        """Save how far messages were delivered, if the deliveries are durable. Raise StoreError."""
        # Saved earlier, a power cut would lose the messages: delivered by the file, but not in the
        # log.
        if self._store.flushed_offset < self._delivered_log_end:
            return
        self.is_dirty = False
        first = min(self._undelivered, default=self._timers_read_offset)
        self._next_offsets[_TIMER_LEVEL] = first
        self._delivered_timers = {offset for offset in self._delivered_timers if offset >= first}
        self._file.save(
            offsetTable=self._next_offsets,
            **{_DELIVERED_TIMERS_KEY: sorted(self._delivered_timers)},
        )


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


def _delivery_record(record: StoredRecord) -> NewRecord:
    properties = decode_properties(record.properties)
    return copy_record(
        record,
        topic=properties.get(names.REAL_TOPIC, record.topic),
        queue_id=_parse_number(properties.get(names.REAL_QUEUE_ID)),
        properties=bytes(record.properties),
    )


def _parse_number(text: str | None) -> int:
    """Return the number, or 0 if the text is not a number or is absurdly long."""
    return int(text) if text is not None and text.isdecimal() and len(text) <= 18 else 0
