"""Writers: named producers that decide their halves batch by batch.

A writer sends the halves of a batch in attempts. Several attempts may exist, because a task was
repeated or a driver was replaced. The decision on a batch names the attempts that won, and all
other halves of the batch, or of earlier ones, are rolled back. The first decision on a batch stands
and is returned to every later request.

A fence is the generation of a writer. Registering raises it, and a process with an older fence can
decide nothing any more. A run is one process of a writer. Registering the same run again returns
the same fence; a run that was replaced can never register again.

Only the last decision of a writer is stored: an earlier batch can be neither decided nor queried.
A writer whose last decision says that it is the last one is purged with the log that holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from escrowmq.errors import CorruptRecord, TransactionConflict, WriterFenced
from escrowmq.message import names
from escrowmq.message.record import NewRecord, StoredRecord

PAST_RUNS_MAX: Final = 16  # replaced runs per writer that are remembered and refused


class Winner(msgspec.Struct, frozen=True):
    """An attempt that won, with the number of its halves."""

    attempt: str
    count: int


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A stored decision about many halves, or about a writer's batch, or a new fence.

    Once it is in the log all of its halves are decided, even if their ops are missing.
    """

    commits: list[int] = []
    rolls_back: list[int] = []
    by: str = ""
    writer: str = ""
    fence: int = 0
    batch: int = -1
    winners: list[Winner] = []
    fingerprint: str = ""
    run: str = ""
    past_runs: list[str] = []
    is_last: bool = False
    reason: str = ""


class Writer(msgspec.Struct):
    """A writer after its last decision or registration."""

    name: str
    fence: int = 0
    batch: int = -1
    winners: list[Winner] = []
    fingerprint: str = ""
    log_offset: int = 0  # of the decision record
    run: str = ""
    past_runs: list[str] = []
    is_last: bool = False  # it will decide nothing after this


def make_decision_record(decision_record: DecisionRecord, *, now_ms: int) -> NewRecord:
    return NewRecord(
        names.DECISION_TOPIC,
        0,
        msgspec.msgpack.encode(decision_record),
        b"TAGS\x01d\x02",
        born_ms=now_ms,
    )


def decode_decision(record: StoredRecord) -> DecisionRecord:
    return decode_decision_body(record.body, record.log_offset)


def decode_decision_body(body: bytes | memoryview, log_offset: int = -1) -> DecisionRecord:
    """Raises CorruptRecord."""
    try:
        return msgspec.msgpack.decode(body, type=DecisionRecord)
    except msgspec.MsgspecError as error:
        raise CorruptRecord(log_offset, f"not a decision record: {error}") from error


class OpenAttempts:
    """The undecided halves of every attempt."""

    def __init__(self) -> None:
        self._offsets_by_batch: dict[tuple[str, int], dict[str, set[int]]] = {}

    def add(self, writer: str, batch: int, attempt: str, queue_offset: int) -> None:
        attempts = self._offsets_by_batch.setdefault((writer, batch), {})
        attempts.setdefault(attempt, set()).add(queue_offset)

    def remove(self, writer: str, batch: int, attempt: str, queue_offset: int) -> None:
        attempts = self._offsets_by_batch.get((writer, batch), {})
        offsets = attempts.get(attempt, set())
        offsets.discard(queue_offset)
        if not offsets:
            attempts.pop(attempt, None)
        if not attempts:
            self._offsets_by_batch.pop((writer, batch), None)

    def half_offsets(self, writer: str, batch: int, attempt: str) -> set[int]:
        return self._offsets_by_batch.get((writer, batch), {}).get(attempt, set())

    def has_open_halves(self, writer: str) -> bool:
        return any(name == writer for name, _ in self._offsets_by_batch)

    def attempts_up_to(self, writer: str, batch: int) -> Iterator[tuple[str, set[int]]]:
        """Yield every attempt at this batch or an earlier one, with its halves."""
        for (name, number), attempts in self._offsets_by_batch.items():
            if name == writer and number <= batch:
                yield from attempts.items()


class WriterTable:
    """All writers, as the log has them and as they will be after this turn."""

    def __init__(self, writers: Iterable[Writer] = ()) -> None:
        self._stored = {writer.name: writer for writer in writers}
        # With the decisions of this turn, which are not stored yet: a later request of the same
        # turn has to see them.
        self._staged = dict(self._stored)
        self.attempts = OpenAttempts()

    def __iter__(self) -> Iterator[Writer]:
        """Iterate over the writers as the log has them."""
        return iter(self._stored.values())

    def find(self, name: str) -> Writer | None:
        return self._staged.get(name)

    def make_registration(
        self, name: str, run: str = "", fence: int | None = None
    ) -> DecisionRecord | None:
        """Return the record that raises the fence; None if this run has its fence already.

        The last decision stays as it is. With `fence`, raises WriterFenced unless the writer still
        has it. Raises WriterFenced if the run was replaced.
        """
        writer = self._staged.get(name) or Writer(name)
        if fence is not None and fence != writer.fence:
            raise WriterFenced(f"writer {name} has fence {writer.fence}, not {fence}")
        if run and run == writer.run:
            return None
        if run and run in writer.past_runs:
            successor = f"run {writer.run}" if writer.run else "a registration without a run"
            raise WriterFenced(f"run {run} of writer {name} was replaced by {successor}")
        past_runs = [*writer.past_runs, writer.run] if writer.run else writer.past_runs
        return DecisionRecord(
            writer=name,
            fence=writer.fence + 1,
            batch=writer.batch,
            winners=writer.winners,
            fingerprint=writer.fingerprint,
            run=run,
            past_runs=past_runs[-PAST_RUNS_MAX:],
        )

    def make_copy(self, writer: Writer) -> DecisionRecord | None:
        """Return the writer's state as a record that can be appended again.

        None if a new decision of the writer is on its way to the log.
        """
        if self._staged.get(writer.name) is not writer:
            return None
        return DecisionRecord(
            writer=writer.name,
            fence=writer.fence,
            batch=writer.batch,
            winners=writer.winners,
            fingerprint=writer.fingerprint,
            run=writer.run,
            past_runs=writer.past_runs,
            is_last=writer.is_last,
        )

    def decide_batch(
        self,
        name: str,
        batch: int,
        fence: int,
        winners: list[Winner],
        fingerprint: str,
        by: str,
        *,
        is_last: bool = False,
    ) -> DecisionRecord | None:
        """Return the decision to store; None if this batch is decided already.

        Raises WriterFenced for an older fence or an earlier batch, and TransactionConflict if a
        winner has not as many undecided halves as it says.
        """
        writer = self._staged.get(name) or Writer(name)
        if fence != writer.fence:
            raise WriterFenced(
                f"writer {name} was registered again: its fence is {writer.fence}, not {fence}"
            )
        if batch == writer.batch:
            return None
        if batch < writer.batch:
            raise WriterFenced(
                f"batch {batch} of writer {name} is too old: batch {writer.batch} is decided"
            )
        commits: list[int] = []
        # Each once: a short request could name one with very many halves thousands of times.
        for winner in dict.fromkeys(winners):
            offsets = self.attempts.half_offsets(name, batch, winner.attempt)
            if len(offsets) != winner.count:
                raise TransactionConflict(
                    f"attempt {winner.attempt} has {len(offsets)} open half messages, "
                    f"not {winner.count}",
                    "rolled_back",
                )
            commits += sorted(offsets)
        commits = list(dict.fromkeys(commits))
        won = set(commits)
        lost = [
            offset
            for _, offsets in self.attempts.attempts_up_to(name, batch)
            for offset in offsets - won
        ]
        return DecisionRecord(
            commits=commits,
            rolls_back=sorted(lost),
            by=by,
            writer=name,
            fence=fence,
            batch=batch,
            winners=winners,
            fingerprint=fingerprint,
            run=writer.run,
            past_runs=writer.past_runs,
            is_last=is_last,
        )

    def purge_below(self, log_offset: int) -> None:
        """Drop writers whose last decision is the last one and is gone from the log."""
        for writer in list(self._stored.values()):
            is_finished = writer.is_last and self._staged.get(writer.name) is writer
            if (
                is_finished
                and writer.log_offset < log_offset
                and not self.attempts.has_open_halves(writer.name)
            ):
                del self._stored[writer.name], self._staged[writer.name]

    def stage(self, decision_record: DecisionRecord) -> None:
        """Show a decision of this turn to later requests, before it is stored."""
        if decision_record.writer:
            self._staged[decision_record.writer] = _make_writer(decision_record, -1)

    def apply(self, decision_record: DecisionRecord, log_offset: int) -> None:
        """Record a decision that is in the log."""
        if decision_record.writer:
            writer = _make_writer(decision_record, log_offset)
            self._stored[decision_record.writer] = self._staged[decision_record.writer] = writer

    def unstage(self, decision_record: DecisionRecord) -> None:
        """Undo `stage()`, because the decision could not be stored."""
        if decision_record.writer:
            self._staged.pop(decision_record.writer, None)
            if decision_record.writer in self._stored:
                self._staged[decision_record.writer] = self._stored[decision_record.writer]

    def has_lost(self, name: str, batch: int, fence: int) -> bool:
        """Whether an undecided half of this batch and fence can never be committed any more."""
        writer = self._staged.get(name)
        return writer is not None and (batch <= writer.batch or fence < writer.fence)

    def dump(self) -> bytes:
        return msgspec.msgpack.encode(list(self._stored.values()))

    @classmethod
    def load(cls, data: bytes) -> WriterTable:
        return cls(msgspec.msgpack.decode(data, type=list[Writer]) if data else ())


def _make_writer(decision_record: DecisionRecord, log_offset: int) -> Writer:
    return Writer(
        decision_record.writer,
        decision_record.fence,
        decision_record.batch,
        decision_record.winners,
        decision_record.fingerprint,
        log_offset,
        decision_record.run,
        decision_record.past_runs,
        decision_record.is_last,
    )
