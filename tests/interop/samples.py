"""Write a store with messages of every kind, which Apache RocketMQ must be able to serve."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from escrowmq.config import StoreConfig
from escrowmq.message.keys import encode_host
from escrowmq.message.properties import encode_properties
from escrowmq.message.record import (
    TRANSACTION_COMMIT,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
    NewRecord,
)
from escrowmq.message.topic_config import DataVersion, TopicConfig
from escrowmq.store.config_files import GroupConfig, groups_file, offsets_file, topics_file
from escrowmq.store.disk import RealDisk
from escrowmq.store.store import MessageStore
from tests.interop.script import LONG_GROUP, unique_key
from tests.interop.stores import HOST, Queue, open_store, read_all

RETRY_TOPIC = "%RETRY%billing"
LONG_TOPIC = f"%RETRY%{LONG_GROUP}"  # its records have the second layout, unknown to 4.9.7
TOPICS = {"orders": 4, "payments": 2, RETRY_TOPIC: 1, LONG_TOPIC: 1, "later": 1}
COMMITTED = {"orders@billing": {0: 3, 1: 2}, "payments@billing": {0: 33}, "orders@audit": {3: 1}}

BODY_SIZES = (1, 10, 100, 500, 1024, 3000, 60_000, 5000, 17)
TAGS = ("TagA", "TagB", None, "中文tag")
BORN = (encode_host("127.0.0.1", 50_001), encode_host("2001:db8::17", 50_002))
SPAN_MS = 60_000  # between the oldest and the newest message


@dataclass
class StoreContents:
    """The contents of a store: the records of each queue as bytes, and the log offsets by key."""

    end: int = 0
    queues: dict[Queue, list[bytes]] = field(default_factory=dict)
    keys: dict[tuple[str, str], set[int]] = field(default_factory=dict)
    # Number of messages in queues that the broker does not let clients pull.
    hidden: dict[Queue, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(map(len, self.queues.values()))

    def messages(self) -> Iterator[bytes]:
        for messages in self.queues.values():
            yield from messages


def write_store(
    directory: Path, settings: StoreConfig, *, version: str, count: int
) -> StoreContents:
    """Write a store and close it cleanly."""
    store = open_store(directory, settings)
    contents = append_samples(store, sample_records(version, count), start_ms=now_ms() - SPAN_MS)
    store.close()
    write_config(directory)
    return contents


def write_killed_store(
    directory: Path, settings: StoreConfig, *, version: str, count: int
) -> StoreContents:
    """Write a store as a killed broker leaves it.

    Queues and keys end at a checkpoint in the middle; the log has a torn end.
    """
    store = open_store(directory, settings)
    records = list(sample_records(version, count))
    start_ms = now_ms() - SPAN_MS
    append_samples(store, iter(records[: count // 2]), start_ms=start_ms)
    store.checkpoint()
    append_samples(store, iter(records[count // 2 :]), start_ms=start_ms + SPAN_MS // 2)
    contents = contents_of(store)
    torn = NewRecord(topic="orders", queue_id=0, body=b"torn" * 200)
    [appended] = store.append([torn], now_ms=now_ms())
    store.flush()
    store.abandon()
    write_config(directory)
    # Overwrite the end of the last record, as if it had not reached the disk.
    with (directory / "commitlog" / log_file(appended.log_offset, settings)).open("r+b") as log:
        log.seek(appended.log_offset % settings.segment_bytes + appended.size - 300)
        log.write(bytes(300))
    return contents


def log_file(log_offset: int, settings: StoreConfig) -> str:
    return f"{log_offset - log_offset % settings.segment_bytes:020d}"


def append_samples(
    store: MessageStore, records: Iterator[NewRecord], *, start_ms: int
) -> StoreContents:
    """Append records one by one, every fifth with the next three in one batch, 7 ms apart."""
    for number, record in enumerate(records):
        batch = [record]
        if number % 5 == 4:
            batch += [following for _, following in zip(range(3), records, strict=False)]
        store.append(batch, now_ms=start_ms + 7 * number)
    return contents_of(store)


def contents_of(store: MessageStore) -> StoreContents:
    """Return what a broker must serve of this store. The key index lacks rolled-back records."""
    contents = StoreContents(end=store.end)
    for topic, queue_id in store.queues():
        contents.queues[topic, queue_id] = read_all(store, topic, queue_id)
    for record in store.records():
        if record.sys_flag & TRANSACTION_ROLLBACK != TRANSACTION_ROLLBACK:
            for key in keys_of(record.properties):
                contents.keys.setdefault((record.topic, key), set()).add(record.log_offset)
    return contents


def keys_of(properties: bytes) -> list[str]:
    """Return the keys of a record and its unique key."""
    pairs = dict(item.split("\x01", 1) for item in properties.decode().split("\x02") if item)
    return [*pairs.get("KEYS", "").split(), *([pairs["UNIQ_KEY"]] if "UNIQ_KEY" in pairs else [])]


# --- records -----------------------------------------------------------------------------------


def sample_records(version: str, count: int) -> Iterator[NewRecord]:
    """Yield records with rare fields, then `count` ordinary ones."""
    yield special("prepared as in old logs", sys_flag=TRANSACTION_PREPARED)
    yield special("rolled back", sys_flag=TRANSACTION_ROLLBACK)
    yield special("committed", sys_flag=TRANSACTION_COMMIT, prepared_offset=17)
    yield special("retried", topic=RETRY_TOPIC, reconsume_times=3)
    if version != "4.9.7":
        yield special("long topic", topic=LONG_TOPIC, reconsume_times=1)
    for number in range(count):
        yield sample(number)


def special(text: str, *, topic: str = "orders", **fields: int) -> NewRecord:
    properties = {"KEYS": text.replace(" ", "-"), "UNIQ_KEY": text.upper().replace(" ", "")}
    return new_record(topic, 0, text.encode(), properties, born_host=BORN[0], **fields)


def sample(number: int) -> NewRecord:
    size = BODY_SIZES[number % len(BODY_SIZES)]
    topic, queue_id = ("payments", 0) if number % 2 else ("orders", number // 2 % 4)
    tag = TAGS[number % len(TAGS)]
    properties = {
        "UNIQ_KEY": unique_key(number),
        **({"TAGS": tag} if tag else {}),
        "KEYS": f"k-{number} decade-{number // 10} größe-{number % 50}",
        "colour": "grün \U0001f600",
    }
    body = (f"message {number}; ".encode() * size)[:size]
    host = BORN[number % 3 == 2]
    return new_record(topic, queue_id, body, properties, born_host=host, flag=number % 4)


def new_record(
    topic: str,
    queue_id: int,
    body: bytes,
    properties: dict[str, str],
    *,
    born_host: bytes = HOST,
    **fields: Any,
) -> NewRecord:
    return NewRecord(
        topic=topic,
        queue_id=queue_id,
        body=body,
        properties=encode_properties(properties),
        born_ms=now_ms(),
        born_host=born_host,
        **fields,
    )


def now_ms() -> int:
    return time.time_ns() // 1_000_000


# --- configuration -----------------------------------------------------------------------------


def write_config(directory: Path) -> None:
    """Write the topics, groups and committed offsets of the samples."""
    disk, version = RealDisk(directory), DataVersion(timestamp=now_ms(), counter=1)
    topics = {
        topic: TopicConfig(topic_name=topic, read_queue_nums=queues, write_queue_nums=queues)
        for topic, queues in TOPICS.items()
    }
    groups = {group: GroupConfig(group_name=group) for group in ("billing", "audit", LONG_GROUP)}
    topics_file(disk).save(topicConfigTable=topics, dataVersion=version)
    groups_file(disk).save(subscriptionGroupTable=groups, dataVersion=version)
    offsets_file(disk).save(offsetTable=COMMITTED)


def add_topic(directory: Path, topic: str) -> None:
    """Add a topic with one queue to the configuration of a store."""
    file = topics_file(RealDisk(directory))
    topics = file.entries("topicConfigTable", TopicConfig)
    topics[topic] = TopicConfig(topic_name=topic, read_queue_nums=1, write_queue_nums=1)
    file.save(topicConfigTable=topics, dataVersion=file.version().next(now_ms()))
