"""The faulty disk: faults happen at the chosen call, and power cuts lose only unsynced changes.

Tests let the n-th call fail, for every n until a run succeeds. Power cuts are tried with many
seeds, and at the end by a state machine, whose model has all versions of files and directories.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from functools import partial
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from escrowmq.errors import StoreError, StoreFailed, StoreFull
from escrowmq.store.disk import read_file, replace_file, write_file
from escrowmq.testing import FaultyDisk, MemoryDisk, PowerCut
from escrowmq.testing.disks import SECTOR_BYTES, Survival

SEEDS = 60
OLD, NEW = b"old " * 400, b"new, longer " * 170


def every_kind_of_call(disk: FaultyDisk) -> None:
    """Make nine calls."""
    disk.lock("lock", b"pid")
    file = disk.create("d/a", 100)
    file.write_at(10, b"data")
    file.resize(50)
    file.sync()
    disk.open("d/a", writable=False)
    disk.rename("d/a", "d/b")
    disk.sync_directory("d")
    disk.remove("d/b")


def failing_runs(
    make_disk: Callable[[int], FaultyDisk], scenario: Callable[[FaultyDisk], None]
) -> Iterator[tuple[FaultyDisk, BaseException]]:
    """Run a scenario on disks whose first, second, … call fails, until a run succeeds."""
    for n in itertools.count(1):
        disk = make_disk(n)
        try:
            scenario(disk)
        except (StoreError, PowerCut) as error:
            yield disk, error
        else:
            return


def test_calls_are_counted_and_traced_in_order() -> None:
    disk = FaultyDisk()
    every_kind_of_call(disk)
    assert disk.calls == len(disk.trace) == 9
    assert "; ".join(disk.trace) == (
        "lock lock; create d/a 100; write_at d/a 10+4; resize d/a 50; sync d/a; open d/a; "
        "rename d/a d/b; sync_directory d; remove d/b"
    )


@pytest.mark.parametrize("error", [StoreFailed, StoreFull])
def test_the_nth_call_fails_and_the_next_does_not(error: type[StoreError]) -> None:
    runs = failing_runs(lambda n: FaultyDisk(fail_at=n, error=error), every_kind_of_call)
    failed = 0
    for failed, (disk, raised) in enumerate(runs, start=1):
        assert type(raised) is error
        assert disk.calls == failed
        assert disk.trace[-1].endswith(f" -> {error.__name__}")
        write_file(disk, "after", b"works")
    assert failed == 9


def test_fail_from_fails_that_call_and_all_later_ones() -> None:
    disk = FaultyDisk(fail_from=2)
    file = disk.create("a", 1)
    for _ in range(3):
        with pytest.raises(StoreFailed):
            file.sync()
    disk.fail_from = None
    file.sync()


def test_a_failing_write_leaves_a_prefix_of_any_length() -> None:
    lengths = set()
    for seed in range(SEEDS):
        disk = FaultyDisk(seed=seed, fail_at=2)
        file = disk.create("a", 3000)
        with pytest.raises(StoreFailed):
            file.write_at(100, b"x" * 2000)
        content = file.read_at(0, file.size)
        length = content.count(b"x")
        assert content == bytes(100) + b"x" * length + bytes(2900 - length)
        lengths.add(length)
    assert len(lengths) > SEEDS / 3
    assert any((100 + length) % SECTOR_BYTES == 0 for length in lengths)


def test_a_failing_create_may_or_may_not_leave_the_file() -> None:
    contents = set()
    for seed in range(SEEDS):
        disk = FaultyDisk(seed=seed, fail_at=1)
        with pytest.raises(StoreFailed):
            disk.create("d/a", 10)
        contents.add(read_file(disk, "d/a"))
    assert contents == {None, b"", bytes(10)}


def test_a_failing_rename_remove_or_resize_changes_nothing() -> None:
    disk = FaultyDisk()
    write_file(disk, "a", b"kept")
    file = disk.open("a")
    disk.fail_from = disk.calls + 1
    with pytest.raises(StoreFailed):
        disk.rename("a", "b")
    with pytest.raises(StoreFailed):
        disk.remove("a")
    with pytest.raises(StoreFailed):
        file.resize(1)
    assert disk.names("") == ["a"]
    assert file.read_at(0, file.size) == b"kept"


def retry_a_failed_sync(*, drops_pages: bool, rewrite: bool) -> set[bytes | None]:
    """Sync again after a failed sync. Return the contents that a power cut may leave."""
    disk = FaultyDisk(sync_failure_drops_pages=drops_pages)
    write_file(disk, "a", b"old")
    file = disk.open("a")
    file.write_at(0, b"new")
    disk.fail_at = disk.calls + 1
    with pytest.raises(StoreFailed):
        file.sync()
    if rewrite:
        file.write_at(0, b"new")
    file.sync()
    return {read_file(disk.power_cut(Random(1), survival), "a") for survival in ("none", "all")}


def test_a_sync_after_a_failed_one_does_not_make_the_bytes_durable() -> None:
    assert retry_a_failed_sync(drops_pages=True, rewrite=False) == {b"old", b"new"}
    assert retry_a_failed_sync(drops_pages=True, rewrite=True) == {b"new"}
    assert retry_a_failed_sync(drops_pages=False, rewrite=False) == {b"new"}


def test_after_a_power_cut_every_call_raises() -> None:
    runs = failing_runs(lambda n: FaultyDisk(power_cut_at=n), every_kind_of_call)
    cuts = 0
    for cuts, (disk, raised) in enumerate(runs, start=1):
        assert type(raised) is PowerCut
        assert disk.calls == cuts
        with pytest.raises(PowerCut):
            disk.sync_directory("")
        every_kind_of_call(disk.power_cut(Random(cuts)))
    assert cuts == 9


def test_a_power_cut_is_not_an_exception_and_its_call_does_not_happen() -> None:
    disk = FaultyDisk(power_cut_at=1)
    with pytest.raises(PowerCut), contextlib.suppress(Exception):
        disk.create("a", 1)
    assert disk.power_cut(Random(1), "all").names("") == []


def dirty_disk() -> FaultyDisk:
    """Return a disk with ten synced sectors of `o`, six of which are overwritten with `n`."""
    disk = FaultyDisk()
    write_file(disk, "a", b"o" * 10 * SECTOR_BYTES)
    disk.open("a").write_at(2 * SECTOR_BYTES, b"n" * 6 * SECTOR_BYTES)
    return disk


@pytest.mark.parametrize(
    ("survival", "torn"), [("mixed", "torn once"), ("scrambled", "torn in words")]
)
def test_a_cut_decides_for_each_sector_and_tears_some(survival: Survival, torn: str) -> None:
    fates = set()
    for seed in range(SEEDS):
        content = read_file(dirty_disk().power_cut(Random(seed), survival), "a")
        assert content is not None
        assert set(content[: 2 * SECTOR_BYTES]) | set(content[8 * SECTOR_BYTES :]) == set(b"o")
        for start in range(2 * SECTOR_BYTES, 8 * SECTOR_BYTES, SECTOR_BYTES):
            sector = content[start : start + SECTOR_BYTES]
            if sector == b"n" * SECTOR_BYTES:
                fates.add("kept")
            elif sector == b"o" * SECTOR_BYTES:
                fates.add("lost")
            elif sector == b"n" * sector.count(b"n") + b"o" * sector.count(b"o"):
                fates.add("torn once")
            else:
                assert set(re.findall(b"." * 8, sector)) == {b"n" * 8, b"o" * 8}
                fates.add("torn in words")
    assert fates == {"kept", "lost", torn}


def after_cuts(disk: FaultyDisk, inspect: Callable[[FaultyDisk], object]) -> set[object]:
    """Cut the power with many seeds, and return what a function observes on the disks."""
    return {inspect(disk.power_cut(Random(seed))) for seed in range(SEEDS)}


def test_a_seed_repeats_a_cut_and_what_survives_is_durable() -> None:
    disk = dirty_disk()
    for seed in range(SEEDS // 4):
        after_cut = disk.power_cut(Random(seed))
        content = read_file(after_cut, "a")
        assert read_file(disk.power_cut(Random(seed)), "a") == content
        assert after_cuts(after_cut, lambda disk: read_file(disk, "a")) == {content}


def test_after_a_cut_a_file_has_any_length_since_its_last_sync() -> None:
    disk = FaultyDisk()
    write_file(disk, "a", b"x" * 30)
    file = disk.open("a")
    file.resize(10)
    file.resize(20)
    assert read_file(disk.power_cut(Random(1), "none"), "a") == b"x" * 30
    lengths = after_cuts(disk, lambda after: len(read_file(after, "a") or b""))
    assert lengths == {30, 10, 20}
    file.sync()
    assert after_cuts(disk, lambda after: read_file(after, "a")) == {b"x" * 10 + bytes(10)}


def test_an_unsynced_file_may_be_missing_or_empty_after_a_cut() -> None:
    disk = FaultyDisk()
    disk.create("d/a", 5)
    assert after_cuts(disk, lambda after: read_file(after, "d/a")) == {None, b"", bytes(5)}
    disk.sync_directory("d")
    assert after_cuts(disk, lambda after: read_file(after, "d/a")) == {b"", bytes(5)}


def test_a_removed_file_may_come_back_until_its_directory_is_synced() -> None:
    disk = FaultyDisk()
    write_file(disk, "d/a", b"x")
    disk.remove("d/a")
    assert after_cuts(disk, lambda after: read_file(after, "d/a")) == {b"x", None}
    disk.remove("d")
    assert after_cuts(disk, lambda after: "".join(after.names("") + after.names("d"))) == {
        "da",
        "d",
        "",
    }
    disk.sync_directory("")
    assert after_cuts(disk, lambda after: after.exists("d")) == {False}


def test_a_cut_leaves_a_prefix_of_the_operations_of_a_directory() -> None:
    disk = FaultyDisk()
    for name in ("1", "2", "3"):
        disk.create(f"d/{name}", 0)
    disk.create("e/1", 0)
    assert after_cuts(disk, lambda after: "".join(after.names("d"))) == {"", "1", "12", "123"}
    both = after_cuts(disk, lambda after: (len(after.names("d")), len(after.names("e"))))
    assert {(0, 1), (1, 0)} <= both  # two directories are independent


def test_a_rename_between_directories_never_loses_or_doubles_the_file() -> None:
    disk = FaultyDisk()
    write_file(disk, "d/a", b"x")
    write_file(disk, "e/b", b"")
    disk.create("d/c", 0)
    disk.rename("d/a", "e/a")
    names = after_cuts(disk, lambda after: "".join(after.names("d") + after.names("e")))
    assert names == {"ab", "acb", "cab"}
    disk.sync_directory("e")  # also makes the earlier operations of the other directory durable
    assert after_cuts(disk, lambda after: "".join(after.names("d"))) == {"c"}


def disk_before_replace(seed: int, cut: bool, n: int) -> FaultyDisk:
    """Return a disk on which the n-th of the following calls fails, or the power is cut there."""
    disk = FaultyDisk(seed=seed)
    write_file(disk, "d/a", OLD)
    disk.create("d/a.tmp", 700).write_at(0, b"left over")
    disk.power_cut_at, disk.fail_at = (disk.calls + n, None) if cut else (None, disk.calls + n)
    return disk


def replace(disk: FaultyDisk) -> None:
    replace_file(disk, "d/a", NEW)


@pytest.mark.parametrize("survival", ["none", "all", "mixed"])
def test_replace_file_is_atomic_wherever_the_power_is_cut(survival: Survival) -> None:
    for seed in range(SEEDS):
        for disk, _ in failing_runs(partial(disk_before_replace, seed, True), replace):
            assert read_file(disk.power_cut(Random(seed), survival), "d/a") in (OLD, NEW)
        disk = disk_before_replace(seed, True, 99)
        replace(disk)
        assert read_file(disk.power_cut(Random(seed), survival), "d/a") == NEW


def test_replace_file_repeated_after_any_failure_is_durable() -> None:
    for seed in range(SEEDS):
        for disk, _ in failing_runs(partial(disk_before_replace, seed, False), replace):
            assert read_file(disk.power_cut(Random(seed)), "d/a") in (OLD, NEW), disk.trace
            replace(disk)
            assert read_file(disk.power_cut(Random(seed)), "d/a") == NEW, disk.trace


def test_the_capacity_limits_the_pages_written() -> None:
    disk = MemoryDisk(capacity_bytes=3 * 4096)
    file = disk.create("a", 1 << 30)
    file.write_at(1 << 20, b"x")
    assert disk.usage().free_bytes == 2 * 4096
    with pytest.raises(StoreFull):
        file.write_at(4000, b"y" * 4096 * 3)
    assert file.read_at(4000, 8289).count(b"y") == 2 * 4096 - 4000
    file.write_at(1 << 20, b"again")
    disk.remove("a")
    assert disk.usage().free_bytes == 3 * 4096


class DiskMachine(RuleBasedStateMachine):
    """A model of one directory.

    It holds all versions of each file since its last sync, and all maps of names since the last
    sync of the directory. The first is durable, the last is current.
    """

    paths = st.sampled_from(["d/a", "d/b"])
    sizes = st.integers(0, 3 * SECTOR_BYTES)

    def __init__(self) -> None:
        super().__init__()
        self.start(FaultyDisk())

    def start(self, disk: FaultyDisk) -> None:
        self.disk = disk
        paths = [f"d/{name}" for name in disk.names("d")]
        self.files = [[read_file(disk, path) or b""] for path in paths]
        self.names = [{path: number for number, path in enumerate(paths)}]

    def change_names(self, removed: str, added: dict[str, int]) -> None:
        remaining = {path: number for path, number in self.names[-1].items() if path != removed}
        self.names.append(remaining | added)

    def versions(self, path: str) -> list[bytes] | None:
        """Return the versions of a file, or None if there is no such file."""
        return self.files[self.names[-1][path]] if path in self.names[-1] else None

    @rule(path=paths, size=sizes)
    def create(self, path: str, size: int) -> None:
        self.disk.create(path, size)
        if path not in self.names[-1]:
            self.change_names("", {path: len(self.files)})
            self.files.append([b""])
        self.files[self.names[-1][path]] += [b"", bytes(size)]

    @rule(path=paths, start=sizes, byte=st.integers(1, 255), length=sizes)
    def write(self, path: str, start: int, byte: int, length: int) -> None:
        if (versions := self.versions(path)) is not None:
            old = versions[-1]
            data = bytes([byte]) * len(old[start : start + length])
            start = min(start, len(old))
            self.disk.open(path).write_at(start, data)
            versions.append(old[:start] + data + old[start + len(data) :])

    @rule(path=paths, size=sizes)
    def resize(self, path: str, size: int) -> None:
        if (versions := self.versions(path)) is not None:
            self.disk.open(path).resize(size)
            versions.append(versions[-1][:size].ljust(size, b"\0"))

    @rule(path=paths)
    def sync(self, path: str) -> None:
        if (versions := self.versions(path)) is not None:
            self.disk.open(path).sync()
            del versions[:-1]

    @rule(old=paths, new=paths)
    def rename(self, old: str, new: str) -> None:
        if old in self.names[-1] and old != new:
            self.disk.rename(old, new)
            self.change_names(old, {new: self.names[-1][old]})

    @rule(path=paths)
    def remove(self, path: str) -> None:
        if path in self.names[-1]:
            self.disk.remove(path)
            self.change_names(path, {})

    @rule()
    def sync_directory(self) -> None:
        if self.disk.exists("d"):
            self.disk.sync_directory("d")
            del self.names[:-1]

    @rule(seed=st.integers(0, 2**32), survival=st.sampled_from(["none", "all", "mixed"]))
    def cut(self, seed: int, survival: Survival) -> None:
        current = {path: self.files[number][-1] for path, number in self.names[-1].items()}
        assert current == {path: read_file(self.disk, path) for path in current}
        disk = self.disk.power_cut(Random(seed), survival)
        contents = {f"d/{name}": read_file(disk, f"d/{name}") or b"" for name in disk.names("d")}
        maps = {"none": self.names[:1], "all": self.names[-1:], "mixed": self.names}[survival]
        assert any(
            names.keys() == contents.keys()
            and all(
                is_possible(self.files[names[path]], contents[path], survival) for path in names
            )
            for names in maps
        )
        self.start(disk)


def is_possible(versions: list[bytes], content: bytes, survival: Survival) -> bool:
    """Return whether a cut may leave this content of a file with these versions."""
    if survival != "mixed":
        return content == versions[-1 if survival == "all" else 0]
    # A cut that undoes a truncation restores the content that the file had before it.
    truncated = [old for old, new in itertools.pairwise(versions) if len(new) < len(old)]
    candidates = [
        version.ljust(len(content), b"\0") for version in (versions[0], *truncated, versions[-1])
    ]
    return any(len(content) == len(version) for version in versions) and all(
        byte in choices for byte, *choices in zip(content, *candidates, strict=False)
    )


def test_a_power_cut_may_restore_content_that_an_unsynced_truncation_removed() -> None:
    contents = set()
    for seed in range(SEEDS):
        disk = FaultyDisk()
        disk.create("d/a", 1)
        disk.sync_directory("d")
        disk.open("d/a").write_at(0, b"x")
        disk.create("d/a", 0)
        contents.add(read_file(disk.power_cut(Random(seed)), "d/a"))
    assert contents == {b"", b"\0", b"x"}


DiskMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestDisk = pytest.mark.slow(DiskMachine.TestCase)
