"""The contract of `Disk`, which the real disk and both fakes must fulfil.

Each test runs three times: on a directory, in memory, and on a FaultyDisk without faults. The root
directory does not exist at the beginning, as on a machine where nothing was ever stored.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from escrowmq.clock import ManualClock
from escrowmq.errors import ReadFailed, StoreError, StoreFailed, StoreLocked
from escrowmq.store.disk import (
    Disk,
    RealDisk,
    SyncAll,
    read_file,
    remove_file,
    replace_file,
    write_file,
)
from escrowmq.testing import FaultyDisk, MemoryDisk

MakeOlder = Callable[[str], None]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=["real", "memory", "faulty"])
def disk(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Disk:
    disks: dict[str, Disk] = {
        "real": RealDisk(tmp_path / "root"),
        "memory": MemoryDisk(clock=clock),
        "faulty": FaultyDisk(clock=clock),
    }
    return disks[request.param]


@pytest.fixture
def make_older(disk: Disk, tmp_path: Path, clock: ManualClock) -> MakeOlder:
    """Return a function that makes the modification of a path older.

    It advances the clock of the fakes and sets an old modification time on the real disk.
    """

    def advance(path: str) -> None:
        clock.advance(ms=60_000)
        if isinstance(disk, RealDisk):
            os.utime(tmp_path / "root" / path, (1_000_000_000, 1_000_000_000))

    return advance


def content(disk: Disk, path: str) -> bytes:
    data = read_file(disk, path)
    assert data is not None
    return data


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_a_new_file_has_the_requested_size_and_is_zero(disk: Disk, size: int) -> None:
    file = disk.create("a", size)
    assert file.size == size
    assert file.read_at(0, file.size) == bytes(size)


def test_a_large_file_takes_no_space_until_it_is_written(disk: Disk) -> None:
    file = disk.create("a", 1 << 30)
    free_before = disk.usage().free_bytes
    file.write_at((1 << 30) - 3, b"end")
    assert file.read_at((1 << 30) - 4, 4) == b"\0end"
    assert free_before - disk.usage().free_bytes < 1 << 29


def test_create_creates_the_directories_of_the_path(disk: Disk) -> None:
    disk.create("a/b/c", 1)
    assert disk.names("") == ["a"]
    assert disk.names("a") == ["b"]
    assert disk.names("a/b") == ["c"]


def test_create_over_an_existing_file_zeroes_it(disk: Disk) -> None:
    write_file(disk, "a", b"something longer")
    disk.create("a", 4)
    assert content(disk, "a") == bytes(4)


@pytest.mark.parametrize("path", ["d", "d/a/b"])
def test_create_over_a_directory_or_below_a_file_fails(disk: Disk, path: str) -> None:
    disk.create("d/a", 1)
    with pytest.raises(StoreFailed):
        disk.create(path, 1)


def test_a_read_returns_exactly_the_requested_bytes(disk: Disk) -> None:
    write_file(disk, "a", b"0123456789")
    file = disk.open("a", writable=False)
    assert file.read_at(3, 4) == b"3456"
    assert file.read_at(10, 0) == b""


def test_a_read_shows_writes_through_another_file_object(disk: Disk) -> None:
    file = disk.create("a", 4)
    disk.open("a").write_at(0, b"both")
    assert file.read_at(0, 4) == b"both"


@pytest.mark.parametrize(("position", "size"), [(8, 3), (10, 1), (99, 1), (0, 11)])
def test_a_read_past_the_end_fails(disk: Disk, position: int, size: int) -> None:
    write_file(disk, "a", b"0123456789")
    with pytest.raises(ReadFailed):
        disk.open("a").read_at(position, size)


def test_a_read_of_a_file_that_was_cut_short_meanwhile_fails(disk: Disk) -> None:
    write_file(disk, "a", b"0123456789")
    file = disk.open("a", writable=False)
    disk.open("a").resize(5)
    assert file.read_at(0, 5) == b"01234"
    with pytest.raises(ReadFailed):
        file.read_at(0, 10)


def test_a_read_of_a_closed_file_fails(disk: Disk) -> None:
    file = disk.create("a", 4)
    file.close()
    with pytest.raises(StoreError):
        file.read_at(0, 4)


def test_sizes_are_those_of_the_files_in_a_directory(disk: Disk) -> None:
    disk.create("d/a", 5)
    disk.create("d/b", 0)
    disk.create("d/e/c", 7)
    assert disk.sizes("d") == {"a": 5, "b": 0}
    assert disk.sizes("nowhere") == {}
    assert (disk.size("d/a"), disk.size("d/x"), disk.size("nowhere/x")) == (5, None, None)


@pytest.mark.parametrize("bytes_type", [bytes, bytearray, memoryview])
def test_any_bytes_like_object_can_be_written(
    disk: Disk, bytes_type: Callable[[bytes], bytes]
) -> None:
    disk.create("a", 4).write_at(0, bytes_type(b"data"))
    assert content(disk, "a") == b"data"


def test_a_write_changes_only_its_own_bytes(disk: Disk) -> None:
    write_file(disk, "a", b"a" * 9000)
    disk.open("a").write_at(4090, b"b" * 20)
    assert content(disk, "a") == b"a" * 4090 + b"b" * 20 + b"a" * 4890


@pytest.mark.parametrize(("position", "data"), [(10, b"x"), (0, b"x" * 11), (8, b"xyz"), (99, b"")])
def test_a_write_past_the_end_is_refused_and_writes_nothing(
    disk: Disk, position: int, data: bytes
) -> None:
    file = disk.create("a", 10)
    with pytest.raises(StoreError, match="past the end"):
        file.write_at(position, data)
    assert content(disk, "a") == bytes(10)


def test_a_file_opened_for_reading_cannot_be_changed(disk: Disk) -> None:
    write_file(disk, "a", b"old")
    file = disk.open("a", writable=False)
    with pytest.raises(StoreFailed):
        file.write_at(0, b"new")
    with pytest.raises(StoreFailed):
        file.resize(1)
    file.sync()
    assert file.read_at(0, file.size) == b"old"


def test_a_closed_file_cannot_be_changed_and_can_be_closed_again(disk: Disk) -> None:
    file = disk.create("a", 3)
    file.close()
    file.close()
    with pytest.raises(StoreFailed):
        file.write_at(0, b"new")
    with pytest.raises(StoreFailed):
        file.resize(1)


def test_a_file_that_shrinks_and_grows_again_ends_with_zeros(disk: Disk) -> None:
    write_file(disk, "a", b"a" * 9000)
    file = disk.open("a")
    file.resize(10)
    assert (file.size, file.read_at(0, file.size)) == (10, b"a" * 10)
    with pytest.raises(StoreError, match="past the end"):
        file.write_at(10, b"b")
    file.resize(9000)
    assert (file.size, file.read_at(0, file.size)) == (9000, b"a" * 10 + bytes(8990))
    file.write_at(8999, b"b")
    assert content(disk, "a") == b"a" * 10 + bytes(8989) + b"b"


@pytest.mark.parametrize("path", ["a", "nowhere/a"])
def test_a_missing_file_cannot_be_opened_or_removed_and_has_no_modification_time(
    disk: Disk, path: str
) -> None:
    assert not disk.exists(path)
    with pytest.raises(StoreFailed):
        disk.open(path)
    with pytest.raises(StoreFailed):
        disk.open(path, writable=False)
    with pytest.raises(StoreFailed):
        disk.remove(path)
    with pytest.raises(StoreFailed):
        disk.modified_ms(path)


def test_names_are_sorted_and_include_directories(disk: Disk) -> None:
    for path in ("d/c", "d/a", "d/b/x", "other"):
        disk.create(path, 0)
    assert disk.names("d") == ["a", "b", "c"]
    assert disk.names("") == ["d", "other"]
    assert disk.exists("d/b")
    assert disk.exists("d/b/x")


def test_names_are_empty_for_a_path_that_is_not_a_directory(disk: Disk) -> None:
    assert disk.names("") == []
    disk.create("file", 0)
    assert disk.names("nowhere") == []
    assert disk.names("file") == []
    assert disk.names("fi") == []


def test_rename_moves_the_content(disk: Disk) -> None:
    write_file(disk, "d/old", b"content")
    write_file(disk, "e/x", b"")
    disk.rename("d/old", "e/new")
    assert not disk.exists("d/old")
    assert content(disk, "e/new") == b"content"


def test_rename_over_an_existing_file_replaces_it(disk: Disk) -> None:
    write_file(disk, "old", b"old")
    write_file(disk, "new", b"new")
    disk.rename("new", "old")
    assert disk.names("") == ["old"]
    assert content(disk, "old") == b"new"


def test_rename_to_itself_changes_nothing(disk: Disk) -> None:
    write_file(disk, "a", b"same")
    disk.rename("a", "a")
    assert content(disk, "a") == b"same"


@pytest.mark.parametrize(("old", "new"), [("missing", "x"), ("a", "nowhere/a"), ("a", "d")])
def test_rename_of_a_missing_file_or_to_an_invalid_path_fails(
    disk: Disk, old: str, new: str
) -> None:
    write_file(disk, "a", b"content")
    write_file(disk, "d/x", b"")
    with pytest.raises(StoreFailed):
        disk.rename(old, new)
    assert content(disk, "a") == b"content"


def test_a_renamed_file_stays_open(disk: Disk) -> None:
    file = disk.create("old", 3)
    disk.rename("old", "new")
    file.write_at(0, b"abc")
    file.sync()
    assert content(disk, "new") == b"abc"


def test_a_replaced_file_stays_readable_while_it_is_open(disk: Disk) -> None:
    write_file(disk, "a", b"old")
    file = disk.open("a")
    replace_file(disk, "a", b"new")
    assert file.read_at(0, file.size) == b"old"
    assert content(disk, "a") == b"new"


def test_a_removed_file_stays_open_and_its_name_can_be_used_again(disk: Disk) -> None:
    file = disk.create("a", 3)
    disk.remove("a")
    assert not disk.exists("a")
    disk.create("a", 3).write_at(0, b"new")
    file.write_at(0, b"abc")
    file.sync()
    assert file.read_at(0, file.size) == b"abc"
    assert content(disk, "a") == b"new"


def test_only_an_empty_directory_can_be_removed(disk: Disk) -> None:
    disk.create("d/a", 1)
    with pytest.raises(StoreFailed):
        disk.remove("d")
    disk.remove("d/a")
    disk.remove("d")
    assert disk.names("") == []


def test_a_directory_can_be_synced_once_it_exists(disk: Disk) -> None:
    with pytest.raises(StoreFailed):
        disk.sync_directory("")
    disk.create("d/a", 1)
    disk.sync_directory("d")
    disk.sync_directory("")


@pytest.mark.parametrize("path", ["nowhere", "file"])
def test_sync_directory_of_a_path_that_is_not_a_directory_fails(disk: Disk, path: str) -> None:
    disk.create("file", 1)
    with pytest.raises(StoreFailed):
        disk.sync_directory(path)


@pytest.mark.parametrize("change", ["write", "resize", "create"])
def test_a_change_updates_the_modification_time(
    disk: Disk, make_older: MakeOlder, change: str
) -> None:
    file = disk.create("d/a", 3)
    make_older("d/a")
    before = disk.modified_ms("d/a")
    if change == "write":
        file.write_at(0, b"abc")
    elif change == "resize":
        file.resize(5)
    else:
        disk.create("d/a", 3)
    assert disk.modified_ms("d/a") > before


def test_reading_and_renaming_do_not_update_the_modification_time(
    disk: Disk, make_older: MakeOlder
) -> None:
    write_file(disk, "a", b"abc")
    make_older("a")
    before = disk.modified_ms("a")
    assert content(disk, "a") == b"abc"
    disk.rename("a", "b")
    assert disk.modified_ms("b") == before


def test_a_new_file_updates_the_modification_time_of_its_directory(
    disk: Disk, make_older: MakeOlder
) -> None:
    disk.create("d/a", 0)
    make_older("d")
    before = disk.modified_ms("d")
    disk.create("d/b", 0)
    assert disk.modified_ms("d") > before


def test_usage_is_within_its_bounds(disk: Disk) -> None:
    disk.create("a", 1)
    usage = disk.usage()
    assert 0 < usage.free_bytes <= usage.total_bytes
    assert 0 <= usage.used_ratio < 1


def test_a_lock_is_a_file_with_the_content_of_its_owner(disk: Disk) -> None:
    disk.lock("d/e/lock", b"longer content of an earlier owner").release()
    disk.lock("d/e/lock", b"pid 7")
    assert disk.names("d/e") == ["lock"]
    assert content(disk, "d/e/lock") == b"pid 7"


def test_a_lock_can_be_taken_only_once_until_it_is_released(disk: Disk) -> None:
    lock = disk.lock("lock", b"first")
    with pytest.raises(StoreLocked):
        disk.lock("lock", b"second")
    assert content(disk, "lock") == b"first"
    lock.release()
    disk.lock("lock", b"third")
    assert content(disk, "lock") == b"third"


def test_the_second_release_of_a_lock_does_not_release_the_next_lock(disk: Disk) -> None:
    first = disk.lock("lock", b"")
    first.release()
    second = disk.lock("lock", b"")
    first.release()
    with pytest.raises(StoreLocked):
        disk.lock("lock", b"")
    second.release()


def test_reading_a_lock_file_does_not_release_the_lock(disk: Disk) -> None:
    lock = disk.lock("lock", b"first")
    disk.open("lock").close()
    with pytest.raises(StoreLocked):
        disk.lock("lock", b"second")
    lock.release()


def test_read_file_returns_none_for_a_missing_file(disk: Disk) -> None:
    assert read_file(disk, "a") is None
    assert read_file(disk, "nowhere/a") is None


def test_read_file_of_a_directory_fails(disk: Disk) -> None:
    disk.create("d/a", 1)
    with pytest.raises(StoreError):
        read_file(disk, "d")


@pytest.mark.parametrize("data", [b"", b"x", b"page" * 1024, bytes(range(256)) * 40])
def test_write_file_and_replace_file_store_exactly_the_data(disk: Disk, data: bytes) -> None:
    write_file(disk, "d/written", b"something else")
    write_file(disk, "d/written", data)
    replace_file(disk, "d/replaced", b"something else")
    replace_file(disk, "d/replaced", data)
    assert content(disk, "d/written") == data
    assert content(disk, "d/replaced") == data
    assert disk.names("d") == ["replaced", "written"]


def test_remove_file_ignores_a_missing_file(disk: Disk) -> None:
    write_file(disk, "d/a", b"x")
    remove_file(disk, "d/a")
    remove_file(disk, "d/a")
    remove_file(disk, "nowhere/a")
    assert disk.names("d") == []


def test_all_files_are_flushed_at_once(disk: Disk) -> None:
    sync_all = begin_sync_all(disk)
    for name in ("a", "b/c"):
        file = disk.create(name, 8)
        file.write_at(2, b"data")
        file.close()
    sync_all.run()
    sync_all.close()
    assert content(disk, "a") == content(disk, "b/c") == b"\0\0data\0\0"


def begin_sync_all(disk: Disk) -> SyncAll:
    disk.create("first", 0).close()  # the root exists from here on
    sync_all = disk.begin_sync_all()
    if sync_all is None:
        pytest.skip("this system cannot flush a whole file system and report errors")
    return sync_all


@pytest.mark.parametrize("is_flushed", [False, True])
def test_a_power_cut_takes_what_was_not_flushed(is_flushed: bool) -> None:
    disk = FaultyDisk()
    file = disk.create("a", 8)
    disk.sync_directory("")
    sync_all = disk.begin_sync_all()
    file.write_at(0, b"data")
    if is_flushed:
        sync_all.run()
    after = disk.power_cut(Random(1), "none")
    assert content(after, "a").startswith(b"data") == is_flushed
