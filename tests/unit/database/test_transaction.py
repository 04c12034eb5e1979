"""The order and error handling of a database transaction with messages, for both drivers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from escrowmq import Message
from escrowmq.client.producer.transaction import Transaction, TransactionOutcome
from escrowmq.database.transaction import (
    AsyncTransactionMessages,
    run_steps,
    run_steps_async,
    transaction_steps,
)
from escrowmq.errors import (
    CommitUnknown,
    Rollback,
    SessionEndedInBlock,
    TransactionConflict,
    TransactionMessageFailed,
)
from escrowmq.message.transaction import Verdict


class RecordingSteps:
    """The steps of a transaction, recorded. `results` has what a step returns or raises."""

    def __init__(self, tx: AsyncTransactionMessages, results: dict[str, object]) -> None:
        self.steps: list[str] = []
        self._tx = tx
        half: Any = "half"
        tx.main_scope.client_transaction.halves.append(half)
        self._results: dict[str, object] = {
            "commit": Verdict.COMMIT,
            "roll_back": "",
            "read_marker": Verdict.UNKNOWN,
            **results,
        }

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def perform(*arguments: object) -> object:
            if name == "end":
                verdict = self._tx.main_scope.verdict
                self._tx.outcome = TransactionOutcome(verdict, verdict is not Verdict.UNKNOWN)
                self.steps.append(f"end {verdict.name}")
            else:
                self.steps.append(name)
            result = self._results.get(name)
            if isinstance(result, BaseException):
                raise result
            return result

        return perform


class AsyncRecordingSteps(RecordingSteps):
    """The same with coroutines."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        perform = super().__getattr__(name)

        async def perform_later(*arguments: object) -> object:
            await asyncio.sleep(0)
            return perform(*arguments)

        return perform_later


def new_messages() -> AsyncTransactionMessages:
    async def park(*_: object) -> Any:
        raise OSError("not sent")

    ender: Any = None  # not used: a send that fails ends nothing
    return AsyncTransactionMessages(Transaction(None, park=park, ender=ender, id="tx"))


def run(
    steps_type: type[RecordingSteps],
    results: dict[str, object],
    error: BaseException | None,
    **options: bool,
) -> tuple[list[str], AsyncTransactionMessages, BaseException | None]:
    """Run a transaction. Return its steps, its messages, and the exception that it raised."""
    tx = new_messages()
    ops: Any = steps_type(tx, results)
    steps = transaction_steps(tx, **options)

    async def run_both_parts() -> None:
        for failure in (None, error):
            if steps_type is AsyncRecordingSteps:
                await run_steps_async(steps, ops, failure)
            else:
                run_steps(steps, ops, failure)

    try:
        asyncio.run(run_both_parts())
    except BaseException as raised:
        return ops.steps, tx, raised
    return ops.steps, tx, None


BEGUN = ["begin", "insert_marker"]
FLUSHED = [*BEGUN, "flush"]
LOST = OSError("connection lost")
FAILED = ValueError("the block failed")
INTERRUPT = KeyboardInterrupt()

ASKED = ["roll_back", "read_marker"]
NOT_THERE: dict[str, object] = {"read_marker": Verdict.ROLLBACK}

CASES: list[tuple[str, dict[str, object], BaseException | None, list[str], object]] = [
    ("commit", {}, None, [*FLUSHED, "commit", "release_connection", "end COMMIT"], None),
    ("block fails", NOT_THERE, FAILED, [*BEGUN, *ASKED, "end ROLLBACK"], FAILED),
    ("Rollback is not raised", NOT_THERE, Rollback(), [*BEGUN, *ASKED, "end ROLLBACK"], None),
    (
        "block fails, but the database has committed",
        {"read_marker": Verdict.COMMIT},
        FAILED,
        [*BEGUN, *ASKED, "end COMMIT"],
        FAILED,
    ),
    (
        "Rollback, but the database has committed",
        {"read_marker": Verdict.COMMIT},
        Rollback(),
        [*BEGUN, *ASKED, "end COMMIT"],
        SessionEndedInBlock,
    ),
    (
        "flush fails",
        {"flush": LOST, **NOT_THERE},
        None,
        [*FLUSHED, *ASKED, "end ROLLBACK"],
        LOST,
    ),
    ("an outer block decides", {"roll_back": "why"}, FAILED, [*BEGUN, "roll_back"], FAILED),
    (
        "rollback fails, but the marker is not there",
        {"roll_back": LOST, **NOT_THERE},
        FAILED,
        [*BEGUN, *ASKED, "end ROLLBACK"],
        FAILED,
    ),
    (
        "block fails, and the marker cannot be read",
        {"read_marker": LOST},
        FAILED,
        [*BEGUN, *ASKED, "end UNKNOWN"],
        FAILED,
    ),
    (
        "block is interrupted, and so is its rollback",
        {"roll_back": INTERRUPT},
        FAILED,
        [*BEGUN, "roll_back"],
        INTERRUPT,
    ),
    (
        "commit fails, marker is committed",
        {"commit": LOST, "read_marker": Verdict.COMMIT},
        None,
        [*FLUSHED, "commit", *ASKED, "end COMMIT"],
        None,
    ),
    (
        "commit fails, marker is a tombstone",
        {"commit": LOST, **NOT_THERE},
        None,
        [*FLUSHED, "commit", *ASKED, "end ROLLBACK"],
        LOST,
    ),
    (
        "commit fails, marker is locked",
        {"commit": LOST, "read_marker": Verdict.UNKNOWN},
        None,
        [*FLUSHED, "commit", *ASKED, "end UNKNOWN"],
        CommitUnknown,
    ),
    (
        "commit fails, and everything after it",
        {"commit": LOST, "roll_back": LOST, "read_marker": LOST},
        None,
        [*FLUSHED, "commit", *ASKED, "end UNKNOWN"],
        CommitUnknown,
    ),
    ("commit is interrupted", {"commit": INTERRUPT}, None, [*FLUSHED, "commit"], INTERRUPT),
    ("decided by an outer block", {"commit": None}, None, [*FLUSHED, "commit"], None),
    (
        "rolled back without an error",
        {"commit": Verdict.ROLLBACK},
        None,
        [*FLUSHED, "commit", "release_connection", "end ROLLBACK"],
        None,
    ),
]


@pytest.mark.parametrize("steps_type", [RecordingSteps, AsyncRecordingSteps])
@pytest.mark.parametrize(
    ("results", "error", "expected", "raised"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_each_case_has_its_sequence_of_steps(
    steps_type: type[RecordingSteps],
    results: dict[str, object],
    error: BaseException | None,
    expected: list[str],
    raised: object,
) -> None:
    steps, tx, failure = run(steps_type, results, error)
    assert steps == expected
    if inspect.isclass(raised):
        assert isinstance(failure, raised)
    else:
        assert failure is raised
    is_left_open = (
        expected[-1] not in ("end COMMIT", "end ROLLBACK")
        and results.get("commit", True) is not None
    )
    assert (tx.outcome is not None and tx.outcome.verdict is Verdict.UNKNOWN) == is_left_open


@pytest.mark.parametrize("steps_type", [RecordingSteps, AsyncRecordingSteps])
def test_a_transaction_that_cannot_begin_sends_nothing(steps_type: type[RecordingSteps]) -> None:
    steps, tx, failure = run(steps_type, {"begin": LOST}, None)
    assert (steps, failure) == (["begin"], LOST)
    assert tx.outcome is None


def test_a_marker_that_cannot_be_inserted_rolls_back() -> None:
    steps, _, failure = run(RecordingSteps, {"insert_marker": LOST, **NOT_THERE}, None)
    assert (steps, failure) == ([*BEGUN, *ASKED, "end ROLLBACK"], LOST)


def test_a_savepoint_that_cannot_be_released_is_rolled_back() -> None:
    steps, _, failure = run(RecordingSteps, {"commit": LOST, **NOT_THERE}, None, is_nested=True)
    assert (steps, failure) == ([*FLUSHED, "commit", *ASKED, "end ROLLBACK"], LOST)


@pytest.mark.parametrize("error", [None, FAILED])
def test_without_messages_no_marker_is_asked(error: BaseException | None) -> None:
    tx = new_messages()
    ops: Any = RecordingSteps(tx, {"commit": LOST})
    tx.main_scope.client_transaction.halves.clear()
    steps = transaction_steps(tx)
    run_steps(steps, ops)
    with pytest.raises((OSError, ValueError)):
        run_steps(steps, ops, error)
    assert "read_marker" not in ops.steps


def test_a_message_after_the_block_is_refused() -> None:
    tx = new_messages()
    ops: Any = RecordingSteps(tx, {})
    steps = transaction_steps(tx)
    run_steps(steps, ops)
    run_steps(steps, ops)
    message: Any = None
    with pytest.raises(TransactionConflict):
        asyncio.run(tx.send(message))


def test_an_error_after_the_commit_ended_the_messages_is_raised() -> None:
    tx = new_messages()
    ops: Any = RecordingSteps(tx, {})
    steps = transaction_steps(tx)
    run_steps(steps, ops)

    def commit() -> None:
        tx.outcome = TransactionOutcome(Verdict.COMMIT, True)
        raise LOST

    ops.commit = commit
    with pytest.raises(OSError, match="connection lost"):
        run_steps(steps, ops)
    assert ops.steps == FLUSHED


def test_a_send_that_failed_rolls_back_even_if_the_block_caught_the_error() -> None:
    tx = new_messages()
    ops: Any = RecordingSteps(tx, NOT_THERE)
    steps = transaction_steps(tx)
    run_steps(steps, ops)
    message: Any = Message("t", b"a")
    with pytest.raises(OSError, match="not sent"):
        asyncio.run(tx.send(message))
    with pytest.raises(TransactionMessageFailed):
        run_steps(steps, ops)
    assert ops.steps == [*BEGUN, *ASKED, "end ROLLBACK"]
