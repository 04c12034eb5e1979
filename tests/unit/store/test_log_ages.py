"""How old the parts of a log are: measured time, marks, and the conversion of recorded times."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import pytest

from escrowmq.store.damage import DamageKind, DamageReports
from escrowmq.store.disk import read_file, replace_file
from escrowmq.store.log_ages import AGES_PATH, LogAges, find_damage, save_ages
from escrowmq.testing import MemoryDisk
from tests.support.stores import NOW_MS

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def load(
    disk: MemoryDisk,
    *,
    elapsed_ms: int,
    wall_ms: int = NOW_MS,
    log_end: int = 1 << 40,
    boot_id: str = "b",
) -> LogAges:
    return LogAges.load(
        disk, boot_id=boot_id, log_end=log_end, elapsed_ms=elapsed_ms, wall_ms=wall_ms
    )


def saved_disk(ages: LogAges, *, elapsed_ms: int, wall_ms: int = NOW_MS) -> MemoryDisk:
    disk = MemoryDisk()
    save_ages(disk, ages.encode(log_begin=0, elapsed_ms=elapsed_ms, wall_ms=wall_ms))
    return disk


def ages_of_one_mark(log_end: int = 100, *, elapsed_ms: int = 1_000) -> LogAges:
    ages = load(MemoryDisk(), elapsed_ms=elapsed_ms)
    ages.start(log_end, elapsed_ms=elapsed_ms, broker_ms=NOW_MS)
    return ages


def test_an_age_counts_from_the_first_mark_that_covers_the_offset() -> None:
    ages = ages_of_one_mark(100)
    ages.add_mark(200, elapsed_ms=5_000, broker_ms=NOW_MS)
    ages.add_mark(200, elapsed_ms=8_000, broker_ms=NOW_MS)  # says nothing new
    assert [ages.age_ms(offset, elapsed_ms=9_000) for offset in (0, 100, 101, 200, 201)] == [
        8_000,
        8_000,
        4_000,
        4_000,
        0,
    ]


@pytest.mark.parametrize(
    ("boot_id", "elapsed_ms", "age_ms"),
    [("b", 10_000, 9_000), ("b", 500, 1_000), ("another", 10_000, 1_000), ("", 10_000, 1_000)],
    ids=["same boot", "a clock that ran backwards", "another boot", "unknown boot"],
)
def test_the_time_between_two_processes_counts_only_if_it_can_be_measured(
    boot_id: str, elapsed_ms: int, age_ms: int
) -> None:
    disk = saved_disk(ages_of_one_mark(), elapsed_ms=2_000)
    ages = load(disk, elapsed_ms=elapsed_ms, boot_id=boot_id)
    assert ages.age_ms(100, elapsed_ms=elapsed_ms) == age_ms


def test_processes_without_a_boot_id_do_not_compare_their_clocks() -> None:
    ages = load(MemoryDisk(), elapsed_ms=0, boot_id="")
    ages.start(100, elapsed_ms=0, broker_ms=NOW_MS)
    disk = saved_disk(ages, elapsed_ms=1_000)
    assert load(disk, elapsed_ms=DAY_MS, boot_id="").age_ms(100, elapsed_ms=DAY_MS) == 1_000


def test_marks_above_the_end_of_the_log_are_dropped() -> None:
    disk = saved_disk(ages_of_one_mark(100), elapsed_ms=2_000)
    ages = load(disk, elapsed_ms=3_000, log_end=99)
    assert ages.age_ms(50, elapsed_ms=3_000) == 0


def test_a_changed_bit_makes_everything_young() -> None:
    disk = saved_disk(ages_of_one_mark(), elapsed_ms=DAY_MS)
    size = disk.open(AGES_PATH).size
    for position in range(size):
        content = bytearray(disk.open(AGES_PATH).read_at(0, size))
        content[position] ^= 1
        damaged = MemoryDisk()
        save_ages(damaged, bytes(content))
        age_ms = load(damaged, elapsed_ms=DAY_MS).age_ms(100, elapsed_ms=DAY_MS)
        assert age_ms == 0 or position == size - 1, position  # the last byte is a line break


def test_marks_get_fewer_with_their_age_and_stay_precise() -> None:
    ages = ages_of_one_mark(0, elapsed_ms=0)
    for second in range(1, 100_000):
        ages.add_mark(second, elapsed_ms=second * 1000, broker_ms=NOW_MS)
    elapsed_ms = 100_000_000
    disk = saved_disk(ages, elapsed_ms=elapsed_ms)
    assert disk.open(AGES_PATH).size < 50_000
    for second in range(1, 99_999, 997):
        real_ms = elapsed_ms - second * 1000
        assert real_ms * 0.94 - 2_000 <= ages.age_ms(second, elapsed_ms=elapsed_ms) <= real_ms


@pytest.mark.parametrize("jump_ms", [-400 * DAY_MS, -HOUR_MS, 0, HOUR_MS, 400 * DAY_MS])
@pytest.mark.parametrize("skew_ms", [-400 * DAY_MS, 0, 400 * DAY_MS])
def test_recorded_times_are_converted_whatever_the_clocks_were(skew_ms: int, jump_ms: int) -> None:
    """The clock was wrong by `skew_ms` in the first process, and jumped before the second."""
    wall_ms = NOW_MS + skew_ms
    ages = load(MemoryDisk(), elapsed_ms=0, wall_ms=wall_ms)
    ages.start(0, elapsed_ms=0, broker_ms=wall_ms)
    ages.add_mark(100, elapsed_ms=10_000, broker_ms=wall_ms + 10_000)
    ages.add_mark(200, elapsed_ms=20_000, broker_ms=wall_ms + 20_000)
    disk = saved_disk(ages, elapsed_ms=20_000, wall_ms=wall_ms + 20_000)
    now_ms = wall_ms + 50_000 + jump_ms
    later = load(disk, elapsed_ms=50_000, wall_ms=now_ms, log_end=200)
    later.start(200, elapsed_ms=50_000, broker_ms=now_ms)
    assert later.wall_change_ms == jump_ms
    times = later.past_times(elapsed_ms=50_000, now_ms=now_ms)
    # A record at log offset 150 was stored 15 seconds after the start: between two marks.
    age_ms = now_ms - times.stored_ms(wall_ms + 15_000, 150)
    assert 30_000 <= age_ms <= 40_000
    if not jump_ms:
        assert age_ms == 35_000
    # It has a time of the broker in it, and so has a file that was saved at the end.
    assert now_ms - times.broker_ms(wall_ms + 3_000, 150, wall_ms + 15_000) == 47_000
    assert now_ms - times.file_ms(wall_ms + 3_000, 200, wall_ms + 20_000) == 47_000


def damaged(disk: MemoryDisk, content: bytes) -> MemoryDisk:
    replace_file(disk, AGES_PATH, content)
    return disk


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda content: content.replace(b"elapsed", b"elapsee"), "has a wrong checksum"),
        (lambda content: content[:20], "has a wrong checksum"),
        (lambda content: b"", "has a wrong checksum"),
        (lambda content: with_checksum(content[9:].replace(b"[100,", b"[900,")), "not in order"),
    ],
    ids=["flipped", "cut", "empty", "wrong order"],
)
def test_a_damaged_file_is_reported(change: Callable[[bytes], bytes], problem: str) -> None:
    ages = ages_of_one_mark(100)
    ages.add_mark(200, elapsed_ms=5_000, broker_ms=NOW_MS)
    disk = saved_disk(ages, elapsed_ms=6_000)
    disk = damaged(disk, change(read_file(disk, AGES_PATH) or b""))
    damage = DamageReports()
    loaded = LogAges.load(
        disk, boot_id="b", log_end=1 << 40, elapsed_ms=9_000, wall_ms=NOW_MS, damage=damage
    )
    assert loaded.age_ms(100, elapsed_ms=10_000) == 0
    [report] = damage.recent
    assert (report.kind, report.place, report.is_repaired) == (DamageKind.AGES, AGES_PATH, False)
    assert problem in report.description
    assert problem in find_damage(disk)


def with_checksum(data: bytes) -> bytes:
    data = data.strip()
    return b"%08x\n%s\n" % (crc32(data), data)


@pytest.mark.parametrize("content", [None, with_checksum(b'{"of": "another version"}')])
def test_a_file_that_is_missing_or_of_another_version_is_no_damage(content: bytes | None) -> None:
    disk, damage = MemoryDisk(), DamageReports()
    if content is not None:
        damaged(disk, content)
    LogAges.load(disk, boot_id="b", log_end=0, elapsed_ms=0, wall_ms=NOW_MS, damage=damage)
    assert damage.total == 0
    assert find_damage(disk) == ""
