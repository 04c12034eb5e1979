"""A run of records is stored exactly like the same records one by one."""

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

EXTRA_PROPERTIES = b"MSG_REGION\x01DefaultRegion\x02"


def new_run(first: int, count: int, **changes: Any) -> RecordRun:
    numbers = range(first, first + count)
    fields: dict[str, Any] = {
        "topic": "T",
        "queue_id": 1,
        "bodies": [memoryview(b"%d" % number * (number % 40)) for number in numbers],
        "keys": [b"K%05d" % number for number in numbers],
        "flags": [number % 3 for number in numbers],
        "extra_properties": EXTRA_PROPERTIES,
        "sys_flag": 0,
        "born_ms": NOW_MS - 5,
        "born_host": encode_host("127.0.0.1", 9),
    }
    return RecordRun(**{**fields, **changes})


MIXED_BATCH: list[Appendable] = [
    new_run(0, 12),
    new_run(12, 1, queue_id=2),
    new_run(13, 2, topic="U"),
    new_run(15, 2, born_host=encode_host("::1", 5), sys_flag=BORN_HOST_IPV6),
    NewRecord("T", 1, b"alone", b"UNIQ_KEY\x01x\x02TAGS\x01t\x02"),
    new_run(17, 2, reconsume_times=3, prepared_offset=99, sys_flag=TRANSACTION_COMMIT),
    new_run(19, 3, extra_properties=b"", keys=[b"K19", b"K20", b"K21"]),
    new_run(22, 28),  # spans several segments
    new_run(50, 5, keys=[b"A" * 24 + b"%08X" % number for number in range(50, 55)]),
    new_run(
        55, 5, keys=[b"%d" % number + b"A" * 22 + b"%08X" % number for number in range(55, 60)]
    ),
]


def queue_contents(store: MessageStore) -> list[bytes]:
    """Return the stored bytes of each queue."""
    results = [
        store.read(topic, queue_id, 0, count_max=1000, bytes_max=1 << 20)
        for topic, queue_id in (("T", 1), ("T", 2), ("U", 1))
    ]
    return [b"".join(result.slices) for result in results]


def positions_of(result: AppendResult) -> list[tuple[int, int, int]]:
    """Return log offset, queue offset and size of each record."""
    if result.run is None:
        return [(result.log_offset, result.queue_offset, result.size)]
    numbered_positions = enumerate(zip(*result.run, strict=True), result.queue_offset)
    return [
        (log_offset, queue_offset, size) for queue_offset, (log_offset, size) in numbered_positions
    ]


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_run_is_stored_like_its_single_records(sealed: bool, host: str) -> None:
    settings = replace(TINY, sealed=sealed)
    contents = []
    for records in (MIXED_BATCH, list(iter_records(MIXED_BATCH))):
        disk = FaultyDisk()
        store = MessageStore.open(disk, settings, store_host=encode_host(host, 1))
        results = store.append(records, now_ms=NOW_MS)
        positions = [position for result in results for position in positions_of(result)]
        assert sum(result.size for result in results) == sum(size for _, _, size in positions)
        queues = queue_contents(store)
        assert all(queues)
        keys = [
            [record.log_offset for record in store.find_by_key("T", key.decode())]
            for run in MIXED_BATCH
            if isinstance(run, RecordRun)
            for key in run.keys
        ]
        contents.append((positions, queues, keys))
        store.close()
    assert contents[0] == contents[1]
    assert sum(map(len, contents[0][2])) == 60 - 2  # two keys are of topic U


def test_a_run_survives_a_crash() -> None:
    disk = FaultyDisk()
    store = open_store(disk)
    store.append(MIXED_BATCH, now_ms=NOW_MS)
    queues = queue_contents(store)
    store.flush()
    store.abandon()
    reopened = open_store(disk)
    assert queue_contents(reopened) == queues
    reopened.close()


@pytest.mark.parametrize(
    "invalid",
    [
        new_run(5, 2, bodies=[memoryview(b""), memoryview(b"x" * 5000)]),
        new_run(5, 2, born_ms=1 << 70),
        new_run(5, 2, queue_id=1 << 40),
        new_run(5, 2, topic="V" * 300),
    ],
)
def test_a_refused_run_refuses_the_whole_append(invalid: RecordRun) -> None:
    store = open_store(FaultyDisk())
    valid = new_run(0, 5)
    with pytest.raises(RecordRefused):
        store.append([valid, invalid], now_ms=NOW_MS)
    assert store.max_offset("T", 1) == 0
    (result,) = store.append([valid], now_ms=NOW_MS)
    assert [queue_offset for _, queue_offset, _ in positions_of(result)] == list(range(5))
    store.close()
    with pytest.raises(StoreError):
        store.append([valid], now_ms=NOW_MS)
