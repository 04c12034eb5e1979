"""Open a store with the settings of a broker, and read its files as bytes and records."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from escrowmq.config import SETTINGS, StoreConfig
from escrowmq.message.keys import encode_host
from escrowmq.message.record import NewRecord, StoredRecord, encode_record
from escrowmq.store.disk import RealDisk
from escrowmq.store.queue_reader import ReadStatus
from escrowmq.store.store import MessageStore
from tests.interop.records import MAGIC_BLANK, Record, decode_record

HOST = encode_host("127.0.0.1", 10911)

Queue = tuple[str, int]  # topic and queue id


def settings_of(conf: Mapping[str, object]) -> StoreConfig:
    """Return the settings of a broker.conf that configure the store."""
    values: dict[str, Any] = {
        setting.name: setting.type.parse(str(conf[setting.key]))
        for setting in SETTINGS
        if setting.group == "store" and setting.key in conf
    }
    return StoreConfig(**values)


def open_store(directory: Path, settings: StoreConfig) -> MessageStore:
    return MessageStore.open(RealDisk(directory), settings, store_host=HOST)


def file_bytes(directory: Path) -> dict[str, bytes]:
    """Return the contents of every file in a directory, by its relative path."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def log_bytes(commitlog: Path) -> dict[int, bytes]:
    """Return every record of a log by its log offset, read without the code under test."""
    records = {}
    for path in sorted(commitlog.iterdir()):
        base, position = int(path.name), 0
        with path.open("rb") as log:
            while len(head := log.read(8)) == 8:
                size, magic = int.from_bytes(head[:4], "big"), int.from_bytes(head[4:], "big")
                if size == 0 or magic == MAGIC_BLANK:
                    break
                records[base + position] = head + log.read(size - 8)
                position += size
    return records


def log_records(commitlog: Path) -> list[Record]:
    return [decode_record(data) for data in log_bytes(commitlog).values()]


def read_all(store: MessageStore, topic: str, queue_id: int) -> list[bytes]:
    """Return every message of a queue, as a pull from our broker returns it."""
    records: list[bytes] = []
    queue_offset = store.min_offset(topic, queue_id)
    while queue_offset < store.max_offset(topic, queue_id):
        result = store.read(topic, queue_id, queue_offset)
        assert result.status is ReadStatus.FOUND, result
        read_records = split_records(b"".join(result.slices))
        assert len(read_records) == result.count
        records += read_records
        queue_offset = result.next_offset
    return records


def split_records(body: bytes) -> list[bytes]:
    """Split the body of a pull response into its records."""
    records, position = [], 0
    while position < len(body):
        size = int.from_bytes(body[position : position + 4], "big")
        records.append(body[position : position + size])
        position += size
    return records


def as_record(stored: StoredRecord) -> Record:
    """Return a record that our code decoded, in the type of the independent decoder."""
    return Record(
        size=stored.size,
        magic=stored.magic,
        body_crc=stored.body_crc,
        queue_id=stored.queue_id,
        flag=stored.flag,
        queue_offset=stored.queue_offset,
        log_offset=stored.log_offset,
        sys_flag=stored.sys_flag,
        born_ms=stored.born_ms,
        born_host=host_text(stored.born_host),
        stored_ms=stored.stored_ms,
        store_host=host_text(stored.store_host),
        reconsume_times=stored.reconsume_times,
        prepared_log_offset=stored.prepared_offset,
        body=bytes(stored.body),
        topic=stored.topic,
        raw_properties=stored.properties,
    )


def host_text(host: bytes) -> str:
    family = socket.AF_INET if len(host) == 8 else socket.AF_INET6
    return f"{socket.inet_ntop(family, host[:-4])}:{int.from_bytes(host[-4:], 'big')}"


def reencode(stored: StoredRecord) -> bytes:
    """Encode a decoded record again, from its fields."""
    record = NewRecord(
        topic=stored.topic,
        queue_id=stored.queue_id,
        body=bytes(stored.body),
        properties=stored.properties,
        flag=stored.flag,
        sys_flag=stored.sys_flag,
        born_ms=stored.born_ms,
        born_host=stored.born_host,
        reconsume_times=stored.reconsume_times,
        prepared_offset=stored.prepared_offset,
    )
    return encode_record(
        record, stored.queue_offset, stored.log_offset, stored.stored_ms, stored.store_host
    )
