"""Appends that a store refuses: they change nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from escrowmq.errors import RecordRefused, StoreError, StoreFull, StoreLocked
from escrowmq.message.record import NewRecord
from escrowmq.store.disk import RealDisk
from escrowmq.store.queue_reader import ReadStatus
from escrowmq.store.store import MessageStore
from escrowmq.testing import MemoryDisk
from tests.support.store_appends import all_bodies, append, bodies, plain
from tests.support.stores import (
    NOW_MS,
    TINY,
    open_store,
)


def state(store: MessageStore) -> object:
    """Return everything that a refused append must not change."""
    queues = store.queues()
    offsets = [(store.min_offset(*queue), store.max_offset(*queue)) for queue in queues]
    return store.end, store.begin, queues, offsets, all_bodies(store)


PROPERTIES_BYTES_MAX = 32_767 - 21  # leaves space for the record CRC


@pytest.mark.parametrize(
    "invalid",
    [
        plain(b"x" * 4096),
        plain(topic=""),
        plain(topic="../x"),
        plain(topic=".."),
        plain(topic="a/b"),
        plain(topic="a b"),
        plain(topic="a\0b"),
        plain(topic="a\n"),
        plain(topic="tópico"),
        plain(topic="t" * 256),
        plain(topic="t" * 300),
        plain(queue_id=-1),
        plain(queue_id=1 << 31),
        plain(properties=b"x" * 4000),
        plain(b"x" * 2048, properties=b"x" * 2040),
    ],
    ids=lambda record: f"{record.topic[:9]!r} {record.queue_id} {len(record.body)}",
)
@pytest.mark.parametrize("transaction_type", [0, 4, 12], ids=["none", "prepared", "rollback"])
def test_an_invalid_record_is_refused_and_changes_nothing(
    invalid: NewRecord, transaction_type: int
) -> None:
    store = open_store(MemoryDisk())
    append(store, plain(b"before"))
    before = state(store)
    fields = {name: getattr(invalid, name) for name in invalid.__struct_fields__}
    with pytest.raises(RecordRefused):
        append(store, NewRecord(**{**fields, "sys_flag": transaction_type}))
    assert state(store) == before
    append(store, plain(b"after"))
    assert bodies(store.read("T", 0, 0)) == [b"before", b"after"]


@pytest.mark.parametrize(
    "fields",
    [
        {"flag": 1 << 31},
        {"sys_flag": 1 << 31},
        {"reconsume_times": 1 << 31},
        {"born_ms": 1 << 63},
        {"prepared_offset": -(1 << 63) - 1},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_number_that_its_field_cannot_hold_is_refused(
    store: MessageStore, fields: dict[str, int]
) -> None:
    append(store, plain(b"before"))
    before = state(store)
    with pytest.raises(RecordRefused):
        append(store, plain(b"wrong", **fields))
    assert state(store) == before


def test_properties_with_a_zero_byte_are_refused() -> None:
    # A zero byte in a record looks like an unwritten sector: recovery would truncate the log
    # there and lose all later records.
    disk = MemoryDisk()
    store = open_store(disk)
    append(store, plain(b"before"))
    with pytest.raises(RecordRefused):
        append(store, plain(b"zero", properties=b"name\x01va\0lue\x02"))
    append(store, plain(b"after"))
    store.flush()
    store.abandon()
    assert all_bodies(open_store(disk)) == [b"before", b"after"]


def test_a_refused_record_refuses_its_whole_batch(store: MessageStore) -> None:
    append(store, plain(b"before"))
    before = state(store)
    batch = [plain(b"a"), plain(b"b", topic="New"), plain(b"c", queue_id=7), plain(topic="a/b")]
    with pytest.raises(RecordRefused):
        store.append(batch, now_ms=NOW_MS + 99)
    assert state(store) == before
    assert store.read("New", 0, 0).status is ReadStatus.NO_QUEUE
    append(store, plain(b"after"))
    assert [record.stored_ms for record in store.records()] == [NOW_MS, NOW_MS]


def test_a_refused_batch_uses_no_queue_offsets(store: MessageStore) -> None:
    append(store, plain(b"before"))
    with pytest.raises(RecordRefused):
        append(store, plain(b"a"), plain(b"b"), plain(topic="a/b"))
    (result,) = store.append([plain(b"after")], now_ms=NOW_MS)
    assert result.queue_offset == 1
    assert store.max_offset("T", 0) == 2
    assert bodies(store.read("T", 0, 0)) == [b"before", b"after"]


def test_the_largest_record_fits() -> None:
    settings = replace(TINY, segment_bytes=1 << 20, sealed=True)
    store = open_store(MemoryDisk(), settings)
    largest = plain(
        b"x" * 100_000, topic="t" * 255, properties=b"k\x01" + b"v" * (PROPERTIES_BYTES_MAX - 2)
    )
    (log_offset,) = append(store, largest)
    # The record CRC and a separator before it use the rest of what the length can express.
    assert len(store.record_at(log_offset).properties) == 32_767 - 20
    with pytest.raises(RecordRefused, match="properties are"):
        append(store, plain(properties=b"k\x01" + b"v" * (PROPERTIES_BYTES_MAX - 1)))


def test_a_record_larger_than_a_segment_is_refused() -> None:
    store = open_store(MemoryDisk(), TINY)
    append(store, plain(b"x" * (4096 - 8 - 92)))
    with pytest.raises(RecordRefused, match="record is 4089 bytes, the limit is 4088"):
        append(store, plain(b"x" * (4096 - 8 - 91)))


def test_a_store_without_disk_space_refuses_appends_and_serves_reads(store: MessageStore) -> None:
    append(store, plain())
    before = state(store)
    store.has_disk_space = False
    with pytest.raises(StoreFull, match="nearly full"):
        append(store, plain())
    assert state(store) == before
    assert store.read("T", 0, 0).count == 1
    store.has_disk_space = True
    append(store, plain())


@pytest.mark.parametrize(
    "operation",
    [
        lambda store: store.append([plain()], now_ms=NOW_MS),
        lambda store: store.flush(),
        lambda store: store.checkpoint(),
        lambda store: store.record_at(0),
        lambda store: store.read("T", 0, 0),
        lambda store: list(store.records()),
        lambda store: store.offset_by_time("T", 0, NOW_MS),
        lambda store: store.min_offset("T", 0),
    ],
    ids=[
        "append",
        "flush",
        "checkpoint",
        "record_at",
        "read",
        "records",
        "offset_by_time",
        "min_offset",
    ],
)
def test_a_closed_store_raises_instead_of_looking_empty(
    tmp_path: Path, operation: Callable[[MessageStore], object]
) -> None:
    store = open_store(RealDisk(tmp_path))
    append(store, plain())
    store.close()
    with pytest.raises(StoreError):
        operation(store)


def test_a_store_can_be_closed_twice(store: MessageStore) -> None:
    append(store, plain())
    store.close()
    store.close()
    assert store.has_failed


def test_a_directory_can_be_opened_only_once(tmp_path: Path) -> None:
    store = open_store(RealDisk(tmp_path))
    append(store, plain())
    with pytest.raises(StoreLocked):
        open_store(RealDisk(tmp_path))
    append(store, plain())
    store.close()
    reopened = open_store(RealDisk(tmp_path))
    assert len(all_bodies(reopened)) == 2
    assert reopened.recovery.was_clean
    reopened.close()


def test_an_open_that_is_refused_does_not_create_the_abort_file(tmp_path: Path) -> None:
    store = open_store(RealDisk(tmp_path))
    (tmp_path / "abort").unlink()
    with pytest.raises(StoreLocked):
        open_store(RealDisk(tmp_path))
    assert not (tmp_path / "abort").exists()
    store.close()
