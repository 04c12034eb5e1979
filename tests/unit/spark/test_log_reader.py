"""Log files read from disk: every record once however they are cut, torn ends, damage."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from escrowmq.errors import DataLost, InvalidOption
from escrowmq.message.record import NewRecord
from escrowmq.spark.data_source import EscrowSource
from escrowmq.spark.log_reader import LogRange, find_log_files, read_records
from escrowmq.store.disk import RealDisk
from tests.support.stores import NOW_MS, fill, open_store, sample

COUNT = 60  # of TINY's files some seven


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    store = open_store(RealDisk(tmp_path))
    fill(store, range(COUNT))
    store.close()
    return tmp_path


def read(path: Path, **given: Any) -> list[dict[str, Any]]:
    source = EscrowSource({"path": str(path), **{k: str(v) for k, v in given.items()}})
    reader = pickle.loads(pickle.dumps(source.reader(source.schema())))
    tasks = pickle.loads(pickle.dumps(reader.partitions()))
    return [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["message_id"] for row in rows]


EXPECTED = [f"U{number:04d}" for number in range(COUNT)]


def test_every_record_is_read_in_its_order(directory: Path) -> None:
    rows = read(directory)
    assert ids(rows) == EXPECTED
    assert (rows[3]["topic"], rows[3]["body"]) == ("T1", sample(3).body)
    assert ids(read(directory / "commitlog")) == EXPECTED


@pytest.mark.parametrize("step", [1, 97, 100, 1000, 4096])
def test_however_a_file_is_cut_each_record_is_in_one_part(directory: Path, step: int) -> None:
    found = []
    for path in find_log_files(directory):
        size = path.stat().st_size
        for begin in range(0, size, step):
            for records in read_records(
                path, begin, min(begin + step, size), fail_on_data_loss=True
            ):
                found += records.log_offset.tolist()
    assert found == [row["log_offset"] for row in read(directory)]


def test_much_is_cut_into_tasks_of_like_size(tmp_path: Path) -> None:
    from escrowmq.config import StoreConfig

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


def test_only_the_topics_that_are_wanted(directory: Path) -> None:
    rows = read(directory, subscribe="T1", columns="topic,queue_id")
    assert rows == [{"topic": "T1", "queue_id": 1}] * (COUNT // 2)


def test_a_torn_end_is_the_end(directory: Path) -> None:
    last = find_log_files(directory)[-1]
    places = [
        at
        for some in read_records(last, 0, 4096, fail_on_data_loss=True)
        for at in some.positions.tolist()
    ]
    with last.open("r+b") as file:
        file.seek(places[-1] + 60)
        file.write(bytes(4096 - places[-1] - 60))
    assert ids(read(directory)) == EXPECTED[:-1]


def test_damage_fails_and_can_be_stepped_over(directory: Path) -> None:
    first = find_log_files(directory)[0]
    [records] = read_records(first, 0, 4096, fail_on_data_loss=True)
    with first.open("r+b") as file:
        file.seek(int(records.positions[2]))
        file.write(b"\xff" * 40)
    with pytest.raises(DataLost, match=rf"log offset {records.positions[2]}.*failOnDataLoss"):
        read(directory)
    assert ids(read(directory, failOnDataLoss=False)) == EXPECTED[:2] + EXPECTED[3:]


def test_a_broker_that_runs_can_be_read(tmp_path: Path) -> None:
    store = open_store(RealDisk(tmp_path))
    fill(store, range(5))
    assert ids(read(tmp_path)) == EXPECTED[:5]
    fill(store, range(5, 30))
    assert ids(read(tmp_path)) == EXPECTED[:30]
    store.abandon()


def test_a_file_that_expired_meanwhile_is_data_loss(directory: Path) -> None:
    gone = directory / "commitlog" / f"{1 << 40:020d}"
    with pytest.raises(DataLost, match="expired"):
        list(read_records(gone, 0, 100, fail_on_data_loss=True))
    assert list(read_records(gone, 0, 100, fail_on_data_loss=False)) == []


def test_a_directory_without_a_log_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(InvalidOption, match="option path"):
            read(path)
