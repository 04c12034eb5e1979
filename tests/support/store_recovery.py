"""Create stores that were closed or killed, and check what must hold after the next start.

A test creates a store, changes its files and opens it again. `check_usable` then reads everything
by log offset, queue and key, appends, closes, checks the files and opens the store once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from escrowmq.config import StoreConfig
from escrowmq.message.keys import has_queue_entry
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import StoredRecord
from escrowmq.store.disk import RealDisk
from escrowmq.store.flush_marks import MARKS_PATH
from escrowmq.store.store import MessageStore
from tests.support.stores import NOW_MS, TINY, assert_clean, fill, locate, open_store, sample

CHECKPOINTED_COUNT = 24  # samples below the last checkpoint
SAMPLE_COUNT = 40


def make_store(root: Path, *, killed: bool, settings: StoreConfig = TINY) -> list[StoredRecord]:
    """Append SAMPLE_COUNT samples, the later ones after a checkpoint. Return the records."""
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
    """Return a copy whose body is not a view of the log, so that it survives the store."""
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return StoredRecord(**{**fields, "body": bytes(record.body)})


def lose_marks(root: Path) -> None:
    """Remove the flush marks, as a power cut may do: only the checkpoint says what was durable."""
    (root / MARKS_PATH).unlink()


def overwrite(root: Path, log_offset: int, data: bytes) -> None:
    path, position = locate(root, log_offset)
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def flip_bit(root: Path, record: StoredRecord) -> None:
    """Flip a bit of the body, which the checksum covers."""
    overwrite(root, record.log_offset + 88, bytes([bytes(record.body)[0] ^ 1]))


def end_of(records: list[StoredRecord]) -> int:
    """Return the log offset after the last record."""
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
    reopened = reopen(root, settings)
    assert reopened.recovery.was_clean
    assert reopened.recovery.records == 0
    bodies = [bytes(record.body) for record in reopened.find_by_key("T1", "k1001")]
    assert bodies == [sample(1001).body]
    check_content(reopened, expected, missing, later_count=20)
    reopened.close()


def check_content(
    store: MessageStore,
    expected: list[StoredRecord],
    missing: Iterable[StoredRecord] = (),
    later_count: int = 0,
) -> None:
    """Check that queues and keys have the expected records and not the missing ones.

    `later_count` records were appended after them, half of them to each queue.
    """
    by_queue: dict[tuple[str, int], list[StoredRecord]] = {}
    for record in expected:
        assert store.record_at(record.log_offset) == record
        key = decode_properties(record.properties)["UNIQ_KEY"]
        log_offsets = [match.log_offset for match in store.find_by_key(record.topic, key)]
        assert log_offsets == [record.log_offset]
        if has_queue_entry(record.sys_flag):
            by_queue.setdefault((record.topic, record.queue_id), []).append(record)
    for queue, records in by_queue.items():
        assert read_all(store, queue, records[0].queue_offset)[: len(records)] == [
            (record.queue_offset, record.body) for record in records
        ]
        assert store.min_offset(*queue) == records[0].queue_offset
        assert store.max_offset(*queue) == records[-1].queue_offset + 1 + later_count // 2
    for record in missing:
        key = decode_properties(record.properties)["UNIQ_KEY"]
        assert store.find_by_key(record.topic, key) == []
        messages = read_all(store, (record.topic, record.queue_id), 0)
        assert record.body not in [body for _, body in messages]


def read_all(
    store: MessageStore, queue: tuple[str, int], first_offset: int
) -> list[tuple[int, bytes]]:
    """Return (queue offset, body) of every message that consumers of a queue would get."""
    messages = []
    queue_offset = max(first_offset, store.min_offset(*queue))
    while queue_offset < store.max_offset(*queue):
        read = store.read(*queue, queue_offset, count_max=1)
        for data in read.slices:
            length = int.from_bytes(data[84:88], "big")
            assert int.from_bytes(data[20:28], "big") == queue_offset
            messages.append((queue_offset, bytes(data[88 : 88 + length])))
        queue_offset = read.next_offset
    return messages
