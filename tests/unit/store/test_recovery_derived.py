"""Recovery with queues, key index or checkpoint that are lost, old or invalid."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.store_recovery import (
    SAMPLE_COUNT,
    check_usable,
    detached_copy,
    end_of,
    make_store,
    reopen,
)
from tests.support.stores import NOW_MS, TINY, fill, sample

pytestmark = pytest.mark.slow  # dozens of real fsyncs each


# --- derived files -------------------------------------------------------------------------------


def copy_of(root: Path, name: str) -> Path:
    target = root.parent / f"copy of {name}"
    if (root / name).is_dir():
        shutil.copytree(root / name, target)
    else:
        shutil.copy(root / name, target)
    return target


def put_back(root: Path, name: str, copy: Path) -> None:
    if copy.is_dir():
        shutil.rmtree(root / name)
        shutil.copytree(copy, root / name)
    else:
        shutil.copy(copy, root / name)


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize(
    ("gone", "queues", "index"),
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
def test_derived_files_may_be_lost(
    root: Path, gone: list[str], queues: bool, index: bool, killed: bool
) -> None:
    kept = make_store(root, killed=killed)
    for name in gone:
        path = root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    store = reopen(root)
    assert (store.recovery.rebuilt_queues, store.recovery.rebuilt_index) == (queues, index)
    assert store.recovery.damage == []
    check_usable(root, store, kept)


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize("which", [0, 1, -1], ids=["first", "middle", "last"])
def test_a_missing_queue_file_is_rebuilt(root: Path, which: int, killed: bool) -> None:
    kept = make_store(root, killed=killed)
    files = sorted((root / "consumequeue/T0/0").iterdir())
    assert len(files) > 2
    files[which].unlink()
    check_usable(root, reopen(root), kept)


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_a_missing_queue_is_rebuilt(root: Path, killed: bool) -> None:
    kept = make_store(root, killed=killed)
    shutil.rmtree(root / "consumequeue/T1")
    check_usable(root, reopen(root), kept)


@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
def test_a_missing_index_file_is_rebuilt(root: Path, which: int) -> None:
    kept = make_store(root, killed=False)
    files = sorted((root / "index").iterdir())
    assert len(files) > 2
    files[which].unlink()
    check_usable(root, reopen(root), kept)


@pytest.mark.parametrize("name", ["consumequeue", "index", "escrowmq.checkpoint"])
@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_derived_files_may_be_old(root: Path, name: str, killed: bool) -> None:
    store = reopen(root)
    fill(store, range(10))
    store.close()
    copy = copy_of(root, name)
    store = reopen(root)
    fill(store, range(10, SAMPLE_COUNT))
    kept = [detached_copy(record) for record in store.records()]
    if killed:
        store.flush()
        store.abandon()
    else:
        store.close()
    put_back(root, name, copy)
    check_usable(root, reopen(root), kept)


@pytest.mark.parametrize("name", ["consumequeue", "index", "escrowmq.checkpoint"])
def test_derived_files_may_be_of_another_store(root: Path, name: str) -> None:
    other = root.parent / "other"
    store = reopen(other)
    for number in range(30):
        store.append([sample(3 * number, topic="T0", body=b"other")], now_ms=NOW_MS)
    store.close()
    copy = copy_of(other, name)
    kept = make_store(root, killed=False)
    put_back(root, name, copy)
    check_usable(root, reopen(root), kept)


def test_an_old_checkpoint_makes_the_replay_longer(root: Path) -> None:
    store = reopen(root)
    fill(store, range(10))
    store.checkpoint()
    copy = copy_of(root, "escrowmq.checkpoint")
    fill(store, range(10, SAMPLE_COUNT))
    kept = [detached_copy(record) for record in store.records()]
    store.close()
    put_back(root, "escrowmq.checkpoint", copy)
    store = reopen(root)
    assert store.recovery.scanned_from == kept[10].log_offset
    assert store.recovery.records == SAMPLE_COUNT - 10
    check_usable(root, store, kept)


@pytest.mark.parametrize(
    "content",
    [
        lambda good: b"",
        lambda good: good[:-20],
        lambda good: bytes(len(good)),
        lambda good: good.replace(b"log_offset", b"log_offseT", 1),
        lambda good: b"00000000\n" + good.partition(b"\n")[2],
        lambda good: b"\xff\xfe garbage",
        lambda good: b"8aabb0b4\n{}\n",
        lambda good: b"\n\n\n",
    ],
    ids=["empty", "cut", "zeros", "bit", "checksum", "garbage", "other version", "lines"],
)
def test_an_invalid_checkpoint_is_ignored(root: Path, content: Callable[[bytes], bytes]) -> None:
    kept = make_store(root, killed=True)
    path = root / "escrowmq.checkpoint"
    path.write_bytes(content(path.read_bytes()))
    store = reopen(root)
    assert store.recovery.scanned_from == 0
    assert store.recovery.records == SAMPLE_COUNT
    check_usable(root, store, kept)


@pytest.mark.parametrize("content", [b"", b"\xff" * 10, bytes(5000), b"\xff" * 4096])
def test_an_invalid_rocketmq_checkpoint_is_replaced(root: Path, content: bytes) -> None:
    kept = make_store(root, killed=False)
    (root / "checkpoint").write_bytes(content)
    store = reopen(root)
    stored_ms = kept[-1].stored_ms
    assert (root / "checkpoint").read_bytes()[:24] == stored_ms.to_bytes(8, "big") * 3
    check_usable(root, store, kept)


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 300, bytes(300)])
def test_an_invalid_redo_file_is_ignored(root: Path, garbage: bytes) -> None:
    kept = make_store(root, killed=True)
    (root / "escrowmq.redo").write_bytes(garbage)
    check_usable(root, reopen(root), kept)


def test_zeroed_queue_files_are_rebuilt(root: Path) -> None:
    kept = make_store(root, killed=True)
    for path in (root / "consumequeue").rglob("0*"):
        if path.is_file():
            path.write_bytes(bytes(TINY.queue_file_bytes))
    check_usable(root, reopen(root), kept)


def test_a_short_queue_file_is_extended(root: Path) -> None:
    kept = make_store(root, killed=True)
    first = root / f"consumequeue/T0/0/{0:020d}"
    with first.open("r+b") as file:
        file.truncate(30)
    check_usable(root, reopen(root), kept)


# --- expired files -------------------------------------------------------------------------------


@pytest.mark.parametrize("derived", [True, False], ids=["queues kept", "queues lost"])
@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_missing_first_segments_count_as_expired(root: Path, killed: bool, derived: bool) -> None:
    kept = make_store(root, killed=killed)
    (root / f"commitlog/{0:020d}").unlink()
    if not derived:
        shutil.rmtree(root / "consumequeue")
        (root / "escrowmq.checkpoint").unlink()
    left = [record for record in kept if record.log_offset >= TINY.segment_bytes]
    store = reopen(root)
    assert store.begin == TINY.segment_bytes
    assert store.recovery.damage == []
    assert store.min_offset("T0", 0) > 0
    check_usable(root, store, left, missing=[kept[0]])


def test_a_log_without_segments_begins_again(root: Path) -> None:
    kept = make_store(root, killed=False)
    shutil.rmtree(root / "commitlog")
    store = reopen(root)
    assert list(store.records()) == []
    (damage,) = store.recovery.damage
    assert (damage.begin, damage.end) == (0, end_of(kept))
    check_usable(root, store, [])
