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

ByteArray = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]

MAGIC_POSITION: Final = 4
QUEUE_ID_POSITION, FLAG_POSITION, QUEUE_OFFSET_POSITION, LOG_OFFSET_POSITION = 12, 16, 20, 28
SYS_FLAG_POSITION, BORN_MS_POSITION, BORN_HOST_POSITION = 36, 40, 48
_HEAD_BYTES: Final = 88  # with both hosts IPv4
_HOST_V4_BYTES, _HOST_V6_BYTES = 8, 20
_SIZE = struct.Struct(">i")


def find_records(data: ByteArray, begin: int, limit: int) -> tuple[list[int], int]:
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

    def __init__(self, data: ByteArray, positions: Int64Array) -> None:
        self.data = data
        self.positions = positions

    @classmethod
    def from_buffer(cls, data: ByteArray) -> Records:
        """A buffer that holds whole records and nothing else, as pull answers do."""
        places, end = find_records(data, 0, len(data))
        if end != len(data):
            raise BrokenBody(f"no record at byte {end} of {len(data)} in what was pulled")
        return cls(data, np.array(places, np.int64))

    def __len__(self) -> int:
        return len(self.positions)

    def select(self, mask: npt.NDArray[np.bool_]) -> Records:
        return self if mask.all() else Records(self.data, self.positions[mask])

    # --- numbers ---------------------------------------------------------------------------------

    def read_int32(self, positions: Int64Array) -> npt.NDArray[np.int32]:
        return _unaligned_view(self.data, ">i4")[positions].astype(np.int32)

    def read_int64(self, positions: Int64Array) -> Int64Array:
        return _unaligned_view(self.data, ">i8")[positions].astype(np.int64)

    @cached_property
    def size(self) -> npt.NDArray[np.int32]:
        return self.read_int32(self.positions)

    @cached_property
    def sys_flag(self) -> npt.NDArray[np.int32]:
        return self.read_int32(self.positions + SYS_FLAG_POSITION)

    @cached_property
    def queue_offset(self) -> Int64Array:
        return self.read_int64(self.positions + QUEUE_OFFSET_POSITION)

    @cached_property
    def log_offset(self) -> Int64Array:
        return self.read_int64(self.positions + LOG_OFFSET_POSITION)

    @cached_property
    def queue_id(self) -> npt.NDArray[np.int32]:
        return self.read_int32(self.positions + QUEUE_ID_POSITION)

    @property
    def flag(self) -> npt.NDArray[np.int32]:
        return self.read_int32(self.positions + FLAG_POSITION)

    @property
    def born_ms(self) -> Int64Array:
        return self.read_int64(self.positions + BORN_MS_POSITION)

    @property
    def stored_ms(self) -> Int64Array:
        return self.read_int64(self._born_end)

    @property
    def reconsume_times(self) -> npt.NDArray[np.int32]:
        return self.read_int32(self.body_position - 16)

    @property
    def prepared_offset(self) -> Int64Array:
        return self.read_int64(self.body_position - 12)

    # --- hosts -----------------------------------------------------------------------------------

    @cached_property
    def is_born_host_v6(self) -> npt.NDArray[np.bool_]:
        return np.asarray((self.sys_flag & BORN_HOST_IPV6) != 0)

    @cached_property
    def _born_end(self) -> Int64Array:
        return (
            self.positions
            + BORN_HOST_POSITION
            + np.where(self.is_born_host_v6, _HOST_V6_BYTES, _HOST_V4_BYTES)
        )

    @cached_property
    def body_position(self) -> Int64Array:
        v6 = (self.sys_flag & STORE_HOST_IPV6) != 0
        return self._born_end + 8 + np.where(v6, _HOST_V6_BYTES, _HOST_V4_BYTES) + 16

    @property
    def born_host(self) -> pa.Array:
        """As bytes: address and port."""
        return gather_slices(self.data, self.positions + BORN_HOST_POSITION, self._born_end)

    @property
    def store_host(self) -> pa.Array:
        return gather_slices(self.data, self._born_end + 8, self.body_position - 16)

    # --- what has a length of its own ------------------------------------------------------------

    @cached_property
    def body_bytes(self) -> npt.NDArray[np.int32]:
        return self.read_int32(self.body_position - 4)

    @cached_property
    def _body_end(self) -> Int64Array:
        return self.body_position + self.body_bytes

    @cached_property
    def _topic_span(self) -> tuple[Int64Array, Int64Array]:
        is_long = self.read_int32(self.positions + MAGIC_POSITION) != _signed(MAGIC_V1)
        length = self.data[self._body_end].astype(np.int64)
        if is_long.any():
            low = self.data[np.minimum(self._body_end + 1, len(self.data) - 1)]
            length = np.where(is_long, length * 256 + low, length)
        begin = self._body_end + 1 + is_long
        return begin, begin + length

    @property
    def body(self) -> pa.Array:
        return gather_slices(self.data, self.body_position, self._body_end)

    def body_from(self, skip_bytes: int) -> pa.Array:
        """The bodies without their first bytes."""
        return gather_slices(
            self.data, np.minimum(self.body_position + skip_bytes, self._body_end), self._body_end
        )

    @property
    def topic(self) -> pa.Array:
        return gather_slices(self.data, *self._topic_span)

    @cached_property
    def properties(self) -> pa.Array:
        """As they are written: see `message/properties.py`."""
        return gather_slices(self.data, self._topic_span[1] + 2, self.positions + self.size)

    def valid_mask(self, first_log_offset: int) -> npt.NDArray[np.bool_]:
        """Which of them are records at all. `first_log_offset` is that of the buffer's begin."""
        magic = self.read_int32(self.positions + MAGIC_POSITION)
        good = np.asarray((magic == _signed(MAGIC_V1)) | (magic == _signed(MAGIC_V2)))
        good &= self.log_offset == self.positions + first_log_offset
        ends = self.positions + self.size
        good &= (
            (self.body_position + 3 <= ends) & (self.body_bytes >= 0) & (self._body_end + 3 <= ends)
        )
        sound = Records(self.data, self.positions[good])
        topic_end = sound._topic_span[1]
        fits = topic_end + 2 <= sound.positions + sound.size
        high = sound.data[np.where(fits, topic_end, 0)].astype(np.int64)
        length = high * 256 + sound.data[np.where(fits, topic_end + 1, 0)]
        good[good] = fits & (topic_end + 2 + length == sound.positions + sound.size)
        return good


def gather_slices(data: ByteArray, begins: Int64Array, ends: Int64Array) -> pa.Array:
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


def _unaligned_view(data: ByteArray, type_code: str) -> npt.NDArray[Any]:
    """The number that begins at each byte."""
    dtype = np.dtype(type_code)
    count = max(0, len(data) - dtype.itemsize + 1)
    return np.ndarray((count,), dtype, data.data, strides=(1,))


def _signed(magic: int) -> int:
    return magic - (1 << 32)
