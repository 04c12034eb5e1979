"""Runs: records of one queue that follow each other and have nothing but a unique key.

The batch of a bulk sender is one. What is the same for all of them is looked at once; what comes
out is what `Batch.add` would have made of each.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final, NamedTuple

from escrowmq.message.checksum import crc32
from escrowmq.message.facts import has_queue_entry
from escrowmq.message.record import CRC_MASK, HEAD_V4, NewRecord, properties_length, topic_field
from escrowmq.message.sysflag import BORN_HOST_IPV6, STORE_HOST_IPV6
from escrowmq.store.consumequeue import ConsumeQueue
from escrowmq.store.keyindex import WaitingKey
from escrowmq.store.logbatch import Batch
from escrowmq.store.queuetable import QueueTable

_HOST_BITS: Final = BORN_HOST_IPV6 | STORE_HOST_IPV6
_HOST_V4_BYTES: Final = 8


Place = tuple[int, int, int]  # log offset, queue offset, size


class Run(NamedTuple):
    """Of each record where it went, and its key."""

    queue: ConsumeQueue | None
    places: list[Place]
    keys: list[WaitingKey]

    def note(
        self, added: list[ConsumeQueue], waiting: list[WaitingKey], ahead: Iterator[NewRecord]
    ) -> bool:
        """Its entries and keys, and go on behind it; whether it has any record. `ahead` has handed
        out the first one."""
        count = len(self.places)
        if self.queue is None or not count:
            return False
        added += [self.queue] * count
        waiting += self.keys
        next(islice(ahead, count - 1, count - 1), None)
        return True


_NONE: Final = Run(None, [], [])


class RunBatch(Batch):
    """A batch that takes runs as well."""

    __slots__ = ()

    def add_run(
        self,
        queues: QueueTable,
        records: Sequence[NewRecord],
        first: int,
        stored_ms: int,
        small_bytes: int,
    ) -> Run:
        """As many from the first on as are one and fit into this file, with their queue entries. If
        that is none, it takes `add`."""
        model = records[first]
        is_odd = self._sealed or len(self._store_host) != _HOST_V4_BYTES
        if is_odd or not has_queue_entry(model.sys_flag):
            return _NONE
        queue = queues.find_or_make(model.topic, model.queue_id)
        try:
            places = self._place(records, first, int(queue.next), stored_ms, small_bytes)
        except struct.error:
            queues.forget(queue)
            raise
        queue.add_run(places)
        keys = [
            (queue.topic, record.lone_key, place[0], stored_ms)
            for record, place in zip(islice(records, first, None), places, strict=False)
        ]
        return Run(queue, places, keys)

    def _place(
        self,
        records: Sequence[NewRecord],
        first: int,
        queue_offset: int,
        stored_ms: int,
        small_bytes: int,
    ) -> list[Place]:
        model, host, at, room = records[first], self._store_host, int(self._at), self._room
        topic, queue_id, flags = model.topic, model.queue_id, model.sys_flag
        magic, name = topic_field(topic)
        head, sys_flag = HEAD_V4.pack, flags & ~_HOST_BITS
        fixed_bytes, known_bytes, middle = HEAD_V4.size + len(name) + 2, -1, b""
        pieces, places = self._pieces, []
        for record in islice(records, first, None):
            body, properties, born_host = record.body, record.properties, record.born_host
            body_bytes, properties_bytes = len(body), len(properties)
            size = fixed_bytes + body_bytes + properties_bytes
            if (
                not record.lone_key
                or size > room
                or size > fixed_bytes + small_bytes
                or (record.queue_id, record.sys_flag) != (queue_id, flags)
                or record.topic != topic
                or len(born_host) != _HOST_V4_BYTES
            ):
                break
            if properties_bytes != known_bytes:
                known_bytes, middle = properties_bytes, name + properties_length(properties_bytes)
            crc, flag, born_ms = crc32(body) & CRC_MASK, record.flag, record.born_ms
            times, prepared = record.reconsume_times, record.prepared_offset
            packed = head(
                *(size, magic, crc, queue_id, flag, queue_offset, at, sys_flag, born_ms, born_host),
                *(stored_ms, host, times, prepared, body_bytes),
            )
            pieces += (packed, body, middle, properties)
            places.append((at, queue_offset, size))
            queue_offset += 1
            at += size
            room -= size
        self._at, self._room = at, room  # type: ignore[assignment]  # as in `add`
        return places
