"""Many records in one buffer, read field by field instead of record by record.

A field of all records is one gather: the buffer is looked at as numbers that begin at every byte,
and those at the records' places are taken. Bodies, topics and properties become Arrow columns in
one copy. Nothing here makes a Python object for a message, but for the walk from one to the next.
"""

from __future__ import annotations

import struct
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from escrowmq.errors import BrokenBody
from escrowmq.message.record import (
    BORN_HOST_IPV6,
    MAGIC_V1,
    MAGIC_V2,
    RECORD_BYTES_MIN,
    STORE_HOST_IPV6,
)

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int64]

MAGIC_AT: Final = 4
QUEUE_ID_AT, FLAG_AT, QUEUE_OFFSET_AT, LOG_OFFSET_AT = 12, 16, 20, 28
SYS_FLAG_AT, BORN_MS_AT, BORN_HOST_AT = 36, 40, 48
_HEAD_BYTES: Final = 88  # with both hosts IPv4
_HOST_V4, _HOST_V6 = 8, 20
_SIZE = struct.Struct(">i")


def walk(data: Bytes, begin: int, limit: int) -> tuple[list[int], int]:
    """Where records begin that do so before the limit, one behind the other; and the place behind
    them, or the first that is no record."""
    places: list[int] = []
    unpack, view, end = _SIZE.unpack_from, data.data, len(data)
    at, limit = begin, min(limit, end - RECORD_BYTES_MIN + 1)
    while at < limit:
        (size,) = unpack(view, at)
        if size < RECORD_BYTES_MIN or size > end - at:
            break
        places.append(at)
        at += size
    return places, at


class Records:
    """Records at these places of a buffer, in rising order."""

    def __init__(self, data: Bytes, places: Numbers) -> None:
        self.data = data
        self.at = places

    @classmethod
    def all_of(cls, data: Bytes) -> Records:
        """A buffer that holds whole records and nothing else, as pull answers do."""
        places, end = walk(data, 0, len(data))
        if end != len(data):
            raise BrokenBody(f"no record at byte {end} of {len(data)} in what was pulled")
        return cls(data, np.array(places, np.int64))

    def __len__(self) -> int:
        return len(self.at)

    def where(self, mask: npt.NDArray[np.bool_]) -> Records:
        return self if mask.all() else Records(self.data, self.at[mask])

    # --- numbers ---------------------------------------------------------------------------------

    def ints(self, places: Numbers) -> npt.NDArray[np.int32]:
        return _numbers(self.data, ">i4")[places].astype(np.int32)

    def longs(self, places: Numbers) -> Numbers:
        return _numbers(self.data, ">i8")[places].astype(np.int64)

    @cached_property
    def size(self) -> npt.NDArray[np.int32]:
        return self.ints(self.at)

    @cached_property
    def sys_flag(self) -> npt.NDArray[np.int32]:
        return self.ints(self.at + SYS_FLAG_AT)

    @cached_property
    def queue_offset(self) -> Numbers:
        return self.longs(self.at + QUEUE_OFFSET_AT)

    @cached_property
    def log_offset(self) -> Numbers:
        return self.longs(self.at + LOG_OFFSET_AT)

    @cached_property
    def queue_id(self) -> npt.NDArray[np.int32]:
        return self.ints(self.at + QUEUE_ID_AT)

    @property
    def flag(self) -> npt.NDArray[np.int32]:
        return self.ints(self.at + FLAG_AT)

    @property
    def born_ms(self) -> Numbers:
        return self.longs(self.at + BORN_MS_AT)

    @property
    def stored_ms(self) -> Numbers:
        return self.longs(self._born_end)

    @property
    def reconsume_times(self) -> npt.NDArray[np.int32]:
        return self.ints(self.body_at - 16)

    @property
    def prepared_offset(self) -> Numbers:
        return self.longs(self.body_at - 12)

    # --- hosts -----------------------------------------------------------------------------------

    @cached_property
    def born_is_v6(self) -> npt.NDArray[np.bool_]:
        return np.asarray((self.sys_flag & BORN_HOST_IPV6) != 0)

    @cached_property
    def _born_end(self) -> Numbers:
        return self.at + BORN_HOST_AT + np.where(self.born_is_v6, _HOST_V6, _HOST_V4)

    @cached_property
    def body_at(self) -> Numbers:
        v6 = (self.sys_flag & STORE_HOST_IPV6) != 0
        return self._born_end + 8 + np.where(v6, _HOST_V6, _HOST_V4) + 16

    @property
    def born_host(self) -> pa.Array:
        """As bytes: address and port."""
        return cut(self.data, self.at + BORN_HOST_AT, self._born_end)

    @property
    def store_host(self) -> pa.Array:
        return cut(self.data, self._born_end + 8, self.body_at - 16)

    # --- what has a length of its own ------------------------------------------------------------

    @cached_property
    def body_bytes(self) -> npt.NDArray[np.int32]:
        return self.ints(self.body_at - 4)

    @cached_property
    def _body_end(self) -> Numbers:
        return self.body_at + self.body_bytes

    @cached_property
    def _topic_span(self) -> tuple[Numbers, Numbers]:
        is_long = self.ints(self.at + MAGIC_AT) != _signed(MAGIC_V1)
        length = self.data[self._body_end].astype(np.int64)
        if is_long.any():
            low = self.data[np.minimum(self._body_end + 1, len(self.data) - 1)]
            length = np.where(is_long, length * 256 + low, length)
        begin = self._body_end + 1 + is_long
        return begin, begin + length

    @property
    def body(self) -> pa.Array:
        return cut(self.data, self.body_at, self._body_end)

    def body_from(self, first: int) -> pa.Array:
        """The bodies without their first bytes."""
        return cut(self.data, np.minimum(self.body_at + first, self._body_end), self._body_end)

    @property
    def topic(self) -> pa.Array:
        return cut(self.data, *self._topic_span)

    @cached_property
    def properties(self) -> pa.Array:
        """As they are written: see `message/properties.py`."""
        return cut(self.data, self._topic_span[1] + 2, self.at + self.size)

    def adds_up(self, first_log_offset: int) -> npt.NDArray[np.bool_]:
        """Which of them are records at all. `first_log_offset` is that of the buffer's begin."""
        magic = self.ints(self.at + MAGIC_AT)
        good = np.asarray((magic == _signed(MAGIC_V1)) | (magic == _signed(MAGIC_V2)))
        good &= self.log_offset == self.at + first_log_offset
        ends = self.at + self.size
        good &= (self.body_at + 3 <= ends) & (self.body_bytes >= 0) & (self._body_end + 3 <= ends)
        sound = Records(self.data, self.at[good])
        topic_end = sound._topic_span[1]
        fits = topic_end + 2 <= sound.at + sound.size
        high = sound.data[np.where(fits, topic_end, 0)].astype(np.int64)
        length = high * 256 + sound.data[np.where(fits, topic_end + 1, 0)]
        good[good] = fits & (topic_end + 2 + length == sound.at + sound.size)
        return good


def cut(data: Bytes, begins: Numbers, ends: Numbers) -> pa.Array:
    """data[begin:end] for each, as one binary column.

    Begins and ends, taken in turn, are the edges of a binary column over the same buffer in which
    every second value is one of ours; taking these is one pass of copying, without numpy.
    """
    count = len(begins)
    if count == 0:
        return pa.array([], pa.binary())
    edges = np.empty(2 * count, np.int32)
    edges[0::2], edges[1::2] = begins, ends
    buffers: list[Any] = [None, pa.py_buffer(edges), pa.py_buffer(data)]
    woven = pa.Array.from_buffers(pa.binary(), 2 * count - 1, buffers)
    return woven.take(pa.array(np.arange(0, 2 * count - 1, 2, dtype=np.int32)))


def _numbers(data: Bytes, kind: str) -> npt.NDArray[Any]:
    """The number that begins at each byte."""
    dtype = np.dtype(kind)
    count = max(0, len(data) - dtype.itemsize + 1)
    return np.ndarray((count,), dtype, data.data, strides=(1,))


def _signed(magic: int) -> int:
    return magic - (1 << 32)
