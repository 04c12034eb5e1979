"""Messages that are delivered later: RocketMQ's delay levels, and any time at all.

A delayed message is first stored under a topic of the broker's own, with its real topic and queue
in its properties:

    DELAY n                   SCHEDULE_TOPIC_XXXX, queue n - 1     in the order of the queue
    TIMER_DELIVER_MS, …       rmq_sys_wheel_timer, queue 0         by time, from a heap

When it is due it is appended again, under its real topic. How far each queue has been delivered is
kept in delayOffset.json. A crash in between delivers what was delivered since the last save again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from escrowmq.broker.topics import TIMER_TOPIC
from escrowmq.errors import CorruptRecord, NoSuchRecord, RequestRefused
from escrowmq.message import names
from escrowmq.message.facts import DELAY_LEVELS_MS, delay_level
from escrowmq.message.properties import decode_properties, encode_properties
from escrowmq.message.record import NewRecord, StoredRecord, moved
from escrowmq.store.configfiles import ConfigFile
from escrowmq.store.store import MessageStore
from escrowmq.wire.codes import ResponseCode

TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
TIMER_DELAY_SEC: Final = "TIMER_DELAY_SEC"
TIMER_DELAY_MS: Final = "TIMER_DELAY_MS"
TIMER_OUT_MS: Final = "TIMER_OUT_MS"
_DELAY_PROPERTIES: Final = (
    names.DELAY_LEVEL,
    TIMER_OUT_MS,
    TIMER_DELIVER_MS,
    TIMER_DELAY_SEC,
    TIMER_DELAY_MS,
)
_TIMER_LEVEL: Final = 0  # its key in delayOffset.json; levels begin at 1
DELIVERED_PER_TURN_MAX: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayRules:
    levels_ms: tuple[int, ...] = DELAY_LEVELS_MS
    timer_max_ms: int = 3 * 24 * 3_600_000


class Delays:
    def __init__(self, store: MessageStore, file: ConfigFile, rules: DelayRules) -> None:
        self._store = store
        self._file = file
        self._rules = rules
        self._next: dict[int, int] = file.numbers()  # by level: the queue offset to deliver next
        self._timers: list[tuple[int, int, int]] = []  # due, queue offset, log offset
        self._undelivered: set[int] = set()  # queue offsets of the timer queue
        self._seen_timers = self._next.get(_TIMER_LEVEL, 0)
        self.dirty = False

    # --- at the moment of sending ----------------------------------------------------------------

    def reroute(self, record: NewRecord, now_ms: int) -> NewRecord:
        """Where a record with delay properties is stored first."""
        properties = decode_properties(record.properties)
        level = delay_level(properties.get(names.DELAY_LEVEL, "").encode())
        if level > 0:
            level = min(level, len(self._rules.levels_ms))
            properties[names.DELAY_LEVEL] = str(level)
            return _moved(record, properties, names.SCHEDULE_TOPIC, level - 1)
        due_ms = self._timer_due_ms(properties, now_ms)
        if due_ms is None or due_ms <= now_ms:
            return record
        if due_ms - now_ms > self._rules.timer_max_ms:
            raise RequestRefused(
                ResponseCode.MESSAGE_ILLEGAL,
                f"a delay of {due_ms - now_ms} ms, limit {self._rules.timer_max_ms}",
            )
        properties[TIMER_OUT_MS] = str(due_ms)
        return _moved(record, properties, TIMER_TOPIC, 0)

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
                        ResponseCode.MESSAGE_ILLEGAL, f"{name}={text!r} is not a number"
                    )
                return begin_ms + int(text) * unit_ms
        return None

    # --- later -----------------------------------------------------------------------------------

    def due(self, now_ms: int) -> Iterator[NewRecord]:
        """What is to be delivered now. Delivered is what the caller has appended."""
        room = DELIVERED_PER_TURN_MAX
        for level in range(1, len(self._rules.levels_ms) + 1):
            for record in self._due_in_level(level, now_ms, room):
                room -= 1
                yield record
        yield from self._due_timers(now_ms, room)

    def _due_in_level(self, level: int, now_ms: int, room: int) -> Iterator[NewRecord]:
        topic, queue_id = names.SCHEDULE_TOPIC, level - 1
        end = self._store.max_offset(topic, queue_id)
        at = max(self._next.get(level, 0), self._store.min_offset(topic, queue_id))
        while at < end and room > 0:
            record = self._record(topic, queue_id, at)
            if record is not None:
                if record.stored_ms + self._rules.levels_ms[level - 1] > now_ms:
                    return
                room -= 1
                yield _delivered(record)
            at += 1
            self._next[level] = at
            self.dirty = True

    def _due_timers(self, now_ms: int, room: int) -> Iterator[NewRecord]:
        self._read_new_timers()
        while self._timers and self._timers[0][0] <= now_ms and room > 0:
            _, queue_offset, log_offset = heapq.heappop(self._timers)
            self._undelivered.discard(queue_offset)
            self.dirty = True
            try:
                record = self._store.record_at(log_offset)
            except (NoSuchRecord, CorruptRecord):
                continue
            room -= 1
            yield _delivered(record)

    def _read_new_timers(self) -> None:
        end = self._store.max_offset(TIMER_TOPIC, 0)
        at = max(self._seen_timers, self._store.min_offset(TIMER_TOPIC, 0))
        while at < end:
            record = self._record(TIMER_TOPIC, 0, at)
            if record is not None:
                due_ms = _number(decode_properties(record.properties).get(TIMER_OUT_MS))
                heapq.heappush(self._timers, (due_ms, at, record.log_offset))
                self._undelivered.add(at)
            at += 1
        self._seen_timers = at

    def _record(self, topic: str, queue_id: int, queue_offset: int) -> StoredRecord | None:
        found = self._store.entry_at(topic, queue_id, queue_offset)
        if found is None:
            return None
        try:
            return self._store.record_at(found)
        except (NoSuchRecord, CorruptRecord):
            return None

    def save(self) -> None:
        self.dirty = False
        self._next[_TIMER_LEVEL] = min(self._undelivered, default=self._seen_timers)
        self._file.save(offsetTable=self._next)


def _moved(record: NewRecord, properties: dict[str, str], topic: str, queue_id: int) -> NewRecord:
    properties[names.REAL_TOPIC] = record.topic
    properties[names.REAL_QUEUE_ID] = str(record.queue_id)
    return moved(record, topic=topic, queue_id=queue_id, properties=encode_properties(properties))


def _delivered(record: StoredRecord) -> NewRecord:
    properties = decode_properties(record.properties)
    topic = properties.pop(names.REAL_TOPIC, record.topic)
    queue_id = _number(properties.pop(names.REAL_QUEUE_ID, "0"))
    for name in _DELAY_PROPERTIES:
        properties.pop(name, None)
    return moved(record, topic=topic, queue_id=queue_id, properties=encode_properties(properties))


def _number(text: str | None) -> int:
    """0 for what is no number, or one that nobody can mean."""
    return int(text) if text is not None and text.isdecimal() and len(text) <= 18 else 0
