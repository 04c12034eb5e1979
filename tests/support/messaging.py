"""Helpers for tests of ordinary messaging with a broker process and the client of tests/interop.

One broker serves all tests of a file; each test has its own topics and groups.
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
    """Return the header of SEND_MESSAGE, version 1. `changes` replaces fields."""
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
    """Wait for messages in queue 0 from an offset on, and return the first ones that arrive."""
    start_pull(client, topic, queue_offset, wait_ms=seconds * 1000)
    return decode_records(next_response(client).body)
