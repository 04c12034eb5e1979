"""Rows to packets: some hundred messages for one queue, as the body of one request.

A row's unique key says which row it is: sink, epoch and partition, hashed, and its number. Who
gets the same row twice sees the same key.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from escrowmq.errors import RowRefused
from escrowmq.message.javahash import java_hash
from escrowmq.spark.write_blocks import encode_rows
from escrowmq.spark.write_columns import Bytes, Rows, bytes_of

_HEAD = struct.Struct(">iiiii").pack
_FIXED: Final = 22  # of a message in a batch, besides body and properties
_KEY_BYTES: Final = len("UNIQ_KEY\x01") + 32 + 1
_PLAIN: Final = _FIXED + _KEY_BYTES
MESSAGE_BYTES_MAX: Final = (4 << 20) - 64_000  # brokers take 4 MiB, unless they are told otherwise


class Target(NamedTuple):
    """One queue."""

    topic: str
    broker: str
    address: str
    queue_id: int


class Packet(NamedTuple):
    target: Target
    pieces: list[Bytes]  # of a batch's body; of a single message, its body
    size: int
    messages: int
    single: bytes | None = None  # the properties, of a message that travels alone


Queues = Callable[[str], Sequence[Target]]


def key_prefix(*names: object) -> str:
    """24 hexadecimal digits for these names; eight more are for a number."""
    return blake2b("\0".join(map(str, names)).encode(), digest_size=12).hexdigest().upper()


@dataclass(slots=True)
class _Lane:
    """What waits for one queue."""

    target: Target
    pieces: list[Bytes] = field(default_factory=list)
    size: int = 0
    count: int = 0

    def add(self, messages: Bytes, count: int) -> None:
        self.pieces.append(messages)
        self.size += len(messages)
        self.count += count

    def take(self) -> Packet:
        packet = Packet(self.target, self.pieces, self.size, self.count)
        self.pieces, self.size, self.count = [], 0, 0
        return packet


class Packer:
    """`delayed_alone`: brokers other than ours take no delayed message in a batch."""

    def __init__(
        self,
        queues: Queues,
        topic: str,
        prefix: str,
        *,
        batch_bytes: int,
        first_queue: int,
        delayed_alone: bool,
    ) -> None:
        self.rows = 0
        self._queues = queues
        self._topic = topic
        self._prefix = prefix
        self._key = b"UNIQ_KEY\x01" + prefix.encode()
        self._batch_bytes = batch_bytes
        self._next_queue = first_queue
        self._delayed_alone = delayed_alone
        self._sticky: dict[str, _Lane] = {}  # one queue at a time, the next when it is full
        self._sharded: dict[Target, _Lane] = {}
        self._shards: dict[tuple[str, str], _Lane] = {}  # by topic and sharding key

    def add(self, rows: Rows) -> Iterator[Packet]:
        if rows.topics is None and rows.properties is None:
            return self._add_plain(rows.bodies)
        return self._add_any(rows)

    def rest(self) -> Iterator[Packet]:
        for lane in (*self._sticky.values(), *self._sharded.values()):
            if lane.count:
                yield lane.take()

    def _add_plain(self, bodies: pa.Array[Any]) -> Iterator[Packet]:
        """Nothing but bodies: most rows of most jobs come by here."""
        lane, limit = self._lane(self._topic), self._batch_bytes
        data, edges = encode_rows(bodies, self.rows, self._key)
        sizes = np.diff(edges)
        if len(sizes) and sizes.max() > MESSAGE_BYTES_MAX:
            row = int(np.argmax(sizes > MESSAGE_BYTES_MAX))
            raise RowRefused(_too_long(self.rows + row, int(sizes[row]) - _PLAIN))
        at = 0
        while at < len(sizes):
            begin = int(edges[at])
            upto = int(np.searchsorted(edges, begin + limit - lane.size, side="right")) - 1
            if upto <= at and lane.count:
                yield lane.take()
                self._turn(lane)
                continue
            upto = max(upto, at + 1)  # one message at the least
            lane.add(data[begin : int(edges[upto])], upto - at)
            self.rows += upto - at
            at = upto

    def _add_any(self, rows: Rows) -> Iterator[Packet]:
        topics, texts, shards, delayed = (
            rows.topics,
            rows.properties,
            rows.sharding_keys,
            rows.delayed,
        )
        for at, body in enumerate(bytes_of(rows.bodies)):
            topic = (topics[at] if topics else None) or self._topic
            if not topic:
                raise RowRefused(f"row {self.rows} has no topic, and there is no option topic")
            shard = shards[at] if shards else None
            lane = self._lane_of_shard(topic, shard) if shard else self._lane(topic)
            tail = b"%b%08X\x02%b" % (self._key, self.rows, texts[at].encode() if texts else b"")
            size = _FIXED + len(body) + len(tail)
            if size > MESSAGE_BYTES_MAX:
                raise RowRefused(_too_long(self.rows, len(body)))
            if self._delayed_alone and delayed and delayed[at]:
                yield Packet(lane.target, [body], len(body), 1, tail)
                self.rows += 1
                continue
            if lane.size + size > self._batch_bytes and lane.count:
                yield lane.take()
                if not shard:
                    self._turn(lane)
            head = _HEAD(size, 0, 0, 0, len(body))
            lane.pieces += (head, body, struct.pack(">h", len(tail)), tail)
            lane.size += size
            lane.count += 1
            self.rows += 1

    def _lane(self, topic: str) -> _Lane:
        lane = self._sticky.get(topic)
        if lane is None:
            queues = self._queues(topic)
            lane = self._sticky[topic] = _Lane(queues[self._next_queue % len(queues)])
        return lane

    def _lane_of_shard(self, topic: str, shard: str) -> _Lane:
        lane = self._shards.get((topic, shard))
        if lane is None:
            queues = self._queues(topic)
            target = queues[java_hash(shard) % len(queues)]
            lane = self._sharded.setdefault(target, _Lane(target))
            self._shards[topic, shard] = lane
        return lane

    def _turn(self, lane: _Lane) -> None:
        self._next_queue += 1
        queues = self._queues(lane.target.topic)
        lane.target = queues[self._next_queue % len(queues)]


def _too_long(row: int, length: int) -> str:
    return f"row {row} has a body of {length} bytes: a message has at most {MESSAGE_BYTES_MAX}"
