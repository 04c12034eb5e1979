"""Records to columns: one function for each column of a message, and none is called in vain.

The properties of many messages at once: where every name and every value lies, found by numpy.

    name 01 value 02 name 01 value 02 | name 01 …       the properties of all messages, end to end

The rules are those of `message/properties.py`: an item without a name or a value is none, a name
that comes twice counts with its last value, the last 02 of a message may be missing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.errors import EscrowError
from escrowmq.message.compression import decompress_body
from escrowmq.message.keys import decode_host, encode_offset_id
from escrowmq.message.record import COMPRESSED, TRANSACTION_MASK
from escrowmq.spark.records import ByteArray, Int64Array, Records, gather_slices
from escrowmq.spark.schema import TIMESTAMP, Columns

_NAME_END, _ITEM_END = 1, 2
_MAX_BITS = 32
_PropertyItems = tuple[Int64Array, Int64Array, Int64Array, Int64Array]


class PropertyTable:
    """`encoded`: a binary column without nulls, one value for each message."""

    def __init__(self, encoded: pa.Array) -> None:
        self._row_count = len(encoded)
        _, edges, data = encoded.buffers()
        self._data: ByteArray = np.frombuffer(data if data is not None else b"", np.uint8)
        offset = encoded.offset
        count = self._row_count + 1
        self._offsets = np.frombuffer(edges, np.int32)[offset : offset + count].astype(np.int64)

    def values(self, name: str) -> pa.Array:
        """One property of each message, null where it has none."""
        items = self._items_named(name.encode())
        if not len(items):
            return pa.nulls(self._row_count, pa.string())
        chosen = np.full(self._row_count, -1, np.int64)
        chosen[self._row[items]] = items  # the last of several stays
        has_one = chosen >= 0
        items = chosen[has_one]
        found = decode_utf8(gather_slices(self._data, self._value_begin[items], self._end[items]))
        if len(found) == self._row_count:
            return found
        places = np.cumsum(has_one) - 1
        return found.take(pa.array(places, pa.int64(), mask=~has_one))

    def as_map(self) -> pa.Array:
        names = gather_slices(self._data, self._begin, self._value_begin - 1)
        codes = names.dictionary_encode()
        rows, begins, ends = self._row, self._value_begin, self._end
        if self._may_repeat(codes.indices.to_numpy(), len(codes.dictionary)):
            # Of two that are named alike in one message, the last: so it is the first from behind.
            marks = rows * len(codes.dictionary) + codes.indices.to_numpy()
            _, from_behind = np.unique(marks[::-1], return_index=True)
            kept = np.sort(len(marks) - 1 - from_behind)
            codes = codes.take(pa.array(kept))
            rows, begins, ends = rows[kept], begins[kept], ends[kept]
        counts = np.bincount(rows, minlength=self._row_count)
        edges = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        values = gather_slices(self._data, begins, ends)
        spelled = decode_utf8(codes.dictionary).take(codes.indices)
        return pa.MapArray.from_arrays(pa.array(edges), spelled, decode_utf8(values))

    def _may_repeat(self, codes: npt.NDArray[np.int32], name_count: int) -> bool:
        """Whether a name may come twice in a message: a bit for each, added up and laid together,
        is not the same then."""
        if name_count > _MAX_BITS:
            return True
        bits = np.left_shift(np.int64(1), codes.astype(np.int64))
        firsts = np.flatnonzero(np.diff(self._row, prepend=-1))
        added, together = np.add.reduceat(bits, firsts), np.bitwise_or.reduceat(bits, firsts)
        return bool((added != together).any())

    def _items_named(self, name: bytes) -> Int64Array:
        items = np.flatnonzero(self._value_begin - 1 - self._begin == len(name))
        for place, byte in enumerate(name):
            items = items[self._data[self._begin[items] + place] == byte]
        return items

    # Of every item that has both sides: where it begins, where its value does, where it ends.

    @property
    def _begin(self) -> Int64Array:
        return self._items[0]

    @property
    def _value_begin(self) -> Int64Array:
        return self._items[1]

    @property
    def _end(self) -> Int64Array:
        return self._items[2]

    @property
    def _row(self) -> Int64Array:
        return self._items[3]

    @cached_property
    def _items(self) -> _PropertyItems:
        within = self._data[self._offsets[0] : self._offsets[-1]]
        separators = np.flatnonzero(within == _ITEM_END) + self._offsets[0]
        name_ends = np.flatnonzero(within == _NAME_END) + self._offsets[0]
        found = self._parse_uniform(separators, name_ends)
        return self._parse_irregular(separators, name_ends) if found is None else found

    def _parse_uniform(
        self, separators: Int64Array, name_ends: Int64Array
    ) -> _PropertyItems | None:
        """Without a search, if every message ends with a separator and each item has its two
        sides and nothing else, as nearly all do."""
        edges, count = self._offsets, len(separators)
        if not count or count != len(name_ends):
            return None
        upto = np.searchsorted(separators, edges[1:])  # of each message, behind its last one
        begins = np.empty_like(separators)
        begins[0], begins[1:] = edges[0], separators[:-1] + 1
        is_ended = (separators[upto - 1] + 1 == edges[1:]).all()
        if not is_ended or not ((begins < name_ends) & (name_ends + 1 < separators)).all():
            return None
        rows = np.repeat(np.arange(self._row_count), np.diff(upto, prepend=0))
        return begins, name_ends + 1, separators, rows

    def _parse_irregular(self, separators: Int64Array, name_ends: Int64Array) -> _PropertyItems:
        edges = self._offsets
        ends = _merge_sorted(separators, edges[1:])
        begins = _merge_sorted(separators + 1, edges[:-1])
        # A separator that ends a message makes an item of nothing behind it: so do begin and end
        # stay in step, and all of these go with the rest that is not name and value.
        following = np.searchsorted(name_ends, begins)
        values = np.append(name_ends, edges[-1])[following] + 1
        sound = (values < ends) & (values - 1 > begins)
        begins, values, ends = begins[sound], values[sound], ends[sound]
        rows = np.searchsorted(edges, begins, side="right") - 1
        return begins, values, ends, rows.astype(np.int64)


def _merge_sorted(first: Int64Array, second: Int64Array) -> Int64Array:
    merged = np.concatenate((first, second))
    merged.sort(kind="stable")
    return merged


def decode_utf8(encoded: pa.Array) -> pa.Array:
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


def is_one_of(column: pa.Array, values: list[str]) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = pc.is_in(column, pa.array(values)).to_numpy(False)
    return found


MAX_BODY_BYTES: Final = 64 << 20


class MessageColumns:
    """The columns of some records of one broker. `topic` is None where records of many lie
    together, as they do in a log."""

    def __init__(self, records: Records, topic: str | None, broker: str | None) -> None:
        self._records = records
        self._topic = topic
        self._broker = broker

    def to_record_batch(self, columns: Columns) -> pa.RecordBatch:
        arrays = [_COLUMN_BUILDERS[name](self) for name in columns.names]
        return pa.RecordBatch.from_arrays(arrays, schema=columns.arrow_schema())

    def property_values(self, name: str) -> pa.Array:
        return self.properties.values(name)

    @cached_property
    def properties(self) -> PropertyTable:
        return PropertyTable(self._records.properties)

    def _topics(self) -> pa.Array:
        if self._topic is not None:
            return pa.repeat(pa.scalar(self._topic), len(self._records))
        return decode_utf8(self._records.topic)

    def _brokers(self) -> pa.Array:
        return pa.repeat(pa.scalar(self._broker, pa.string()), len(self._records))

    def _message_ids(self) -> pa.Array:
        """What the sender called it; where that is missing, the place where it lies."""
        found = self.property_values("UNIQ_KEY")
        if not found.null_count:
            return found
        rows = Records(self._records.data, self._records.positions[found.is_null().to_numpy(False)])
        places = zip(rows.store_host.to_pylist(), rows.log_offset.tolist(), strict=True)
        made = pa.array([encode_offset_id(host, at) for host, at in places], pa.string())
        return pc.replace_with_mask(found, found.is_null(), made)

    def _transaction_ids(self) -> pa.Array:
        """Null for a message that was not sent in a transaction."""
        named = pc.coalesce(
            self.property_values("TX_ID"), self.property_values("__transactionId__")
        )
        is_part = (self._records.sys_flag & TRANSACTION_MASK) != 0
        if not is_part.any():
            return named
        nothing = pa.scalar(None, pa.string())
        return pc.coalesce(named, pc.if_else(pa.array(is_part), self._message_ids(), nothing))

    def _bodies(self) -> pa.Array:
        records = self._records
        bodies = records.body
        compressed = (records.sys_flag & COMPRESSED) != 0
        if not compressed.any():
            return bodies
        mask = pa.array(compressed)
        flags, places = records.sys_flag[compressed].tolist(), records.log_offset[compressed]
        whole = [
            _decompress(body, flag, at)
            for body, flag, at in zip(bodies.filter(mask).to_pylist(), flags, places, strict=True)
        ]
        return pc.replace_with_mask(bodies, mask, pa.array(whole, pa.binary()))


def _decompress(body: bytes, sys_flag: int, log_offset: int) -> bytes:
    try:
        return decompress_body(body, sys_flag, body_bytes_max=MAX_BODY_BYTES)
    except EscrowError as error:
        raise type(error)(f"the message at log offset {log_offset}: {error}") from error


def int_array(values: Any, arrow_type: pa.DataType) -> pa.Array:
    return pa.array(values, arrow_type)


def timestamp_array(values_ms: Any) -> pa.Array:
    return pa.array(values_ms * 1000, pa.int64()).cast(TIMESTAMP)


def host_array(encoded: pa.Array) -> pa.Array:
    """`address:port`. Messages are many, their senders few."""
    known = encoded.dictionary_encode()
    names = [_format_host(host) for host in known.dictionary.to_pylist()]
    return pa.array(names, pa.string()).take(known.indices)


def _format_host(host: bytes) -> str:
    address, port = decode_host(host)
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


_COLUMN_BUILDERS: Final[dict[str, Callable[[MessageColumns], pa.Array]]] = {
    "topic": MessageColumns._topics,
    "broker": MessageColumns._brokers,
    "queue_id": lambda of: int_array(of._records.queue_id, pa.int32()),
    "queue_offset": lambda of: int_array(of._records.queue_offset, pa.int64()),
    "log_offset": lambda of: int_array(of._records.log_offset, pa.int64()),
    "message_id": MessageColumns._message_ids,
    "keys": lambda of: of.property_values("KEYS"),
    "tags": lambda of: of.property_values("TAGS"),
    "body": MessageColumns._bodies,
    "properties": lambda of: of.properties.as_map(),
    "born_time": lambda of: timestamp_array(of._records.born_ms),
    "store_time": lambda of: timestamp_array(of._records.stored_ms),
    "born_host": lambda of: host_array(of._records.born_host),
    "reconsume_times": lambda of: int_array(of._records.reconsume_times, pa.int32()),
    "transaction_id": MessageColumns._transaction_ids,
    "prepared_offset": lambda of: int_array(of._records.prepared_offset, pa.int64()),
    "flag": lambda of: int_array(of._records.flag, pa.int32()),
}
