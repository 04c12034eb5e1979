"""Ordinary messaging with a broker that is a process of its own, by a client that is not ours.

One broker serves a whole file of tests; each test has topics and groups of its own.
"""

from __future__ import annotations

import itertools
import time

from tests.interop.records import Record, decode_records
from tests.interop.remoting import Client
from tests.support.brokers import next_response, start_pull

unique_numbers = itertools.count()


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def send_v1_fields(topic: str, **changes: object) -> dict[str, object]:
    """The header of SEND_MESSAGE."""
    fields: dict[str, object] = {
        "producerGroup": "producers",
        "topic": topic,
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": 4,
        "queueId": 0,
        "sysFlag": 0,
        "bornTimestamp": now_ms(),
        "flag": 0,
        "properties": "",
        "reconsumeTimes": 0,
        "unitMode": False,
    }
    return {**fields, **changes}


def bodies(records: list[Record]) -> list[bytes]:
    return [record.body for record in records]


def wait_for_messages(
    client: Client, topic: str, queue_offset: int, *, seconds: int = 10
) -> list[Record]:
    """What comes to queue 0 from there on, as soon as there is something."""
    start_pull(client, topic, queue_offset, wait_ms=seconds * 1000)
    return decode_records(next_response(client).body)
