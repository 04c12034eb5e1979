"""A real process that appends and flushes is killed at a random moment, again and again.

The process prints how many records are flushed; whatever it printed must be there afterwards, once
and in order. Five rounds on one directory, each going on where the last one was killed.
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

# Every seventh flush is a checkpoint; numbers go on from what is in the log.
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


def write_and_be_killed(root: Path, *, after_lines: int, then_bytes: int) -> int:
    """What the process had flushed, as far as it could say so."""
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(root)],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    assert process.stdout is not None
    try:
        for _ in range(after_lines):
            assert process.stdout.readline(), "the writer ended by itself"
        process.stdout.read(then_bytes)  # a moment that no line decides
    finally:
        process.kill()
        said = process.stdout.read()
        process.stdout.close()
    assert process.wait() == -signal.SIGKILL
    return int(said.rpartition(b"\n")[0].rpartition(b"\n")[2] or 0)


@pytest.mark.slow
def test_what_was_flushed_before_a_kill_is_there_once_and_in_order(tmp_path: Path) -> None:
    seed = random.randrange(1 << 32)
    rng = random.Random(seed)
    print(f"SEED={seed}")  # noqa: T201 - shown if the test fails
    root = tmp_path / "store"
    flushed = 0
    for _ in range(ROUNDS):
        said = write_and_be_killed(
            root, after_lines=rng.randint(1, 60), then_bytes=rng.randint(0, 9)
        )
        flushed = max(flushed, said)
        assert (root / "abort").exists()
        assert_clean(root, SETTINGS)
        flushed = look(root, flushed)
    assert flushed > ROUNDS


def look(root: Path, flushed: int) -> int:
    store = MessageStore.open(RealDisk(root), SETTINGS, store_host=HOST)
    assert not store.recovery.was_clean
    assert store.recovery.damage == []
    numbers = [int(bytes(record.body).partition(b":")[0]) for record in store.records()]
    assert numbers == list(range(len(numbers)))
    assert len(numbers) >= flushed
    for queue_id in range(QUEUES):
        assert served(store, queue_id) == numbers[queue_id::QUEUES]
    for number in numbers[:: max(1, len(numbers) // 50)]:
        (found,) = store.find_by_key("orders", f"U{number}")
        assert found.body[: len(str(number))] == str(number).encode()
    store.abandon()  # so that the next round finds a directory that nobody has closed
    return len(numbers)


def served(store: MessageStore, queue_id: int) -> list[int]:
    numbers = []
    at = 0
    while at < store.max_offset("orders", queue_id):
        found = store.read("orders", queue_id, at)
        for data in found.slices:
            position = 0
            while position < len(data):
                body = bytes(data[position + 88 : position + 88 + 12])
                numbers.append(int(body.partition(b":")[0]))
                position += int.from_bytes(data[position : position + 4], "big")
        at = found.next_offset
    return numbers
