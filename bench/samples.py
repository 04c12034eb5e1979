"""Messages and stores for the benchmarks: 1 KiB bodies with the usual properties."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from escrowmq.config import StoreConfig
from escrowmq.message.keys import encode_host
from escrowmq.message.record import NewRecord
from escrowmq.store.disk import RealDisk
from escrowmq.store.store import MessageStore

HOST = encode_host("127.0.0.1", 10911)
NOW_MS = 1_700_000_000_000
TOPIC = "TopicTest"


@cache
def _body(size: int) -> bytes:
    """Return the same record each time: a broker has just read it, so it is in the CPU cache."""
    return b"x" * size


def sample(number: int, *, queues: int = 4, body_bytes: int = 1024) -> NewRecord:
    unique = b"7F0000012A9F18B4AAC2%08X%04X" % (number >> 16, number & 0xFFFF)
    return NewRecord(
        topic=TOPIC,
        queue_id=number % queues,
        body=_body(body_bytes),
        properties=b"TAGS\x01TagA\x02UNIQ_KEY\x01%s\x02WAIT\x01true\x02" % unique,
        born_ms=NOW_MS,
        born_host=HOST,
    )


def open_store(directory: Path, settings: StoreConfig | None = None) -> MessageStore:
    return MessageStore.open(RealDisk(directory), settings or StoreConfig(), store_host=HOST)


@contextmanager
def directory() -> Iterator[Path]:
    """Create a new directory on the file system given by ESCROWMQ_BENCH_DIR."""
    path = Path(
        tempfile.mkdtemp(prefix="escrowmq-bench-", dir=os.environ.get("ESCROWMQ_BENCH_DIR"))
    )
    try:
        yield path
    finally:
        shutil.rmtree(path)
