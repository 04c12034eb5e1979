"""Helpers for tests of appends and reads, on disks in memory with tiny files."""

from __future__ import annotations

from typing import Any

from escrowmq.message.record import NewRecord
from escrowmq.store.queue_reader import QueueRead
from escrowmq.store.store import MessageStore
from tests.support.stores import (
    NOW_MS,
    properties,
)

FIRST_FILE = f"commitlog/{0:020d}"


def plain(body: bytes = b"body", **changes: Any) -> NewRecord:
    """Return a record of one queue, without tags and keys."""
    fields: dict[str, Any] = {"topic": "T", "queue_id": 0, "body": body, "properties": b""}
    return NewRecord(**{**fields, **changes})


def append(store: MessageStore, *records: NewRecord, now_ms: int = NOW_MS) -> list[int]:
    return [placed.log_offset for placed in store.append(records, now_ms=now_ms)]


def bodies(found: QueueRead) -> list[bytes]:
    """Return the bodies of the records in the slices of a read."""
    read = []
    for data in found.slices:
        at = 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 4], "big")
            length = int.from_bytes(data[at + 84 : at + 88], "big")
            read.append(bytes(data[at + 88 : at + 88 + length]))
            at += size
    assert len(read) == found.count
    return read


def all_bodies(store: MessageStore) -> list[bytes]:
    return [bytes(record.body) for record in store.records()]


def keyed(key: str, body: bytes = b"", **changes: Any) -> NewRecord:
    return plain(body, properties=properties(KEYS=key), **changes)


def bodies_by_key(store: MessageStore, topic: str, key: str, **limits: int) -> list[bytes]:
    return [bytes(record.body) for record in store.find_by_key(topic, key, **limits)]
