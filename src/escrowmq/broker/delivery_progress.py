"""Which delayed messages are delivered: known in memory, in the log, and after every crash.

Delayed messages are delivered in batches. A batch is one append that begins with a delivery note, a
record of a topic of its own that names the messages which follow it:

    delivery note "3:17-19 0:44"  |  message, message, message, message

    3:17-19    queue offsets 17 to 19 of level 3        0:44    queue offset 44 of the timers

A crash leaves the first n records of an append, so whatever precedes another note is complete, and
only the last note of the log may name more messages than follow it. A start compares each of them
with the records behind the note. The next note repeats those that were not there, with a `!`.

A note and not a property of each delivered message: messages are delivered with the properties they
were sent with, whose room may be used up; no client can write a note; and a start reads a queue of
notes instead of the log.

What the notes say is saved now and then, so that a start reads only the last ones. Nothing is saved
before the log that it depends on is durable.

    config/delayOffset.json   how far each level is delivered, in RocketMQ's format; saved often
    escrowmq.delays           which timers are delivered; saved when the log has grown
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import msgspec

from escrowmq.errors import CorruptRecord, RecordNotFound, StoreError
from escrowmq.message import names
from escrowmq.message.names import DELIVERY_TOPIC, REAL_TOPIC, SCHEDULE_TOPIC, TIMER_TOPIC
from escrowmq.message.properties import find_property
from escrowmq.message.record import LogOffset, NewRecord, StoredRecord
from escrowmq.store.config_files import delay_offsets_file
from escrowmq.store.disk import Disk
from escrowmq.store.snapshot_files import DELAYS_PATH, load_snapshot, save_snapshot
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

TIMER_LEVEL: Final = 0  # RocketMQ's levels begin at 1
SNAPSHOT_INTERVAL_BYTES: Final = 16 << 20  # of log between two snapshots; a start reads no more
BATCH_MESSAGES_MAX: Final = 1000

# Keys of delayOffset.json that RocketMQ ignores.
_PROGRESS_KEY: Final = "escrowProgress"
_OLD_TIMERS_KEY: Final = "escrowDeliveredTimers"  # written by earlier versions


class DelayedPosition(NamedTuple):
    """A delayed message: its level, or TIMER_LEVEL, and its offset in the queue of the level."""

    level: int
    queue_offset: int

    @property
    def queue(self) -> tuple[str, int]:
        """The topic and the queue id in which the message waits."""
        return delay_queue(self.level)

    def __str__(self) -> str:
        topic, queue_id = self.queue
        return f"topic={topic} queue_id={queue_id} queue_offset={self.queue_offset}"


def delay_queue(level: int) -> tuple[str, int]:
    return (TIMER_TOPIC, 0) if level == TIMER_LEVEL else (SCHEDULE_TOPIC, level - 1)


# --- delivery notes ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeliveryNote:
    positions: list[DelayedPosition]  # in the order of the messages that follow the note
    # Messages that the previous note named, and that a crash has cut off.
    undelivered: list[DelayedPosition] = field(default_factory=list)


def make_note(note: DeliveryNote, now_ms: int) -> NewRecord:
    parts = [f"!{run}" for run in _format_runs(note.undelivered)]
    parts += _format_runs(note.positions)
    return NewRecord(DELIVERY_TOPIC, 0, " ".join(parts).encode(), born_ms=now_ms)


def _format_runs(positions: Iterable[DelayedPosition]) -> Iterator[str]:
    for level, begin, end in _runs(positions):
        yield f"{level}:{begin}" if end == begin + 1 else f"{level}:{begin}-{end - 1}"


def _runs(positions: Iterable[DelayedPosition]) -> Iterator[tuple[int, int, int]]:
    """Yield level, begin and end of each run of consecutive positions."""
    level = begin = end = -1
    for position in positions:
        if (level, end) == position:
            end += 1
            continue
        if end > begin:
            yield level, begin, end
        level, begin = position
        end = begin + 1
    if end > begin:
        yield level, begin, end


def decode_note(record: StoredRecord) -> DeliveryNote:
    """Raises CorruptRecord."""
    note = DeliveryNote([])
    try:
        for part in bytes(record.body).decode("ascii").split():
            positions = note.undelivered if part.startswith("!") else note.positions
            level, _, value = part.removeprefix("!").partition(":")
            begin, _, last = value.partition("-")
            offsets = range(int(begin), int(last or begin) + 1)
            if len(positions) + len(offsets) > BATCH_MESSAGES_MAX:
                raise ValueError("too many messages")
            positions += [DelayedPosition(int(level), offset) for offset in offsets]
    except ValueError as error:
        raise CorruptRecord(record.log_offset, f"not a delivery note: {error}") from error
    return note


# --- what is delivered ---------------------------------------------------------------------------

_CHUNK_OFFSETS: Final = 1 << 16
_CHUNK_BYTES: Final = _CHUNK_OFFSETS // 8


class DeliveredTimers:
    """The queue offsets of delivered timers.

    Timers are delivered by time, so one that waits for days has millions of delivered ones behind
    it. A chunk of 65,536 timers that are all delivered takes one number, any other a bit for each.
    """

    def __init__(self, first_waiting: int = 0) -> None:
        self.first_waiting = first_waiting  # every timer before it is delivered
        self._partial_chunks: dict[int, bytearray] = {}
        self._counts: dict[int, int] = {}  # of the bits that are set in each partial chunk
        self._full_chunks: set[int] = set()

    def __contains__(self, queue_offset: int) -> bool:
        if queue_offset < self.first_waiting:
            return True
        number, index = divmod(queue_offset, _CHUNK_OFFSETS)
        chunk = self._partial_chunks.get(number)
        if chunk is None:
            return number in self._full_chunks
        return bool(chunk[index >> 3] & (1 << (index & 7)))

    @property
    def overtaking_count(self) -> int:
        """The number of delivered timers behind the first one that waits."""
        count = sum(self._counts.values()) + len(self._full_chunks) * _CHUNK_OFFSETS
        number, index = divmod(self.first_waiting, _CHUNK_OFFSETS)
        chunk = self._partial_chunks.get(number)
        passed = 0 if chunk is None else int.from_bytes(chunk, "little") & ((1 << index) - 1)
        return count - passed.bit_count()

    def add(self, queue_offset: int) -> None:
        if queue_offset in self:
            return
        if queue_offset == self.first_waiting:
            self.advance_to(self.next_waiting(queue_offset + 1))
            return
        number, index = divmod(queue_offset, _CHUNK_OFFSETS)
        chunk = self._partial_chunks.setdefault(number, bytearray(_CHUNK_BYTES))
        chunk[index >> 3] |= 1 << (index & 7)
        self._counts[number] = self._counts.get(number, 0) + 1
        if self._counts[number] == _CHUNK_OFFSETS:
            self._full_chunks.add(number)
            del self._partial_chunks[number], self._counts[number]

    def next_waiting(self, queue_offset: int) -> int:
        """Return the first offset from this one on that is not known to be delivered."""
        offset = max(queue_offset, self.first_waiting)
        while True:
            number, index = divmod(offset, _CHUNK_OFFSETS)
            if number in self._full_chunks:
                offset = (number + 1) * _CHUNK_OFFSETS
                continue
            chunk = self._partial_chunks.get(number)
            if chunk is None:
                return offset
            waiting = _first_clear_bit(chunk, index)
            if waiting < _CHUNK_OFFSETS:
                return number * _CHUNK_OFFSETS + waiting
            offset = (number + 1) * _CHUNK_OFFSETS

    def advance_to(self, queue_offset: int) -> None:
        """Forget everything below this offset: all of it is delivered or no longer in the log."""
        if queue_offset <= self.first_waiting:
            return
        previous_chunk = self.first_waiting // _CHUNK_OFFSETS
        self.first_waiting = self.next_waiting(queue_offset)
        first_chunk = self.first_waiting // _CHUNK_OFFSETS
        if first_chunk == previous_chunk:
            return
        for number in [number for number in self._partial_chunks if number < first_chunk]:
            del self._partial_chunks[number], self._counts[number]
        self._full_chunks = {number for number in self._full_chunks if number >= first_chunk}

    def cut_to(self, queue_end: int) -> None:
        """Forget offsets from here on: the log has lost them, and other timers will have them."""
        self.first_waiting = min(self.first_waiting, queue_end)
        last_chunk, index = divmod(queue_end, _CHUNK_OFFSETS)
        for number in [number for number in self._full_chunks if number >= last_chunk]:
            self._full_chunks.discard(number)
            if number == last_chunk:
                self._partial_chunks[number] = bytearray(b"\xff" * _CHUNK_BYTES)
        for number in [number for number in self._partial_chunks if number > last_chunk]:
            del self._partial_chunks[number]
        chunk = self._partial_chunks.get(last_chunk)
        if chunk is not None:
            kept = int.from_bytes(chunk, "little") & ((1 << index) - 1)
            self._partial_chunks[last_chunk] = bytearray(kept.to_bytes(_CHUNK_BYTES, "little"))
        self._counts = {
            number: int.from_bytes(bits, "little").bit_count()
            for number, bits in self._partial_chunks.items()
        }

    def dump(self) -> TimersDump:
        return TimersDump(
            first_waiting=self.first_waiting,
            full_chunks=sorted(self._full_chunks),
            partial_chunks={
                number: zlib.compress(bits, 1) for number, bits in self._partial_chunks.items()
            },
        )

    @classmethod
    def load(cls, dump: TimersDump) -> DeliveredTimers:
        """Raises ValueError."""
        timers = cls(dump.first_waiting)
        timers._full_chunks = set(dump.full_chunks)
        for number, compressed in dump.partial_chunks.items():
            decoder = zlib.decompressobj()
            try:
                bits = bytearray(decoder.decompress(compressed, _CHUNK_BYTES))
            except zlib.error as error:
                raise ValueError(f"chunk {number}: {error}") from error
            if len(bits) != _CHUNK_BYTES:
                raise ValueError(f"chunk {number} has {len(bits)} bytes")
            timers._partial_chunks[number] = bits
            timers._counts[number] = int.from_bytes(bits, "little").bit_count()
        return timers


def _first_clear_bit(chunk: bytearray, index: int) -> int:
    """Return the first bit from `index` on that is not set; the number of all bits if none is."""
    byte = index >> 3
    value = chunk[byte] | ((1 << (index & 7)) - 1)
    while value == 0xFF:
        byte += 1
        if byte == _CHUNK_BYTES:
            return _CHUNK_OFFSETS
        value = chunk[byte]
    return (byte << 3) + ((~value & (value + 1)).bit_length() - 1)


class TimersDump(msgspec.Struct, frozen=True, kw_only=True):
    first_waiting: int
    full_chunks: list[int]
    partial_chunks: dict[int, bytes]


@dataclass(frozen=True, slots=True)
class _StoredNote:
    log_offset: int
    log_end: int
    note: DeliveryNote | None  # None: it cannot be read


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The content of escrowmq.delays."""

    log_offset: int  # every note below it is included
    timers: TimersDump


@dataclass(slots=True)
class LevelProgress:
    """A level is delivered in queue order, except for the messages that had to be set aside."""

    next_offset: int = 0
    set_aside: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _PendingSave:
    """What to save once the log is durable up to `log_offset`."""

    log_offset: int
    offsets: dict[int, int]
    set_aside: dict[int, list[tuple[int, int]]]
    snapshot: bytes | None


class DeliveryProgress:
    """Which delayed messages are delivered. Rebuilt from the files and the notes at the start."""

    def __init__(self, store: MessageStore, disk: Disk) -> None:
        self._store = store
        self._disk = disk
        self._file = delay_offsets_file(disk, store.damage)
        self._levels: dict[int, LevelProgress] = {}
        self.timers = DeliveredTimers()
        # Messages that the last note names and that a crash has cut off. The next note repeats
        # them.
        self._undelivered: list[DelayedPosition] = []
        self._pending_save: _PendingSave | None = None
        self._saved_log_end = -1  # of the snapshot
        self.snapshot_interval_bytes = SNAPSHOT_INTERVAL_BYTES
        self.is_dirty = False
        self._has_lost_notes = False  # this start has found out what lost notes had named
        self._recover()
        if self._has_lost_notes:
            self._save_now()

    def level(self, level: int) -> LevelProgress:
        progress = self._levels.get(level)
        if progress is None:
            progress = self._levels[level] = LevelProgress()
        return progress

    def is_delivered(self, position: DelayedPosition) -> bool:
        level, queue_offset = position
        if level == TIMER_LEVEL:
            return queue_offset in self.timers
        progress = self.level(level)
        return queue_offset < progress.next_offset and queue_offset not in progress.set_aside

    def mark_delivered(self, position: DelayedPosition) -> None:
        """Mark a message as delivered. Earlier ones of its level that are not are set aside."""
        level, queue_offset = position
        self.is_dirty = True
        if level == TIMER_LEVEL:
            self.timers.add(queue_offset)
            return
        progress = self.level(level)
        if queue_offset == progress.next_offset:
            progress.next_offset += 1  # almost every message
            return
        self._pass(level, queue_offset)
        progress.set_aside.discard(queue_offset)

    def set_aside(self, position: DelayedPosition) -> None:
        """Let a level go on behind a message that cannot be delivered now."""
        level, queue_offset = position
        if level != TIMER_LEVEL:
            self.is_dirty = True
            self._pass(level, queue_offset)

    def _pass(self, level: int, queue_offset: int) -> None:
        progress = self.level(level)
        if queue_offset >= progress.next_offset:
            progress.set_aside.update(range(progress.next_offset, queue_offset + 1))
            progress.next_offset = queue_offset + 1

    def set_aside_positions(self) -> list[DelayedPosition]:
        return [
            DelayedPosition(level, queue_offset)
            for level, progress in self._levels.items()
            for queue_offset in sorted(progress.set_aside)
        ]

    def first_waiting_positions(self) -> list[DelayedPosition]:
        """Return the first waiting message of each queue, and all that are set aside."""
        positions = [DelayedPosition(TIMER_LEVEL, self.timers.first_waiting)]
        for level, progress in self._levels.items():
            positions.append(DelayedPosition(level, progress.next_offset))
        return positions + self.set_aside_positions()

    def skip_expired(self, level: int) -> int:
        """Pass over the messages of a queue that the log no longer has. Return how many waited."""
        first = self._store.min_offset(*delay_queue(level))
        if level == TIMER_LEVEL:
            expired = 0
            while (offset := self.timers.next_waiting(self.timers.first_waiting)) < first:
                expired += 1
                self.timers.add(offset)
            return expired
        progress = self.level(level)
        lost = {offset for offset in progress.set_aside if offset < first}
        progress.set_aside -= lost
        expired = len(lost) + max(0, first - progress.next_offset)
        progress.next_offset = max(progress.next_offset, first)
        return expired

    def make_note(self, positions: list[DelayedPosition], now_ms: int) -> NewRecord:
        """Return the record to append in front of these messages."""
        return make_note(DeliveryNote(positions, self._undelivered), now_ms)

    def batch_stored(self, positions: Iterable[DelayedPosition]) -> None:
        """Mark the messages of a batch that is in the log with its note."""
        self._undelivered = []
        for position in positions:
            self.mark_delivered(position)

    # --- start -----------------------------------------------------------------------------------

    def _recover(self) -> None:
        begin = self._load_files()
        notes = list(self._notes_from(begin))
        self._fit_to_queues()
        readable_end = begin  # behind the last note that could be read
        for index, stored in enumerate(notes):
            following = notes[index + 1] if index + 1 < len(notes) else None
            if stored.note is None:
                self._apply_lost_note(readable_end, following)
                continue
            readable_end = stored.log_end
            self._undelivered = self._undelivered_of(stored, stored.note, following)
            cut_off = set(self._undelivered)
            for position in stored.note.positions:
                if position not in cut_off:
                    self.mark_delivered(position)
        # A lost note behind the last readable one may have delivered them.
        self._undelivered = [
            position for position in self._undelivered if not self.is_delivered(position)
        ]
        self._fit_to_queues()
        if notes:
            log.info(
                "delayed messages recovered notes_read=%d cut_off=%d set_aside=%d",
                len(notes),
                len(self._undelivered),
                len(self.set_aside_positions()),
            )

    def _undelivered_of(
        self, stored: _StoredNote, note: DeliveryNote, following: _StoredNote | None
    ) -> list[DelayedPosition]:
        """Return the messages of a note that a crash has cut off."""
        if following is None or following.note is None:
            return self._find_undelivered(stored, note)
        return following.note.undelivered

    def _load_files(self) -> int:
        """Load what was saved, and return the log offset from which notes have to be read."""
        content = self._file.content
        offsets = self._file.int_keys()
        timers_first = offsets.pop(TIMER_LEVEL, 0)
        for level, offset in offsets.items():
            if level > 0:
                self.level(level).next_offset = max(0, offset)
        progress = content.get(_PROGRESS_KEY)
        saved_offset = _load_progress(progress, self._levels)
        content.pop(_PROGRESS_KEY, None)
        snapshot = self._load_snapshot()
        if snapshot is not None:
            self.timers = DeliveredTimers.load(snapshot.timers)
            self._saved_log_end = snapshot.log_offset
        else:
            # Written by an earlier version, by RocketMQ, or by us before the first snapshot.
            self.timers = DeliveredTimers(max(0, timers_first))
            for offset in content.get(_OLD_TIMERS_KEY) or ():
                self.timers.add(int(offset))
        content.pop(_OLD_TIMERS_KEY, None)
        if snapshot is None or saved_offset is None:
            return 0
        return min(saved_offset, snapshot.log_offset)

    def _load_snapshot(self) -> _Snapshot | None:
        damage = self._store.damage
        data = load_snapshot(self._disk, DELAYS_PATH, damage, "all delivery notes are read instead")
        if data is None:
            return None
        try:
            snapshot = msgspec.msgpack.decode(data, type=_Snapshot)
            DeliveredTimers.load(snapshot.timers)
        except (msgspec.MsgspecError, ValueError) as error:  # written by another version
            log.error("%s is not used, all delivery notes are read: %s", DELAYS_PATH, error)
            return None
        # One that is ahead of the log, or of another log, would hide timers that still wait.
        if not snapshot.log_offset <= self._store.end:
            log.error(
                "%s is not used, all delivery notes are read: it is ahead of the log", DELAYS_PATH
            )
            return None
        return snapshot

    def _fit_to_queues(self) -> None:
        """Forget what the queues do not have: expired messages, and lost ones behind their end."""
        for topic, queue_id in self._store.queues():
            if topic == SCHEDULE_TOPIC:
                self.level(queue_id + 1)
        for level, progress in self._levels.items():
            end = self._store.max_offset(*delay_queue(level))
            progress.next_offset = min(progress.next_offset, end)
            progress.set_aside = {offset for offset in progress.set_aside if offset < end}
            self.skip_expired(level)
        self.timers.cut_to(self._store.max_offset(TIMER_TOPIC, 0))
        self.timers.advance_to(self._store.min_offset(TIMER_TOPIC, 0))

    def _notes_from(self, log_offset: int) -> list[_StoredNote]:
        """Return the notes from a log offset on, and the one before, in the order of the log."""
        store = self._store
        first: int = store.min_offset(DELIVERY_TOPIC, 0)
        end: int = store.max_offset(DELIVERY_TOPIC, 0)
        low, high = first, end
        while low < high:
            middle = (low + high) // 2
            [(middle_offset, *_)] = store.entries(DELIVERY_TOPIC, 0, middle, 1)
            if middle_offset >= log_offset:
                high = middle
            else:
                low = middle + 1
        notes: list[_StoredNote] = []
        for queue_offset in range(max(low - 1, first), end):
            [(note_offset, size, _)] = store.entries(DELIVERY_TOPIC, 0, queue_offset, 1)
            note: DeliveryNote | None = None
            try:
                if store.log_offset_of(DELIVERY_TOPIC, 0, queue_offset) is None:
                    raise RecordNotFound("the log has lost it")
                note = decode_note(store.record_at(note_offset))
            except (RecordNotFound, CorruptRecord) as error:
                log.error("delivery note unreadable queue_offset=%d: %s", queue_offset, error)
            notes.append(_StoredNote(note_offset, note_offset + size, note))
        # Where records are lost, one may have been a note, even if no entry of the queue says so.
        notes += [
            _StoredNote(damage.begin, damage.end, None)
            for damage in store.recovery.damage
            if damage.end > log_offset
        ]
        return sorted(notes, key=lambda stored: (stored.log_offset, stored.note is not None))

    def _find_undelivered(self, stored: _StoredNote, note: DeliveryNote) -> list[DelayedPosition]:
        """Return the messages of the last note that are not in the log behind it."""
        records = self._store.records(stored.log_end)
        for index, position in enumerate(note.positions):
            source = read_delayed(self._store, position)
            try:
                record = next(records, None)
            except (RecordNotFound, CorruptRecord):
                # A damaged record: what follows it can be found only by its key.
                return [
                    position
                    for position in note.positions[index:]
                    if not self._has_delivery(position, stored.log_offset)
                ]
            if record is None or (source is not None and not _is_delivery(record, source)):
                return note.positions[index:]
        return []

    def _has_delivery(self, position: DelayedPosition, note_offset: int) -> bool:
        """Return whether a message was delivered behind a note, by its key."""
        source = read_delayed(self._store, position)
        if source is None:
            return True  # unreadable: it cannot be delivered again
        key = _text_property(source, names.UNIQUE_KEY)
        return bool(key) and any(
            record.log_offset > note_offset and _is_delivery(record, source)
            for topic in {_text_property(source, REAL_TOPIC), TIMER_TOPIC}
            for record in self._store.find_by_key(topic, key)
        )

    def _apply_lost_note(self, begin: int, following: _StoredNote | None) -> None:
        """Find out from the records of a range which delayed messages a lost note has named.

        Where it was is not known exactly, so the range begins behind the last readable note. It
        need not begin before the first message that waits: a delivery follows its message.
        """
        store = self._store
        first_waiting = min(
            (
                log_offset
                for position in self.first_waiting_positions()
                for log_offset, *_ in store.entries(*position.queue, position.queue_offset, 1)
            ),
            default=store.end,
        )
        end = store.end if following is None else following.log_offset
        for record in store.readable_records(LogOffset(max(begin, first_waiting))):
            if record.log_offset >= end:
                break
            self._mark_source_of(record)
        self._has_lost_notes = True

    def _mark_source_of(self, record: StoredRecord) -> None:
        """Mark the delayed message that a record delivers, if it delivers one."""
        # A delivered message keeps this property, and no client can send it.
        if find_property(record.properties, REAL_TOPIC.encode()) is None:
            return
        key = _text_property(record, names.UNIQUE_KEY)
        for topic in (SCHEDULE_TOPIC, TIMER_TOPIC):
            for source in self._store.find_by_key(topic, key) if key else ():
                level = TIMER_LEVEL if topic == TIMER_TOPIC else source.queue_id + 1
                if source.log_offset < record.log_offset and _is_delivery(record, source):
                    self.mark_delivered(DelayedPosition(level, source.queue_offset))

    # --- saving ----------------------------------------------------------------------------------

    def save(self) -> None:
        """Save the progress as of the last flush. Raises StoreError."""
        self._write_if_durable()
        if self._pending_save is None and self.is_dirty:
            self._pending_save = self._make_save()
            self.is_dirty = False
            self._write_if_durable()

    def _save_now(self) -> None:
        """Save everything at a start, because the next one may find no trace of a lost note."""
        self.is_dirty = True
        self._saved_log_end = -1  # with the timers
        try:
            self.save()
        except StoreError as error:
            log.warning("progress of delayed messages not saved, tried again later: %s", error)

    @property
    def needs_save(self) -> bool:
        return self.is_dirty or self._pending_save is not None

    def _write_if_durable(self) -> None:
        # Saved earlier, a power cut would lose messages: delivered by the file, but not in the log.
        pending = self._pending_save
        if pending is None or self._store.flushed_offset < pending.log_offset:
            return
        if pending.snapshot is not None:
            save_snapshot(self._disk, DELAYS_PATH, pending.snapshot)
            self._saved_log_end = pending.log_offset
        self._file.save(
            offsetTable=pending.offsets,
            **{_PROGRESS_KEY: {"logOffset": pending.log_offset, "setAside": pending.set_aside}},
        )
        self._pending_save = None

    def _make_save(self) -> _PendingSave:
        log_offset = self._store.end
        offsets = {level: progress.next_offset for level, progress in self._levels.items()}
        offsets[TIMER_LEVEL] = self.timers.first_waiting
        snapshot: bytes | None = None
        growth = log_offset - self._saved_log_end
        if growth >= self.snapshot_interval_bytes or self._saved_log_end < 0:
            snapshot = msgspec.msgpack.encode(
                _Snapshot(log_offset=log_offset, timers=self.timers.dump())
            )
        return _PendingSave(
            log_offset,
            offsets,
            {
                level: [
                    (begin, end)
                    for _, begin, end in _runs(
                        DelayedPosition(level, offset) for offset in sorted(progress.set_aside)
                    )
                ]
                for level, progress in self._levels.items()
                if progress.set_aside
            },
            snapshot,
        )


class _SavedProgress(msgspec.Struct, rename="camel"):
    log_offset: int
    set_aside: dict[int, list[tuple[int, int]]] = {}


def _load_progress(content: object, levels: dict[int, LevelProgress]) -> int | None:
    """Load the messages that were set aside, and return the log offset of the progress."""
    try:
        saved = msgspec.convert(content, _SavedProgress, strict=False)
    except msgspec.ValidationError:
        return None  # RocketMQ has written the file since
    for level, ranges in saved.set_aside.items():
        if level in levels:
            levels[level].set_aside.update(*(range(begin, end) for begin, end in ranges))
    return saved.log_offset


# --- reading -------------------------------------------------------------------------------------


def read_delayed(store: MessageStore, position: DelayedPosition) -> StoredRecord | None:
    """Return a delayed message; None if it cannot be read."""
    log_offset = store.log_offset_of(*position.queue, position.queue_offset)
    if log_offset is None:
        return None
    try:
        return store.record_at(log_offset)
    except (RecordNotFound, CorruptRecord):
        return None


def _is_delivery(record: StoredRecord, source: StoredRecord) -> bool:
    """Return whether a record delivers a delayed message, or is a copy of it that still waits."""
    topics = _text_property(source, REAL_TOPIC), TIMER_TOPIC
    return record.topic in topics and _identity(record) == _identity(source)


def _text_property(record: StoredRecord, name: str) -> str:
    return (find_property(record.properties, name.encode()) or b"").decode("utf-8", "replace")


def _identity(record: StoredRecord) -> tuple[object, ...]:
    return (
        find_property(record.properties, b"UNIQ_KEY"),
        record.born_ms,
        record.born_host,
        record.body_crc,
        len(record.body),
        record.flag,
        record.reconsume_times,
        record.prepared_offset,
    )
