"""Log files read from disk: each record is read once, torn ends, and damage."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from escrowmq.config import StoreConfig
from escrowmq.errors import DataLost, InvalidOption
from escrowmq.message.record import NewRecord, encode_record
from escrowmq.spark.data_source import EscrowSource
from escrowmq.spark.log_reader import LogRange, find_log_files, read_records
from escrowmq.store.disk import RealDisk
from tests.support.stores import HOST, NOW_MS, fill, open_store, sample

COUNT = 60  # about seven files of a tiny store


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    store = open_store(RealDisk(tmp_path))
    fill(store, range(COUNT))
    store.close()
    return tmp_path


def read(path: Path, **options: Any) -> list[dict[str, Any]]:
    """Read a directory as Spark does: reader and tasks are pickled."""
    texts = {name: str(value) for name, value in options.items()}
    source = EscrowSource({"path": str(path), **texts})
    reader = pickle.loads(pickle.dumps(source.reader(source.schema())))
    tasks = pickle.loads(pickle.dumps(reader.partitions()))
    return [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["message_id"] for row in rows]


ALL_IDS = [f"U{number:04d}" for number in range(COUNT)]


def test_every_record_is_read_in_order(directory: Path) -> None:
    rows = read(directory)
    assert ids(rows) == ALL_IDS
    assert (rows[3]["topic"], rows[3]["body"]) == ("T1", sample(3).body)
    assert ids(read(directory / "commitlog")) == ALL_IDS


@pytest.mark.parametrize("step", [1, 97, 100, 1000, 4096])
def test_each_record_is_in_one_part_of_a_divided_file(directory: Path, step: int) -> None:
    log_offsets = []
    for path in find_log_files(directory):
        size = path.stat().st_size
        for begin in range(0, size, step):
            end = min(begin + step, size)
            for records in read_records(path, begin, end, fail_on_data_loss=True):
                log_offsets += records.log_offset.tolist()
    assert log_offsets == [row["log_offset"] for row in read(directory)]


def test_a_large_log_is_divided_into_tasks_of_similar_size(tmp_path: Path) -> None:
    store = open_store(RealDisk(tmp_path), StoreConfig(segment_bytes=1 << 20))
    for number in range(20):
        store.append([NewRecord("T", 0, bytes(1 << 15)) for _ in range(10)], now_ms=NOW_MS + number)
    store.close()
    source = EscrowSource({"path": str(tmp_path), "minPartitions": "5", "columns": "log_offset"})
    reader: Any = source.reader(source.schema())
    counts = []
    for task in reader.partitions():
        assert isinstance(task, LogRange)
        counts.append(sum(batch.num_rows for batch in reader.read(task)))
    assert sum(counts) == 200
    assert len(counts) == 5
    assert min(counts) > 20


def test_only_the_subscribed_topics_are_read(directory: Path) -> None:
    rows = read(directory, subscribe="T1", columns="topic,queue_id")
    assert rows == [{"topic": "T1", "queue_id": 1}] * (COUNT // 2)


def test_a_read_ends_at_a_torn_end(directory: Path) -> None:
    last_file = find_log_files(directory)[-1]
    *_, last_records = read_records(last_file, 0, 4096, fail_on_data_loss=True)
    torn_position = int(last_records.positions[-1]) + 60
    with last_file.open("r+b") as file:
        file.seek(torn_position)
        file.write(bytes(4096 - torn_position))
    assert ids(read(directory)) == ALL_IDS[:-1]


def test_damage_is_an_error_and_can_be_skipped(directory: Path) -> None:
    first = find_log_files(directory)[0]
    [records] = read_records(first, 0, 4096, fail_on_data_loss=True)
    with first.open("r+b") as file:
        file.seek(int(records.positions[2]) + 28)
        file.write(b"\x10")  # a bit of its log offset
    with pytest.raises(DataLost, match=rf"log offset {records.positions[2]}.*failOnDataLoss"):
        read(directory)
    assert ids(read(directory, failOnDataLoss=False)) == ALL_IDS[:2] + ALL_IDS[3:]


@pytest.mark.parametrize("step", [50, 400, 4096])
def test_a_record_inside_a_body_is_never_read(tmp_path: Path, step: int) -> None:
    store = open_store(RealDisk(tmp_path))
    fill(store, range(3))
    outer = store.end
    forged_offset = outer + 88 + 20
    forged = encode_record(NewRecord("forged", 0, b""), 0, forged_offset, NOW_MS, HOST)
    store.append([NewRecord("T0", 0, b"x" * 20 + forged)], now_ms=NOW_MS)
    fill(store, range(4, 8))
    store.close()
    [path] = find_log_files(tmp_path)

    def read_topics() -> set[bytes]:
        ranges = [(begin, min(begin + step, 4096)) for begin in range(0, 4096, step)]
        return {
            topic
            for begin, end in ranges
            for records in read_records(path, begin, end, fail_on_data_loss=False)
            for topic in records.topic.to_pylist()
        }

    assert read_topics() == {b"T0", b"T1"}
    with path.open("r+b") as file:  # the damaged size points to the forged record
        file.seek(outer)
        file.write((forged_offset - outer).to_bytes(4, "big"))
    assert read_topics() == {b"T0", b"T1"}
    with pytest.raises(DataLost, match=f"log offset {outer}"):
        list(read_records(path, 0, 4096, fail_on_data_loss=True))


def test_the_directory_of_a_running_broker_can_be_read(tmp_path: Path) -> None:
    store = open_store(RealDisk(tmp_path))
    fill(store, range(5))
    assert ids(read(tmp_path)) == ALL_IDS[:5]
    fill(store, range(5, 30))
    assert ids(read(tmp_path)) == ALL_IDS[:30]
    store.abandon()


def test_a_file_that_expired_during_the_read_is_data_loss(directory: Path) -> None:
    expired = directory / "commitlog" / f"{1 << 40:020d}"
    with pytest.raises(DataLost, match="expired"):
        list(read_records(expired, 0, 100, fail_on_data_loss=True))
    assert list(read_records(expired, 0, 100, fail_on_data_loss=False)) == []


def test_a_directory_without_a_log_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(InvalidOption, match="option path"):
            read(path)
