"""A record inside the body of a message is never found, whatever is damaged around it.

The sender of a message can know the log offset that its body will have, and can write a record with
that offset and with correct checksums into it. Nothing but its position tells it from a real one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import pytest

from escrowmq.config import StoreConfig
from escrowmq.message.record import NewRecord, decode_record, encode_record
from escrowmq.store.checkpoint import CHECKPOINT_PATH
from escrowmq.store.log_files import LogFiles
from escrowmq.testing import FaultyDisk
from tests.support.disk_damage import delete_files, overwrite_log
from tests.support.stores import HOST, NOW_MS, examine, open_store, sample

SEALED: Final = StoreConfig(
    segment_bytes=1 << 16, queue_file_bytes=200, index_slots=7, index_entries=100
)
PLAIN: Final = replace(SEALED, sealed=False)
HEAD_BYTES: Final = 88
PADDING: Final = 40  # bytes of the body before the forged record
# Its length has no zero byte, so that the end of the outer record can be the end of the forged one.
LONG_PROPERTIES: Final = b"UNIQ_KEY\x01outer\x02PAD\x01" + b"p" * 300 + b"\x02"


@dataclass(frozen=True)
class ForgedLog:
    disk: FaultyDisk
    outer: int  # log offset of the message with the forged record in its body
    outer_size: int
    forged: int  # log offset of the forged record
    bodies: list[bytes]  # of the other messages
    end: int


def forged_record(log_offset: int, *, is_sealed: bool, properties: bytes = b"") -> bytes:
    record = NewRecord("victim", 0, b"forged", properties, born_ms=NOW_MS, born_host=HOST)
    return encode_record(record, 0, log_offset, NOW_MS, HOST, is_sealed)


def embed_whole(log_offset: int, is_sealed: bool) -> bytes:
    """Return a body with several forged records one after the other."""
    body = b"x" * PADDING
    for _ in range(3):
        body += forged_record(log_offset + HEAD_BYTES + len(body), is_sealed=is_sealed)
    return body + b"y" * 50


def embed_up_to_the_end(log_offset: int, is_sealed: bool) -> bytes:
    """Return a body that ends with the first part of a forged record.

    Its last part is the end of the outer record. So its end is a real record boundary.
    """
    topic = b"\x02T0"
    tail = topic + struct.pack(">h", len(LONG_PROPERTIES)) + LONG_PROPERTIES
    forged_offset = log_offset + HEAD_BYTES + PADDING
    whole = forged_record(forged_offset, is_sealed=False, properties=b"k\x01v\x02" + tail)
    assert whole.endswith(tail)
    decode_record(whole, 0, forged_offset)  # type: ignore[arg-type]  # a LogOffset is a number
    return b"x" * PADDING + whole.removesuffix(tail)


Embed = Callable[[int, bool], bytes]


def write_log(settings: StoreConfig, embed: Embed, *, checkpointed: int, flushed: int) -> ForgedLog:
    """Write nine messages, the fifth with a forged record, and stop like a killed process."""
    disk = FaultyDisk()
    store = open_store(disk, settings)
    outer = outer_size = 0
    bodies = []
    for number in range(9):
        record = sample(number, topic="T0", queue_id=0)
        if number == 4:
            outer = store.end
            record = sample(
                number,
                topic="T0",
                queue_id=0,
                body=embed(outer, settings.sealed),
                properties=LONG_PROPERTIES,
            )
        else:
            bodies.append(record.body)
        [result] = store.append([record], now_ms=NOW_MS)
        outer_size = result.size if number == 4 else outer_size
        if number + 1 == checkpointed:
            store.checkpoint()
        if number + 1 == flushed:
            store.flush()
    end = store.end
    store.abandon()
    return ForgedLog(disk, outer, outer_size, outer + HEAD_BYTES + PADDING, bodies, end)


# --- damage to the outer record ------------------------------------------------------------------


def field_of(log: ForgedLog, position: int, data: bytes) -> Callable[[FaultyDisk], None]:
    return lambda disk: overwrite_log(disk, SEALED.segment_bytes, log.outer + position, data)


ONE_FIELD: Final[dict[str, Callable[[ForgedLog], tuple[int, bytes]]]] = {
    "its size points to the forged record": lambda log: (
        0,
        struct.pack(">i", log.forged - log.outer),
    ),
    "its size points past the end": lambda log: (0, struct.pack(">i", 1 << 14)),
    "its size is negative": lambda log: (0, struct.pack(">i", -5)),
    "its magic is wrong": lambda log: (4, b"\x5a"),
    "its body CRC is wrong": lambda log: (8, b"\xff\xff"),
    "its queue offset is wrong": lambda log: (20, struct.pack(">q", 1 << 40)),
    "its log offset is wrong": lambda log: (28, b"\x40"),
    "its hosts look like IPv6": lambda log: (39, b"\x30"),
    "its body ends at the forged record": lambda log: (84, struct.pack(">i", PADDING)),
    "its body is too long": lambda log: (84, struct.pack(">i", 1 << 14)),
    "its body is damaged": lambda log: (HEAD_BYTES + 3, b"\xff"),
}
MANY_BYTES: Final[dict[str, Callable[[ForgedLog], tuple[int, bytes]]]] = {
    "its head is zero": lambda log: (0, bytes(HEAD_BYTES)),
    "its head is another one's": lambda log: (
        0,
        forged_record(7, is_sealed=False)[:HEAD_BYTES],
    ),
    "its size and magic are gone": lambda log: (0, b"\xff" * 8),
    "everything in front of the forged record is gone": lambda log: (
        0,
        b"\xee" * (log.forged - log.outer),
    ),
}

LAYOUTS = pytest.mark.parametrize("embed", [embed_whole, embed_up_to_the_end])
SEALS = pytest.mark.parametrize("settings", [SEALED, PLAIN], ids=["sealed", "plain"])
PLACES = pytest.mark.parametrize(
    ("checkpointed", "flushed"),
    [(7, 9), (2, 9), (2, 7), (2, 3)],
    ids=["checkpointed", "flushed", "in a flushed group", "written"],
)
LOSSES: Final = {"nothing": "", "queues": "consumequeue/", "checkpoint": CHECKPOINT_PATH}


def bodies_after(
    log: ForgedLog, settings: StoreConfig, position: int, data: bytes, lost: str
) -> list[bytes]:
    """Damage a log, open it, and return the bodies of all messages but the outer one."""
    disk = log.disk.after_kill()
    overwrite_log(disk, settings.segment_bytes, log.outer + position, data)
    if lost:
        delete_files(disk, lost)
    examine(disk, settings)
    items = list(LogFiles(disk).scan())
    assert "victim" not in [getattr(item, "topic", "") for item in items]
    store = open_store(disk, settings)
    assert "victim" not in [topic for topic, _ in store.queues()]
    bodies = []
    for queue_offset in range(store.max_offset("T0", 0)):
        log_offset = store.log_offset_of("T0", 0, queue_offset)
        if log_offset is not None and log_offset != log.outer:
            bodies.append(bytes(store.record_at(log_offset).body))
    store.close()
    assert b"forged" not in bodies
    return bodies


@LAYOUTS
@SEALS
@PLACES
def test_a_forged_record_is_not_found_behind_one_wrong_field(
    embed: Embed, settings: StoreConfig, checkpointed: int, flushed: int
) -> None:
    log = write_log(settings, embed, checkpointed=checkpointed, flushed=flushed)
    for name, damage in ONE_FIELD.items():
        for loss, path in LOSSES.items():
            bodies = bodies_after(log, settings, *damage(log), path)
            assert bodies == log.bodies, f"{name}; lost: {loss}"


@LAYOUTS
@SEALS
@PLACES
def test_a_forged_record_is_not_found_behind_many_wrong_bytes(
    embed: Embed, settings: StoreConfig, checkpointed: int, flushed: int
) -> None:
    log = write_log(settings, embed, checkpointed=checkpointed, flushed=flushed)
    for damage in MANY_BYTES.values():
        for path in LOSSES.values():
            bodies = bodies_after(log, settings, *damage(log), path)
            assert bodies == [body for body in log.bodies if body in bodies]
            assert bodies[:4] == log.bodies[:4]
            if path != "consumequeue/" and checkpointed == 7:
                assert bodies == log.bodies  # the queues say where the next record begins
