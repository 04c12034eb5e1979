"""What the escrow knows, in a small file, so that a start need not read every op there ever was.

It holds the two bits of every half and how far the queues were read for them; the open halves
themselves are read again from the log, which is where they are. Derived and disposable: without it
everything is read again, and comes out the same.
"""

from __future__ import annotations

from typing import Final
from zlib import crc32

import msgspec

PATH: Final = "escrowmq.escrow"


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    log_offset: int  # all of it speaks of the log below
    halves_read: int
    steps_read: int
    decisions_read: int
    base: int
    bits: bytes
    half_cursor: int
    op_cursor: int
    checks: dict[int, tuple[int, int]]  # of halves that were asked about: how often, when last
    aliases: dict[int, int]
    writers: bytes = b""


def encode_snapshot(snapshot: Snapshot) -> bytes:
    data = msgspec.msgpack.encode(snapshot)
    return crc32(data).to_bytes(4, "big") + data


def decode_snapshot(content: bytes, log_begin: int, log_end: int) -> Snapshot | None:
    """None if there is none that fits this log: it can be done without."""
    data = content[4:]
    if len(content) <= 4 or crc32(data) != int.from_bytes(content[:4], "big"):
        return None
    try:
        snapshot = msgspec.msgpack.decode(data, type=Snapshot)
    except msgspec.MsgspecError:  # of another version
        return None
    # Of what the log has lost it must not speak, nor of another log.
    return snapshot if log_begin <= snapshot.log_offset <= log_end else None
