"""The remark of a verdict is stored in the journal and the op, and shown in history and log."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from escrowmq.escrow.records import REMARK_LENGTH_MAX, decode_op
from escrowmq.message import names
from escrowmq.message.properties import decode_properties
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import EndTransaction, ResumeTransaction, TransactionHeader
from escrowmq.remoting.requests import Request
from tests.support.broker_requests import new_request
from tests.support.escrows import (
    COMMIT,
    ESCROW,
    ROLLBACK,
    UNKNOWN,
    EscrowBench,
    HalfPosition,
    end_many_request,
)


def end_with_remark(
    position: HalfPosition, verdict: int, remark: str, *, check: bool = False
) -> Request[Any]:
    fields = EndTransaction(
        producer_group="p",
        tran_state_table_offset=position.queue_offset,
        commit_log_offset=position.log_offset,
        commit_or_rollback=verdict,
        from_transaction_check=check,
    )
    return with_remark(new_request(RequestCode.END_TRANSACTION, fields), remark)


def with_remark(request: Request[Any], remark: str) -> Request[Any]:
    head = msgspec.structs.replace(request.head, remark=remark)
    return msgspec.structs.replace(request, head=head)


def history(bench: EscrowBench, key: str) -> Any:
    request = new_request(RequestCode.SHOW_TRANSACTION, TransactionHeader(transaction_id=key))
    return json.loads(bench.request(request).body)


def step(bench: EscrowBench, key: str, name: str) -> Any:
    """Return the only step of a transaction with this name."""
    (step,) = [step for step in history(bench, key)["steps"] if step["what"] == name]
    return step


def strand_with_unknown(bench: EscrowBench, position: HalfPosition, remark: str) -> None:
    """Answer every check with UNKNOWN until the half is stranded."""
    for number in range(ESCROW.checks_max):
        bench.tick(after_ms=ESCROW.check_interval_ms)
        answer = end_with_remark(position, UNKNOWN, f"{remark} {number}", check=True)
        assert bench.request(answer).code == 0
    bench.tick(after_ms=ESCROW.check_interval_ms)
    assert bench.state_in_memory(position) == "stranded"


def test_the_remark_of_a_rollback_is_in_its_op_and_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = EscrowBench()
    position = bench.park("k")
    assert bench.request(end_with_remark(position, ROLLBACK, "stock is empty")).code == 0
    op = decode_op(bench.messages(names.OP_TOPIC)[0])
    assert op is not None
    assert op.reason == "stock is empty"
    assert step(bench, "k", "rolled_back")["reason"] == "stock is empty"
    (line,) = caplog.messages
    assert line.startswith("transaction rolled back by its producer id=k group=p peer=sender: ")
    assert line.endswith("stock is empty")


def test_a_rollback_without_a_remark_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = EscrowBench()
    assert bench.end(bench.park("k"), ROLLBACK).code == 0
    assert caplog.messages == []


def test_the_remark_of_a_rollback_of_many_is_in_each_op() -> None:
    bench = EscrowBench()
    positions = [bench.park("a"), bench.park("b")]
    request = with_remark(end_many_request([*positions], ROLLBACK), "order cancelled")
    assert bench.request(request).code == 0
    assert step(bench, "a", "rolled_back")["reason"] == "order cancelled"
    assert step(bench, "b", "rolled_back")["reason"] == "order cancelled"


def test_an_unknown_after_the_send_is_in_the_history_and_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = EscrowBench()
    position = bench.park("k")
    assert bench.request(end_with_remark(position, UNKNOWN, "timeout of the bank")).code == 0
    unknown = step(bench, "k", "unknown_at_send")
    assert (unknown["who"], unknown["reason"]) == ("sender", "timeout of the bank")
    assert "timeout of the bank" in history(bench, "k")["pendingBecause"]
    (line,) = caplog.messages
    assert line == ("verdict UNKNOWN after the send id=k group=p peer=sender: timeout of the bank")


def test_an_unknown_answer_to_a_check_has_its_remark(caplog: pytest.LogCaptureFixture) -> None:
    bench = EscrowBench()
    position = bench.park("k")
    bench.tick(after_ms=ESCROW.immunity_ms)
    bench.request(end_with_remark(position, UNKNOWN, "database is down", check=True))
    answered = step(bench, "k", "unknown")
    assert (answered["reason"], answered["detail"]) == ("database is down", "check 1")
    assert history(bench, "k")["pendingBecause"].endswith("UNKNOWN: database is down")
    assert caplog.messages == [
        "verdict UNKNOWN at check 1 id=k group=p peer=sender: database is down"
    ]


def test_many_unknown_verdicts_write_few_log_lines(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = EscrowBench()
    for number in range(100):
        bench.end(bench.park(f"k{number}"), UNKNOWN)
    assert len(caplog.messages) == 10


@pytest.mark.parametrize("restart", ["", "restarted", "killed"])
def test_the_reason_for_stranding_has_the_answers_of_the_producer(restart: str) -> None:
    bench = EscrowBench()
    position = bench.park("k")
    bench.tick(after_ms=ESCROW.check_interval_ms)
    bench.request(end_with_remark(position, UNKNOWN, "first", check=True))
    if restart:
        bench = getattr(bench, restart)()
        bench.heartbeat(bench.channel, "p")
    bench.tick(after_ms=ESCROW.check_interval_ms)  # not answered
    bench.tick(after_ms=ESCROW.check_interval_ms)
    bench.request(end_with_remark(position, UNKNOWN, "database is down", check=True))
    bench.tick(after_ms=ESCROW.check_interval_ms)
    reason = "checked 3 times: 2 UNKNOWN, 1 without an answer, last: database is down"
    (stranded,) = bench.messages(names.STRANDED_TOPIC)
    assert decode_properties(stranded.properties)[names.REASON] == reason
    assert step(bench, "k", "stranded")["reason"] == reason


def test_a_resumed_half_starts_with_no_answers() -> None:
    bench = EscrowBench()
    position = bench.park("k")
    strand_with_unknown(bench, position, "no")
    fields = ResumeTransaction(transaction_id="k", operator="ann", reason="bank is back")
    assert bench.request(new_request(RequestCode.RESUME_TRANSACTION, fields)).code == 0
    resumed = step(bench, "k", "resumed")
    assert (resumed["who"], resumed["reason"]) == ("operator ann", "bank is back")
    for _ in range(ESCROW.checks_max + 1):
        bench.tick(after_ms=ESCROW.check_interval_ms)
    steps = history(bench, "k")["steps"]
    reasons = [step["reason"] for step in steps if step["what"] == "stranded"]
    assert reasons == [
        "checked 3 times: 3 UNKNOWN, last: no 2",
        "checked 3 times: 3 without an answer",
    ]


def test_a_half_that_moves_keeps_its_answers() -> None:
    bench = EscrowBench()
    position = bench.park("k")
    bench.tick(after_ms=ESCROW.check_interval_ms)
    bench.request(end_with_remark(position, UNKNOWN, "no", check=True))
    bench.broker.transactions.move_halves_below(bench.store.end, bench.now_ms)
    bench.turn()
    bench = bench.killed(with_snapshot=False)
    half = bench.coordinator.find_open(*position)
    assert half is not None
    assert (half.checks, half.unknown_answers) == (1, 1)


def test_a_long_remark_with_control_characters_is_shortened_to_one_line() -> None:
    bench = EscrowBench()
    position = bench.park("k")
    remark = "java.lang.Exception: no\n\tat Bank\x01\x02" + "x" * 100_000
    assert bench.request(end_with_remark(position, UNKNOWN, remark)).code == 0
    reason = step(bench, "k", "unknown_at_send")["reason"]
    assert reason.startswith("java.lang.Exception: no  at Bank  xxx")
    assert len(reason) == REMARK_LENGTH_MAX
    assert bench.request(end_with_remark(position, ROLLBACK, remark)).code == 0
    op = decode_op(bench.messages(names.OP_TOPIC)[0])
    assert op is not None
    assert op.reason.startswith("java.lang.Exception: no  at Bank  xxx")


# --- positions -----------------------------------------------------------------------------------


def step_records(bench: EscrowBench, name: str) -> list[tuple[str, str, int]]:
    """Return kind, topic and queue offset of the records that a step of transaction k stored."""
    records = step(bench, "k", name)["records"]
    for record in records:
        assert bench.store.record_at(record["logOffset"]).topic == record["topic"]
    return [(record["kind"], record["topic"], record["queueOffset"]) for record in records]


def test_a_history_has_the_positions_of_half_final_and_op() -> None:
    bench = EscrowBench()
    bench.end(bench.park("other"), ROLLBACK)
    bench.end(bench.park("k"), COMMIT)
    assert step_records(bench, "parked") == [("half", names.HALF_TOPIC, 1)]
    assert step_records(bench, "committed") == [("final", "T", 0), ("op", names.OP_TOPIC, 1)]


def test_a_history_has_the_positions_of_the_stranded_copy_and_its_op() -> None:
    bench = EscrowBench()
    position = bench.park("k")
    strand_with_unknown(bench, position, "no")
    assert step_records(bench, "stranded") == [
        ("stranded", names.STRANDED_TOPIC, 0),
        ("op", names.OP_TOPIC, 0),
    ]
    bench.end(position, ROLLBACK)
    assert step_records(bench, "rolled_back") == [("op", names.OP_TOPIC, 1)]


def test_a_history_has_the_position_of_the_copy_of_a_moved_half() -> None:
    bench = EscrowBench()
    bench.park("k")
    bench.broker.transactions.move_halves_below(bench.store.end, bench.now_ms)
    bench.turn()
    assert step_records(bench, "appended_again") == [
        ("half", names.HALF_TOPIC, 1),
        ("op", names.OP_TOPIC, 0),
    ]
