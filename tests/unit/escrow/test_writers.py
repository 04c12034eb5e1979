"""Writers: fences, the order of batches, and attempts that win or lose."""

from __future__ import annotations

import pytest

from escrowmq.errors import CorruptRecord, TransactionConflict, WriterFenced
from escrowmq.escrow.writers import (
    PAST_RUNS_MAX,
    DecisionRecord,
    OpenAttempts,
    Winner,
    WriterTable,
    decode_decision,
    make_decision_record,
)
from tests.support.broker_requests import stored_records
from tests.support.escrows import EscrowBench
from tests.support.stores import sample


def decide(
    writers: WriterTable, batch: int, *winners: Winner, fence: int = 0
) -> DecisionRecord | None:
    return writers.decide_batch("w", batch, fence, list(winners), "print", "writer w")


def test_a_registration_raises_the_fence_and_keeps_the_last_decision() -> None:
    writers = WriterTable()
    writers.apply(DecisionRecord(writer="w", fence=3, batch=8, fingerprint="f"), 100)
    second = writers.make_registration("w")
    assert second is not None
    assert (second.fence, second.batch, second.fingerprint) == (4, 8, "f")
    new = writers.make_registration("new")
    assert new is not None
    assert new.fence == 1


@pytest.mark.parametrize(("batch", "fence"), [(9, 2), (9, 4), (7, 3)])
def test_a_wrong_fence_or_an_earlier_batch_is_refused(batch: int, fence: int) -> None:
    writers = WriterTable()
    writers.apply(DecisionRecord(writer="w", fence=3, batch=8), 0)
    with pytest.raises(WriterFenced):
        decide(writers, batch, fence=fence)


def test_an_attempt_that_is_named_many_times_is_looked_up_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writers = WriterTable()
    writers.attempts.add("w", 1, "a", 0)
    look_up, looked_up = writers.attempts.half_offsets, []

    def half_offsets(name: str, batch: int, attempt: str) -> set[int]:
        looked_up.append(attempt)
        return look_up(name, batch, attempt)

    monkeypatch.setattr(writers.attempts, "half_offsets", half_offsets)
    decision = decide(writers, 1, *[Winner("a", 1)] * 1_000)
    assert decision is not None
    assert decision.commits == [0]
    assert looked_up == ["a"]


def test_a_batch_is_decided_only_once() -> None:
    writers = WriterTable()
    writers.apply(DecisionRecord(writer="w", fence=3, batch=8), 0)
    assert decide(writers, 8, Winner("any", 7), fence=3) is None


def test_the_winners_are_committed_and_all_others_up_to_this_batch_are_rolled_back() -> None:
    writers = WriterTable()
    for offset, (batch, attempt) in enumerate(
        [(1, "a"), (1, "b"), (1, "a"), (0, "a"), (2, "a"), (1, "c")]
    ):
        writers.attempts.add("w", batch, attempt, offset)
    writers.attempts.add("other", 1, "a", 99)
    decision = decide(writers, 1, Winner("a", 2), Winner("c", 1))
    assert decision is not None
    assert (decision.commits, decision.rolls_back) == ([0, 2, 5], [1, 3])


def test_a_winner_named_twice_is_committed_once() -> None:
    writers = WriterTable()
    writers.attempts.add("w", 0, "a", 7)
    decision = decide(writers, 0, Winner("a", 1), Winner("a", 1))
    assert decision is not None
    assert decision.commits == [7]


def test_a_winner_with_missing_halves_is_a_conflict() -> None:
    writers = WriterTable()
    writers.attempts.add("w", 0, "a", 7)
    with pytest.raises(TransactionConflict):
        decide(writers, 0, Winner("a", 2))


def test_a_staged_decision_is_neither_saved_nor_copied_until_it_is_applied() -> None:
    writers = WriterTable()
    writers.apply(DecisionRecord(writer="w", batch=1), 10)
    writers.stage(DecisionRecord(writer="w", batch=2))
    writers.stage(DecisionRecord(writer="w", batch=3))
    assert [writer.batch for writer in WriterTable.load(writers.dump())] == [1]
    [writer] = writers
    assert writers.make_copy(writer) is None  # a copy would undo the staged decisions
    writers.unstage(DecisionRecord(writer="w", batch=2))
    writers.unstage(DecisionRecord(writer="w", batch=3))
    unstaged = writers.find("w")
    assert unstaged is not None
    assert (unstaged.batch, unstaged.log_offset) == (1, 10)
    assert writers.make_copy(writer) == DecisionRecord(writer="w", batch=1)


def test_unstaging_the_first_decision_removes_the_writer() -> None:
    writers = WriterTable()
    writers.stage(DecisionRecord(writer="w", batch=2))
    writers.unstage(DecisionRecord(writer="w", batch=2))
    assert writers.find("w") is None
    assert WriterTable.load(b"").find("w") is None


@pytest.mark.parametrize(
    ("batch", "fence", "has_lost"), [(8, 3, True), (9, 3, False), (9, 2, True), (7, 9, True)]
)
def test_a_half_has_lost_if_its_batch_is_decided_or_its_fence_is_old(
    batch: int, fence: int, has_lost: bool
) -> None:
    writers = WriterTable()
    writers.apply(DecisionRecord(writer="w", fence=3, batch=8), 0)
    assert writers.has_lost("w", batch, fence) is has_lost
    assert not writers.has_lost("unknown", batch, fence)


def test_an_attempt_is_removed_with_its_last_half() -> None:
    attempts = OpenAttempts()
    attempts.add("w", 0, "a", 1)
    attempts.add("w", 0, "a", 2)
    attempts.remove("w", 0, "a", 1)
    assert attempts.half_offsets("w", 0, "a") == {2}
    attempts.remove("w", 0, "a", 2)
    attempts.remove("w", 0, "a", 2)  # a second call is harmless
    assert list(attempts.attempts_up_to("w", 9)) == []


def test_a_decision_is_read_as_it_was_written() -> None:
    bench = EscrowBench()
    decision = DecisionRecord(
        commits=[1, 2], rolls_back=[3], by="x", writer="w", batch=4, winners=[Winner("a", 2)]
    )
    bench.store.append([make_decision_record(decision, now_ms=0), sample(0)], now_ms=0)
    [record] = stored_records(bench.store, "ESCROW_DECISION")
    assert decode_decision(record) == decision
    [ordinary] = stored_records(bench.store, "T0")
    with pytest.raises(CorruptRecord):
        decode_decision(ordinary)


def test_a_run_that_was_replaced_cannot_register_again() -> None:
    writers = WriterTable()
    first = writers.make_registration("w", "r1")
    assert first is not None
    writers.apply(first, 0)
    assert writers.make_registration("w", "r1") is None
    second = writers.make_registration("w", "r2")
    assert second is not None
    assert (second.fence, second.run) == (2, "r2")
    writers.apply(second, 1)
    with pytest.raises(WriterFenced, match="run r1 of writer w was replaced by run r2"):
        writers.make_registration("w", "r1")
    decision = decide(writers, 0, fence=2)
    assert decision is not None
    writers.apply(decision, 2)
    with pytest.raises(WriterFenced):
        WriterTable.load(writers.dump()).make_registration("w", "r1")


def test_a_registration_with_a_fence_replaces_only_that_fence() -> None:
    writers = WriterTable()
    writers.apply(DecisionRecord(writer="w", fence=2, run="r2", past_runs=["r1"]), 0)
    with pytest.raises(WriterFenced, match="has fence 2, not 1"):
        writers.make_registration("w", fence=1)
    registration = writers.make_registration("w", fence=2)
    assert registration is not None
    writers.apply(registration, 1)
    with pytest.raises(WriterFenced, match="replaced by a registration without a run"):
        writers.make_registration("w", "r2")
    assert writers.has_lost("w", 0, 2)


def test_the_number_of_remembered_runs_is_bounded() -> None:
    writers = WriterTable()
    for number in range(3 * PAST_RUNS_MAX):
        decision = writers.make_registration("w", f"r{number}")
        assert decision is not None
        writers.apply(decision, number)
    writer = writers.find("w")
    assert writer is not None
    assert len(writer.past_runs) == PAST_RUNS_MAX


def test_a_writer_that_decided_its_last_batch_is_purged_with_the_log() -> None:
    writers = WriterTable()
    writers.apply(DecisionRecord(writer="once", batch=0, is_last=True), 10)
    writers.apply(DecisionRecord(writer="w", batch=0), 10)
    writers.attempts.add("once", 0, "loser", 5)
    writers.purge_below(11)
    assert writers.find("once") is not None  # its losers are not rolled back yet
    writers.attempts.remove("once", 0, "loser", 5)
    writers.purge_below(10)
    assert writers.find("once") is not None
    writers.purge_below(11)
    assert [writer.name for writer in writers] == ["w"]
