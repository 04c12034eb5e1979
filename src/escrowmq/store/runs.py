"""Runs of records (`message/newrun.py`) on their way into the log.

What is the same for all of them is encoded once; what comes out is what `Batch.add` would have made
of each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from operator import itemgetter
from typing import Any, Final

from escrowmq.message.checksum import crc32
from escrowmq.message.newrun import KEY_BEGIN, NewRun
from escrowmq.message.record import CRC_MASK, HEAD_V4, properties_length, topic_field
from escrowmq.message.sysflag import BORN_HOST_IPV6, STORE_HOST_IPV6
from escrowmq.store.keyindex import WaitingKey
from escrowmq.store.logbatch import Batch
from escrowmq.store.placed import Place

_HOST_BITS: Final = BORN_HOST_IPV6 | STORE_HOST_IPV6
_HOST_V4_BYTES: Final = 8
# HEAD_V4, but what a run has once is packed once: magic, queue id, sysFlag to prepared offset.
_HEAD: Final = struct.Struct(">i4sI4siqq48si")
_SAME_FOR_ALL: Final = struct.Struct(">iq8sq8siq")
assert _HEAD.size == HEAD_V4.size
_log_offset = itemgetter(0)


class RunBatch(Batch):
    """A batch that takes runs as well."""

    __slots__ = ()

    def add_run(self, run: NewRun, queue_offset: int, stored_ms: int) -> list[Place]:
        """Place them all behind what is there, in this file and in the following ones."""
        if self._sealed or {len(self._store_host), len(run.born_host)} != {_HOST_V4_BYTES}:
            numbered = enumerate(run.records(), queue_offset)
            added = ((self.add(record, at, stored_ms), at) for at, record in numbered)
            return [(log_offset, at, size) for (log_offset, size), at in added]
        places: list[Place] = []
        while True:
            self._place(run, places, queue_offset, stored_ms)
            if len(places) == len(run.bodies):
                return places
            self._at = self._roll(self._at)

    def _place(self, run: NewRun, places: list[Place], first: int, stored_ms: int) -> None:
        """As many of those that are left as fit into this file."""
        pieces: list[Any] = self._pieces
        at, room = int(self._at), self._room
        magic_number, name = topic_field(run.topic)
        magic, queue_id = struct.pack(">I", magic_number), struct.pack(">i", run.queue_id)
        sys_flag, times, prepared = run.sys_flag, run.reconsume_times, run.prepared_offset
        same = _SAME_FOR_ALL.pack(
            *(sys_flag & ~_HOST_BITS, run.born_ms, run.born_host),
            *(stored_ms, self._store_host, times, prepared),
        )
        marks, head, key_bytes, middle, fixed_bytes = b"\x02" + run.marks, _HEAD.pack, -1, b"", 0
        done = len(places)
        queue_offset = first + done
        columns = islice(zip(run.bodies, run.keys, run.flags, strict=True), done, None)
        for body, key, flag in columns:
            if len(key) != key_bytes:
                key_bytes = len(key)
                properties_bytes = len(KEY_BEGIN) + key_bytes + len(marks)
                middle = name + properties_length(properties_bytes) + KEY_BEGIN
                fixed_bytes = HEAD_V4.size + len(name) + 2 + properties_bytes
            body_bytes = len(body)
            size = fixed_bytes + body_bytes
            if size > room:
                break
            crc = crc32(body) & CRC_MASK
            packed = head(size, magic, crc, queue_id, flag, queue_offset, at, same, body_bytes)
            pieces += (packed, body, middle, key, marks)
            places.append((at, queue_offset, size))
            queue_offset += 1
            at += size
            room -= size
        self._at, self._room = at, room  # type: ignore[assignment]  # as in `add`


def waiting_keys(run: NewRun, places: Sequence[Place], stored_ms: int) -> Iterator[WaitingKey]:
    log_offsets = map(_log_offset, places)
    return zip(repeat(run.topic), run.keys, log_offsets, repeat(stored_ms), strict=False)
