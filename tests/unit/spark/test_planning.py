"""Ranges divided into tasks: each message is in one task, and tasks have about the same bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from escrowmq.client.messages import MessageQueue
from escrowmq.spark.planning import LARGE_TASK_BYTES, MIN_TASK_BYTES, TaskSizing, split_ranges
from escrowmq.spark.range_pull import QueueRange

MIB = 1 << 20


def queue_range(queue_id: int, begin: int, end: int) -> QueueRange:
    return QueueRange(MessageQueue("t", "b", queue_id), "b:1", begin, end)


def messages_of(ranges: list[QueueRange]) -> list[tuple[int, int]]:
    """Return the queue id and the queue offset of each message in the ranges."""
    return [
        (part.queue.queue_id, queue_offset)
        for part in ranges
        for queue_offset in range(part.begin, part.end)
    ]


def test_the_number_of_tasks_depends_on_the_bytes_and_the_cores() -> None:
    sizing = TaskSizing(cores=4)
    assert sizing.task_count(1) == 1
    assert sizing.task_count(2 * MIN_TASK_BYTES) == 2
    assert sizing.task_count(40 * MIN_TASK_BYTES) == 4
    assert sizing.task_count(5 * LARGE_TASK_BYTES) == 8
    assert TaskSizing(cores=4, min_tasks=9).task_count(1) == 9
    assert TaskSizing(cores=4, max_task_bytes=MIB).task_count(20 * MIB) == 20


def test_a_queue_with_most_messages_is_divided_for_all_cores() -> None:
    tasks = split_ranges(
        [queue_range(0, 0, 100_000), queue_range(1, 0, 10)], TaskSizing(cores=4), {}
    )
    assert len(tasks) == 4
    assert all(20_000 < sum(part.end - part.begin for part in task) < 30_000 for task in tasks)


def test_tasks_are_divided_by_bytes_and_not_by_messages() -> None:
    small, large = MessageQueue("t", "b", 0), MessageQueue("t", "b", 1)
    sizes = {small: 100.0, large: 1_000_000.0}
    tasks = split_ranges(
        [queue_range(0, 0, 1000), queue_range(1, 0, 100)], TaskSizing(cores=2), sizes
    )
    assert [
        sum(part.end - part.begin for part in task if part.queue == large) for task in tasks
    ] == [50, 50]


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 200)), max_size=8),
    st.integers(1, 20),
    st.integers(1, 4_000_000),
)
def test_every_message_is_in_one_task(
    spans: list[tuple[int, int]], tasks_min: int, size: int
) -> None:
    ranges = [
        queue_range(index, begin, begin + count) for index, (begin, count) in enumerate(spans)
    ]
    sizes = {part.queue: float(size + part.queue.queue_id) for part in ranges}
    tasks = split_ranges(ranges, TaskSizing(cores=2, min_tasks=tasks_min), sizes)
    parts = [part for task in tasks for part in task]
    messages = messages_of(parts)
    assert messages == messages_of(ranges)
    assert all(part.begin < part.end for part in parts)
    assert len(tasks) <= max(tasks_min, TaskSizing(cores=2).task_count(len(messages) * (size + 8)))
