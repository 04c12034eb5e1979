"""Writers: fences, batches in order, attempts that win or lose."""

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
    again = writers.make_registration("w")
    assert again is not None
    assert (again.fence, again.batch, again.fingerprint) == (4, 8, "f")
    new = writers.make_registration("new")
    assert new is not None
    assert new.fence == 1


@pytest.mark.parametrize(("batch", "fence"), [(9, 2), (9, 4), (7, 3)])
def test_a_wrong_fence_or_an_earlier_batch_is_refused(batch: int, fence: int) -> None:
    writers = WriterTable()
    writers.apply(DecisionRecord(writer="w", fence=3, batch=8), 0)
    with pytest.raises(WriterFenced):
        decide(writers, batch, fence=fence)


def test_a_decided_batch_needs_no_decision() -> None:
    writers = WriterTable()
    writers.apply(DecisionRecord(writer="w", fence=3, batch=8), 0)
    assert decide(writers, 8, Winner("whoever", 7), fence=3) is None


def test_the_winners_are_committed_and_everything_else_up_to_this_batch_is_not() -> None:
    writers = WriterTable()
    for offset, (batch, attempt) in enumerate(
        [(1, "a"), (1, "b"), (1, "a"), (0, "a"), (2, "a"), (1, "c")]
    ):
        writers.attempts.add("w", batch, attempt, offset)
    writers.attempts.add("other", 1, "a", 99)
    decision = decide(writers, 1, Winner("a", 2), Winner("c", 1))
    assert decision is not None
    assert (decision.commits, decision.rolls_back) == ([0, 2, 5], [1, 3])


def test_a_winner_counts_once_however_often_it_is_named() -> None:
    writers = WriterTable()
    writers.attempts.add("w", 0, "a", 7)
    decision = decide(writers, 0, Winner("a", 1), Winner("a", 1))
    assert decision is not None
    assert decision.commits == [7]


def test_a_winner_that_is_not_all_there_is_a_contradiction() -> None:
    writers = WriterTable()
    writers.attempts.add("w", 0, "a", 7)
    with pytest.raises(TransactionConflict):
        decide(writers, 0, Winner("a", 2))


def test_what_is_expected_is_not_written_down_until_it_is_in_the_log() -> None:
    writers = WriterTable()
    writers.apply(DecisionRecord(writer="w", batch=1), 10)
    writers.stage(DecisionRecord(writer="w", batch=2))
    writers.stage(DecisionRecord(writer="w", batch=3))
    assert [writer.batch for writer in WriterTable.load(writers.dump())] == [1]
    [kept] = writers
    assert writers.make_copy(kept) is None  # it would undo what is under way
    writers.unstage(DecisionRecord(writer="w", batch=2))
    writers.unstage(DecisionRecord(writer="w", batch=3))
    found = writers.find("w")
    assert found is not None
    assert (found.batch, found.log_offset) == (1, 10)
    assert writers.make_copy(kept) == DecisionRecord(writer="w", batch=1)


def test_a_first_decision_that_is_taken_back_leaves_no_writer() -> None:
    writers = WriterTable()
    writers.stage(DecisionRecord(writer="w", batch=2))
    writers.unstage(DecisionRecord(writer="w", batch=2))
    assert writers.find("w") is None
    assert WriterTable.load(b"").find("w") is None


@pytest.mark.parametrize(
    ("batch", "fence", "lost"), [(8, 3, True), (9, 3, False), (9, 2, True), (7, 9, True)]
)
def test_a_half_has_lost_when_its_batch_is_past_or_its_writer_replaced(
    batch: int, fence: int, lost: bool
) -> None:
    writers = WriterTable()
    writers.apply(DecisionRecord(writer="w", fence=3, batch=8), 0)
    assert writers.has_lost("w", batch, fence) is lost
    assert not writers.has_lost("unknown", batch, fence)


def test_an_attempt_is_gone_with_its_last_half() -> None:
    attempts = OpenAttempts()
    attempts.add("w", 0, "a", 1)
    attempts.add("w", 0, "a", 2)
    attempts.remove("w", 0, "a", 1)
    assert attempts.half_offsets("w", 0, "a") == {2}
    attempts.remove("w", 0, "a", 2)
    attempts.remove("w", 0, "a", 2)
    assert list(attempts.attempts_up_to("w", 9)) == []


def test_a_decision_is_read_as_it_was_written() -> None:
    bench = EscrowBench()
    decision = DecisionRecord(
        commits=[1, 2], rolls_back=[3], by="x", writer="w", batch=4, winners=[Winner("a", 2)]
    )
    bench.store.append([make_decision_record(decision, now_ms=0), sample(0)], now_ms=0)
    [record] = stored_records(bench.store, "ESCROW_DECISION")
    assert decode_decision(record) == decision
    [other] = stored_records(bench.store, "T0")
    with pytest.raises(CorruptRecord):
        decode_decision(other)


def test_a_run_registers_once_and_never_comes_back() -> None:
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


def test_whoever_gives_up_disturbs_nobody() -> None:
    writers = WriterTable()
    writers.apply(DecisionRecord(writer="w", fence=2, run="r2", past_runs=["r1"]), 0)
    with pytest.raises(WriterFenced, match="has fence 2, not 1"):
        writers.make_registration("w", fence=1)
    gone = writers.make_registration("w", fence=2)
    assert gone is not None
    writers.apply(gone, 1)
    with pytest.raises(WriterFenced, match="replaced by a registration without a run"):
        writers.make_registration("w", "r2")
    assert writers.has_lost("w", 0, 2)


def test_only_so_many_runs_are_remembered() -> None:
    writers = WriterTable()
    for number in range(3 * PAST_RUNS_MAX):
        decision = writers.make_registration("w", f"r{number}")
        assert decision is not None
        writers.apply(decision, number)
    found = writers.find("w")
    assert found is not None
    assert len(found.past_runs) == PAST_RUNS_MAX


def test_a_writer_that_said_his_last_goes_with_the_log() -> None:
    writers = WriterTable()
    writers.apply(DecisionRecord(writer="once", batch=0, is_last=True), 10)
    writers.apply(DecisionRecord(writer="w", batch=0), 10)
    writers.attempts.add("once", 0, "loser", 5)
    writers.purge_below(11)
    assert writers.find("once") is not None  # its losers are still to be rolled back
    writers.attempts.remove("once", 0, "loser", 5)
    writers.purge_below(10)
    assert writers.find("once") is not None
    writers.purge_below(11)
    assert [writer.name for writer in writers] == ["w"]
