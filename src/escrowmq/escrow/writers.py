"""Writers: each decides its batches one after the other, every batch once.

A writer sends the halves of a batch in attempts, of which several may be under way (a task that is
repeated, a driver that was thought dead). The decision on a batch names the attempts that won; all
others of it are rolled back. The first decision on a batch stands, and is told to whoever asks
again. Registering raises the writer's fence: whoever registered before can decide nothing any more.
A run of a writer, one life of his, registers once however often it says so; once another has taken
its place it never comes back.

Only the last decision of a writer is kept: a batch that is past can be neither decided nor asked
for. A writer that said that it was his last is forgotten with the log that holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from escrowmq.errors import CorruptRecord, TransactionConflict, WriterFenced
from escrowmq.message import names
from escrowmq.message.record import NewRecord, StoredRecord

PAST_RUNS_MAX: Final = 16  # of those that are over, so that none of them registers again


class Winner(msgspec.Struct, frozen=True):
    attempt: str
    count: int  # of its halves


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Of a group of halves; with a writer, of a batch of his. Alone in the log, it decides."""

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


class Writer(msgspec.Struct):
    name: str
    fence: int = 0
    batch: int = -1
    winners: list[Winner] = []
    fingerprint: str = ""
    log_offset: int = 0  # of the record that says so
    run: str = ""
    past_runs: list[str] = []
    is_last: bool = False  # he decides nothing after this


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
        raise CorruptRecord(log_offset, f"no decision: {error}") from error


class OpenAttempts:
    """Which open halves belong to which attempt."""

    def __init__(self) -> None:
        self._offsets_by_batch: dict[tuple[str, int], dict[str, set[int]]] = {}

    def add(self, writer: str, batch: int, attempt: str, queue_offset: int) -> None:
        batches = self._offsets_by_batch.setdefault((writer, batch), {})
        batches.setdefault(attempt, set()).add(queue_offset)

    def remove(self, writer: str, batch: int, attempt: str, queue_offset: int) -> None:
        attempts = self._offsets_by_batch.get((writer, batch), {})
        halves = attempts.get(attempt, set())
        halves.discard(queue_offset)
        if not halves:
            attempts.pop(attempt, None)
        if not attempts:
            self._offsets_by_batch.pop((writer, batch), None)

    def half_offsets(self, writer: str, batch: int, attempt: str) -> set[int]:
        return self._offsets_by_batch.get((writer, batch), {}).get(attempt, set())

    def has_open_halves(self, writer: str) -> bool:
        return any(name == writer for name, _ in self._offsets_by_batch)

    def attempts_up_to(self, writer: str, batch: int) -> Iterator[tuple[str, set[int]]]:
        """Every attempt at this batch or an earlier one."""
        for (name, number), attempts in self._offsets_by_batch.items():
            if name == writer and number <= batch:
                yield from attempts.items()


class WriterTable:
    def __init__(self, writers: Iterable[Writer] = ()) -> None:
        self._stored = {writer.name: writer for writer in writers}
        self._staged = dict(self._stored)  # as they will be once this turn's decisions are stored
        self.attempts = OpenAttempts()

    def __iter__(self) -> Iterator[Writer]:
        """As the log has them."""
        return iter(self._stored.values())

    def find(self, name: str) -> Writer | None:
        return self._staged.get(name)

    def make_registration(
        self, name: str, run: str = "", fence: int | None = None
    ) -> DecisionRecord | None:
        """The next fence, and the last decision as it is; None if this run has its fence already.

        With a fence, only if that is still the one. Raises WriterFenced.
        """
        writer = self._staged.get(name) or Writer(name)
        if fence is not None and fence != writer.fence:
            raise WriterFenced(f"writer {name} has the fence {writer.fence}, not {fence}")
        if run and run == writer.run:
            return None
        if run and run in writer.past_runs:
            after = f"run {writer.run} has taken its place" if writer.run else "it gave up"
            raise WriterFenced(f"run {run} of writer {name} is over: {after}")
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
        """The same again, for another place in the log; None while he decides something new."""
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
        """The decision to be stored; None if this batch is decided already.

        Raises WriterFenced, or TransactionContradicted if a winner is not all there.
        """
        writer = self._staged.get(name) or Writer(name)
        if fence != writer.fence:
            raise WriterFenced(
                f"writer {name} has registered again: fence {writer.fence}, and this is {fence}"
            )
        if batch == writer.batch:
            return None
        if batch < writer.batch:
            raise WriterFenced(f"batch {batch} of {name} is past: {writer.batch} is decided")
        commits: list[int] = []
        for winner in winners:
            halves = self.attempts.half_offsets(name, batch, winner.attempt)
            if len(halves) != winner.count:
                raise TransactionConflict(
                    f"attempt {winner.attempt} has {len(halves)} open halves, not {winner.count}",
                    "rolled_back",
                )
            commits += sorted(halves)
        commits = list(dict.fromkeys(commits))
        won = set(commits)
        lost = [
            at for _, halves in self.attempts.attempts_up_to(name, batch) for at in halves - won
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
        """Whoever has said his last, and the log does not have it any more."""
        for writer in list(self._stored.values()):
            is_over = writer.is_last and self._staged.get(writer.name) is writer
            if (
                is_over
                and writer.log_offset < log_offset
                and not self.attempts.has_open_halves(writer.name)
            ):
                del self._stored[writer.name], self._staged[writer.name]

    def stage(self, decision_record: DecisionRecord) -> None:
        """It goes to the log with this turn: whoever comes after it hears of it."""
        if decision_record.writer:
            self._staged[decision_record.writer] = _make_writer(decision_record, -1)

    def apply(self, decision_record: DecisionRecord, log_offset: int) -> None:
        """It is in the log."""
        if decision_record.writer:
            writer = _make_writer(decision_record, log_offset)
            self._stored[decision_record.writer] = self._staged[decision_record.writer] = writer

    def unstage(self, decision_record: DecisionRecord) -> None:
        """It did not reach the log: what is there counts."""
        if decision_record.writer:
            self._staged.pop(decision_record.writer, None)
            if decision_record.writer in self._stored:
                self._staged[decision_record.writer] = self._stored[decision_record.writer]

    def has_lost(self, name: str, batch: int, fence: int) -> bool:
        """Whether an open half of an attempt can never win any more."""
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
