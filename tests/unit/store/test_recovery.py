"""Open a real directory in which one thing is wrong: what is found, kept, rebuilt and reported.

A directory is made, something in it is changed, and it is opened again. `check_life` then reads all
of it back by log, queue and key, appends on, stops in order, opens again and lets the check look.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from escrowmq.errors import StoreDamaged
from escrowmq.message.facts import has_queue_entry
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import StoredRecord
from escrowmq.store.disk import RealDisk
from escrowmq.store.settings import StoreSettings
from escrowmq.store.store import MessageStore
from tests.stores import NOW_MS, TINY, assert_clean, fill, open_store, sample

pytestmark = pytest.mark.slow  # dozens of real fsyncs each

HALF = 24  # so many samples lie below the last checkpoint
ALL = 40


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


def make(root: Path, *, killed: bool, settings: StoreSettings = TINY) -> list[StoredRecord]:
    """Samples 0 to ALL - 1 in several files of each kind; the later ones after a checkpoint."""
    store = open_store(RealDisk(root), settings)
    fill(store, range(9))
    store.checkpoint()
    fill(store, range(9, HALF))
    store.checkpoint()
    fill(store, range(HALF, ALL))
    store.flush()
    kept = [detached(record) for record in store.records()]
    if killed:
        store.abandon()
    else:
        store.close()
    return kept


def detached(record: StoredRecord) -> StoredRecord:
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return StoredRecord(**{**fields, "body": bytes(record.body)})


def place(root: Path, log_offset: int) -> tuple[Path, int]:
    base = log_offset - log_offset % TINY.segment_bytes
    return root / f"commitlog/{base:020d}", log_offset - base


def overwrite(root: Path, log_offset: int, data: bytes) -> None:
    path, position = place(root, log_offset)
    with path.open("r+b") as file:
        file.seek(position)
        file.write(data)


def flip_bit(root: Path, record: StoredRecord) -> None:
    """In the body, where the checksum sees it."""
    overwrite(root, record.log_offset + 88, bytes([bytes(record.body)[0] ^ 1]))


def end_of(records: list[StoredRecord]) -> int:
    return records[-1].log_offset + records[-1].size


def reopen(root: Path, settings: StoreSettings = TINY) -> MessageStore:
    return open_store(RealDisk(root), settings)


def check_life(
    root: Path,
    store: MessageStore,
    expected: list[StoredRecord],
    settings: StoreSettings = TINY,
    *,
    missing: Iterable[StoredRecord] = (),
) -> None:
    """The store holds just these; it goes on from there; and so does the next one."""
    check_content(store, expected, missing)
    store.append([sample(1000 + number) for number in range(20)], now_ms=NOW_MS)
    store.close()
    assert_clean(root, settings)
    again = reopen(root, settings)
    assert again.recovery.clean
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
    """(queue offset, body) of all that consumers of a queue would get."""
    served = []
    at = max(at, store.min_offset(*queue))
    while at < store.max_offset(*queue):
        found = store.read(*queue, at, count_max=1)
        for data in found.slices:
            length = int.from_bytes(data[84:88], "big")
            offset = int.from_bytes(data[20:28], "big")
            assert offset == at
            served.append((offset, bytes(data[88 : 88 + length])))
        at = found.next
    return served


# --- how it was stopped --------------------------------------------------------------------------


def test_an_empty_directory_is_an_empty_store(root: Path) -> None:
    store = reopen(root)
    found = store.recovery
    assert (found.clean, found.records, found.end, found.torn) == (True, 0, 0, None)
    assert not found.rebuilt_queues
    assert store.queues() == []
    store.close()
    assert_clean(root)


def test_a_clean_stop_leaves_nothing_to_walk(root: Path) -> None:
    kept = make(root, killed=False)
    store = reopen(root)
    found = store.recovery
    assert (found.clean, found.records, found.torn, found.damaged) == (True, 0, None, [])
    assert found.walked_from == found.end == end_of(kept)
    assert (found.last_record, found.stored_ms) == (kept[-1].log_offset, kept[-1].stored_ms)
    assert not found.rebuilt_queues
    assert not found.rebuilt_index
    check_life(root, store, kept)


def test_a_kill_costs_a_walk_over_the_tail(root: Path) -> None:
    kept = make(root, killed=True)
    store = reopen(root)
    found = store.recovery
    assert (found.clean, found.torn, found.damaged) == (False, None, [])
    assert found.walked_from == kept[HALF].log_offset
    assert (found.records, found.end) == (ALL - HALF, end_of(kept))
    assert not found.rebuilt_queues
    assert not found.rebuilt_index
    check_life(root, store, kept)


def test_a_kill_right_after_opening_walks_nothing(root: Path) -> None:
    kept = make(root, killed=True)
    reopen(root).abandon()
    store = reopen(root)
    assert not store.recovery.clean
    assert (store.recovery.records, store.recovery.walked_from) == (0, end_of(kept))
    check_life(root, store, kept)


def test_prepared_and_rolled_back_records_survive_without_a_place(root: Path) -> None:
    store = reopen(root)
    kinds = [0, 4, 12, 8, 4, 0]
    batch = [sample(0, sys_flag=kind, body=b"%d" % kind) for kind in kinds]
    store.append(batch, now_ms=NOW_MS)
    store.flush()
    store.abandon()
    store = reopen(root)
    assert [record.sys_flag for record in store.records()] == kinds
    assert [offset for offset, _ in read_all(store, ("T0", 0), 0)] == [0, 1, 2]
    assert len(store.find_by_key("T0", "U0000")) == 5
    store.close()
    assert_clean(root)


def test_sealed_records_survive(root: Path) -> None:
    settings = replace(TINY, sealed=True)
    kept = make(root, killed=True, settings=settings)
    check_life(root, reopen(root, settings), kept, settings)


def test_seals_may_be_switched_on_and_off(root: Path) -> None:
    settings = replace(TINY, sealed=True)
    kept = make(root, killed=True)
    check_life(root, reopen(root, settings), kept, settings)


# --- the torn end --------------------------------------------------------------------------------


def test_a_log_file_cut_short_keeps_what_is_before_the_cut(root: Path) -> None:
    kept = make(root, killed=True)
    path, position = place(root, kept[-2].log_offset + 50)
    with path.open("r+b") as file:
        file.truncate(position)
    store = reopen(root)
    assert store.recovery.torn is not None
    assert store.end == kept[-2].log_offset
    assert path.stat().st_size == TINY.segment_bytes
    check_life(root, store, kept[:-2], missing=kept[-2:])


@pytest.mark.parametrize(
    ("tail", "is_torn"),
    [
        (lambda record: bytes(record.size), False),
        (lambda record: b"\xff" * record.size, True),
        (lambda record: bytes(range(1, 92)), True),
        (lambda record: b"\xcb\xd4\x31\x94" * 20, True),
    ],
    ids=["zeros", "ones", "garbage", "the magic of a blank record"],
)
def test_a_last_record_that_was_not_written_is_cut_off(
    root: Path, tail: Callable[[StoredRecord], bytes], is_torn: bool
) -> None:
    kept = make(root, killed=True)
    overwrite(
        root, kept[-1].log_offset, tail(kept[-1])[: kept[-1].size].ljust(kept[-1].size, b"\0")
    )
    store = reopen(root)
    assert (store.recovery.torn is not None) == is_torn
    assert store.recovery.damaged == []
    assert store.end == kept[-1].log_offset
    check_life(root, store, kept[:-1], missing=kept[-1:])


@pytest.mark.parametrize("number", [HALF, HALF + 1, ALL - 2, ALL - 1])
def test_behind_the_checkpoint_a_bad_record_ends_the_log(root: Path, number: int) -> None:
    kept = make(root, killed=True)
    flip_bit(root, kept[number])
    store = reopen(root)
    assert store.recovery.torn == "the body's checksum is wrong"
    assert store.recovery.damaged == []
    assert store.recovery.records == number - HALF
    assert store.end == kept[number].log_offset
    check_life(root, store, kept[:number], missing=kept[number:])


def test_garbage_behind_the_last_record_is_wiped(root: Path) -> None:
    kept = make(root, killed=True)
    path, position = place(root, end_of(kept))
    garbage = b"\xda\xa3\x20\xa7" * ((TINY.segment_bytes - position) // 4)
    overwrite(root, end_of(kept), garbage)
    store = reopen(root)
    assert store.recovery.torn is not None
    assert not any(path.read_bytes()[position:])
    check_life(root, store, kept)


def test_garbage_after_a_clean_stop_is_wiped_too(root: Path) -> None:
    kept = make(root, killed=False)
    overwrite(root, end_of(kept), b"garbage " * 12)
    store = reopen(root)
    assert store.recovery.clean
    assert store.recovery.torn is not None
    check_life(root, store, kept)


def test_zeros_and_then_an_old_record_are_not_the_log(root: Path) -> None:
    # A drive that wrote the last sectors and not those before them.
    kept = make(root, killed=True)
    overwrite(root, kept[-3].log_offset, bytes(kept[-3].size))
    store = reopen(root)
    assert store.end == kept[-3].log_offset
    check_life(root, store, kept[:-3], missing=kept[-3:])


def test_a_log_file_that_holds_nothing_yet_is_fine(root: Path) -> None:
    kept = make(root, killed=True)
    base = (end_of(kept) // TINY.segment_bytes + 1) * TINY.segment_bytes
    (root / f"commitlog/{base:020d}").write_bytes(b"")
    store = reopen(root)
    assert store.end == end_of(kept)
    check_life(root, store, kept)


# --- damage to what was durable ------------------------------------------------------------------


def lose_queues(root: Path) -> None:
    """So that the log is read from its start; what was durable is still known."""
    shutil.rmtree(root / "consumequeue")


@pytest.mark.parametrize("number", [0, 1, 9, HALF - 2])
@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_damage_below_the_checkpoint_is_stepped_over_and_reported(
    root: Path, number: int, killed: bool
) -> None:
    kept = make(root, killed=killed)
    flip_bit(root, kept[number])
    lose_queues(root)
    store = reopen(root)
    (damage,) = store.recovery.damaged
    assert damage.begin == kept[number].log_offset
    assert damage.end == kept[number + 1].log_offset
    assert damage.why == "the body's checksum is wrong"
    assert store.recovery.torn is None
    assert store.end == end_of(kept)
    rest = kept[:number] + kept[number + 1 :]
    check_content(store, rest, missing=[kept[number]])
    store.append([sample(1000)], now_ms=NOW_MS)
    store.close()
    again = reopen(root)
    assert again.recovery.damaged == []
    check_served(again, rest, kept[number])
    again.close()


def check_served(store: MessageStore, rest: list[StoredRecord], gone: StoredRecord) -> None:
    queue = gone.topic, gone.queue_id
    served = [body for _, body in read_all(store, queue, 0)]
    expected = [r.body for r in rest if (r.topic, r.queue_id) == queue]
    assert served[: len(expected)] == expected


def test_damage_to_many_neighbours_is_one_report(root: Path) -> None:
    kept = make(root, killed=True)
    begin, end = kept[3].log_offset, kept[6].log_offset
    overwrite(root, begin, b"\xee" * (end - begin))
    lose_queues(root)
    store = reopen(root)
    assert [(damage.begin, damage.end) for damage in store.recovery.damaged] == [(begin, end)]
    check_content(store, kept[:3] + kept[6:], missing=kept[3:6])
    store.close()


def test_damage_at_the_end_of_a_file_goes_up_to_the_next_file(root: Path) -> None:
    kept = make(root, killed=True)
    second = TINY.segment_bytes
    last = max(number for number in range(HALF) if kept[number].log_offset < second)
    begin = kept[last].log_offset
    overwrite(root, begin, b"\xee" * (second - begin))
    lose_queues(root)
    store = reopen(root)
    assert [(damage.begin, damage.end) for damage in store.recovery.damaged] == [(begin, second)]
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
    kept = [detached(record) for record in store.records()]
    assert end_of(kept) < TINY.segment_bytes
    store.abandon()
    flip_bit(root, kept[4])
    store = reopen(root)
    assert [damage.begin for damage in store.recovery.damaged] == [kept[4].log_offset]
    check_content(store, kept[:4] + kept[5:], missing=[kept[4]])
    store.close()


def test_the_loss_of_the_last_durable_record_is_reported(root: Path) -> None:
    kept = make(root, killed=False)
    flip_bit(root, kept[-1])
    store = reopen(root)
    (damage,) = store.recovery.damaged
    assert (damage.begin, damage.end) == (kept[-1].log_offset, end_of(kept))
    check_life(root, store, kept[:-1], missing=kept[-1:])


def test_the_loss_of_the_newest_file_is_reported(root: Path) -> None:
    kept = make(root, killed=False)
    path, position = place(root, end_of(kept))
    path.unlink()
    store = reopen(root)
    left = [record for record in kept if record.log_offset < end_of(kept) - position]
    (damage,) = store.recovery.damaged
    assert (damage.begin, damage.end) == (end_of(left), end_of(kept))
    assert damage.why == "was durable, and is not there"
    check_life(root, store, left)


def test_without_a_checkpoint_damage_in_an_older_file_is_still_no_end(root: Path) -> None:
    kept = make(root, killed=True)
    flip_bit(root, kept[2])
    (root / "escrowmq.checkpoint").unlink()
    store = reopen(root)
    assert [damage.begin for damage in store.recovery.damaged] == [kept[2].log_offset]
    check_content(store, kept[:2] + kept[3:], missing=[kept[2]])
    store.close()


def test_a_file_missing_between_two_others_stops_the_start(root: Path) -> None:
    make(root, killed=False)
    missing = root / f"commitlog/{TINY.segment_bytes:020d}"
    kept = missing.read_bytes()
    missing.unlink()
    with pytest.raises(StoreDamaged, match=f"commitlog/{missing.name} is missing"):
        reopen(root)
    missing.write_bytes(kept)
    reopen(root).close()  # the lock was given back
    assert_clean(root)


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
def test_what_is_derived_may_be_lost(
    root: Path, gone: list[str], queues: bool, index: bool, killed: bool
) -> None:
    kept = make(root, killed=killed)
    for name in gone:
        path = root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    store = reopen(root)
    assert (store.recovery.rebuilt_queues, store.recovery.rebuilt_index) == (queues, index)
    assert store.recovery.damaged == []
    check_life(root, store, kept)


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
@pytest.mark.parametrize("which", [0, 1, -1], ids=["first", "middle", "last"])
def test_one_missing_queue_file_is_made_again(root: Path, which: int, killed: bool) -> None:
    kept = make(root, killed=killed)
    files = sorted((root / "consumequeue/T0/0").iterdir())
    assert len(files) > 2
    files[which].unlink()
    check_life(root, reopen(root), kept)


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_one_missing_queue_is_made_again(root: Path, killed: bool) -> None:
    kept = make(root, killed=killed)
    shutil.rmtree(root / "consumequeue/T1")
    check_life(root, reopen(root), kept)


@pytest.mark.parametrize("which", [0, -1], ids=["first", "last"])
def test_one_missing_index_file_is_made_again(root: Path, which: int) -> None:
    kept = make(root, killed=False)
    files = sorted((root / "index").iterdir())
    assert len(files) > 2
    files[which].unlink()
    check_life(root, reopen(root), kept)


@pytest.mark.parametrize("name", ["consumequeue", "index", "escrowmq.checkpoint"])
@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_what_is_derived_may_be_old(root: Path, name: str, killed: bool) -> None:
    store = reopen(root)
    fill(store, range(10))
    store.close()
    copy = copy_of(root, name)
    store = reopen(root)
    fill(store, range(10, ALL))
    kept = [detached(record) for record in store.records()]
    if killed:
        store.flush()
        store.abandon()
    else:
        store.close()
    put_back(root, name, copy)
    check_life(root, reopen(root), kept)


@pytest.mark.parametrize("name", ["consumequeue", "index", "escrowmq.checkpoint"])
def test_what_is_derived_may_be_of_another_store(root: Path, name: str) -> None:
    other = root.parent / "other"
    store = reopen(other)
    for number in range(30):
        store.append([sample(3 * number, topic="T0", body=b"other")], now_ms=NOW_MS)
    store.close()
    copy = copy_of(other, name)
    kept = make(root, killed=False)
    put_back(root, name, copy)
    check_life(root, reopen(root), kept)


def test_an_old_checkpoint_makes_the_walk_longer(root: Path) -> None:
    store = reopen(root)
    fill(store, range(10))
    store.checkpoint()
    copy = copy_of(root, "escrowmq.checkpoint")
    fill(store, range(10, ALL))
    kept = [detached(record) for record in store.records()]
    store.close()
    put_back(root, "escrowmq.checkpoint", copy)
    store = reopen(root)
    assert store.recovery.walked_from == kept[10].log_offset
    assert store.recovery.records == ALL - 10
    check_life(root, store, kept)


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
def test_a_broken_checkpoint_is_no_checkpoint(
    root: Path, content: Callable[[bytes], bytes]
) -> None:
    kept = make(root, killed=True)
    path = root / "escrowmq.checkpoint"
    path.write_bytes(content(path.read_bytes()))
    store = reopen(root)
    assert store.recovery.walked_from == 0
    assert store.recovery.records == ALL
    check_life(root, store, kept)


@pytest.mark.parametrize("content", [b"", b"\xff" * 10, bytes(5000), b"\xff" * 4096])
def test_rocketmqs_checkpoint_is_written_whatever_it_was(root: Path, content: bytes) -> None:
    kept = make(root, killed=False)
    (root / "checkpoint").write_bytes(content)
    store = reopen(root)
    stored_ms = kept[-1].stored_ms
    assert (root / "checkpoint").read_bytes()[:24] == stored_ms.to_bytes(8, "big") * 3
    check_life(root, store, kept)


@pytest.mark.parametrize("garbage", [b"", b"\xff" * 300, bytes(300)])
def test_a_broken_redo_file_was_never_begun(root: Path, garbage: bytes) -> None:
    kept = make(root, killed=True)
    (root / "escrowmq.redo").write_bytes(garbage)
    check_life(root, reopen(root), kept)


def test_zeroed_queue_files_are_made_again(root: Path) -> None:
    kept = make(root, killed=True)
    for path in (root / "consumequeue").rglob("0*"):
        if path.is_file():
            path.write_bytes(bytes(TINY.queue_file_bytes))
    check_life(root, reopen(root), kept)


def test_a_queue_file_cut_short_is_filled_up_again(root: Path) -> None:
    kept = make(root, killed=True)
    first = root / f"consumequeue/T0/0/{0:020d}"
    with first.open("r+b") as file:
        file.truncate(30)
    check_life(root, reopen(root), kept)


# --- expired files -------------------------------------------------------------------------------


@pytest.mark.parametrize("derived", [True, False], ids=["queues kept", "queues lost"])
@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_missing_first_files_are_messages_that_expired(
    root: Path, killed: bool, derived: bool
) -> None:
    kept = make(root, killed=killed)
    (root / f"commitlog/{0:020d}").unlink()
    if not derived:
        shutil.rmtree(root / "consumequeue")
        (root / "escrowmq.checkpoint").unlink()
    left = [record for record in kept if record.log_offset >= TINY.segment_bytes]
    store = reopen(root)
    assert store.begin == TINY.segment_bytes
    assert store.recovery.damaged == []
    assert store.min_offset("T0", 0) > 0
    check_life(root, store, left, missing=[kept[0]])


def test_a_log_whose_files_are_all_gone_begins_anew(root: Path) -> None:
    kept = make(root, killed=False)
    shutil.rmtree(root / "commitlog")
    store = reopen(root)
    assert list(store.records()) == []
    (damage,) = store.recovery.damaged
    assert (damage.begin, damage.end) == (0, end_of(kept))
    check_life(root, store, [])


# --- other settings, other files -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"segment_bytes": 8192}, "mappedFileSizeCommitLog"),
        ({"segment_bytes": 6144}, "mappedFileSizeCommitLog"),
        ({"queue_file_bytes": 60}, "mappedFileSizeConsumeQueue"),
        ({"queue_file_bytes": 200}, "mappedFileSizeConsumeQueue"),
        ({"queue_file_bytes": 120}, "mappedFileSizeConsumeQueue"),
    ],
)
def test_other_settings_are_named_and_nothing_is_changed(
    root: Path, wrong: dict[str, int], said: str
) -> None:
    kept = make(root, killed=False)
    sizes = file_sizes(root)
    settings = replace(TINY, **wrong)  # type: ignore[arg-type]
    with pytest.raises(StoreDamaged, match=said):
        reopen(root, settings)
    assert file_sizes(root) == sizes
    check_life(root, reopen(root), kept)


def test_smaller_log_files_than_there_are_are_refused(root: Path) -> None:
    settings = replace(TINY, segment_bytes=8192)
    kept = make(root, killed=False, settings=settings)
    with pytest.raises(StoreDamaged, match=r"has 8192 bytes.*mappedFileSizeCommitLog"):
        reopen(root)
    check_life(root, reopen(root, settings), kept, settings)


def file_sizes(root: Path) -> dict[str, int]:
    return {
        str(path.relative_to(root)): path.stat().st_size
        for directory in ("commitlog", "consumequeue", "index")
        for path in (root / directory).rglob("*")
        if path.is_file()
    }


def test_an_index_of_another_size_is_made_again(root: Path) -> None:
    kept = make(root, killed=False)
    settings = replace(TINY, index_slots=11, index_entries=33)
    check_life(root, reopen(root, settings), kept, settings)


@pytest.mark.parametrize(
    "name",
    [
        "commitlog/notes.txt",
        "commitlog/.00000000000000000000.swp",
        "commitlog/123",
        "consumequeue/README",
        "consumequeue/T0/notes",
        "consumequeue/T0/0/notes",
        "consumequeue/T0/old/00000000000000000000",
        "consumequeue/not.a.topic/0/00000000000000000000",
        "consumequeue/T0/99999999999/00000000000000000000",
        "index/notes.txt",
        "escrowmq.checkpoint.tmp",
        "timerwheel",
        "config/topics.json",
    ],
)
def test_files_of_unknown_names_are_left_alone(root: Path, name: str) -> None:
    kept = make(root, killed=True)
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(b"{}")
    store = reopen(root)
    assert (root / name).exists() or name.endswith(".tmp")
    check_content(store, kept)
    store.close()
    again = reopen(root)
    check_content(again, kept)
    again.close()
