"""Batches: several messages of one topic in one request, and uniform runs of records.

The body of SEND_BATCH_MESSAGE is a sequence of messages:

    size 4 | magic 4 | crc 4 | flag 4 | body length 4 | body | properties length 2 | properties

`size` counts the whole message with itself. Magic and crc are zero: the broker computes the CRC of
each body when it stores it. Properties are encoded as in properties.py.

A run is a batch whose messages have nothing but a body and a unique key, as bulk senders produce
it. What all messages have in common is stored once, and the rest in columns: such a sender brings
hundreds of thousands of messages per second, and one object for each would be too much.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, final

import msgspec

from escrowmq.errors import BrokenBody, LocalProtocolError
from escrowmq.message.record import NewRecord

BATCH_HEAD: Final = struct.Struct(">iiiii")
# All messages of a request are stored in one append, for which other requests wait: about 50 ms.
BATCH_MESSAGES_MAX: Final = 6_144
BULK_MESSAGES_MAX: Final = 12_288  # of a batch that becomes a run
_PROPERTIES_LENGTH = struct.Struct(">h")
_HEAD_BYTES = BATCH_HEAD.size
_FIXED_BYTES = BATCH_HEAD.size + _PROPERTIES_LENGTH.size


# --- batches -------------------------------------------------------------------------------------


class BatchItem(msgspec.Struct, frozen=True, gc=False):
    """One message of a batch."""

    flag: int
    body: bytes | memoryview
    properties: bytes = b""


def encode_batch(items: Iterable[BatchItem]) -> bytes:
    """Return the body of a batch. Raises LocalProtocolError if a message is too long for one."""
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
    """Return the messages of a batch. Raises BrokenBody, whatever is wrong with it.

    A batch with more than BATCH_MESSAGES_MAX messages is refused too.

    Bodies are views of `body`, properties are copies.
    """
    view, whole = memoryview(body), bytes(body)  # short slices of bytes are cheaper than views
    items: list[BatchItem] = []
    begin, end, last = 0, len(whole), len(whole) - _FIXED_BYTES
    head, properties_length, add = (
        BATCH_HEAD.unpack_from,
        _PROPERTIES_LENGTH.unpack_from,
        items.append,
    )
    while begin < end:
        if begin > last:
            raise BrokenBody(
                f"message {len(items)} of a batch: {end - begin} bytes are too few for a message"
            )
        size, _, _, flag, body_length = head(whole, begin)
        item_end = begin + size
        body_begin = begin + _HEAD_BYTES
        body_end = body_begin + body_length
        if body_length < 0 or body_end + 2 > item_end or item_end > end:
            raise BrokenBody(
                f"message {len(items)} of a batch: its size is {size}, its body has {body_length} "
                f"bytes, {end - begin} bytes remain"
            )
        if body_end + 2 + properties_length(whole, body_end)[0] != item_end:
            raise BrokenBody(
                f"message {len(items)} of a batch: its properties do not end at its end"
            )
        add(BatchItem(flag, view[body_begin:body_end], whole[body_end + 2 : item_end]))
        begin = item_end
        if len(items) > BATCH_MESSAGES_MAX:
            raise BrokenBody(f"the batch has more than {BATCH_MESSAGES_MAX} messages; split it")
    return items


# --- runs ----------------------------------------------------------------------------------------

UNIQUE_KEY_PREFIX: Final = b"UNIQ_KEY\x01"
_ITEM_END: Final = 2
_LENGTH: Final = struct.Struct(">h")
_HEAD: Final = struct.Struct(">i8xii")  # size, flag and body length of BATCH_HEAD
assert _HEAD.size == BATCH_HEAD.size
# A tail is the length of the properties and the properties. The shortest key has one letter.
_TAIL_BYTES_MIN: Final = _LENGTH.size + len(UNIQUE_KEY_PREFIX) + 2
_TAIL_BYTES_MAX: Final = _TAIL_BYTES_MIN + 254
_RUN_FIXED_BYTES: Final = BATCH_HEAD.size + _TAIL_BYTES_MIN


@final
class RecordRun(msgspec.Struct, frozen=True, gc=False):
    """Messages to be appended one after the other to one queue."""

    topic: str
    queue_id: int
    bodies: list[memoryview]
    keys: list[bytes]  # all of one length
    flags: list[int]
    extra_properties: bytes  # the properties of each message after its key
    sys_flag: int
    born_ms: int
    born_host: bytes
    reconsume_times: int = 0
    prepared_offset: int = 0

    def properties(self) -> list[bytes]:
        """Return the encoded properties of each message."""
        return [
            b"%b%b\x02%b" % (UNIQUE_KEY_PREFIX, key, self.extra_properties) for key in self.keys
        ]

    def records(self) -> Iterator[NewRecord]:
        """Yield the same messages as single records."""
        columns = zip(self.bodies, self.properties(), self.flags, strict=True)
        for body, properties, flag in columns:
            yield NewRecord(
                self.topic,
                self.queue_id,
                body,  # type: ignore[arg-type]  # a view, like the body of a single message
                properties,
                flag,
                self.sys_flag,
                self.born_ms,
                self.born_host,
                self.reconsume_times,
                self.prepared_offset,
            )


Appendable = NewRecord | RecordRun


def iter_records(appendables: Sequence[Appendable]) -> Iterator[NewRecord]:
    """Yield all records, with runs as single records."""
    for appendable in appendables:
        if type(appendable) is RecordRun:
            yield from appendable.records()
        else:
            yield appendable


class BulkBatch(msgspec.Struct, frozen=True, gc=False):
    """The columns of a batch that can become a run."""

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
        """Return a run for this queue with the fields that all its messages have in common."""
        columns = self.bodies, self.keys, self.flags
        born = born_ms, born_host
        times = reconsume_times, prepared_offset
        return RecordRun(topic, queue_id, *columns, extra_properties, sys_flag, *born, *times)


def decode_bulk_batch(body: bytes | memoryview) -> BulkBatch | None:
    """Return the columns of a batch whose messages have no property but a unique key.

    All keys must have the same length and consist of letters and digits. Return None for any other
    batch, also for a broken one: `decode_batch` finds out what is wrong.
    """
    view = memoryview(body)
    bodies: list[memoryview] = []
    tails: list[memoryview] = []
    flags: list[int] = []
    begin, end, last = 0, len(view), len(view) - _RUN_FIXED_BYTES
    head, head_bytes, tail_min = _HEAD.unpack_from, _HEAD.size, _TAIL_BYTES_MIN
    while begin < end:
        if begin > last:
            return None
        size, flag, body_bytes = head(view, begin)
        body_begin = begin + head_bytes
        body_end = body_begin + body_bytes
        begin += size
        if body_bytes < 0 or begin > end or begin - body_end < tail_min:
            return None
        bodies.append(view[body_begin:body_end])
        tails.append(view[body_end:begin])
        flags.append(flag)
        if len(flags) > BULK_MESSAGES_MAX:
            return None
    keys = _unique_keys_only(tails)
    return BulkBatch(bodies, keys, flags) if keys else None


def _unique_keys_only(tails: list[memoryview]) -> list[bytes]:
    """Return the keys of these tails, or an empty list if a tail is anything but a key."""
    lengths = set(map(len, tails))
    if len(lengths) != 1:
        return []
    (length,) = lengths
    if length > _TAIL_BYTES_MAX:
        return []
    joined, count = b"".join(tails), len(tails)
    # All tails have one length, so their column i is joined[i::length]. Checking the columns that
    # must be constant takes a dozen comparisons, however many messages there are.
    prefix = _LENGTH.pack(length - _LENGTH.size) + UNIQUE_KEY_PREFIX
    constant_columns = [*enumerate(prefix), (length - 1, _ITEM_END)]
    if any(joined[column::length] != bytes((byte,)) * count for column, byte in constant_columns):
        return []
    key_bytes = length - len(prefix) - 1
    keys = [joined[begin : begin + key_bytes] for begin in range(len(prefix), len(joined), length)]
    return keys if b"".join(keys).isalnum() else []
