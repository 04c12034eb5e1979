"""Decode records to columns of messages: one function per column, called only if it is selected.

The properties of all messages are parsed at once by numpy, which finds where every name and value
begins and ends:

    name 01 value 02 name 01 value 02 | name 01 …       the properties of all messages, end to end

The rules are those of `message/properties.py`: an item without a name or a value is ignored, the
last of several items with one name counts, and the last 02 of a message may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
_MAX_BITS = 32  # names that `_may_repeat` can test with one number
_PropertyItems = tuple[Int64Array, Int64Array, Int64Array, Int64Array]


MAX_BODY_BYTES: Final = 64 << 20  # of a decompressed body
MAX_BATCH_BODY_BYTES: Final = 128 << 20  # of the decompressed bodies of a batch, but for the last

# --- messages ------------------------------------------------------------------------------------


class MessageColumns:
    """The columns of records of one broker.

    `topic` is None if the records have different topics, as in a commit log.
    """

    def __init__(
        self,
        records: Records,
        topic: str | None,
        broker: str | None,
        decompressed: Sequence[bytes] | None = None,
    ) -> None:
        self._records = records
        self._topic = topic
        self._broker = broker
        self._decompressed = decompressed  # the bodies of the compressed records, if they are known

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
        """Return the unique keys; the offset id for a message without one."""
        keys = self.property_values("UNIQ_KEY")
        if not keys.null_count:
            return keys
        without_key = keys.is_null()
        rows = Records(self._records.data, self._records.positions[without_key.to_numpy(False)])
        positions = zip(rows.store_host.to_pylist(), rows.log_offset.tolist(), strict=True)
        offset_ids = [encode_offset_id(host, log_offset) for host, log_offset in positions]
        return pc.replace_with_mask(keys, without_key, pa.array(offset_ids, pa.string()))

    def _transaction_ids(self) -> pa.Array:
        """Return the ids of transactions; null for a message that was sent without one."""
        ids = pc.coalesce(self.property_values("TX_ID"), self.property_values("__transactionId__"))
        is_transactional = (self._records.sys_flag & TRANSACTION_MASK) != 0
        if not is_transactional.any():
            return ids
        null = pa.scalar(None, pa.string())
        return pc.coalesce(ids, pc.if_else(pa.array(is_transactional), self._message_ids(), null))

    def _bodies(self) -> pa.Array:
        records = self._records
        bodies = records.body
        is_compressed = (records.sys_flag & COMPRESSED) != 0
        if not is_compressed.any():
            return bodies
        decompressed = self._decompressed
        if decompressed is None:
            compressed = Records(records.data, records.positions[is_compressed])
            decompressed = list(_decompressed_bodies(compressed))
        mask = pa.array(is_compressed)
        return pc.replace_with_mask(bodies, mask, pa.array(decompressed, pa.binary()))


def message_batches(
    records: Records, topic: str | None, broker: str | None, columns: Columns
) -> Iterator[pa.RecordBatch]:
    """Yield the columns of records, in several batches if their bodies are long.

    A few compressed records can become gigabytes. A batch ends with the record with which its
    decompressed bodies reach MAX_BATCH_BODY_BYTES.
    """
    is_compressed = (records.sys_flag & COMPRESSED) != 0
    if "body" not in columns.names or not is_compressed.any():
        yield MessageColumns(records, topic, broker).to_record_batch(columns)
        return
    rows = np.flatnonzero(is_compressed).tolist()
    compressed = Records(records.data, records.positions[is_compressed])
    begin, body_bytes, bodies = 0, 0, list[bytes]()
    for row, body in zip(rows, _decompressed_bodies(compressed), strict=True):
        bodies.append(body)
        body_bytes += len(body)
        if body_bytes >= MAX_BATCH_BODY_BYTES:
            part = Records(records.data, records.positions[begin : row + 1])
            yield MessageColumns(part, topic, broker, bodies).to_record_batch(columns)
            begin, body_bytes, bodies = row + 1, 0, []
    if begin < len(records):
        part = Records(records.data, records.positions[begin:])
        yield MessageColumns(part, topic, broker, bodies).to_record_batch(columns)


def _decompressed_bodies(compressed: Records) -> Iterator[bytes]:
    columns = zip(
        compressed.body, compressed.sys_flag.tolist(), compressed.log_offset.tolist(), strict=True
    )
    for body, flag, log_offset in columns:
        yield _decompress(body.as_py(), flag, log_offset)


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
    """Return `address:port`. Each distinct host is formatted once: there are few."""
    codes = encoded.dictionary_encode()
    names = [_format_host(host) for host in codes.dictionary.to_pylist()]
    return pa.array(names, pa.string()).take(codes.indices)


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


# --- helpers of both kinds of columns -------------------------------------------------------------


def decode_utf8(encoded: pa.Array) -> pa.Array:
    """Return text; invalid UTF-8 is replaced, as everywhere else."""
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
    mask: npt.NDArray[np.bool_] = pc.is_in(column, pa.array(values)).to_numpy(False)
    return mask


# --- properties ----------------------------------------------------------------------------------


class PropertyTable:
    """The properties of many messages.

    `encoded` is a binary column without nulls, with the encoded properties of one message each.
    """

    def __init__(self, encoded: pa.Array) -> None:
        self._row_count = len(encoded)
        _, offsets, data = encoded.buffers()
        self._data: ByteArray = np.frombuffer(data if data is not None else b"", np.uint8)
        first, count = encoded.offset, self._row_count + 1
        self._offsets = np.frombuffer(offsets, np.int32)[first : first + count].astype(np.int64)

    def values(self, name: str) -> pa.Array:
        """Return one property of each message, null where a message does not have it."""
        items = self._items_named(name.encode())
        if not len(items):
            return pa.nulls(self._row_count, pa.string())
        item_of_row = np.full(self._row_count, -1, np.int64)
        item_of_row[self._row[items]] = items  # of several, the last one is stored last
        has_value = item_of_row >= 0
        items = item_of_row[has_value]
        values = decode_utf8(gather_slices(self._data, self._value_begin[items], self._end[items]))
        if len(values) == self._row_count:
            return values
        indices = np.cumsum(has_value) - 1
        return values.take(pa.array(indices, pa.int64(), mask=~has_value))

    def as_map(self) -> pa.Array:
        """Return all properties of each message as a map column."""
        names = gather_slices(self._data, self._begin, self._value_begin - 1)
        codes = names.dictionary_encode()
        rows, begins, ends = self._row, self._value_begin, self._end
        if self._may_repeat(codes.indices.to_numpy(), len(codes.dictionary)):
            # Keep the last item of each row and name. unique() returns the first index of a value,
            # so it gets the items in reverse order.
            row_and_name = rows * len(codes.dictionary) + codes.indices.to_numpy()
            _, reverse_indices = np.unique(row_and_name[::-1], return_index=True)
            retained = np.sort(len(row_and_name) - 1 - reverse_indices)
            codes = codes.take(pa.array(retained))
            rows, begins, ends = rows[retained], begins[retained], ends[retained]
        counts = np.bincount(rows, minlength=self._row_count)
        map_offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        values = gather_slices(self._data, begins, ends)
        keys = decode_utf8(codes.dictionary).take(codes.indices)
        return pa.MapArray.from_arrays(pa.array(map_offsets), keys, decode_utf8(values))

    def _may_repeat(self, codes: npt.NDArray[np.int32], name_count: int) -> bool:
        """Return whether a name may occur twice in a message.

        Each name is one bit. If a name repeats in a message, the sum of its bits differs from
        their disjunction.
        """
        if name_count > _MAX_BITS:
            return True
        bits = np.left_shift(np.int64(1), codes.astype(np.int64))
        firsts = np.flatnonzero(np.diff(self._row, prepend=-1))
        sums, disjunctions = np.add.reduceat(bits, firsts), np.bitwise_or.reduceat(bits, firsts)
        return bool((sums != disjunctions).any())

    def _items_named(self, name: bytes) -> Int64Array:
        items = np.flatnonzero(self._value_begin - 1 - self._begin == len(name))
        for index, byte in enumerate(name):
            items = items[self._data[self._begin[items] + index] == byte]
        return items

    # Positions of every item that has a name and a value, and the number of its message.

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
        items = self._parse_uniform(separators, name_ends)
        return self._parse_irregular(separators, name_ends) if items is None else items

    def _parse_uniform(
        self, separators: Int64Array, name_ends: Int64Array
    ) -> _PropertyItems | None:
        """Parse regular properties; return None if they are not.

        Nearly all are: every item has exactly one name and one value, and every message ends with
        a separator. Then the n-th name end belongs to the n-th item, and nothing is searched.
        """
        offsets, count = self._offsets, len(separators)
        if not count or count != len(name_ends):
            return None
        end_items = np.searchsorted(separators, offsets[1:])  # per message, behind its last item
        begins = np.empty_like(separators)
        begins[0], begins[1:] = offsets[0], separators[:-1] + 1
        is_ended = (separators[end_items - 1] + 1 == offsets[1:]).all()
        if not is_ended or not ((begins < name_ends) & (name_ends + 1 < separators)).all():
            return None
        rows = np.repeat(np.arange(self._row_count), np.diff(end_items, prepend=0))
        return begins, name_ends + 1, separators, rows

    def _parse_irregular(self, separators: Int64Array, name_ends: Int64Array) -> _PropertyItems:
        """Parse any properties."""
        offsets = self._offsets
        # Items end at separators and at the ends of messages. A separator at the end of a message
        # makes an empty item behind it, so that begins and ends stay paired. Empty items are
        # dropped together with those that lack a name or a value.
        ends = _merge_sorted(separators, offsets[1:])
        begins = _merge_sorted(separators + 1, offsets[:-1])
        next_name_end = np.searchsorted(name_ends, begins)
        values = np.append(name_ends, offsets[-1])[next_name_end] + 1
        is_valid = (values < ends) & (values - 1 > begins)
        begins, values, ends = begins[is_valid], values[is_valid], ends[is_valid]
        rows = np.searchsorted(offsets, begins, side="right") - 1
        return begins, values, ends, rows.astype(np.int64)


def _merge_sorted(first: Int64Array, second: Int64Array) -> Int64Array:
    merged = np.concatenate((first, second))
    merged.sort(kind="stable")
    return merged
