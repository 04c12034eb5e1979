"""Recovery skips and reports damaged records that were durable."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from escrowmq.errors import StoreDamaged
from escrowmq.message.record import StoredRecord
from escrowmq.store.store import MessageStore
from tests.support.store_recovery import (
    CHECKPOINTED_COUNT,
    check_content,
    check_usable,
    detached_copy,
    end_of,
    flip_bit,
    make_store,
    overwrite,
    read_all,
    reopen,
)
from tests.support.stores import NOW_MS, TINY, assert_clean, fill, locate, sample

pytestmark = pytest.mark.slow  # dozens of real fsyncs each


def remove_queues(root: Path) -> None:
    """Remove the queues but not the checkpoint, so that recovery reads the log from its start."""
    shutil.rmtree(root / "consumequeue")


@pytest.mark.parametrize("number", [0, 1, 9, CHECKPOINTED_COUNT - 2])
@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_damage_below_the_checkpoint_is_skipped_and_reported(
    root: Path, number: int, killed: bool
) -> None:
    records = make_store(root, killed=killed)
    flip_bit(root, records[number])
    remove_queues(root)
    store = reopen(root)
    (damage,) = store.recovery.damage
    assert damage.begin == records[number].log_offset
    assert damage.end == records[number + 1].log_offset
    assert damage.reason == "the body's checksum is wrong"
    assert store.recovery.torn_reason is None
    assert store.end == end_of(records)
    remaining = records[:number] + records[number + 1 :]
    check_content(store, remaining, missing=[records[number]])
    store.append([sample(1000)], now_ms=NOW_MS)
    store.close()
    reopened = reopen(root)
    assert reopened.recovery.damage == []
    check_served(reopened, remaining, records[number])
    reopened.close()


def check_served(
    store: MessageStore, remaining: list[StoredRecord], lost_record: StoredRecord
) -> None:
    queue = lost_record.topic, lost_record.queue_id
    served_bodies = [body for _, body in read_all(store, queue, 0)]
    expected = [record.body for record in remaining if (record.topic, record.queue_id) == queue]
    assert served_bodies[: len(expected)] == expected


def test_damage_to_adjacent_records_is_reported_as_one_range(root: Path) -> None:
    records = make_store(root, killed=True)
    begin, end = records[3].log_offset, records[6].log_offset
    overwrite(root, begin, b"\xee" * (end - begin))
    (root / "escrowmq.checkpoint").unlink()  # the queues tell where the records behind it begin
    store = reopen(root)
    assert [(damage.begin, damage.end) for damage in store.recovery.damage] == [(begin, end)]
    check_content(store, records[:3] + records[6:], missing=records[3:6])
    store.close()


def test_damage_to_the_end_of_a_segment_does_not_reach_the_next_segment(root: Path) -> None:
    records = make_store(root, killed=True)
    segment_end = TINY.segment_bytes
    last_number = max(
        number for number in range(CHECKPOINTED_COUNT) if records[number].log_offset < segment_end
    )
    begin = records[last_number].log_offset
    overwrite(root, begin, b"\xee" * (segment_end - begin))
    remove_queues(root)
    store = reopen(root)
    assert [(damage.begin, damage.end) for damage in store.recovery.damage] == [
        (begin, segment_end)
    ]
    check_content(
        store, records[:last_number] + records[last_number + 1 :], missing=[records[last_number]]
    )
    store.close()


def test_damage_to_the_last_record_below_the_checkpoint_loses_that_record_alone(
    root: Path,
) -> None:
    # All records are in one segment, and all those after the damaged one are flushed.
    store = reopen(root)
    fill(store, range(5))
    store.checkpoint()
    fill(store, range(5, 10))
    store.flush()
    records = [detached_copy(record) for record in store.records()]
    assert end_of(records) < TINY.segment_bytes
    store.abandon()
    flip_bit(root, records[4])
    store = reopen(root)
    assert [damage.begin for damage in store.recovery.damage] == [records[4].log_offset]
    assert not store.recovery.rebuilt_queues  # the checkpoint is still of use
    for record in records[:4] + records[5:]:
        assert store.record_at(record.log_offset) == record
        assert store.log_offset_of(record.topic, record.queue_id, record.queue_offset) == (
            record.log_offset
        )
    store.close()


def test_the_loss_of_the_last_durable_record_is_reported(root: Path) -> None:
    records = make_store(root, killed=False)
    flip_bit(root, records[-1])
    store = reopen(root)
    (damage,) = store.recovery.damage
    assert (damage.begin, damage.end) == (records[-1].log_offset, end_of(records))
    assert store.end == end_of(records)
    store.close()


def test_the_loss_of_the_newest_segment_is_reported(root: Path) -> None:
    records = make_store(root, killed=False)
    path, position = locate(root, end_of(records))
    path.unlink()
    store = reopen(root)
    remaining = [record for record in records if record.log_offset < end_of(records) - position]
    (damage,) = store.recovery.damage
    assert (damage.begin, damage.end) == (end_of(remaining), end_of(records))
    assert damage.reason == "was durable and is missing"
    check_usable(root, store, remaining)


def test_without_a_checkpoint_damage_in_an_older_segment_does_not_end_the_log(root: Path) -> None:
    records = make_store(root, killed=True)
    flip_bit(root, records[2])
    (root / "escrowmq.checkpoint").unlink()
    store = reopen(root)
    assert [damage.begin for damage in store.recovery.damage] == [records[2].log_offset]
    check_content(store, records[:2] + records[3:], missing=[records[2]])
    store.close()


def test_a_missing_segment_between_two_others_is_an_error(root: Path) -> None:
    make_store(root, killed=False)
    segment = root / f"commitlog/{TINY.segment_bytes:020d}"
    content = segment.read_bytes()
    segment.unlink()
    with pytest.raises(StoreDamaged, match=f"commitlog/{segment.name} is missing"):
        reopen(root)
    segment.write_bytes(content)
    reopen(root).close()  # the failed open released the lock
    assert_clean(root)
