"""Runs are stored exactly like their records one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from escrowmq.errors import RecordRefused, StoreError
from escrowmq.message.batch import Appendable, RecordRun, iter_records
from escrowmq.message.keys import encode_host
from escrowmq.message.record import BORN_HOST_IPV6, TRANSACTION_COMMIT, NewRecord
from escrowmq.store.commit_log import AppendResult
from escrowmq.store.store import MessageStore
from escrowmq.testing.disks import FaultyDisk
from tests.support.stores import NOW_MS, TINY, open_store

MARKS = b"MSG_REGION\x01DefaultRegion\x02"


def a_run(first: int, count: int, **changes: Any) -> RecordRun:
    numbers = range(first, first + count)
    fields: dict[str, Any] = {
        "topic": "T",
        "queue_id": 1,
        "bodies": [memoryview(b"%d" % number * (number % 40)) for number in numbers],
        "keys": [b"K%05d" % number for number in numbers],
        "flags": [number % 3 for number in numbers],
        "extra_properties": MARKS,
        "sys_flag": 0,
        "born_ms": NOW_MS - 5,
        "born_host": encode_host("127.0.0.1", 9),
    }
    return RecordRun(**{**fields, **changes})


MIXED: list[Appendable] = [
    a_run(0, 12),
    a_run(12, 1, queue_id=2),
    a_run(13, 2, topic="U"),
    a_run(15, 2, born_host=encode_host("::1", 5), sys_flag=BORN_HOST_IPV6),
    NewRecord("T", 1, b"alone", b"UNIQ_KEY\x01x\x02TAGS\x01t\x02"),
    a_run(17, 2, reconsume_times=3, prepared_offset=99, sys_flag=TRANSACTION_COMMIT),
    a_run(19, 3, extra_properties=b"", keys=[b"K19", b"K20", b"K21"]),
    a_run(22, 28),  # over the end of several files
    a_run(50, 5, keys=[b"A" * 24 + b"%08X" % number for number in range(50, 55)]),
    a_run(55, 5, keys=[b"%d" % number + b"A" * 22 + b"%08X" % number for number in range(55, 60)]),
]


def stored(store: MessageStore, topic: str, queue_id: int) -> bytes:
    found = store.read(topic, queue_id, 0, count_max=1000, bytes_max=1 << 20)
    return b"".join(found.slices)


def places_of(placed: AppendResult) -> list[tuple[int, int, int]]:
    """Return log offset, queue offset and size of each record."""
    if placed.run is None:
        return [(placed.log_offset, placed.queue_offset, placed.size)]
    numbered = enumerate(zip(*placed.run, strict=True), placed.queue_offset)
    return [(log_offset, at, size) for at, (log_offset, size) in numbered]


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_run_is_stored_like_its_single_records(sealed: bool, host: str) -> None:
    settings = replace(TINY, sealed=sealed)
    kept = []
    for records in (MIXED, list(iter_records(MIXED))):
        disk = FaultyDisk()
        store = MessageStore.open(disk, settings, store_host=encode_host(host, 1))
        placed = store.append(records, now_ms=NOW_MS)
        places = [place for one in placed for place in places_of(one)]
        assert sum(one.size for one in placed) == sum(size for _, _, size in places)
        queues = [stored(store, topic, at) for topic, at in (("T", 1), ("T", 2), ("U", 1))]
        assert all(queues)
        keys = [
            [record.log_offset for record in store.find_by_key("T", key.decode())]
            for run in MIXED
            if isinstance(run, RecordRun)
            for key in run.keys
        ]
        kept.append((places, queues, keys))
        store.close()
    assert kept[0] == kept[1]
    assert sum(map(len, kept[0][2])) == 60 - 2  # two are of another topic


def test_a_run_survives_a_crash() -> None:
    disk = FaultyDisk()
    store = open_store(disk)
    store.append(MIXED, now_ms=NOW_MS)
    queues = [stored(store, topic, at) for topic, at in (("T", 1), ("T", 2), ("U", 1))]
    store.flush()
    store.abandon()
    again = open_store(disk)
    assert queues == [stored(again, topic, at) for topic, at in (("T", 1), ("T", 2), ("U", 1))]
    again.close()


@pytest.mark.parametrize(
    "bad",
    [
        a_run(5, 2, bodies=[memoryview(b""), memoryview(b"x" * 5000)]),
        a_run(5, 2, born_ms=1 << 70),
        a_run(5, 2, queue_id=1 << 40),
        a_run(5, 2, topic="V" * 300),
    ],
)
def test_a_refused_run_undoes_the_whole_append(bad: RecordRun) -> None:
    store = open_store(FaultyDisk())
    good = a_run(0, 5)
    with pytest.raises(RecordRefused):
        store.append([good, bad], now_ms=NOW_MS)
    assert store.max_offset("T", 1) == 0
    (placed,) = store.append([good], now_ms=NOW_MS)
    assert [queue_offset for _, queue_offset, _ in places_of(placed)] == list(range(5))
    store.close()
    with pytest.raises(StoreError):
        store.append([good], now_ms=NOW_MS)
