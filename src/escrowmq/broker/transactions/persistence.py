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
from escrowmq.escrow.checks import CoordinatorRules
from escrowmq.escrow.coordinator import (
    Decision,
    TransactionCoordinator,
    apply_piece,
    decision_pieces,
)
from escrowmq.escrow.recovery import (
    SNAPSHOT_PATH,
    CoordinatorSnapshot,
    decode_snapshot,
    encode_snapshot,
    recover,
)
from escrowmq.escrow.writers import DecisionRecord
from escrowmq.message import names
from escrowmq.message.batch import Appendable, RecordRun
from escrowmq.message.names import CURSOR_GROUP
from escrowmq.message.record import NewRecord
from escrowmq.message.transaction import TransactionState
from escrowmq.store.disk import Disk, read_file, replace_file
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

SNAPSHOT_INTERVAL_BYTES: Final = (
    64 << 20
)  # of log since the last note; a start reads no more than that


Redirect = Callable[[NewRecord, int], NewRecord]


def redirect_finals(decision: Decision, redirect: Redirect, now_ms: int) -> list[Appendable]:
    """A delay counts from the commit: the final waits where delayed messages wait."""
    if decision.state is not TransactionState.COMMITTED:
        return decision.records
    return [_redirect_final(record, redirect, now_ms) for record in decision.records]


def _redirect_final(record: Appendable, redirect: Redirect, now_ms: int) -> Appendable:
    if (
        type(record) is RecordRun
        or not _is_delayed(record.properties)
        or record.topic == names.OP_TOPIC
    ):
        return record
    try:
        return redirect(record, now_ms)
    except RequestRefused as error:
        # Parked under other settings, or by RocketMQ: better early than never.
        log.warning("delivered without its delay topic=%s: %s", record.topic, error)
        return record


def _is_delayed(properties: bytes) -> bool:
    # `find`, not `in`: every commit comes by here, and it is twice as fast for bytes.
    return properties.find(b"DELAY\x01") >= 0 or properties.find(b"TIMER_D") >= 0


class CoordinatorStorage:
    def __init__(
        self,
        store: MessageStore,
        disk: Disk,
        offsets: ConsumerOffsets,
        rules: CoordinatorRules,
        redirect: Redirect,
    ) -> None:
        self._store = store
        self._redirect = redirect
        self._disk = disk
        self._offsets = offsets
        self.coordinator = TransactionCoordinator(store, rules)
        self._pending_cursors: tuple[int, int, int] | None = None  # half, op, and the log they need
        self._pending_snapshot: CoordinatorSnapshot | None = None
        self._saved_log_end = -1
        self._recover()

    def _recover(self) -> None:
        store = self._store
        snapshot = decode_snapshot(
            read_file(self._disk, SNAPSHOT_PATH) or b"", store.begin, store.end
        )
        cursor = self._offsets.query(names.HALF_TOPIC, CURSOR_GROUP, 0)
        now_ms = store.last_stored_ms
        found = recover(self.coordinator, store, snapshot, cursor, now_ms=now_ms)
        if found.records:
            records = [_redirect_final(record, self._redirect, now_ms) for record in found.records]
            placed = store.append(records, now_ms=now_ms)
            for place, record in zip(placed, records, strict=True):
                if type(record) is not RecordRun and record.topic == names.OP_TOPIC:
                    self.coordinator.cursors.add_op(place.queue_offset, int(record.body))
            store.flush()
        for decision in found.unfinished_decisions:
            self._complete_decision(decision, now_ms)
        if found.half_count or found.op_count:
            log.info(
                "escrow open=%d halves_read=%d ops_read=%d completed=%d",
                found.open_count,
                found.half_count,
                found.op_count,
                len(found.records),
            )

    def _complete_decision(self, decision_record: DecisionRecord, now_ms: int) -> None:
        """It was decided, and a crash came before everything that follows was stored."""
        for piece in decision_pieces(self.coordinator, decision_record, now_ms=now_ms):
            records = [
                record
                for change in piece
                for record in redirect_finals(change, self._redirect, now_ms)
            ]
            placed = self._store.append(records, now_ms=now_ms)
            offsets = [place.queue_offset for place in placed]
            apply_piece(self.coordinator, piece, offsets, now_ms=now_ms)
            self._store.flush()

    # --- RocketMQ's cursors ----------------------------------------------------------------------

    def commit_cursors(self) -> None:
        """Into the offsets that RocketMQ would read, once the log they speak of is durable."""
        if (
            self._pending_cursors is not None
            and self._store.flushed_offset >= self._pending_cursors[2]
        ):
            half, op, _ = self._pending_cursors
            self._pending_cursors = None
            self._offsets.commit(names.HALF_TOPIC, CURSOR_GROUP, 0, half)
            self._offsets.commit(names.OP_TOPIC, CURSOR_GROUP, 0, op)
        if self._pending_cursors is None:
            self.coordinator.advance_cursors()
            cursors = self.coordinator.cursors
            self._pending_cursors = cursors.half_offset, cursors.op_offset, self._store.end

    # --- our own note ----------------------------------------------------------------------------

    def save(self, *, force: bool = False) -> None:
        if (
            self._pending_snapshot is not None
            and self._store.flushed_offset >= self._pending_snapshot.log_offset
        ):
            replace_file(self._disk, SNAPSHOT_PATH, encode_snapshot(self._pending_snapshot))
            self._saved_log_end = self._pending_snapshot.log_offset
            self._pending_snapshot = None
        grown = self._store.end - max(self._saved_log_end, 0)
        if self._pending_snapshot is None and (
            grown >= SNAPSHOT_INTERVAL_BYTES or (force and grown)
        ):
            self.coordinator.purge_below(self._store.min_offset(names.HALF_TOPIC, 0))
            self.coordinator.writers.purge_below(self._store.begin)
            self._pending_snapshot = self._make_snapshot()
            if self._store.flushed_offset >= self._pending_snapshot.log_offset:
                self.save()

    def _make_snapshot(self) -> CoordinatorSnapshot:
        escrow, store = self.coordinator, self._store
        escrow.advance_cursors()
        return CoordinatorSnapshot(
            log_offset=store.end,
            halves_read=escrow.states.next_offset,
            steps_read=store.max_offset(names.JOURNAL_TOPIC, 0),
            decisions_read=min(
                escrow.unfinished_decisions, default=int(store.max_offset(names.DECISION_TOPIC, 0))
            ),
            base=escrow.states.base_offset,
            bits=escrow.states.dump(),
            half_cursor=escrow.cursors.half_offset,
            op_cursor=escrow.cursors.op_offset,
            checks={
                half.queue_offset: (half.checks, half.due_ms - escrow.check_interval_ms(half))
                for half in escrow.halves
                if half.checks
            },
            aliases=dict(escrow.aliases),
            writers=escrow.writers.dump(),
        )
