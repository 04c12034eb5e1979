"""Records that go together lie in the log as if each had come alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from escrowmq.errors import RecordRefused, StoreError
from escrowmq.message.ids import encode_host
from escrowmq.message.record import NewRecord
from escrowmq.message.sysflag import TRANSACTION_COMMIT, TRANSACTION_PREPARED
from escrowmq.store.store import MessageStore
from escrowmq.testing.disks import FaultyDisk
from tests.stores import NOW_MS, TINY, open_store

MARKS = b"MSG_REGION\x01DefaultRegion\x02"


def a_record(number: int, **changes: Any) -> NewRecord:
    key = b"K%05d" % number
    fields: dict[str, Any] = {
        "topic": "T",
        "queue_id": 1,
        "body": b"%d" % number * (number % 40),
        "properties": b"UNIQ_KEY\x01%s\x02" % key + MARKS * (number % 3),
        "born_ms": NOW_MS - 5,
        "lone_key": key,
    }
    return NewRecord(**{**fields, **changes})


def one_by_one(record: NewRecord) -> NewRecord:
    """The same, but its keys have to be looked for."""
    return msgspec.structs.replace(record, lone_key=b"")


MIXED = [
    *(a_record(number) for number in range(12)),
    a_record(12, queue_id=2),
    a_record(13, topic="U"),
    a_record(14, born_host=encode_host("::1", 5)),
    a_record(15, flag=7, reconsume_times=3, prepared_offset=99),
    a_record(16, born_ms=NOW_MS - 6),
    a_record(17, properties=b"UNIQ_KEY\x01x\x02TAGS\x01t\x02", lone_key=b""),
    a_record(18, sys_flag=TRANSACTION_COMMIT),
    a_record(19, sys_flag=TRANSACTION_PREPARED),
    a_record(20, body=b"long" * 400),
    *(a_record(number) for number in range(21, 60)),  # over the end of several files
]


def stored(store: MessageStore, topic: str, queue_id: int) -> bytes:
    found = store.read(topic, queue_id, 0, count_max=1000, bytes_max=1 << 20)
    return b"".join(found.slices)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_runs_are_as_if_each_had_come_alone(sealed: bool, host: str) -> None:
    settings = replace(TINY, sealed=sealed)
    kept = []
    for records in (MIXED, [one_by_one(record) for record in MIXED]):
        disk = FaultyDisk()
        store = MessageStore.open(disk, settings, store_host=encode_host(host, 1))
        placed = store.append(records, now_ms=NOW_MS)
        queues = [stored(store, topic, at) for topic, at in (("T", 1), ("T", 2), ("U", 1))]
        assert all(queues)
        keys = [
            [record.log_offset for record in store.find_by_key("T", f"K{n:05d}")] for n in range(60)
        ]
        kept.append((placed, queues, keys))
        store.close()
    assert kept[0] == kept[1]


def test_one_that_is_refused_takes_all_of_its_run_back() -> None:
    disk = FaultyDisk()
    store = open_store(disk)
    good = [a_record(number) for number in range(5)]
    with pytest.raises(RecordRefused):
        store.append([*good, a_record(5, body=b"x" * 5000)], now_ms=NOW_MS)
    with pytest.raises(RecordRefused):
        store.append([*good, a_record(5, flag=1 << 40)], now_ms=NOW_MS)
    assert store.max_offset("T", 1) == 0
    assert [place.queue_offset for place in store.append(good, now_ms=NOW_MS)] == list(range(5))
    store.close()
    with pytest.raises(StoreError):
        store.append(good, now_ms=NOW_MS)
