"""The transaction protocol: park a half message, decide it once, move it when its segment expires.

              park                decide: commit, roll back
      (send) ------> OPEN -------------------------------> COMMITTED, ROLLED_BACK
                      |  ^                                    ^
    checked too often |  | resume (move)                      | decide: a late producer
    or too old        v  |                                    | or an operator
                     STRANDED --------------------------------+

Every change is a record in the log before it is a change in memory. `decide`, `strand` and `move`
return the records to append and mark the half as being decided. When the records are stored the
caller calls `apply` (or `moved`), otherwise `cancel`, which leaves the half as it was.

The first decision wins. While a half is being decided, another decision gets `InProgress` and is
tried again after the turn. Afterwards the same verdict gets `AlreadyDecided` and the opposite
verdict raises TransactionConflict.

There are three ways in, and all of them end in `_decision()`:

    decide         one half: END_TRANSACTION, operators, lost attempts, unreadable halves
    decide_many    all halves or none: END_TRANSACTIONS
    decide_batch   the attempts of a writer: DECIDE_BATCH

`decide_many` and `decide_batch` store a decision record first. It decides all of its halves, even
if the finals and ops, which follow in pieces of bounded size, are cut off by a crash: recovery
appends the missing ones.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from escrowmq.config import TransactionConfig
from escrowmq.errors import (
    CorruptRecord,
    RecordNotFound,
    TooManyOpenTransactions,
    TransactionConflict,
    TransactionNotFound,
)
from escrowmq.escrow.checks import CheckSchedule, TransactionCounters
from escrowmq.escrow.decisions import (
    AlreadyDecided,
    Decision,
    DecisionPiece,
    GroupDecision,
    HalfLog,
    InProgress,
    NativeChanges,
    StoredPosition,
    no_half,
)
from escrowmq.escrow.half_table import (
    FinalCache,
    Half,
    HalfStates,
    HalfTable,
    PythonHalfTable,
    RocketMQCursors,
)
from escrowmq.escrow.records import (
    NO_HOST,
    CheckState,
    DecidedBy,
    HalfProperties,
    Redirect,
    make_copy,
    make_finals,
    make_op,
    make_plain_final,
    make_stranded,
    parse_half,
)
from escrowmq.escrow.writers import DecisionRecord, Winner, WriterTable, make_decision_record
from escrowmq.message import names
from escrowmq.message.batch import Appendable
from escrowmq.message.record import NewRecord, StoredRecord
from escrowmq.message.transaction import (
    COMMITTED,
    ROLLED_BACK,
    STATE_BY_VERDICT,
    STRANDED,
    TransactionState,
    Verdict,
)
from escrowmq.peer import Peer
from escrowmq.sliced_work import SlicedResult, run_to_end

log = logging.getLogger(__name__)

# A decision about many halves is stored in pieces, so that no turn appends gigabytes at once.
DECISION_PIECE_BYTES: Final = 1 << 20
DECISION_HALVES_MAX: Final = 100_000
PIECE_HALVES_MAX: Final = 256  # in one append, however small they are
SHARED_REMARKS_MAX: Final = 1_000


class TransactionCoordinator:
    def __init__(
        self,
        half_log: HalfLog,
        config: TransactionConfig,
        redirect: Redirect | None = None,
        *,
        age_max_ms: int,
        piece_bytes: int = DECISION_PIECE_BYTES,
        halves: HalfTable | None = None,
    ) -> None:
        """`redirect`: turns the final of a delayed message into the record to store first.

        `halves`: an empty table; a `PythonHalfTable` if there is none.
        """
        self.config = config
        self.age_max_ms = age_max_ms  # older halves are stranded
        self.piece_bytes = piece_bytes
        self.halves: HalfTable = PythonHalfTable() if halves is None else halves
        self.states = HalfStates()
        self.cursors = RocketMQCursors()
        self.schedule = CheckSchedule()
        self.counters = TransactionCounters()
        self.writers = WriterTable()
        self.final_cache = FinalCache()
        # Queue offsets that a moved half had before, each with the one it has now.
        self.aliases: dict[int, int] = {}
        # Queue offsets of decision records whose finals and ops are not all stored yet.
        self.unfinished_decisions: set[int] = set()
        self._half_log = half_log
        self._redirect = redirect
        # Queues in which messages of an unfinished group decision are hidden. Another group
        # decision must not use them: it would become visible in part.
        self._reserved_queues: set[tuple[str, int]] = set()
        self._shared_remarks: dict[str, str] = {}  # one object for equal remarks

    # --- park ------------------------------------------------------------------------------------

    def new_half(
        self,
        topic: str,
        queue_id: int,
        group: str,
        key: bytes,
        parked_ms: int,
        producer: Peer | None,
        immunity_ms: int | None = None,
    ) -> Half:
        """Return a half without offsets and size; `parked()` sets them."""
        due_ms = parked_ms + self.config.immunity_of_ms(topic, group, immunity_ms)
        return self.halves.new_half(topic, queue_id, group, key, parked_ms, due_ms, producer)

    def park(self, half: Half, size: int) -> bool:
        """Reserve the key of a half that is about to be appended.

        Return False if it is a repeated send: the half is stored, or will be in this turn. Call
        `parked()` or `park_failed()` after the append. Raises TooManyOpenTransactions.
        """
        if not self.halves.reserve(half):
            self.counters.duplicate_sends += 1
            return False
        try:
            self._check_limits(half.group, size)
        except TooManyOpenTransactions:
            self.halves.release(half)
            raise
        return True

    def parked(
        self,
        half: Half,
        position: StoredPosition,
        record: NewRecord,
        final_properties: bytes | None = None,
    ) -> None:
        """Track a half whose record is now stored in the log.

        With `final_properties` its final is cached, so that a commit that comes soon need not
        read the half again. The body of the record must not be a view then.
        """
        half.queue_offset, half.log_offset = position.queue_offset, position.log_offset
        half.size = position.size
        self.counters.parked += 1
        self._track(half)
        if final_properties is not None:
            final = make_plain_final(
                record, final_properties, half.topic, half.queue_id, half.log_offset
            )
            self.final_cache.put(half.queue_offset, final)
            half.final_properties_bytes = len(final_properties)

    def park_failed(self, half: Half) -> None:
        """Release the key of a half that could not be stored."""
        self.halves.release(half)

    def find_duplicate(self, group: str, topic: str, key: bytes) -> tuple[int, int] | None:
        """Return queue and log offset of the half that this group parked with this key.

        A repeated send has the topic of the first one. A send for another topic is another
        transaction: whoever may write one topic must not get hold of a half of another.
        """
        return self.halves.find_duplicate(group, topic, key)

    def restore_half(
        self,
        properties: HalfProperties,
        *,
        queue_offset: int,
        log_offset: int,
        size: int,
        parked_ms: int,
    ) -> Half:
        """Track a half that recovery read from the log."""
        half = self.new_half(
            properties.topic,
            properties.queue_id,
            properties.group,
            properties.key,
            parked_ms,
            None,
            properties.immunity_ms,
        )
        half.attempt = properties.attempt
        half.queue_offset, half.log_offset, half.size = queue_offset, log_offset, size
        self._track(half)
        return half

    def _check_limits(self, group: str, size: int) -> None:
        config, total, group_total = self.config, self.halves.total, self.halves.group_totals(group)
        if (
            total.count < config.open_max
            and group_total.count < config.group_open_max
            and total.size + size <= config.open_bytes_max
            and group_total.size + size <= config.group_open_bytes_max
        ):
            return
        of_group = f"of producer group {group}"
        limits = (
            ("transactions", total.count + 1, config.open_max, "escrowOpenMax"),
            ("bytes", total.size + size, config.open_bytes_max, "escrowOpenBytesMax"),
            (
                f"transactions {of_group}",
                group_total.count + 1,
                config.group_open_max,
                "escrowOpenPerGroupMax",
            ),
            (
                f"bytes {of_group}",
                group_total.size + size,
                config.group_open_bytes_max,
                "escrowOpenBytesPerGroupMax",
            ),
        )
        for subject, used, limit, setting in limits:
            if used > limit:
                raise TooManyOpenTransactions(
                    f"too many open {subject}: the limit is {limit}; commit or roll back some, "
                    f"or raise {setting}"
                )

    def _track(self, half: Half) -> None:
        self.states.extend_to(half.queue_offset)
        self.halves.add(half)
        self.schedule.add(half.queue_offset, half.due_ms)
        if half.attempt is not None:
            self._add_to_attempt(half)

    # --- decide ----------------------------------------------------------------------------------

    def decide(
        self,
        queue_offset: int,
        log_offset: int,
        verdict: Verdict,
        *,
        group: str | None,
        by: DecidedBy,
        by_name: str = "",
        reason: str = "",
        born_host: bytes = NO_HOST,
        now_ms: int,
    ) -> Decision | AlreadyDecided | InProgress:
        """Decide the half at this position. The verdict is COMMIT or ROLLBACK.

        `group` is the producer group that asks for it; None means an operator or the broker,
        which may decide any half. `by`, `by_name`, `reason` and `born_host` are stored in the op.

        Raises TransactionNotFound if there is no such half in this group, TransactionConflict if
        it was decided with the opposite verdict, and CorruptRecord or RecordNotFound if it cannot
        be read; then nothing has changed.
        """
        state = STATE_BY_VERDICT[verdict]
        half = self.halves.find(queue_offset)
        # The fast path of find_open(): almost every decision names an open half correctly.
        if half is None or half.log_offset != log_offset or half.group != group:
            half = self.find_open(queue_offset, log_offset, group)
            if half is None:
                return self._already_decided(queue_offset, log_offset, state, group)
        if half.is_being_decided:
            return InProgress()
        decided_by = f"{by} {by_name}" if by_name else by
        return self._decision(half, state, decided_by, reason, now_ms, born_host)

    def decide_many(
        self,
        positions: Sequence[tuple[int, int]],
        verdict: Verdict,
        *,
        group: str | None,
        by: DecidedBy,
        by_name: str = "",
        reason: str = "",
        now_ms: int,
    ) -> SlicedResult[GroupDecision | AlreadyDecided | InProgress]:
        """Decide all halves at these positions (queue offset, log offset), or none of them.

        Raises as `decide()` does, but TransactionNotFound for a half that cannot be read.
        It is done in slices: there may be very many halves.
        """
        state = STATE_BY_VERDICT[verdict]
        queue_offsets: dict[int, None] = {}  # each half once, even if its aliases were named too
        for queue_offset, log_offset in dict.fromkeys(positions):
            half = self.find_open(queue_offset, log_offset, group)
            if half is None:
                self._already_decided(queue_offset, log_offset, state, group)
            else:
                queue_offsets[half.queue_offset] = None
            yield
        if not queue_offsets:
            return AlreadyDecided(state)
        decided_by = f"{by} {by_name}" if by_name else by.value
        record = DecisionRecord(commits=list(queue_offsets), by=decided_by, reason=reason)
        if state is ROLLED_BACK:
            record = DecisionRecord(rolls_back=list(queue_offsets), by=decided_by, reason=reason)
        return (yield from self._group_decision(record, now_ms))

    def decide_batch(
        self,
        writer: str,
        batch: int,
        fence: int,
        winners: list[Winner],
        fingerprint: str,
        *,
        is_last: bool = False,
        now_ms: int,
    ) -> SlicedResult[GroupDecision | AlreadyDecided | InProgress]:
        """Commit the attempts of a writer's batch that won and roll back all others.

        Raises WriterFenced, TransactionConflict if halves of a winner are missing, and
        TransactionNotFound if one of them cannot be read.
        It is done in slices.
        """
        decided_by = f"{DecidedBy.WRITER} {writer}"
        previous = self.writers.find(writer)
        record = self.writers.decide_batch(
            writer, batch, fence, winners, fingerprint, decided_by, is_last=is_last
        )
        if record is None:
            return AlreadyDecided(COMMITTED)
        is_current = lambda: self.writers.find(writer) is previous  # noqa: E731
        return (yield from self._group_decision(record, now_ms, is_current))

    def register_writer(
        self, name: str, run: str, fence: int | None, *, now_ms: int
    ) -> GroupDecision | AlreadyDecided | InProgress:
        """Raise the fence of a writer. AlreadyDecided: this run has its fence. Raises WriterFenced.

        The new fence is a decision record without halves: both change the state of a writer, and
        have to reach the log in the order in which they were made.
        """
        record = self.writers.make_registration(name, run, fence)
        if record is None:
            return AlreadyDecided(COMMITTED)
        return run_to_end(self._group_decision(record, now_ms))  # it has no halves

    def find_open(
        self, queue_offset: int, log_offset: int, group: str | None = None
    ) -> Half | None:
        """Return the undecided half that has or had this position; None if it is decided.

        Raises TransactionNotFound if another half is there, or one of another group than `group`.
        The error tells nothing about the half: the client that asks may not be its producer.
        """
        half = self.halves.find(self.aliases.get(queue_offset, queue_offset))
        if half is None:
            return None
        if half.queue_offset == queue_offset:
            stored_offset: int | None = half.log_offset
        else:
            stored_offset = self._half_log.log_offset_of(names.HALF_TOPIC, 0, queue_offset)
        # None: the log has lost that position. The alias still proves that it belongs to the half.
        if (stored_offset is not None and stored_offset != log_offset) or (
            group is not None and half.group != group
        ):
            raise no_half(queue_offset, log_offset, group)
        return half

    def decided_state(
        self, queue_offset: int, log_offset: int, group: str | None = None
    ) -> TransactionState:
        """Return how the half at this position was decided. Raises TransactionNotFound."""
        recorded = self.states.get(queue_offset)
        stored_offset = self._half_log.log_offset_of(names.HALF_TOPIC, 0, queue_offset)
        if (
            recorded is None
            or stored_offset != log_offset
            or (group is not None and self._stored_group(stored_offset) not in (None, group))
        ):
            raise no_half(queue_offset, log_offset, group)
        if not recorded.is_decided:
            raise TransactionNotFound(
                f"the half message at queue offset {queue_offset} cannot be read"
            )
        return recorded

    def _stored_group(self, log_offset: int) -> str | None:
        """Return the producer group of a stored half; None if it cannot be read."""
        try:
            properties = parse_half(self._half_log.record_at(log_offset))
        except (CorruptRecord, RecordNotFound):
            return None
        return None if properties is None else properties.group

    def strand(self, half: Half, reason: str, record: StoredRecord, *, now_ms: int) -> Decision:
        """Set a half aside for an operator: no more checks are sent for it."""
        half.reason = reason
        stranded = make_stranded(record, reason)
        return self._decision(half, STRANDED, DecidedBy.BROKER, reason, now_ms, finals=[stranded])

    def complete(
        self,
        half: Half,
        state: TransactionState,
        reason: str,
        finals: Sequence[Appendable] = (),
        *,
        now_ms: int,
    ) -> Decision:
        """Finish a decision that the log proves and that lacks its op. For recovery.

        `finals`: those that are missing too.
        """
        if state is STRANDED:
            half.reason = reason
        return self._decision(half, state, DecidedBy.BROKER, reason, now_ms, finals=finals)

    def make_finals(self, half: Half, record: StoredRecord, now_ms: int) -> list[Appendable]:
        return make_finals(record, half.topic, half.queue_id, self._redirect, now_ms)

    def complete_group(self, record: DecisionRecord, *, now_ms: int) -> GroupDecision:
        """Return what is missing of a decision whose record is in the log. For recovery."""
        pieces = self._decision_pieces(record, now_ms)
        return GroupDecision(record, pieces)

    def apply(
        self,
        decision: Decision,
        results: Sequence[StoredPosition],
        first_index: int = 0,
        *,
        now_ms: int,
    ) -> None:
        """Record a decision whose records are stored. Those begin at `results[first_index]`."""
        half, state = decision.half, decision.state
        half.is_being_decided = False
        self.states.put(half.queue_offset, state)
        op_offset = results[first_index + len(decision.records) - 1].queue_offset
        self.cursors.add_op(op_offset, half.queue_offset)
        if state is STRANDED:
            self.halves.strand(half)
            self.counters.stranded += 1
        else:
            self._close(half, state)
            self.counters.finish_seconds.observe(max(0, now_ms - half.parked_ms) / 1000)
            by_topic = self.counters.committed
            if state is ROLLED_BACK:
                by_topic = self.counters.rolled_back
            by_topic[half.topic] = by_topic.get(half.topic, 0) + 1

    def apply_native(self, changes: NativeChanges) -> None:
        """Record what the native path has parked and decided. Its table knows it already."""
        self.counters.parked += changes.half_count
        if changes.half_count:
            self.states.extend_to(changes.last_half_offset)
        for due_ms, queue_offsets in changes.due:
            self.schedule.add_many(array("q", queue_offsets), due_ms)
        self.states.put_many(array("q", changes.committed), COMMITTED)
        self.states.put_many(array("q", changes.rolled_back), ROLLED_BACK)
        self.cursors.add_ops(changes.first_op_offset, array("q", changes.ended))
        for topic, is_commit, waited_ms, count in changes.outcomes:
            self.counters.finish_seconds.observe(waited_ms / 1000, count)
            by_topic = self.counters.committed if is_commit else self.counters.rolled_back
            by_topic[topic] = by_topic.get(topic, 0) + count

    def cancel(self, decision: Decision) -> None:
        """Undo `decide()` after a failed append; the half is open again."""
        decision.half.is_being_decided = False
        if decision.state is STRANDED:
            decision.half.reason = ""

    def apply_piece(
        self,
        group_decision: GroupDecision,
        piece: DecisionPiece,
        results: Sequence[StoredPosition],
        *,
        now_ms: int,
    ) -> None:
        """Record a piece of a group decision whose records are stored at `results`."""
        index = 0
        if piece.has_decision_record:
            self.writers.apply(group_decision.record, results[0].log_offset)
            group_decision.queue_offset = results[0].queue_offset
            index = 1
        for decision in piece.decisions:
            self.apply(decision, results, index, now_ms=now_ms)
            index += len(decision.records)
        if piece.is_last:
            self.unfinished_decisions.discard(group_decision.queue_offset)
            self._reserved_queues -= group_decision.reserved_queues
        else:
            self.unfinished_decisions.add(group_decision.queue_offset)

    def cancel_piece(self, group_decision: GroupDecision, piece: DecisionPiece) -> None:
        """Undo a piece that was not stored.

        Without its decision record nothing is decided, and all halves are open again. With it
        everything is decided, and the piece has to be stored later.
        """
        if not piece.has_decision_record:
            group_decision.put_back(piece)
            return
        for half in self._undecided_halves(group_decision.record):
            half.is_being_decided = False
        self.writers.unstage(group_decision.record)
        self._reserved_queues -= group_decision.reserved_queues

    def _decision(
        self,
        half: Half,
        state: TransactionState,
        decided_by: str,
        reason: str,
        now_ms: int,
        born_host: bytes = NO_HOST,
        finals: Sequence[Appendable] | None = None,
    ) -> Decision:
        """Build the records of every decision. `finals`: None builds them from the half."""
        op = make_op(
            half.queue_offset,
            state,
            decided_by,
            reason,
            previous_offsets=half.previous_offsets if state is not STRANDED else (),
            born_host=born_host,
            now_ms=now_ms,
        )
        records: list[Appendable]
        cached_final = self.final_cache.take(half.queue_offset)
        if finals is not None:
            records = [*finals, op]
        elif state is not COMMITTED:
            records = [op]
        elif cached_final is not None:
            records = [cached_final, op]
        else:
            record = self._half_log.record_at(half.log_offset)
            records = [*self.make_finals(half, record, now_ms), op]
        half.is_being_decided = True
        return Decision(half, state, records)

    def _already_decided(
        self, queue_offset: int, log_offset: int, state: TransactionState, group: str | None
    ) -> AlreadyDecided:
        """Compare the recorded outcome of a half that is not open with the expected one."""
        recorded = self.decided_state(queue_offset, log_offset, group)
        if recorded is not state:
            self.counters.conflicts += 1
            raise TransactionConflict(
                f"the transaction at queue offset {queue_offset} is {recorded.text} and cannot "
                f"become {state.text}",
                recorded.text,
            )
        self.counters.repeated_ends += 1
        return AlreadyDecided(recorded)

    def _group_decision(
        self, record: DecisionRecord, now_ms: int, is_current: Callable[[], bool] = lambda: True
    ) -> SlicedResult[GroupDecision | InProgress]:
        """Return the decision, or InProgress if another request decides one of the halves.

        Each half is reserved in its slice, so that nobody else decides it; all are released if the
        work is dropped or fails. `is_current` says whether the record is still right in the end.
        """
        reserved: list[Half] = []
        queues: set[tuple[str, int]] = set()
        is_decided = False
        try:
            for offsets, is_commit in ((record.commits, True), (record.rolls_back, False)):
                for queue_offset in offsets:
                    half = self.halves.find(queue_offset)
                    if half is None or half.is_being_decided:
                        return InProgress()
                    # Once the decision record is stored it is too late to refuse: read it before.
                    if is_commit and self.read_half(half) is None:
                        problem = f"queue offset {queue_offset} cannot be read: {half.reason}"
                        raise TransactionNotFound(f"the half message at {problem}")
                    if is_commit:
                        queues.add((half.topic, half.queue_id))
                    half.is_being_decided = True
                    reserved.append(half)
                    yield
            if not self._reserved_queues.isdisjoint(queues) or not is_current():
                return InProgress()
            self.writers.stage(record)
            decision = GroupDecision(
                record,
                self._decision_pieces(record, now_ms),
                make_decision_record(record, now_ms=now_ms),
            )
            is_decided = True
        finally:
            if not is_decided:
                for half in reserved:
                    half.is_being_decided = False
        first_piece = decision.next_piece()
        if not first_piece.is_last:
            decision.reserved_queues = frozenset(queues)
            self._reserved_queues |= queues
        decision.put_back(first_piece)
        return decision

    def _decision_pieces(self, record: DecisionRecord, now_ms: int) -> Iterator[list[Decision]]:
        """Yield the decisions that are not stored yet, about `piece_bytes` at a time."""
        piece: list[Decision] = []
        size = 0
        for state, offsets in ((COMMITTED, record.commits), (ROLLED_BACK, record.rolls_back)):
            for queue_offset in offsets:
                half = self.halves.find(self.aliases.get(queue_offset, queue_offset))
                if half is None:
                    continue
                try:
                    piece.append(self._decision(half, state, record.by, record.reason, now_ms))
                except (CorruptRecord, RecordNotFound):
                    self.read_half(half)  # reports it; the other halves are delivered
                    # Nothing more is stored for it now. It stays open, as every unreadable half
                    # does, until an operator or the end of its segment decides it.
                    half.is_being_decided = False
                    continue
                size += half.size
                if size >= self.piece_bytes or len(piece) >= PIECE_HALVES_MAX:
                    yield piece
                    piece, size = [], 0
        if piece:
            yield piece

    def _undecided_halves(self, record: DecisionRecord) -> Iterator[Half]:
        for queue_offset in (*record.commits, *record.rolls_back):
            half = self.halves.find(queue_offset)
            if half is not None:
                yield half

    def _close(self, half: Half, state: TransactionState) -> None:
        """Forget a decided half; its state and, for a while, its key remain."""
        self.halves.close(half)
        for queue_offset in half.previous_offsets:
            self.states.put(queue_offset, state)
            self.aliases.pop(queue_offset, None)
        if half.attempt is not None:
            self.remove_from_attempt(half)

    def _add_to_attempt(self, half: Half) -> None:
        if half.attempt is not None:
            writer, batch, attempt, _ = half.attempt
            self.writers.attempts.add(writer, batch, attempt, half.queue_offset)

    def remove_from_attempt(self, half: Half) -> None:
        if half.attempt is not None:
            writer, batch, attempt, _ = half.attempt
            self.writers.attempts.remove(writer, batch, attempt, half.queue_offset)

    # --- check -----------------------------------------------------------------------------------

    def read_half(self, half: Half) -> StoredRecord | None:
        """Return the record of a half. None if the log cannot read it; this is logged and counted.

        An unreadable half is not checked any more, so that it does not block others.
        """
        try:
            return self._half_log.record_at(half.log_offset)
        except (CorruptRecord, RecordNotFound) as error:
            self.counters.unreadable_halves += not half.is_unreadable
            half.reason = f"unreadable: {error}"
            log.error("half message unreadable queue_offset=%d: %s", half.queue_offset, error)
            return None

    def set_aside(self, half: Half, reason: str) -> None:
        """Send no more checks for a half because of an error of the broker's own.

        Nothing is stored: an operator sees the reason and can resume or decide it, and a restart
        tries it again.
        """
        self.counters.set_aside_halves += not half.reason
        half.reason = f"set aside: {reason}"

    def check_sent(self, half: Half, now_ms: int) -> None:
        """Count a check that was handed to a socket. Unsent checks do not count."""
        half.checks += 1
        self.reschedule(half, now_ms + self.check_interval_ms(half))

    def unknown_received(self, half: Half, remark: str, *, is_answer: bool) -> None:
        """Remember that a producer said UNKNOWN: as the answer to a check, or after its send."""
        if is_answer:
            half.unknown_answers = min(half.unknown_answers + 1, half.checks)
        if remark:
            # Producers that fail for one reason send the same remark for thousands of halves.
            if len(self._shared_remarks) >= SHARED_REMARKS_MAX:
                self._shared_remarks.clear()
            half.last_remark = self._shared_remarks.setdefault(remark, remark)

    def reschedule(self, half: Half, due_ms: int) -> None:
        half.due_ms = due_ms
        self.schedule.add(half.queue_offset, due_ms)

    def check_interval_ms(self, half: Half) -> int:
        return self.config.next_check_after_ms(half.topic, half.group, half.checks)

    # --- move ------------------------------------------------------------------------------------

    def move(
        self, half: Half, record: StoredRecord, *, is_resume: bool, now_ms: int
    ) -> tuple[CheckState, list[NewRecord]]:
        """Return the records that append a half again, and the check state it will have then.

        A half moves when its segment expires, or when an operator resumes a stranded one, whose
        checks then start again. Call `moved()` or `move_failed()` after the append.
        """
        half.is_being_decided = True
        check_state = CheckState(
            half.parked_ms, half.due_ms, half.checks, half.is_stranded, half.unknown_answers
        )
        if is_resume and half.is_stranded:
            check_state = CheckState(now_ms, now_ms, 0, False)
        queue_offsets = *half.previous_offsets, half.queue_offset
        copy = make_copy(record, *queue_offsets, check_state=check_state)
        return check_state, [copy, self.make_move_op(half, now_ms=now_ms)]

    def make_move_op(self, half: Half, *, now_ms: int) -> NewRecord:
        """Return the op which says that a copy has replaced the half at its present position."""
        return make_op(
            half.queue_offset,
            TransactionState.OPEN,
            DecidedBy.BROKER,
            "appended again",
            now_ms=now_ms,
        )

    def moved(
        self, half: Half, check_state: CheckState, copy: StoredPosition, op: StoredPosition
    ) -> None:
        """Record that a half has moved. Its previous positions still lead to it."""
        old_offset, queue_offset = half.queue_offset, copy.queue_offset
        self.halves.remove(half)
        self.remove_from_attempt(half)
        half.previous_offsets += (old_offset,)
        for previous_offset in half.previous_offsets:
            self.aliases[previous_offset] = queue_offset
        self.states.extend_to(queue_offset)
        # Neither open nor decided here: the copy is the one to look at.
        self.states.put(old_offset, STRANDED)
        self.cursors.add_op(op.queue_offset, old_offset)
        half.queue_offset, half.log_offset = queue_offset, copy.log_offset
        half.is_being_decided = False
        half.parked_ms, half.due_ms, half.checks, half.is_stranded, half.unknown_answers = (
            check_state
        )
        if not half.checks:
            half.last_remark = ""  # resumed: the checks start again
        if half.is_stranded:
            self.states.put(queue_offset, STRANDED)
        else:
            half.reason = ""
        self.halves.add(half)
        self.schedule.add(queue_offset, half.due_ms)
        self._add_to_attempt(half)

    def move_failed(self, half: Half) -> None:
        half.is_being_decided = False

    def undecided_below(self, log_offset: int, count_max: int) -> list[Half]:
        """Return up to `count_max` halves that would be lost with the log below this offset."""
        queue_offsets = self.halves.stored_before(log_offset, count_max)
        return [half for half in map(self.halves.find, queue_offsets) if half is not None]

    def purge_below(self, min_queue_offset: int) -> None:
        """Drop the states of halves below the first one that the log still has."""
        self.states.purge_below(min_queue_offset)

    def advance_cursors(self) -> None:
        self.cursors.advance(self.states.first_open(self.cursors.half_offset))
