"""The body of SEND_BATCH_MESSAGE: several messages of one topic, back to back.

    size 4 | magic 4 | crc 4 | flag 4 | body length 4 | body | properties length 2 | properties

`size` counts all of it, itself too. Magic and crc are zero; the broker computes the crc of
each body when it stores it. Properties are encoded as in properties.py.

Runs: messages of one queue that have nothing but a body and a unique key.

The batch of a bulk sender is one. What is the same for all of them is kept once, and the rest in
columns: such a sender brings hundreds of thousands a second, and an object for each is too much.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, final

import msgspec

from escrowmq.errors import BrokenBody, LocalProtocolError
from escrowmq.message.record import NewRecord

PROPERTIES_BYTES_MAX: Final = 0x7FFF

BATCH_HEAD: Final = struct.Struct(">iiiii")
_PROPERTIES_LENGTH = struct.Struct(">h")
_HEAD_BYTES = BATCH_HEAD.size
_FIXED_BYTES = BATCH_HEAD.size + _PROPERTIES_LENGTH.size


class BatchItem(msgspec.Struct, frozen=True, gc=False):
    flag: int
    body: bytes | memoryview
    properties: bytes = b""


def encode_batch(items: Iterable[BatchItem]) -> bytes:
    pieces: list[bytes | memoryview] = []
    for item in items:
        size = _FIXED_BYTES + len(item.body) + len(item.properties)
        try:
            head = BATCH_HEAD.pack(size, 0, 0, item.flag, len(item.body))
            properties_length = _PROPERTIES_LENGTH.pack(len(item.properties))
        except struct.error as error:
            raise LocalProtocolError(f"message {len(pieces) // 4} of a batch: {error}") from error
        pieces += (head, item.body, properties_length, item.properties)
    return b"".join(pieces)


def decode_batch(body: bytes | memoryview) -> list[BatchItem]:
    """Bodies are views, properties are copies. Raises BrokenBody, whatever is wrong."""
    view, whole = memoryview(body), bytes(body)  # short pieces of bytes are cheaper than views
    items: list[BatchItem] = []
    at, end, last = 0, len(whole), len(whole) - _FIXED_BYTES
    head, properties_length, add = (
        BATCH_HEAD.unpack_from,
        _PROPERTIES_LENGTH.unpack_from,
        items.append,
    )
    while at < end:
        if at > last:
            raise BrokenBody(f"message {len(items)} of a batch: {end - at} bytes are no message")
        size, _, _, flag, body_length = head(whole, at)
        following = at + size
        body_at = at + _HEAD_BYTES
        body_end = body_at + body_length
        if body_length < 0 or body_end + 2 > following or following > end:
            raise BrokenBody(
                f"message {len(items)} of a batch: {size} bytes with a body of {body_length}, "
                f"{end - at} are left"
            )
        if body_end + 2 + properties_length(whole, body_end)[0] != following:
            raise BrokenBody(
                f"message {len(items)} of a batch: its properties do not end where it does"
            )
        add(BatchItem(flag, view[body_at:body_end], whole[body_end + 2 : following]))
        at = following
    return items


UNIQUE_KEY_PREFIX: Final = b"UNIQ_KEY\x01"
_ITEM_END: Final = 2
_LENGTH: Final = struct.Struct(">h")
_HEAD: Final = struct.Struct(">i8xii")  # BATCH_HEAD: its size, flag and length of the body
assert _HEAD.size == BATCH_HEAD.size
_TAIL_BYTES_MIN: Final = (
    _LENGTH.size + len(UNIQUE_KEY_PREFIX) + 2
)  # a key of one letter, and its end
_TAIL_BYTES_MAX: Final = _TAIL_BYTES_MIN + 254
_RUN_FIXED_BYTES: Final = BATCH_HEAD.size + _TAIL_BYTES_MIN


@final
class RecordRun(msgspec.Struct, frozen=True, gc=False):
    """Messages to be appended one behind the other, for consumers to see."""

    topic: str
    queue_id: int
    bodies: list[memoryview]
    keys: list[bytes]  # all of one length
    flags: list[int]
    extra_properties: bytes  # the properties that each has behind its key
    sys_flag: int
    born_ms: int
    born_host: bytes
    reconsume_times: int = 0
    prepared_offset: int = 0

    def properties(self) -> list[bytes]:
        return [
            b"%b%b\x02%b" % (UNIQUE_KEY_PREFIX, key, self.extra_properties) for key in self.keys
        ]

    def records(self) -> Iterator[NewRecord]:
        """The same one by one."""
        columns = zip(self.bodies, self.properties(), self.flags, strict=True)
        for body, properties, flag in columns:
            yield NewRecord(
                self.topic,
                self.queue_id,
                body,  # type: ignore[arg-type]  # a view, as that of a single message
                properties,
                flag,
                self.sys_flag,
                self.born_ms,
                self.born_host,
                self.reconsume_times,
                self.prepared_offset,
            )


Appendable = NewRecord | RecordRun


def iter_records(records: Sequence[Appendable]) -> Iterator[NewRecord]:
    for one in records:
        if type(one) is RecordRun:
            yield from one.records()
        else:
            yield one


class BulkBatch(msgspec.Struct, frozen=True, gc=False):
    bodies: list[memoryview]
    keys: list[bytes]
    flags: list[int]

    def to_run(
        self,
        topic: str,
        queue_id: int,
        extra_properties: bytes,
        sys_flag: int,
        born_ms: int,
        born_host: bytes,
        reconsume_times: int,
        prepared_offset: int = 0,
    ) -> RecordRun:
        columns = self.bodies, self.keys, self.flags
        born = born_ms, born_host
        times = reconsume_times, prepared_offset
        return RecordRun(topic, queue_id, *columns, extra_properties, sys_flag, *born, *times)


def decode_bulk_batch(body: bytes | memoryview) -> BulkBatch | None:
    """The body of a batch (`message/batch.py`) whose messages have nothing but a unique key, of
    letters and digits, all of one length. None if it is another one, or broken: `decode_batch`
    finds out."""
    view = memoryview(body)
    bodies: list[memoryview] = []
    tails: list[memoryview] = []  # from the length of the properties on
    flags: list[int] = []
    at, end, last = 0, len(view), len(view) - _RUN_FIXED_BYTES
    head, head_bytes, tail_min = _HEAD.unpack_from, _HEAD.size, _TAIL_BYTES_MIN
    while at < end:
        if at > last:
            return None
        size, flag, body_bytes = head(view, at)
        body_at = at + head_bytes
        body_end = body_at + body_bytes
        at += size
        if body_bytes < 0 or at > end or at - body_end < tail_min:
            return None
        bodies.append(view[body_at:body_end])
        tails.append(view[body_end:at])
        flags.append(flag)
    keys = _unique_keys_only(tails)
    return BulkBatch(bodies, keys, flags) if keys else None


def _unique_keys_only(tails: list[memoryview]) -> list[bytes]:
    """The keys in these, if all are of one length and nothing else is there; else none."""
    lengths = set(map(len, tails))
    if len(lengths) != 1:
        return []
    (length,) = lengths
    if length > _TAIL_BYTES_MAX:
        return []
    joined, count = b"".join(tails), len(tails)
    begin = _LENGTH.pack(length - _LENGTH.size) + UNIQUE_KEY_PREFIX
    same = [*enumerate(begin), (length - 1, _ITEM_END)]
    if any(joined[at::length] != bytes((byte,)) * count for at, byte in same):
        return []
    keys = [
        joined[at : at + length - len(begin) - 1] for at in range(len(begin), len(joined), length)
    ]
    return keys if b"".join(keys).isalnum() else []
