"""Messages that are delivered later: RocketMQ's delay levels, and any time at all.

A delayed message is first stored under a topic of the broker's own, with its real topic and queue
in its properties:

    DELAY n                   SCHEDULE_TOPIC_XXXX, queue n - 1     in the order of the queue
    TIMER_DELIVER_MS, …       rmq_sys_wheel_timer, queue 0         by time, from a heap

A level counts from when the message was stored, a timer names a time: both by the wall. If that is
set back, a message of a level would wait for the difference too; it waits for its level instead,
counted from when this was found out.

When it is due it is appended again, under its real topic. How far each queue has been delivered is
kept in delayOffset.json. A crash in between delivers what was delivered since the last save again.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from escrowmq.errors import CorruptRecord, RecordNotFound, RequestRefused
from escrowmq.message import names
from escrowmq.message.keys import DELAY_LEVELS_MS, delay_level
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

_DELAY_PROPERTIES: Final = (
    names.REAL_TOPIC,
    names.REAL_QUEUE_ID,
    names.DELAY_LEVEL,
    TIMER_OUT_MS,
    TIMER_DELIVER_MS,
    TIMER_DELAY_SEC,
    TIMER_DELAY_MS,
)
_DELIVERED_TIMERS_KEY: Final = "escrowDeliveredTimers"  # beside RocketMQ's tables, which ignores it
_TIMER_LEVEL: Final = 0  # its key in delayOffset.json; levels begin at 1
DELIVERED_PER_TURN_MAX: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayRules:
    levels_ms: tuple[int, ...] = DELAY_LEVELS_MS
    timer_max_ms: int = 3 * 24 * 3_600_000
    has_timers: bool = True


@dataclass(slots=True)
class DueMessages:
    """Messages whose time has come, and how far that brings each queue."""

    records: list[NewRecord] = field(default_factory=list)
    next_offsets: dict[int, int] = field(default_factory=dict)
    timers: list[tuple[int, int, int]] = field(default_factory=list)


class DelayedMessages:
    def __init__(
        self,
        store: MessageStore,
        file: ConfigFile,
        rules: DelayRules,
        wall_ms: Callable[[int], int] = lambda now_ms: now_ms,
    ) -> None:
        self._store = store
        self._wall_ms = wall_ms
        self._file = file
        self._rules = rules
        self._next_offsets: dict[int, int] = (
            file.int_keys()
        )  # by level: the queue offset to deliver next
        self._timers_read_offset = self._next_offsets.get(_TIMER_LEVEL, 0)
        # Timers that were delivered although an earlier one of their queue was not.
        self._delivered_timers = {int(at) for at in file.content.get(_DELIVERED_TIMERS_KEY, [])}
        self._timers: list[tuple[int, int, int]] = []  # due, queue offset, log offset
        self._undelivered: set[int] = set()  # queue offsets of the timer queue
        # By level: up to which queue offset messages are from "later than now", and when they go.
        self._clock_set_back: dict[int, tuple[int, int]] = {}
        self._delivered_log_end = 0  # of the log, after what was delivered last
        self.is_dirty = False

    # --- at the moment of sending ----------------------------------------------------------------

    def redirect(self, record: NewRecord, now_ms: int) -> NewRecord:
        """Where a record with delay properties is stored first."""
        now_ms = self._wall_ms(now_ms)
        properties = decode_properties(record.properties)
        text = properties.get(names.DELAY_LEVEL, "").encode()
        level = delay_level(text, len(self._rules.levels_ms))
        if level > 0:
            put = {names.DELAY_LEVEL: str(level)}
            return _redirected_record(record, put, names.SCHEDULE_TOPIC, level - 1)
        due_ms = self._timer_due_ms(properties, now_ms)
        if due_ms is None or due_ms <= now_ms:
            return record
        if not self._rules.has_timers:
            raise RequestRefused(ResponseCode.MESSAGE_ILLEGAL, "timers are switched off here")
        if due_ms - now_ms > self._rules.timer_max_ms:
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"a delay of {due_ms - now_ms} ms, limit {self._rules.timer_max_ms}",
            )
        return _redirected_record(record, {TIMER_OUT_MS: str(due_ms)}, TIMER_TOPIC, 0)

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

    # --- later -----------------------------------------------------------------------------------

    def find_due(self, now_ms: int) -> DueMessages:
        """What is to be delivered now. It counts as delivered when `delivered` is told so."""
        found = DueMessages()
        for level in range(1, len(self._rules.levels_ms) + 1):
            self._find_due_in_level(level, now_ms, found)
        self._find_due_timers(self._wall_ms(now_ms), found)
        return found

    def mark_delivered(self, due: DueMessages) -> None:
        """It is in the log, at the end of it as it is now."""
        self._next_offsets.update(due.next_offsets)
        for entry in due.timers:
            self._undelivered.discard(entry[1])
            self._delivered_timers.add(entry[1])
        gone = set(due.timers)
        self._timers = [entry for entry in self._timers if entry not in gone]
        heapq.heapify(self._timers)
        self._delivered_log_end = self._store.end
        self.is_dirty = True

    def _find_due_in_level(self, level: int, now_ms: int, due: DueMessages) -> None:
        topic, queue_id = names.SCHEDULE_TOPIC, level - 1
        end = self._store.max_offset(topic, queue_id)
        at = max(self._next_offsets.get(level, 0), self._store.min_offset(topic, queue_id))
        level_ms, wall_ms = self._rules.levels_ms[level - 1], self._wall_ms(now_ms)
        released = self._released_offset(level, now_ms)
        while at < end and len(due.records) < DELIVERED_PER_TURN_MAX:
            record = self._read_record(topic, queue_id, at)
            if record is not None:
                if at >= released and record.stored_ms + level_ms > wall_ms:
                    if record.stored_ms > wall_ms and level not in self._clock_set_back:
                        self._clock_set_back[level] = end, now_ms + level_ms
                    return
                due.records.append(_delivery_record(record))
            at += 1
            due.next_offsets[level] = at

    def _released_offset(self, level: int, now_ms: int) -> int:
        """Up to where messages go whatever the wall says: it was set back, and they have waited."""
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
        for entry in sorted(entry for entry in self._timers if entry[0] <= now_ms):
            if len(due.records) >= DELIVERED_PER_TURN_MAX:
                return
            due.timers.append(entry)
            try:
                due.records.append(_delivery_record(self._store.record_at(entry[2])))
            except (RecordNotFound, CorruptRecord):
                continue

    def _read_new_timers(self) -> None:
        end = self._store.max_offset(TIMER_TOPIC, 0)
        at = max(self._timers_read_offset, self._store.min_offset(TIMER_TOPIC, 0))
        while at < end:
            record = self._read_record(TIMER_TOPIC, 0, at)
            if record is not None and at not in self._delivered_timers:
                due_ms = _parse_number(decode_properties(record.properties).get(TIMER_OUT_MS))
                heapq.heappush(self._timers, (due_ms, at, record.log_offset))
                self._undelivered.add(at)
            at += 1
        self._timers_read_offset = at

    def _read_record(self, topic: str, queue_id: int, queue_offset: int) -> StoredRecord | None:
        found = self._store.log_offset_of(topic, queue_id, queue_offset)
        if found is None:
            return None
        try:
            return self._store.record_at(found)
        except (RecordNotFound, CorruptRecord):
            return None

    def save(self) -> None:
        """Not before what was delivered is durable: a power cut would lose it otherwise."""
        if self._store.flushed_offset < self._delivered_log_end:
            return
        self.is_dirty = False
        first = min(self._undelivered, default=self._timers_read_offset)
        self._next_offsets[_TIMER_LEVEL] = first
        self._delivered_timers = {at for at in self._delivered_timers if at >= first}
        self._file.save(
            offsetTable=self._next_offsets,
            **{_DELIVERED_TIMERS_KEY: sorted(self._delivered_timers)},
        )


def _redirected_record(
    record: NewRecord, changes: dict[str, str], topic: str, queue_id: int
) -> NewRecord:
    changes |= {names.REAL_TOPIC: record.topic, names.REAL_QUEUE_ID: str(record.queue_id)}
    properties = change_properties(record.properties, update=changes)
    return copy_record(record, topic=topic, queue_id=queue_id, properties=properties)


def _delivery_record(record: StoredRecord) -> NewRecord:
    properties = decode_properties(record.properties)
    return copy_record(
        record,
        topic=properties.get(names.REAL_TOPIC, record.topic),
        queue_id=_parse_number(properties.get(names.REAL_QUEUE_ID)),
        properties=change_properties(record.properties, remove=_DELAY_PROPERTIES),
    )


def _parse_number(text: str | None) -> int:
    """0 for what is no number, or one that nobody can mean."""
    return int(text) if text is not None and text.isdecimal() and len(text) <= 18 else 0
