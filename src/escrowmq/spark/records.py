"""Many records in one buffer, read field by field instead of record by record.

A numeric field of all records is one gather of numpy: the buffer is seen as an array of numbers
that begin at every byte, and the numbers at the positions of the records are taken. Bodies, topics
and properties become Arrow columns in one copy. There is no Python object per message, except in
the loop that finds where each record begins.

The layout of a record is specified in `message/record.py`.
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
    CRC_PROPERTY_BYTES,
    CRC_PROPERTY_NAME,
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
_HOST_V4_BYTES, _HOST_V6_BYTES = 8, 20
_SIZE = struct.Struct(">i")


def find_records(data: ByteArray, begin: int, limit: int) -> tuple[list[int], int]:
    """Return where consecutive records begin, from `begin` to before `limit`.

    Also return the position behind the last one, which is the limit, the end of the buffer, or the
    first position that is not a record.
    """
    positions: list[int] = []
    unpack, view, end = _SIZE.unpack_from, data.data, len(data)
    position, limit = begin, min(limit, end - RECORD_BYTES_MIN + 1)
    while position < limit:
        (size,) = unpack(view, position)
        if size < RECORD_BYTES_MIN or size > end - position:
            break
        positions.append(position)
        position += size
    return positions, position


class Records:
    """The records at these positions of a buffer, in rising order. Fields are read when used."""

    def __init__(self, data: ByteArray, positions: Int64Array) -> None:
        self.data = data
        self.positions = positions

    @classmethod
    def from_buffer(cls, data: ByteArray) -> Records:
        """Return the records of a buffer with nothing else in it, as the response to a pull.

        Raises BrokenBody.
        """
        positions, end = find_records(data, 0, len(data))
        if end != len(data):
            raise BrokenBody(f"no record at byte {end} of {len(data)} in the response to a pull")
        records = cls(data, np.array(positions, np.int64))
        # Lengths that lie would make Arrow read outside of the buffer.
        is_valid = records.layout_mask()
        if not is_valid.all():
            position = positions[int(np.argmin(is_valid))]
            raise BrokenBody(f"the record at byte {position} in the response to a pull is broken")
        return records

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
        """The encoded hosts: address and port."""
        return gather_slices(self.data, self.positions + BORN_HOST_POSITION, self._born_end)

    @property
    def store_host(self) -> pa.Array:
        return gather_slices(self.data, self._born_end + 8, self.body_position - 16)

    # --- fields of variable length ---------------------------------------------------------------

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
        """Return the bodies without their first bytes."""
        return gather_slices(
            self.data, np.minimum(self.body_position + skip_bytes, self._body_end), self._body_end
        )

    @property
    def topic(self) -> pa.Array:
        return gather_slices(self.data, *self._topic_span)

    @cached_property
    def properties(self) -> pa.Array:
        """The encoded properties without the record CRC: see `message/properties.py`."""
        begins, ends = self._topic_span[1] + 2, self.positions + self.size
        has_crc = ends - begins >= CRC_PROPERTY_BYTES
        for index, byte in enumerate(CRC_PROPERTY_NAME):
            has_crc &= self.data[ends - CRC_PROPERTY_BYTES + index] == byte
        return gather_slices(self.data, begins, ends - np.where(has_crc, CRC_PROPERTY_BYTES, 0))

    def valid_mask(self, first_log_offset: int) -> npt.NDArray[np.bool_]:
        """Return which positions hold a valid record, in a buffer that may be damaged.

        `first_log_offset` is the log offset of the begin of the buffer. Magic, log offset and all
        lengths must agree; the checks are ordered so that nothing outside of the buffer is read.
        """
        is_valid = self.layout_mask()
        is_valid &= self.log_offset == self.positions + first_log_offset
        return is_valid

    def layout_mask(self) -> npt.NDArray[np.bool_]:
        """Return at which positions magic and all lengths are those of a record.

        Each check is made only where the checks before it succeeded, so that nothing outside of the
        buffer is read.
        """
        magic = self.read_int32(self.positions + MAGIC_POSITION)
        is_valid = np.asarray((magic == _signed(MAGIC_V1)) | (magic == _signed(MAGIC_V2)))
        is_valid &= self.body_position + 3 <= self.positions + self.size
        with_head = Records(self.data, self.positions[is_valid])
        ends = with_head.positions + with_head.size
        is_valid[is_valid] = (with_head.body_bytes >= 0) & (with_head._body_end + 3 <= ends)
        with_body = Records(self.data, self.positions[is_valid])
        ends = with_body.positions + with_body.size
        topic_end = with_body._topic_span[1]
        fits = topic_end + 2 <= ends
        high = self.data[np.where(fits, topic_end, 0)].astype(np.int64)
        length = high * 256 + self.data[np.where(fits, topic_end + 1, 0)]
        is_valid[is_valid] = fits & (topic_end + 2 + length == ends)
        return is_valid


def gather_slices(data: ByteArray, begins: Int64Array, ends: Int64Array) -> pa.Array:
    """Return data[begin:end] for each pair, as one binary column.

    Begins and ends, taken alternately, are the offsets of a binary column over the same buffer, in
    which every second value is a slice and the others are the gaps between them. Arrow's `take` of
    every second value copies each slice once.
    """
    count = len(begins)
    if count == 0:
        return pa.array([], pa.binary())
    offsets = np.empty(2 * count, np.int32)
    offsets[0::2], offsets[1::2] = begins, ends
    buffers: list[Any] = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    slices_and_gaps = pa.Array.from_buffers(pa.binary(), 2 * count - 1, buffers)
    return slices_and_gaps.take(pa.array(np.arange(0, 2 * count - 1, 2, dtype=np.int32)))


def _unaligned_view(data: ByteArray, type_code: str) -> npt.NDArray[Any]:
    """Return the number that begins at each byte, without a copy."""
    dtype = np.dtype(type_code)
    count = max(0, len(data) - dtype.itemsize + 1)
    return np.ndarray((count,), dtype, data.data, strides=(1,))


def _signed(magic: int) -> int:
    return magic - (1 << 32)
