"""A start with the native table restores the same halves and decisions as one in Python."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from escrowmq.escrow.half_table import Half
from escrowmq.message.names import OP_TOPIC
from escrowmq.native import SWITCH, load_native
from tests.support.broker_requests import send_request
from tests.support.escrows import COMMIT, ROLLBACK, UNKNOWN, EscrowBench

NATIVE = load_native({})
pytestmark = pytest.mark.skipif(NATIVE.module is None, reason=NATIVE.reason)

PROPERTIES: list[dict[str, str]] = [
    {},
    {"KEYS": "a b"},
    {"CHECK_IMMUNITY_TIME_IN_SECONDS": "3"},
    {"DELAY": "2"},
    {"TRAN_MSG_": "PGROUP"},
]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("park"), st.sampled_from(PROPERTIES), st.sampled_from(["p", "q"])),
        st.tuples(st.just("end"), st.integers(0, 30), st.sampled_from([COMMIT, ROLLBACK, UNKNOWN])),
        st.tuples(st.just("send"), st.integers(0, 40_000), st.none()),
        st.tuples(st.just("tick"), st.integers(1, 40_000), st.none()),
        st.tuples(st.just("move"), st.none(), st.none()),
    ),
    max_size=25,
)


def run(bench: EscrowBench, steps: list[Any]) -> None:
    positions = []
    for number, (step, first, second) in enumerate(steps):
        if step == "park":
            positions.append(bench.park(f"k{number}", group=second, **first))
        elif step == "end" and positions:
            bench.end(positions[first % len(positions)], second)
        elif step == "send":
            bench.request(send_request(body=bytes(first)))
        elif step == "tick":
            bench.tick(first)
        elif step == "move":
            bench.broker.transactions.move_halves_below(bench.store.end, bench.now_ms)
            bench.turn()


def description(half: Half) -> tuple[object, ...]:
    offsets = half.queue_offset, half.log_offset, half.size, half.queue_id, half.previous_offsets
    times = half.parked_ms, half.due_ms, half.checks, half.unknown_answers
    rest = half.is_stranded, half.reason, half.last_remark, half.attempt
    return (*half.group_topic_key, *offsets, *times, *rest)


def recovered(bench: EscrowBench, *, with_snapshot: bool) -> list[object]:
    """Kill the process, start again, and return what it knows."""
    restarted = bench.killed(with_snapshot=with_snapshot)
    coordinator, store = restarted.coordinator, restarted.store
    state: list[object] = [description(half) for half in coordinator.halves]
    state += [coordinator.schedule.next_due_ms(coordinator.halves), coordinator.states.dump()]
    state += [coordinator.aliases, coordinator.counters.unreadable_halves, store.end]
    due = coordinator.schedule.take_due(1 << 60, 10_000, coordinator.halves)
    restarted.store.abandon()
    return [*state, sorted(set(due))]


@given(steps=STEPS, with_snapshot=st.booleans())
@settings(deadline=None, max_examples=60)
def test_both_tables_are_restored_alike(steps: list[Any], with_snapshot: bool) -> None:
    states = []
    for switch in ("0", "1"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(SWITCH, switch)
            bench = EscrowBench()
            run(bench, steps)
            states.append(recovered(bench, with_snapshot=with_snapshot))
    assert states[0] == states[1]


def test_the_native_table_restores_plain_halves_by_itself() -> None:
    """Otherwise the test above would compare the Python path with itself."""
    bench = EscrowBench()
    for number in range(50):
        bench.park(f"k{number}")
    window = bench.store.record_window("RMQ_SYS_TRANS_HALF_TOPIC", 0, 0, 50)
    assert window is not None
    assert NATIVE.module is not None
    table = NATIVE.module.HalfTable(decided_max=1)
    entries, data, begin = window.entries, window.data, window.data_begin
    runs = table.restore(0, entries, data, begin, lambda *_: (1, 2, 1 << 62))
    assert runs == [(2, 50)]
    assert len(table) == 50


def committed_ops(bench: EscrowBench, count: int) -> bytes:
    """Commit halves, and return what the native table reads of their ops."""
    for position in [bench.park(f"k{number}") for number in range(count)]:
        bench.end(position, COMMIT)
    return read_commits(bench)


def read_commits(bench: EscrowBench, *, flipped_byte: int | None = None) -> bytes:
    window = bench.store.record_window(OP_TOPIC, 0, 0, 1 << 20)
    assert window is not None
    assert NATIVE.module is not None
    data = bytearray(window.data)
    if flipped_byte is not None:
        data[flipped_byte] ^= 1
    table = NATIVE.module.HalfTable(decided_max=1)
    packed = table.plain_commits(0, window.entries, bytes(data), window.data_begin)
    assert isinstance(packed, bytes)
    return packed


def test_the_native_table_reads_plain_commits_by_itself() -> None:
    assert array("q", committed_ops(EscrowBench(), 50)) == array("q", range(50))


def test_the_native_table_stops_in_front_of_an_op_that_is_no_plain_commit() -> None:
    bench = EscrowBench()
    committed_ops(bench, 3)
    bench.end(bench.park("other"), ROLLBACK)
    bench.end(bench.park("last"), COMMIT)
    assert array("q", read_commits(bench)) == array("q", range(3))


def test_the_native_table_reads_no_damaged_op() -> None:
    bench = EscrowBench()
    committed_ops(bench, 1)
    window = bench.store.record_window(OP_TOPIC, 0, 0, 1)
    assert window is not None
    readable = [n for n in range(len(window.data)) if read_commits(bench, flipped_byte=n)]
    assert readable == []
