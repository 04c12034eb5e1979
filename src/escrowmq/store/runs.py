"""Runs of records (`message/newrun.py`) on their way into the log.

What is the same for all of them is encoded once, the rest column by column; what comes out is what
`Batch.add` would have made of each.
"""

from __future__ import annotations

import struct
from itertools import accumulate, chain, count, repeat
from typing import Any, Final

from escrowmq.message.checksum import crc32
from escrowmq.message.newrun import KEY_BEGIN, NewRun
from escrowmq.message.offsets import LogOffset
from escrowmq.message.record import CRC_MASK, HEAD_V4, properties_length, topic_field
from escrowmq.message.sysflag import BORN_HOST_IPV6, STORE_HOST_IPV6
from escrowmq.store.logbatch import Batch
from escrowmq.store.placed import RunPlaces

_HOST_BITS: Final = BORN_HOST_IPV6 | STORE_HOST_IPV6
_HOST_V4_BYTES: Final = 8
# HEAD_V4, but what a run has once is packed once: magic, queue id, sysFlag to prepared offset.
_HEAD: Final = struct.Struct(">i4sI4siqq48si")
_SAME_FOR_ALL: Final = struct.Struct(">iq8sq8siq")
assert _HEAD.size == HEAD_V4.size


class RunBatch(Batch):
    """A batch that takes runs as well."""

    __slots__ = ()

    def add_run(self, run: NewRun, queue_offset: int, stored_ms: int) -> RunPlaces:
        """Place them all behind what is there."""
        if self._sealed or {len(self._store_host), len(run.born_host)} != {_HOST_V4_BYTES}:
            return self._add_one_by_one(run, queue_offset, stored_ms)
        magic, topic = topic_field(run.topic)
        marks = b"\x02" + run.marks
        properties_bytes = len(KEY_BEGIN) + len(run.keys[0]) + len(marks)
        middle = topic + properties_length(properties_bytes) + KEY_BEGIN
        fixed_bytes = HEAD_V4.size + len(topic) + 2 + properties_bytes
        lengths = list(map(len, run.bodies))
        sizes = [fixed_bytes + length for length in lengths]
        log_offsets = list(accumulate(sizes, initial=int(self._at)))
        end = log_offsets.pop()
        if end - self._at > self._room:  # over the end of this file, once in a long while
            return self._add_one_by_one(run, queue_offset, stored_ms)
        heads = map(
            _HEAD.pack,
            sizes,
            repeat(struct.pack(">I", magic)),
            [crc & CRC_MASK for crc in map(crc32, run.bodies)],
            repeat(struct.pack(">i", run.queue_id)),
            run.flags,
            count(queue_offset),
            log_offsets,
            repeat(self._same_for_all(run, stored_ms)),
            lengths,
        )
        records = zip(heads, run.bodies, repeat(middle), run.keys, repeat(marks), strict=False)
        pieces: list[Any] = self._pieces  # some of them are views
        pieces.extend(chain.from_iterable(records))
        self._room -= end - self._at
        self._at = LogOffset(end)
        return RunPlaces(log_offsets, sizes)

    def _add_one_by_one(self, run: NewRun, queue_offset: int, stored_ms: int) -> RunPlaces:
        numbered = enumerate(run.records(), queue_offset)
        added = [self.add(record, at, stored_ms) for at, record in numbered]
        return RunPlaces([int(at) for at, _ in added], [size for _, size in added])

    def _same_for_all(self, run: NewRun, stored_ms: int) -> bytes:
        return _SAME_FOR_ALL.pack(
            run.sys_flag & ~_HOST_BITS,
            run.born_ms,
            run.born_host,
            stored_ms,
            self._store_host,
            run.reconsume_times,
            run.prepared_offset,
        )
