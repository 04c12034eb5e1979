"""Recovery of durable records that are damaged: they are skipped and reported."""

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


def lose_queues(root: Path) -> None:
    """Remove the queues, so that the log is read from its start. The checkpoint stays."""
    shutil.rmtree(root / "consumequeue")


@pytest.mark.parametrize("number", [0, 1, 9, CHECKPOINTED_COUNT - 2])
@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_damage_below_the_checkpoint_is_skipped_and_reported(
    root: Path, number: int, killed: bool
) -> None:
    kept = make_store(root, killed=killed)
    flip_bit(root, kept[number])
    lose_queues(root)
    store = reopen(root)
    (damage,) = store.recovery.damage
    assert damage.begin == kept[number].log_offset
    assert damage.end == kept[number + 1].log_offset
    assert damage.reason == "the body's checksum is wrong"
    assert store.recovery.torn_reason is None
    assert store.end == end_of(kept)
    rest = kept[:number] + kept[number + 1 :]
    check_content(store, rest, missing=[kept[number]])
    store.append([sample(1000)], now_ms=NOW_MS)
    store.close()
    again = reopen(root)
    assert again.recovery.damage == []
    check_served(again, rest, kept[number])
    again.close()


def check_served(store: MessageStore, rest: list[StoredRecord], gone: StoredRecord) -> None:
    queue = gone.topic, gone.queue_id
    served = [body for _, body in read_all(store, queue, 0)]
    expected = [r.body for r in rest if (r.topic, r.queue_id) == queue]
    assert served[: len(expected)] == expected


def test_damage_to_many_neighbours_is_one_report(root: Path) -> None:
    kept = make_store(root, killed=True)
    begin, end = kept[3].log_offset, kept[6].log_offset
    overwrite(root, begin, b"\xee" * (end - begin))
    lose_queues(root)
    store = reopen(root)
    assert [(damage.begin, damage.end) for damage in store.recovery.damage] == [(begin, end)]
    check_content(store, kept[:3] + kept[6:], missing=kept[3:6])
    store.close()


def test_damage_at_the_end_of_a_segment_ends_with_it(root: Path) -> None:
    kept = make_store(root, killed=True)
    second = TINY.segment_bytes
    last = max(number for number in range(CHECKPOINTED_COUNT) if kept[number].log_offset < second)
    begin = kept[last].log_offset
    overwrite(root, begin, b"\xee" * (second - begin))
    lose_queues(root)
    store = reopen(root)
    assert [(damage.begin, damage.end) for damage in store.recovery.damage] == [(begin, second)]
    check_content(store, kept[:last] + kept[last + 1 :], missing=[kept[last]])
    store.close()


def test_damage_to_the_last_record_below_the_checkpoint_loses_that_record_alone(
    root: Path,
) -> None:
    # All in one file; everything behind it was flushed and acknowledged.
    store = reopen(root)
    fill(store, range(5))
    store.checkpoint()
    fill(store, range(5, 10))
    store.flush()
    kept = [detached_copy(record) for record in store.records()]
    assert end_of(kept) < TINY.segment_bytes
    store.abandon()
    flip_bit(root, kept[4])
    store = reopen(root)
    assert [damage.begin for damage in store.recovery.damage] == [kept[4].log_offset]
    check_content(store, kept[:4] + kept[5:], missing=[kept[4]])
    store.close()


def test_the_loss_of_the_last_durable_record_is_reported(root: Path) -> None:
    kept = make_store(root, killed=False)
    flip_bit(root, kept[-1])
    store = reopen(root)
    (damage,) = store.recovery.damage
    assert (damage.begin, damage.end) == (kept[-1].log_offset, end_of(kept))
    check_usable(root, store, kept[:-1], missing=kept[-1:])


def test_the_loss_of_the_newest_file_is_reported(root: Path) -> None:
    kept = make_store(root, killed=False)
    path, position = locate(root, end_of(kept))
    path.unlink()
    store = reopen(root)
    left = [record for record in kept if record.log_offset < end_of(kept) - position]
    (damage,) = store.recovery.damage
    assert (damage.begin, damage.end) == (end_of(left), end_of(kept))
    assert damage.reason == "was durable and is missing"
    check_usable(root, store, left)


def test_without_a_checkpoint_damage_in_an_older_segment_does_not_end_the_log(root: Path) -> None:
    kept = make_store(root, killed=True)
    flip_bit(root, kept[2])
    (root / "escrowmq.checkpoint").unlink()
    store = reopen(root)
    assert [damage.begin for damage in store.recovery.damage] == [kept[2].log_offset]
    check_content(store, kept[:2] + kept[3:], missing=[kept[2]])
    store.close()


def test_a_missing_segment_between_two_others_is_an_error(root: Path) -> None:
    make_store(root, killed=False)
    missing = root / f"commitlog/{TINY.segment_bytes:020d}"
    kept = missing.read_bytes()
    missing.unlink()
    with pytest.raises(StoreDamaged, match=f"commitlog/{missing.name} is missing"):
        reopen(root)
    missing.write_bytes(kept)
    reopen(root).close()  # the lock was given back
    assert_clean(root)
