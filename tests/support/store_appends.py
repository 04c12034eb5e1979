"""Helpers for tests of appends and reads, on disks in memory with tiny files."""

from __future__ import annotations

from typing import Any

from escrowmq.message.record import NewRecord
from escrowmq.store.queue_reader import QueueRead
from escrowmq.store.store import MessageStore
from tests.support.stores import NOW_MS, properties

FIRST_FILE = f"commitlog/{0:020d}"


def plain(body: bytes = b"body", **changes: Any) -> NewRecord:
    """Return a record of one queue, without tags and keys."""
    fields: dict[str, Any] = {"topic": "T", "queue_id": 0, "body": body, "properties": b""}
    return NewRecord(**{**fields, **changes})


def append(store: MessageStore, *records: NewRecord, now_ms: int = NOW_MS) -> list[int]:
    """Append records and return their log offsets."""
    return [position.log_offset for position in store.append(records, now_ms=now_ms)]


def bodies(read: QueueRead) -> list[bytes]:
    """Return the bodies of the records in the slices of a read."""
    bodies_read = []
    for data in read.slices:
        index = 0
        while index < len(data):
            size = int.from_bytes(data[index : index + 4], "big")
            length = int.from_bytes(data[index + 84 : index + 88], "big")
            bodies_read.append(bytes(data[index + 88 : index + 88 + length]))
            index += size
    assert len(bodies_read) == read.count
    return bodies_read


def all_bodies(store: MessageStore) -> list[bytes]:
    """Return the bodies of all records in the log."""
    return [bytes(record.body) for record in store.records()]


def keyed(key: str, body: bytes = b"", **changes: Any) -> NewRecord:
    """Return a record with KEYS."""
    return plain(body, properties=properties(KEYS=key), **changes)


def bodies_by_key(store: MessageStore, topic: str, key: str, **limits: int) -> list[bytes]:
    """Return the bodies of the records that the index has for a key."""
    return [bytes(record.body) for record in store.find_by_key(topic, key, **limits)]
