"""Ranges cut into tasks: nothing left out, nothing twice, about the same bytes for each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from escrowmq.client.messages import MessageQueue
from escrowmq.spark.planning import LARGE_TASK_BYTES, MIN_TASK_BYTES, TaskSizing, split_ranges
from escrowmq.spark.range_pull import QueueRange

MIB = 1 << 20


def piece(queue_id: int, begin: int, end: int) -> QueueRange:
    return QueueRange(MessageQueue("t", "b", queue_id), "b:1", begin, end)


def test_a_little_data_is_one_task_and_much_is_twice_the_cores() -> None:
    rules = TaskSizing(cores=4)
    assert rules.task_count(1) == 1
    assert rules.task_count(2 * MIN_TASK_BYTES) == 2
    assert rules.task_count(40 * MIN_TASK_BYTES) == 4
    assert rules.task_count(5 * LARGE_TASK_BYTES) == 8
    assert TaskSizing(cores=4, min_tasks=9).task_count(1) == 9
    assert TaskSizing(cores=4, max_task_bytes=MIB).task_count(20 * MIB) == 20


def test_one_hot_queue_uses_every_core() -> None:
    tasks = split_ranges([piece(0, 0, 100_000), piece(1, 0, 10)], TaskSizing(cores=4), {})
    assert len(tasks) == 4
    assert all(20_000 < sum(p.end - p.begin for p in task) < 30_000 for task in tasks)


def test_large_messages_weigh_more() -> None:
    small, large = MessageQueue("t", "b", 0), MessageQueue("t", "b", 1)
    sizes = {small: 100.0, large: 1_000_000.0}
    tasks = split_ranges([piece(0, 0, 1000), piece(1, 0, 100)], TaskSizing(cores=2), sizes)
    assert [sum(p.end - p.begin for p in task if p.queue == large) for task in tasks] == [50, 50]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 200)), max_size=8),
    st.integers(1, 20),
    st.integers(1, 4_000_000),
)
def test_every_message_is_in_one_task(
    spans: list[tuple[int, int]], tasks_min: int, size: int
) -> None:
    pieces = [piece(at, begin, begin + count) for at, (begin, count) in enumerate(spans)]
    sizes = {p.queue: float(size + p.queue.queue_id) for p in pieces}
    tasks = split_ranges(pieces, TaskSizing(cores=2, min_tasks=tasks_min), sizes)
    seen = [(p.queue.queue_id, at) for task in tasks for p in task for at in range(p.begin, p.end)]
    assert seen == [(p.queue.queue_id, at) for p in pieces for at in range(p.begin, p.end)]
    assert all(p.begin < p.end for task in tasks for p in task)
    assert len(tasks) <= max(tasks_min, TaskSizing(cores=2).task_count(len(seen) * (size + 8)))
