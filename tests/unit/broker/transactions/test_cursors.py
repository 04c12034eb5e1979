"""The request for RocketMQ's two cursors, and the worked example of messages 1 to 7.

The example is the one that articles about RocketMQ use. RocketMQ appends a half again before it
checks it, so that its cursor can advance. EscrowMQ does not move the half, and the half cursor
stays at the first open half. `docs/from-the-articles.md` shows both side by side.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from escrowmq.remoting.bodies import TransactionCursors, decode_body
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import TransactionCursorsHeader
from tests.support.broker_requests import new_request
from tests.support.escrows import COMMIT, ESCROW, EscrowBench, HalfPosition, sent_checks


class QueueState(NamedTuple):
    """Cursor and end of both queue_state, and the first open half."""

    half_cursor: int
    half_end: int
    op_cursor: int
    op_end: int
    first_open: int | None


def read_cursors(bench: EscrowBench) -> TransactionCursors:
    request = new_request(RequestCode.TRANSACTION_CURSORS, TransactionCursorsHeader())
    return decode_body(TransactionCursors, bench.request(request).body)


def queue_state(bench: EscrowBench) -> QueueState:
    cursors = read_cursors(bench)
    return QueueState(
        cursors.half_cursor,
        cursors.half_end,
        cursors.op_cursor,
        cursors.op_end,
        cursors.first_open,
    )


def test_the_worked_example_of_messages_1_to_7() -> None:
    bench = EscrowBench()
    positions: dict[int, HalfPosition] = {}

    def send(*numbers: int) -> None:
        for number in numbers:
            positions[number] = bench.park(str(number))

    def commit(number: int) -> None:
        assert bench.end(positions[number], COMMIT).code == 0

    def checked_keys() -> list[str]:
        bench.tick(after_ms=ESCROW.check_interval_ms)
        return sorted(key for key, _ in sent_checks(bench.channel))

    send(1, 2, 3)
    for number in (1, 2, 3):
        commit(number)
    assert queue_state(bench) == QueueState(3, 3, 3, 3, None)

    send(4)
    assert checked_keys() == ["4"]
    assert queue_state(bench) == QueueState(3, 4, 3, 3, 3), (
        "4 is checked where it is, not appended again"
    )

    commit(4)
    assert queue_state(bench) == QueueState(4, 4, 4, 4, None)

    send(5, 6, 7)
    commit(7)
    assert checked_keys() == ["5", "6"]
    assert queue_state(bench) == QueueState(4, 7, 4, 5, 4), "the op of 7 waits for 5 and 6"

    commit(5)
    assert queue_state(bench) == QueueState(5, 7, 4, 6, 5), "the op of 7 is first in the op queue"

    commit(6)
    assert queue_state(bench) == QueueState(7, 7, 7, 7, None)
    assert bench.bodies() == [b"1", b"2", b"3", b"4", b"7", b"5", b"6"]


def test_the_next_check_is_that_of_the_first_half_that_is_due() -> None:
    bench = EscrowBench()
    assert read_cursors(bench).next_due is None
    bench.park("slow", CHECK_IMMUNITY_TIME_IN_SECONDS="60")
    quick = bench.park("quick", CHECK_IMMUNITY_TIME_IN_SECONDS="5")
    cursors = read_cursors(bench)
    assert (cursors.open, cursors.stranded) == (2, 0)
    assert cursors.next_due == bench.now_ms + 5_000
    bench.end(quick, COMMIT)
    assert read_cursors(bench).next_due == bench.now_ms + 60_000


def test_a_stranded_half_is_counted_and_has_no_next_check() -> None:
    bench = EscrowBench()
    bench.park("k")
    for _ in range(ESCROW.checks_max + 1):
        bench.tick(after_ms=ESCROW.check_interval_ms)
    cursors = read_cursors(bench)
    assert (cursors.open, cursors.stranded, cursors.next_due) == (0, 1, None)
    assert cursors.half_cursor == 1, "to RocketMQ a stranded half is decided"


def test_the_search_for_the_next_check_passes_a_bounded_number_of_decided_halves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("escrowmq.escrow.checks.PASSED_ENTRIES_MAX", 3)
    bench = EscrowBench()
    for number in range(5):
        bench.end(bench.park(str(number)), COMMIT)
    first_slot_ms = bench.now_ms + ESCROW.immunity_ms
    bench.now_ms += 60_000
    bench.park("open")
    assert read_cursors(bench).next_due == first_slot_ms
