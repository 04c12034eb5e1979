"""The escrow's memory on disk: filled from the log at the start, noted down now and then.

Nothing is noted before it is durable in the log: a note that is ahead of the log would take a
transaction for settled whose settlement a power cut has undone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.errors import RequestRefused
from escrowmq.escrow.checks import EscrowRules
from escrowmq.escrow.coordinator import Change, Escrow, pieces, settle_all
from escrowmq.escrow.records import CURSOR_GROUP
from escrowmq.escrow.recovery import (
    PATH,
    Snapshot,
    decode_snapshot,
    encode_snapshot,
    recover_escrow,
)
from escrowmq.escrow.writers import Decision
from escrowmq.message import names
from escrowmq.message.batch import NewRun, ToAppend
from escrowmq.message.record import NewRecord
from escrowmq.message.transaction import State
from escrowmq.store.disk import Disk, read_file, replace_file
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

NOTED_AFTER_BYTES: Final = 64 << 20  # of log since the last note; a start reads no more than that


Reroute = Callable[[NewRecord, int], NewRecord]


def rerouted(change: Change, reroute: Reroute, now_ms: int) -> list[ToAppend]:
    """A delay counts from the commit: the final waits where delayed messages wait."""
    if change.state is not State.COMMITTED:
        return change.records
    return [_rerouted(record, reroute, now_ms) for record in change.records]


def _rerouted(record: ToAppend, reroute: Reroute, now_ms: int) -> ToAppend:
    if (
        type(record) is NewRun
        or not _is_delayed(record.properties)
        or record.topic == names.OP_TOPIC
    ):
        return record
    try:
        return reroute(record, now_ms)
    except RequestRefused as error:
        # Parked under other settings, or by RocketMQ: better early than never.
        log.warning("delivered without its delay topic=%s: %s", record.topic, error)
        return record


def _is_delayed(properties: bytes) -> bool:
    # `find`, not `in`: every commit comes by here, and it is twice as fast for bytes.
    return properties.find(b"DELAY\x01") >= 0 or properties.find(b"TIMER_D") >= 0


class EscrowMemory:
    def __init__(
        self,
        store: MessageStore,
        disk: Disk,
        offsets: ConsumerOffsets,
        rules: EscrowRules,
        reroute: Reroute,
    ) -> None:
        self._store = store
        self._reroute = reroute
        self._disk = disk
        self._offsets = offsets
        self.escrow = Escrow(store, rules)
        self._cursors: tuple[int, int, int] | None = None  # half, op, and the log they need
        self._snapshot: Snapshot | None = None
        self._saved_end = -1
        self._recover()

    def _recover(self) -> None:
        store = self._store
        snapshot = decode_snapshot(read_file(self._disk, PATH) or b"", store.begin, store.end)
        cursor = self._offsets.query(names.HALF_TOPIC, CURSOR_GROUP, 0)
        now_ms = store.last_stored_ms
        found = recover_escrow(self.escrow, store, snapshot, cursor, now_ms=now_ms)
        if found.records:
            records = [_rerouted(record, self._reroute, now_ms) for record in found.records]
            placed = store.append(records, now_ms=now_ms)
            for place, record in zip(placed, records, strict=True):
                if type(record) is not NewRun and record.topic == names.OP_TOPIC:
                    self.escrow.cursors.op_written(place.queue_offset, int(record.body))
            store.flush()
        for decision in found.decisions:
            self._carry_out(decision, now_ms)
        if found.halves or found.ops:
            log.info(
                "escrow open=%d halves_read=%d ops_read=%d completed=%d",
                found.open,
                found.halves,
                found.ops,
                len(found.records),
            )

    def _carry_out(self, decision: Decision, now_ms: int) -> None:
        """It was decided, and a crash came before everything that follows was stored."""
        for piece in pieces(self.escrow, decision, now_ms=now_ms):
            records = [
                record for change in piece for record in rerouted(change, self._reroute, now_ms)
            ]
            placed = self._store.append(records, now_ms=now_ms)
            offsets = [place.queue_offset for place in placed]
            settle_all(self.escrow, piece, offsets, now_ms=now_ms)
            self._store.flush()

    # --- RocketMQ's cursors ----------------------------------------------------------------------

    def note_cursors(self) -> None:
        """Into the offsets that RocketMQ would read, once the log they speak of is durable."""
        if self._cursors is not None and self._store.flushed >= self._cursors[2]:
            half, op, _ = self._cursors
            self._cursors = None
            self._offsets.commit(names.HALF_TOPIC, CURSOR_GROUP, 0, half)
            self._offsets.commit(names.OP_TOPIC, CURSOR_GROUP, 0, op)
        if self._cursors is None:
            self.escrow.advance_cursors()
            cursors = self.escrow.cursors
            self._cursors = cursors.half, cursors.op, self._store.end

    # --- our own note ----------------------------------------------------------------------------

    def save(self, *, at_once: bool = False) -> None:
        if self._snapshot is not None and self._store.flushed >= self._snapshot.log_offset:
            replace_file(self._disk, PATH, encode_snapshot(self._snapshot))
            self._saved_end = self._snapshot.log_offset
            self._snapshot = None
        grown = self._store.end - max(self._saved_end, 0)
        if self._snapshot is None and (grown >= NOTED_AFTER_BYTES or (at_once and grown)):
            self.escrow.forget_below(self._store.min_offset(names.HALF_TOPIC, 0))
            self.escrow.writers.forget_below(self._store.begin)
            self._snapshot = self._note()
            if self._store.flushed >= self._snapshot.log_offset:
                self.save()

    def _note(self) -> Snapshot:
        escrow, store = self.escrow, self._store
        escrow.advance_cursors()
        return Snapshot(
            log_offset=store.end,
            halves_read=escrow.settled.next,
            steps_read=store.max_offset(names.JOURNAL_TOPIC, 0),
            decisions_read=min(
                escrow.unfinished, default=int(store.max_offset(names.DECISION_TOPIC, 0))
            ),
            base=escrow.settled.base,
            bits=escrow.settled.dump(),
            half_cursor=escrow.cursors.half,
            op_cursor=escrow.cursors.op,
            checks={
                half.queue_offset: (half.checks, half.due_ms - escrow.interval_ms(half))
                for half in escrow.open
                if half.checks
            },
            aliases=dict(escrow.aliases),
            writers=escrow.writers.dump(),
        )
