"""Stores that were closed or killed, and what must hold after the next start.

A test creates a directory, changes something in it and opens it again. `check_life` then reads
everything by log, queue and key, appends, closes, checks the directory and opens it once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from escrowmq.config import StoreConfig
from escrowmq.message.keys import has_queue_entry
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import StoredRecord
from escrowmq.store.disk import RealDisk
from escrowmq.store.store import MessageStore
from tests.support.stores import NOW_MS, TINY, assert_clean, fill, locate, open_store, sample

CHECKPOINTED_COUNT = 24  # so many samples lie below the last checkpoint
SAMPLE_COUNT = 40


def make_store(root: Path, *, killed: bool, settings: StoreConfig = TINY) -> list[StoredRecord]:
    """Append samples 0 to ALL - 1, the later ones after a checkpoint. Return the records."""
    store = open_store(RealDisk(root), settings)
    fill(store, range(9))
    store.checkpoint()
    fill(store, range(9, CHECKPOINTED_COUNT))
    store.checkpoint()
    fill(store, range(CHECKPOINTED_COUNT, SAMPLE_COUNT))
    store.flush()
    records = [detached_copy(record) for record in store.records()]
    if killed:
        store.abandon()
    else:
        store.close()
    return records


def detached_copy(record: StoredRecord) -> StoredRecord:
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return StoredRecord(**{**fields, "body": bytes(record.body)})


def overwrite(root: Path, log_offset: int, data: bytes) -> None:
    path, position = locate(root, log_offset)
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def flip_bit(root: Path, record: StoredRecord) -> None:
    """Flip a bit of the body, which the checksum covers."""
    overwrite(root, record.log_offset + 88, bytes([bytes(record.body)[0] ^ 1]))


def end_of(records: list[StoredRecord]) -> int:
    return records[-1].log_offset + records[-1].size


def reopen(root: Path, settings: StoreConfig = TINY) -> MessageStore:
    return open_store(RealDisk(root), settings)


def check_usable(
    root: Path,
    store: MessageStore,
    expected: list[StoredRecord],
    settings: StoreConfig = TINY,
    *,
    missing: Iterable[StoredRecord] = (),
) -> None:
    """Check that a store contains exactly these records, accepts more, and can be reopened."""
    check_content(store, expected, missing)
    store.append([sample(1000 + number) for number in range(20)], now_ms=NOW_MS)
    store.close()
    assert_clean(root, settings)
    again = reopen(root, settings)
    assert again.recovery.was_clean
    assert again.recovery.records == 0
    bodies = [bytes(record.body) for record in again.find_by_key("T1", "k1001")]
    assert bodies == [sample(1001).body]
    check_content(again, expected, missing, behind=20)
    again.close()


def check_content(
    store: MessageStore,
    expected: list[StoredRecord],
    missing: Iterable[StoredRecord] = (),
    behind: int = 0,
) -> None:
    by_queue: dict[tuple[str, int], list[StoredRecord]] = {}
    for record in expected:
        assert store.record_at(record.log_offset) == record
        key = decode_properties(record.properties)["UNIQ_KEY"]
        assert [found.log_offset for found in store.find_by_key(record.topic, key)] == [
            record.log_offset
        ]
        if has_queue_entry(record.sys_flag):
            by_queue.setdefault((record.topic, record.queue_id), []).append(record)
    for queue, records in by_queue.items():
        assert read_all(store, queue, records[0].queue_offset)[: len(records)] == [
            (record.queue_offset, record.body) for record in records
        ]
        assert store.min_offset(*queue) == records[0].queue_offset
        assert store.max_offset(*queue) == records[-1].queue_offset + 1 + behind // 2
    for record in missing:
        key = decode_properties(record.properties)["UNIQ_KEY"]
        assert store.find_by_key(record.topic, key) == []
        served = read_all(store, (record.topic, record.queue_id), 0)
        assert record.body not in [body for _, body in served]


def read_all(store: MessageStore, queue: tuple[str, int], at: int) -> list[tuple[int, bytes]]:
    """Return (queue offset, body) of every message that consumers of a queue would get."""
    served = []
    at = max(at, store.min_offset(*queue))
    while at < store.max_offset(*queue):
        found = store.read(*queue, at, count_max=1)
        for data in found.slices:
            length = int.from_bytes(data[84:88], "big")
            offset = int.from_bytes(data[20:28], "big")
            assert offset == at
            served.append((offset, bytes(data[88 : 88 + length])))
        at = found.next_offset
    return served
