"""The properties of many messages at once: where every name and every value lies, found by numpy.

    name 01 value 02 name 01 value 02 | name 01 …       the properties of all messages, end to end

The rules are those of `message/properties.py`: an item without a name or a value is none, a name
that comes twice counts with its last value, the last 02 of a message may be missing.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.spark.records import Bytes, Numbers, cut

_NAME_END, _ITEM_END = 1, 2
_BITS_MAX = 32
_Items = tuple[Numbers, Numbers, Numbers, Numbers]


class PropertyTable:
    """`encoded`: a binary column without nulls, one value for each message."""

    def __init__(self, encoded: pa.Array) -> None:
        self._rows = len(encoded)
        _, edges, data = encoded.buffers()
        self._data: Bytes = np.frombuffer(data if data is not None else b"", np.uint8)
        offset = encoded.offset
        count = self._rows + 1
        self._edges = np.frombuffer(edges, np.int32)[offset : offset + count].astype(np.int64)

    def value_of(self, name: str) -> pa.Array:
        """One property of each message, null where it has none."""
        items = self._called(name.encode())
        if not len(items):
            return pa.nulls(self._rows, pa.string())
        chosen = np.full(self._rows, -1, np.int64)
        chosen[self._row[items]] = items  # the last of several stays
        has_one = chosen >= 0
        items = chosen[has_one]
        found = text(cut(self._data, self._value_at[items], self._end[items]))
        if len(found) == self._rows:
            return found
        places = np.cumsum(has_one) - 1
        return found.take(pa.array(places, pa.int64(), mask=~has_one))

    def as_map(self) -> pa.Array:
        names = cut(self._data, self._begin, self._value_at - 1)
        codes = names.dictionary_encode()
        rows, begins, ends = self._row, self._value_at, self._end
        if self._may_repeat(codes.indices.to_numpy(), len(codes.dictionary)):
            # Of two that are named alike in one message, the last: so it is the first from behind.
            marks = rows * len(codes.dictionary) + codes.indices.to_numpy()
            _, from_behind = np.unique(marks[::-1], return_index=True)
            kept = np.sort(len(marks) - 1 - from_behind)
            codes = codes.take(pa.array(kept))
            rows, begins, ends = rows[kept], begins[kept], ends[kept]
        counts = np.bincount(rows, minlength=self._rows)
        edges = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        values = cut(self._data, begins, ends)
        spelled = text(codes.dictionary).take(codes.indices)
        return pa.MapArray.from_arrays(pa.array(edges), spelled, text(values))

    def _may_repeat(self, codes: npt.NDArray[np.int32], names: int) -> bool:
        """Whether a name may come twice in a message: a bit for each, added up and laid together,
        is not the same then."""
        if names > _BITS_MAX:
            return True
        bits = np.left_shift(np.int64(1), codes.astype(np.int64))
        firsts = np.flatnonzero(np.diff(self._row, prepend=-1))
        added, together = np.add.reduceat(bits, firsts), np.bitwise_or.reduceat(bits, firsts)
        return bool((added != together).any())

    def _called(self, name: bytes) -> Numbers:
        items = np.flatnonzero(self._value_at - 1 - self._begin == len(name))
        for place, byte in enumerate(name):
            items = items[self._data[self._begin[items] + place] == byte]
        return items

    # Of every item that has both sides: where it begins, where its value does, where it ends.

    @property
    def _begin(self) -> Numbers:
        return self._items[0]

    @property
    def _value_at(self) -> Numbers:
        return self._items[1]

    @property
    def _end(self) -> Numbers:
        return self._items[2]

    @property
    def _row(self) -> Numbers:
        return self._items[3]

    @cached_property
    def _items(self) -> _Items:
        within = self._data[self._edges[0] : self._edges[-1]]
        separators = np.flatnonzero(within == _ITEM_END) + self._edges[0]
        name_ends = np.flatnonzero(within == _NAME_END) + self._edges[0]
        found = self._read_off(separators, name_ends)
        return self._searched(separators, name_ends) if found is None else found

    def _read_off(self, separators: Numbers, name_ends: Numbers) -> _Items | None:
        """Without a search, if every message ends with a separator and each item has its two
        sides and nothing else, as nearly all do."""
        edges, count = self._edges, len(separators)
        if not count or count != len(name_ends):
            return None
        upto = np.searchsorted(separators, edges[1:])  # of each message, behind its last one
        begins = np.empty_like(separators)
        begins[0], begins[1:] = edges[0], separators[:-1] + 1
        is_ended = (separators[upto - 1] + 1 == edges[1:]).all()
        if not is_ended or not ((begins < name_ends) & (name_ends + 1 < separators)).all():
            return None
        rows = np.repeat(np.arange(self._rows), np.diff(upto, prepend=0))
        return begins, name_ends + 1, separators, rows

    def _searched(self, separators: Numbers, name_ends: Numbers) -> _Items:
        edges = self._edges
        ends = _merged(separators, edges[1:])
        begins = _merged(separators + 1, edges[:-1])
        # A separator that ends a message makes an item of nothing behind it: so do begin and end
        # stay in step, and all of these go with the rest that is not name and value.
        following = np.searchsorted(name_ends, begins)
        values = np.append(name_ends, edges[-1])[following] + 1
        sound = (values < ends) & (values - 1 > begins)
        begins, values, ends = begins[sound], values[sound], ends[sound]
        rows = np.searchsorted(edges, begins, side="right") - 1
        return begins, values, ends, rows.astype(np.int64)


def _merged(some: Numbers, others: Numbers) -> Numbers:
    merged = np.concatenate((some, others))
    merged.sort(kind="stable")
    return merged


def text(encoded: pa.Array) -> pa.Array:
    """Bytes that should be UTF-8; what is not is replaced, as everywhere else."""
    try:
        return encoded.cast(pa.string())
    except pa.ArrowInvalid:
        return pa.array(
            [
                None if raw is None else raw.decode("utf-8", "replace")
                for raw in encoded.to_pylist()
            ],
            pa.string(),
        )


def is_one_of(column: pa.Array, wanted: list[str]) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = pc.is_in(column, pa.array(wanted)).to_numpy(False)
    return found
