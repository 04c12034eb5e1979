"""A real process that appends and flushes is killed at a random moment, again and again.

The process prints how many records are flushed; that many records must be there after the kill,
once and in order. There are five rounds on one directory, and each continues the one before.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from escrowmq.config import StoreConfig
from escrowmq.store.disk import RealDisk
from escrowmq.store.store import MessageStore
from tests.support.stores import HOST, assert_clean

ROUNDS = 5
QUEUES = 3
SETTINGS = StoreConfig(
    segment_bytes=64 * 1024, queue_file_bytes=2000, index_slots=101, index_entries=500
)

# Every seventh flush is a checkpoint; the numbers continue those in the log.
WRITER = """
import sys

from escrowmq.clock import SystemClock
from escrowmq.message.record import NewRecord
from escrowmq.store.disk import RealDisk
from escrowmq.store.store import MessageStore
from tests.e2e.broker.test_kill_store import QUEUES, SETTINGS
from tests.support.stores import HOST

clock = SystemClock()
store = MessageStore.open(RealDisk(sys.argv[1]), SETTINGS, store_host=HOST)
count = sum(1 for _ in store.records())
for turn in range(1 << 30):
    batch = [
        NewRecord(
            topic="orders",
            queue_id=number % QUEUES,
            body=b"%d:" % number + b"x" * (number % 700),
            properties=b"UNIQ_KEY\\x01U%d\\x02" % number,
        )
        for number in range(count, count + 1 + turn % 9)
    ]
    store.append(batch, now_ms=clock.now_ms())
    store.checkpoint() if turn % 7 == 6 else store.flush()
    count += len(batch)
    print(count, flush=True)
"""


def write_and_kill(root: Path, *, after_lines: int, then_bytes: int) -> int:
    """Kill a writer after this much output, and return the last count that it printed."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert process.stdout is not None
    try:
        for _ in range(after_lines):
            assert process.stdout.readline(), "the writer ended before it was killed"
        process.stdout.read(then_bytes)  # not always at the end of a line, to vary the moment
    finally:
        process.kill()
        output = process.stdout.read()
        process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    return int(output.rpartition(b"\n")[0].rpartition(b"\n")[2] or 0)


@pytest.mark.slow
def test_flushed_records_are_found_once_and_in_order_after_a_kill(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    print(f"SEED={seed}")  # noqa: T201 - shown if the test fails
    root = tmp_path / "store"
    flushed = 0
    for _ in range(ROUNDS):
        printed = write_and_kill(root, after_lines=rng.randint(1, 60), then_bytes=rng.randint(0, 9))
        flushed = max(flushed, printed)
        assert (root / "abort").exists()
        assert_clean(root, SETTINGS)
        flushed = check_store(root, flushed)
    assert flushed > ROUNDS


def check_store(root: Path, flushed: int) -> int:
    """Check log, queues and key index after a kill, and return the number of records."""
    store = MessageStore.open(RealDisk(root), SETTINGS, store_host=HOST)
    assert not store.recovery.was_clean
    assert store.recovery.damage == []
    numbers = [int(bytes(record.body).partition(b":")[0]) for record in store.records()]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= flushed
    for queue_id in range(QUEUES):
        assert queue_numbers(store, queue_id) == numbers[queue_id::QUEUES]
    for number in numbers[:: max(1, len(numbers) // 50)]:
        (record,) = store.find_by_key("orders", f"U{number}")
        assert record.body[: len(str(number))] == str(number).encode()
    store.abandon()  # without closing, so that the next round starts after a crash too
    return len(numbers)


def queue_numbers(store: MessageStore, queue_id: int) -> list[int]:
    """Return the numbers in the bodies of a queue's messages, as a pull reads them."""
    numbers = []
    queue_offset = 0
    while queue_offset < store.max_offset("orders", queue_id):
        result = store.read("orders", queue_id, queue_offset)
        for data in result.slices:
            position = 0
            while position < len(data):
                body = bytes(data[position + 88 : position + 88 + 12])
                numbers.append(int(body.partition(b":")[0]))
                position += int.from_bytes(data[position : position + 4], "big")
        queue_offset = result.next_offset
    return numbers
