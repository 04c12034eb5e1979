"""Many rows that are nothing but bodies, encoded at once: one copy, and no Python object for a row.

    size 4 | 0 4 | 0 4 | flag 4 | body length 4 | body | properties length 2 | UNIQ_KEY 01 key 02

What stands before and behind the bodies has the same length in every row, so numpy makes it as two
tables; Arrow weaves them with the bodies into one buffer, in which the messages lie end to end.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Edges = npt.NDArray[np.int64]

NUMBER_DIGITS: Final = 8  # of a row, at the end of its key
_DIGITS: Final = np.frombuffer(b"0123456789ABCDEF", np.uint8)
_SHIFTS: Final = np.arange(4 * (NUMBER_DIGITS - 1), -1, -4)
_NOTHING: Final = pa.scalar(b"", pa.large_binary())
_HEAD: Final = np.dtype([(name, ">i4") for name in ("size", "magic", "crc", "flag", "body_bytes")])


class Block(NamedTuple):
    """Message n lies at data[edges[n]:edges[n + 1]]."""

    data: memoryview
    edges: Edges


def encode_rows(bodies: pa.Array[Any], first_row: int, key: bytes) -> Block:
    """`key`: the property up to the number of the row, which is its end."""
    bodies = bodies.cast(pa.large_binary())
    count, tails = len(bodies), _tails(first_row, len(bodies), key)
    heads = np.zeros(count, _HEAD)
    heads["body_bytes"] = _edges_of(bodies)[1:] - _edges_of(bodies)[:-1]
    heads["size"] = heads["body_bytes"] + (_HEAD.itemsize + tails.shape[1])
    before = heads.view(np.uint8).reshape(count, _HEAD.itemsize)
    woven = pc.binary_join_element_wise(_column(before), bodies, _column(tails), _NOTHING)
    return Block(memoryview(woven.buffers()[2]), _edges_of(woven))


def _tails(first_row: int, count: int, key: bytes) -> npt.NDArray[np.uint8]:
    """Length, property and number of each row."""
    length = len(key) + NUMBER_DIGITS + 1
    before = struct.pack(">h", length) + key
    tails = np.empty((count, 2 + length), np.uint8)
    tails[:, : len(before)] = np.frombuffer(before, np.uint8)
    numbers = np.arange(first_row, first_row + count)[:, None]
    tails[:, len(before) : -1] = _DIGITS[numbers >> _SHIFTS & 0xF]
    tails[:, -1] = 2
    return tails


def _column(table: npt.NDArray[np.uint8]) -> pa.Array[Any]:
    count, width = table.shape
    edges = np.arange(0, (count + 1) * width, width, dtype=np.int64)
    buffers: list[Any] = [None, pa.py_buffer(edges), pa.py_buffer(table)]
    return pa.Array.from_buffers(pa.large_binary(), count, buffers)


def _edges_of(column: pa.Array[Any]) -> Edges:
    _, edges, _ = column.buffers()
    return np.frombuffer(edges, np.int64)[column.offset : column.offset + len(column) + 1]
