"""Our store beside Apache's: the same settings, and the bytes and records of a directory."""

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

Queue = tuple[str, int]


def settings_of(conf: Mapping[str, object]) -> StoreConfig:
    """What a broker.conf says, as far as it is about the store."""
    ours: dict[str, Any] = {
        setting.name: setting.type.parse(str(conf[setting.key]))
        for setting in SETTINGS
        if setting.group == "store" and setting.key in conf
    }
    return StoreConfig(**ours)


def open_store(directory: Path, settings: StoreConfig) -> MessageStore:
    return MessageStore.open(RealDisk(directory), settings, store_host=HOST)


def file_bytes(directory: Path) -> dict[str, bytes]:
    """Every file below a directory, by its name from there."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def log_bytes(commitlog: Path) -> dict[int, bytes]:
    """Every record of a log by where it lies, found without our code. Reads no unwritten part."""
    found = {}
    for path in sorted(commitlog.iterdir()):
        base, position = int(path.name), 0
        with path.open("rb") as log:
            while len(head := log.read(8)) == 8:
                size, magic = int.from_bytes(head[:4], "big"), int.from_bytes(head[4:], "big")
                if size == 0 or magic == MAGIC_BLANK:
                    break
                found[base + position] = head + log.read(size - 8)
                position += size
    return found


def log_records(commitlog: Path) -> list[Record]:
    return [decode_record(data) for data in log_bytes(commitlog).values()]


def read_all(store: MessageStore, topic: str, queue_id: int) -> list[bytes]:
    """Every message of a queue, as a pull would get it from us."""
    records: list[bytes] = []
    queue_offset = store.min_offset(topic, queue_id)
    while queue_offset < store.max_offset(topic, queue_id):
        found = store.read(topic, queue_id, queue_offset)
        assert found.status is ReadStatus.FOUND, found
        body = b"".join(found.slices)
        pulled = cut(body)
        assert len(pulled) == found.count
        records += pulled
        queue_offset = found.next_offset
    return records


def cut(body: bytes) -> list[bytes]:
    """The records in the body of a pull, one by one."""
    records, at = [], 0
    while at < len(body):
        size = int.from_bytes(body[at : at + 4], "big")
        records.append(body[at : at + size])
        at += size
    return records


def as_record(ours: StoredRecord) -> Record:
    """What we decoded, as the independent decoder would tell it."""
    return Record(
        size=ours.size,
        magic=ours.magic,
        body_crc=ours.body_crc,
        queue_id=ours.queue_id,
        flag=ours.flag,
        queue_offset=ours.queue_offset,
        log_offset=ours.log_offset,
        sys_flag=ours.sys_flag,
        born_ms=ours.born_ms,
        born_host=host_text(ours.born_host),
        stored_ms=ours.stored_ms,
        store_host=host_text(ours.store_host),
        reconsume_times=ours.reconsume_times,
        prepared_log_offset=ours.prepared_offset,
        body=bytes(ours.body),
        topic=ours.topic,
        raw_properties=ours.properties,
    )


def host_text(host: bytes) -> str:
    family = socket.AF_INET if len(host) == 8 else socket.AF_INET6
    return f"{socket.inet_ntop(family, host[:-4])}:{int.from_bytes(host[-4:], 'big')}"


def encoded_again(ours: StoredRecord) -> bytes:
    """A record that was read, written once more from its fields."""
    record = NewRecord(
        topic=ours.topic,
        queue_id=ours.queue_id,
        body=bytes(ours.body),
        properties=ours.properties,
        flag=ours.flag,
        sys_flag=ours.sys_flag,
        born_ms=ours.born_ms,
        born_host=ours.born_host,
        reconsume_times=ours.reconsume_times,
        prepared_offset=ours.prepared_offset,
    )
    return encode_record(
        record, ours.queue_offset, ours.log_offset, ours.stored_ms, ours.store_host
    )
