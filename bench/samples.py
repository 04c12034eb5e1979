"""Messages and stores for the figures: 1 KiB bodies with the properties that clients send."""

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
    """The same one each time: a broker has just read it from a socket, so it is in the cache."""
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
    """A fresh directory; ESCROWMQ_BENCH_DIR says on which file system."""
    path = Path(
        tempfile.mkdtemp(prefix="escrowmq-bench-", dir=os.environ.get("ESCROWMQ_BENCH_DIR"))
    )
    try:
        yield path
    finally:
        shutil.rmtree(path)
