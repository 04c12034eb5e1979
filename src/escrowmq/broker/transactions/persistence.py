"""The coordinator's state on disk: rebuilt from the log at the start, saved now and then.

Nothing is saved before the log it depends on is durable. A snapshot that is ahead of the log would
report a transaction as decided whose decision a power cut has undone.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Final

from escrowmq.config import TransactionConfig
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.errors import StoreError
from escrowmq.escrow.coordinator import TransactionCoordinator
from escrowmq.escrow.half_table import HalfTable
from escrowmq.escrow.records import Redirect
from escrowmq.escrow.recovery import RecoveryResult, recover
from escrowmq.escrow.snapshot import (
    CoordinatorSnapshot,
    TimeConversion,
    UnchangedTimes,
    decode_snapshot,
    encode_snapshot,
)
from escrowmq.escrow.writers import DecisionRecord
from escrowmq.message import names
from escrowmq.message.batch import Appendable
from escrowmq.message.names import CURSOR_GROUP
from escrowmq.store.disk import Disk
from escrowmq.store.snapshot_files import TRANSACTIONS_PATH, load_snapshot, save_snapshot
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

SNAPSHOT_INTERVAL_BYTES: Final = 64 << 20  # of log between snapshots; a start reads no more


class CoordinatorStorage:
    def __init__(
        self,
        store: MessageStore,
        disk: Disk,
        offsets: ConsumerOffsets,
        config: TransactionConfig,
        redirect: Redirect | None,
        *,
        age_max_ms: int,
        piece_bytes: int,
        times: TimeConversion | None = None,
        halves: HalfTable | None = None,
    ) -> None:
        """Recover the coordinator, and complete in the log what a crash has cut off.

        `times`: converts recorded times. Without it they are believed.
        """
        self._store = store
        self._disk = disk
        self._offsets = offsets
        self.coordinator = TransactionCoordinator(
            store,
            config,
            redirect,
            age_max_ms=age_max_ms,
            piece_bytes=piece_bytes,
            halves=halves,
        )
        # Half cursor, op cursor, and the log offset that has to be flushed before they are saved.
        self._pending_cursors: tuple[int, int, int] | None = None
        self._pending_snapshot: CoordinatorSnapshot | None = None
        self._saved_log_end = -1
        self._now_ms = 0
        self._recover(UnchangedTimes(store.last_stored_ms) if times is None else times)

    # --- start -----------------------------------------------------------------------------------

    def _recover(self, times: TimeConversion) -> None:
        store, now_ms = self._store, times.now_ms
        self._now_ms = now_ms
        snapshot = self._load_snapshot()
        result = recover(self.coordinator, store, snapshot, times=times)
        self._append_missing(result, now_ms)
        for decision_record in result.unfinished_decisions:
            self._complete_group(decision_record, now_ms)
        if result.half_count or result.op_count:
            log.info(
                "transactions recovered open=%d halves_read=%d ops_read=%d completed=%d",
                len(self.coordinator.halves),
                result.half_count,
                result.op_count,
                len(result.decisions),
            )

    def _load_snapshot(self) -> CoordinatorSnapshot | None:
        """Return the snapshot, or None if everything has to be read from the log."""
        store = self._store
        consequence = "the open transactions are read from the whole log"
        data = load_snapshot(self._disk, TRANSACTIONS_PATH, store.damage, consequence)
        return None if data is None else decode_snapshot(data, store.begin, store.end)

    def _append_missing(self, result: RecoveryResult, now_ms: int) -> None:
        records: list[Appendable] = []
        for decision in result.decisions:
            records += decision.records
        first_move_op = len(records)
        records += result.move_ops
        if not records:
            return
        positions = self._store.append(records, now_ms=now_ms)
        index = 0
        for decision in result.decisions:
            self.coordinator.apply(decision, positions, index, now_ms=now_ms)
            index += len(decision.records)
        for op, position in zip(result.move_ops, positions[first_move_op:], strict=True):
            self.coordinator.cursors.add_op(position.queue_offset, int(op.body))
        self._store.flush()

    def _complete_group(self, decision_record: DecisionRecord, now_ms: int) -> None:
        """Append the finals and ops that follow from a decision record and are missing."""
        decision = self.coordinator.complete_group(decision_record, now_ms=now_ms)
        while (piece := decision.next_piece()).records:
            positions = self._store.append(piece.records, now_ms=now_ms)
            self.coordinator.apply_piece(decision, piece, positions, now_ms=now_ms)
            self._store.flush()

    # --- RocketMQ's cursors ----------------------------------------------------------------------

    def tick(self, now_ms: int) -> None:
        self._now_ms = now_ms
        self._commit_cursors()
        # As soon as it may be written: a start reads everything behind it. If that fails, the next
        # `save` tries again, and reports the error.
        with contextlib.suppress(StoreError):
            self._write_pending_snapshot()

    def _commit_cursors(self) -> None:
        """Store the cursors that RocketMQ would read, once the log behind them is durable."""
        if (
            self._pending_cursors is not None
            and self._store.flushed_offset >= self._pending_cursors[2]
        ):
            half_offset, op_offset, _ = self._pending_cursors
            self._pending_cursors = None
            self._offsets.set_offsets(names.HALF_TOPIC, CURSOR_GROUP, {0: half_offset})
            self._offsets.set_offsets(names.OP_TOPIC, CURSOR_GROUP, {0: op_offset})
        if self._pending_cursors is None:
            self.coordinator.advance_cursors()
            cursors = self.coordinator.cursors
            self._pending_cursors = cursors.half_offset, cursors.op_offset, self._store.end

    # --- snapshot --------------------------------------------------------------------------------

    def save(self, *, force: bool = False) -> None:
        """Take a snapshot if the log has grown enough, and write it once the log is flushed.

        `force`: take one if the log has grown at all.
        """
        self._write_pending_snapshot()
        growth = self._store.end - max(self._saved_log_end, 0)
        if self._pending_snapshot is None and (
            growth >= SNAPSHOT_INTERVAL_BYTES or (force and growth)
        ):
            self.coordinator.purge_below(self._store.min_offset(names.HALF_TOPIC, 0))
            self.coordinator.writers.purge_below(self._store.begin)
            self._pending_snapshot = self._make_snapshot()
            self._write_pending_snapshot()

    def _write_pending_snapshot(self) -> None:
        """Write the snapshot that was taken, if everything that it depends on is flushed."""
        snapshot = self._pending_snapshot
        if snapshot is not None and self._store.flushed_offset >= snapshot.log_offset:
            save_snapshot(self._disk, TRANSACTIONS_PATH, encode_snapshot(snapshot))
            self._saved_log_end = snapshot.log_offset
            self._pending_snapshot = None

    def _make_snapshot(self) -> CoordinatorSnapshot:
        coordinator, store = self.coordinator, self._store
        coordinator.advance_cursors()
        checks, remarks = coordinator.halves.check_histories(coordinator.config.next_check_after_ms)
        return CoordinatorSnapshot(
            log_offset=store.end,
            halves_read=coordinator.states.next_offset,
            steps_read=store.max_offset(names.JOURNAL_TOPIC, 0),
            # An unfinished decision has to be read again, to complete it after a crash.
            decisions_read=min(
                coordinator.unfinished_decisions,
                default=int(store.max_offset(names.DECISION_TOPIC, 0)),
            ),
            base=coordinator.states.base_offset,
            bits=coordinator.states.dump(),
            half_cursor=coordinator.cursors.half_offset,
            op_cursor=coordinator.cursors.op_offset,
            checks=checks,
            remarks=remarks,
            aliases=dict(coordinator.aliases),
            writers=coordinator.writers.dump(),
            saved_ms=self._now_ms,
        )
