"""Questions and the journal of them: what a producer is asked, and one line for each step."""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from escrowmq.errors import CorruptRecord
from escrowmq.escrow.shapes import CHECK_TIMES
from escrowmq.message import names
from escrowmq.message.record import NewRecord, StoredRecord, encode_record


def check_body(half: StoredRecord, topic: str, queue_id: int, checks: int) -> bytes:
    """The message as its producer is asked about it: where it wants to go, and not where it is."""
    properties = half.properties + f"{CHECK_TIMES}\x01{checks}\x02".encode()
    record = NewRecord(
        topic,
        queue_id,
        half.body,  # type: ignore[arg-type]
        properties,
        half.flag,
        half.sys_flag,
        half.born_ms,
        half.born_host,
        half.reconsume_times,
    )
    return encode_record(
        record, half.queue_offset, half.log_offset, half.stored_ms, half.store_host
    )


class Step(msgspec.Struct, frozen=True):
    """One line of the journal."""

    half: int
    what: str  # asked, unknown, resumed
    number: int  # of the check
    peer: str
    at_ms: int = 0


_JOURNAL = struct.Struct(">qBH")
STEPS: Final = ("asked", "unknown", "resumed")


def journal_of(step: Step, *, now_ms: int) -> NewRecord:
    body = _JOURNAL.pack(step.half, STEPS.index(step.what), step.number) + step.peer.encode()
    return NewRecord(
        names.JOURNAL_TOPIC, 0, body, f"KEYS\x01{step.half}\x02".encode(), born_ms=now_ms
    )


def decode_step(record: StoredRecord) -> Step:
    try:
        half, what, number = _JOURNAL.unpack_from(record.body)
        peer = bytes(record.body[_JOURNAL.size :]).decode()
        return Step(half, STEPS[what], number, peer, record.stored_ms)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise CorruptRecord(record.log_offset, f"no line of a journal: {error}") from error
