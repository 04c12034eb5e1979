"""Recovery when queues, key index or checkpoint are lost, old or invalid."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.store_recovery import ALL, check_life, detached, end_of, make, reopen
from tests.support.stores import NOW_MS, TINY, fill, sample

pytestmark = pytest.mark.slow  # dozens of real fsyncs each


# --- derived files -------------------------------------------------------------------------------


def copy_to_sibling(root: Path, name: str) -> Path:
    """Copy a file or directory of a store to a place beside the store. Return the copy."""
    target = root.parent / f"copy of {name}"
    if (root / name).is_dir():
        shutil.copytree(root / name, target)
    else:
        shutil.copy(root / name, target)
    return target


def restore_copy(root: Path, name: str, copy: Path) -> None:
    if copy.is_dir():
        shutil.rmtree(root / name)
        shutil.copytree(copy, root / name)
    else:
        shutil.copy(copy, root / name)


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize(
    ("lost_names", "rebuilt_queues", "rebuilt_index"),
    [
        (["consumequeue"], True, True),
        (["index"], False, True),
        (["consumequeue", "index"], True, True),
        (["escrowmq.checkpoint"], True, True),
        (["checkpoint"], False, False),
        (["escrowmq.redo"], False, False),
        (["escrowmq.checkpoint", "checkpoint", "consumequeue", "index", "lock"], True, True),
    ],
    ids=["queues", "index", "both", "checkpoint", "RocketMQ's checkpoint", "redo", "all but log"],
)
def test_lost_derived_files_are_rebuilt(
    root: Path, lost_names: list[str], rebuilt_queues: bool, rebuilt_index: bool, killed: bool
) -> None:
    records = make(root, killed=killed)
    for name in lost_names:
        path = root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    store = reopen(root)
    assert (store.recovery.rebuilt_queues, store.recovery.rebuilt_index) == (
        rebuilt_queues,
        rebuilt_index,
    )
    assert store.recovery.damage == []
    check_life(root, store, records)


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize("file_number", [0, 1, -1], ids=["first", "middle", "last"])
def test_a_missing_queue_file_is_rebuilt(root: Path, file_number: int, killed: bool) -> None:
    records = make(root, killed=killed)
    files = sorted((root / "consumequeue/T0/0").iterdir())
    assert len(files) > 2
    files[file_number].unlink()
    check_life(root, reopen(root), records)


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_a_missing_queue_is_rebuilt(root: Path, killed: bool) -> None:
    records = make(root, killed=killed)
    shutil.rmtree(root / "consumequeue/T1")
    check_life(root, reopen(root), records)


@pytest.mark.parametrize("file_number", [0, -1], ids=["first", "last"])
def test_a_missing_index_file_is_rebuilt(root: Path, file_number: int) -> None:
    records = make(root, killed=False)
    files = sorted((root / "index").iterdir())
    assert len(files) > 2
    files[file_number].unlink()
    check_life(root, reopen(root), records)


@pytest.mark.parametrize("name", ["consumequeue", "index", "escrowmq.checkpoint"])
@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_recovery_corrects_old_derived_files(root: Path, name: str, killed: bool) -> None:
    store = reopen(root)
    fill(store, range(10))
    store.close()
    copy = copy_to_sibling(root, name)
    store = reopen(root)
    fill(store, range(10, ALL))
    records = [detached(record) for record in store.records()]
    if killed:
        store.flush()
        store.abandon()
    else:
        store.close()
    restore_copy(root, name, copy)
    check_life(root, reopen(root), records)


@pytest.mark.parametrize("name", ["consumequeue", "index", "escrowmq.checkpoint"])
def test_recovery_replaces_derived_files_of_another_store(root: Path, name: str) -> None:
    other = root.parent / "other"
    store = reopen(other)
    for number in range(30):
        store.append([sample(3 * number, topic="T0", body=b"other")], now_ms=NOW_MS)
    store.close()
    copy = copy_to_sibling(other, name)
    records = make(root, killed=False)
    restore_copy(root, name, copy)
    check_life(root, reopen(root), records)


def test_an_old_checkpoint_makes_the_replay_longer(root: Path) -> None:
    store = reopen(root)
    fill(store, range(10))
    store.checkpoint()
    copy = copy_to_sibling(root, "escrowmq.checkpoint")
    fill(store, range(10, ALL))
    records = [detached(record) for record in store.records()]
    store.close()
    restore_copy(root, "escrowmq.checkpoint", copy)
    store = reopen(root)
    assert store.recovery.scanned_from == records[10].log_offset
    assert store.recovery.records == ALL - 10
    check_life(root, store, records)


@pytest.mark.parametrize(
    "content",
    [
        lambda valid: b"",
        lambda valid: valid[:-20],
        lambda valid: bytes(len(valid)),
        lambda valid: valid.replace(b"log_offset", b"log_offseT", 1),
        lambda valid: b"00000000\n" + valid.partition(b"\n")[2],
        lambda valid: b"\xff\xfe garbage",
        lambda valid: b"8aabb0b4\n{}\n",
        lambda valid: b"\n\n\n",
    ],
    ids=[
        "empty",
        "truncated",
        "zeros",
        "flipped bit",
        "wrong checksum",
        "garbage",
        "other version",
        "empty lines",
    ],
)
def test_an_invalid_checkpoint_is_ignored(root: Path, content: Callable[[bytes], bytes]) -> None:
    records = make(root, killed=True)
    path = root / "escrowmq.checkpoint"
    path.write_bytes(content(path.read_bytes()))
    store = reopen(root)
    assert store.recovery.scanned_from == 0
    assert store.recovery.records == ALL
    check_life(root, store, records)


@pytest.mark.parametrize("content", [b"", b"\xff" * 10, bytes(5000), b"\xff" * 4096])
def test_an_invalid_rocketmq_checkpoint_is_replaced(root: Path, content: bytes) -> None:
    records = make(root, killed=False)
    (root / "checkpoint").write_bytes(content)
    store = reopen(root)
    stored_ms = records[-1].stored_ms
    assert (root / "checkpoint").read_bytes()[:24] == stored_ms.to_bytes(8, "big") * 3
    check_life(root, store, records)


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 300, bytes(300)])
def test_an_invalid_redo_file_is_ignored(root: Path, garbage: bytes) -> None:
    records = make(root, killed=True)
    (root / "escrowmq.redo").write_bytes(garbage)
    check_life(root, reopen(root), records)


def test_zeroed_queue_files_are_rebuilt(root: Path) -> None:
    records = make(root, killed=True)
    for path in (root / "consumequeue").rglob("0*"):
        if path.is_file():
            path.write_bytes(bytes(TINY.queue_file_bytes))
    check_life(root, reopen(root), records)


def test_a_short_queue_file_is_extended(root: Path) -> None:
    records = make(root, killed=True)
    first = root / f"consumequeue/T0/0/{0:020d}"
    with first.open("r+b") as file:
        file.truncate(30)
    check_life(root, reopen(root), records)


# --- expired files -------------------------------------------------------------------------------


@pytest.mark.parametrize("has_queues", [True, False], ids=["queues kept", "queues lost"])
@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_a_missing_first_segment_counts_as_expired(
    root: Path, killed: bool, has_queues: bool
) -> None:
    records = make(root, killed=killed)
    (root / f"commitlog/{0:020d}").unlink()
    if not has_queues:
        shutil.rmtree(root / "consumequeue")
        (root / "escrowmq.checkpoint").unlink()
    remaining = [record for record in records if record.log_offset >= TINY.segment_bytes]
    store = reopen(root)
    assert store.begin == TINY.segment_bytes
    assert store.recovery.damage == []
    assert store.min_offset("T0", 0) > 0
    check_life(root, store, remaining, missing=[records[0]])


def test_a_log_without_segments_begins_again(root: Path) -> None:
    records = make(root, killed=False)
    shutil.rmtree(root / "commitlog")
    store = reopen(root)
    assert list(store.records()) == []
    (damage,) = store.recovery.damage
    assert (damage.begin, damage.end) == (0, end_of(records))
    check_life(root, store, [])
