"""Encode rows of a table as batches of messages: some hundred messages for one queue per request.

    check_columns()          is the table writable?
    read_rows()              Arrow batch -> RowBatch: bodies, topics, encoded properties
    BatchEncoder.add()       RowBatch -> SendBatch: the body of a request, and its queue

The unique key of a message identifies its row: a hash of sink, epoch and partition, then the number
of the row. If a row is sent twice, both messages have the same key.

Tables with nothing but bodies have a fast path, `encode_bodies()`: one copy of the data, and no
Python object per row. A message in a batch is

    size 4 | 0 4 | 0 4 | flag 4 | body length 4 | body | properties length 2 | UNIQ_KEY 01 key 02

What is before and behind the body has the same length in every row. So numpy fills two tables, and
Arrow interleaves them with the bodies into one buffer, in which the messages lie end to end.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegralType,
    MapType,
    StringType,
    StructType,
)

from escrowmq.client.messages import MessageQueue
from escrowmq.errors import ConfigError, RowRefused
from escrowmq.message.batch import BATCH_MESSAGES_MAX, BULK_MESSAGES_MAX
from escrowmq.message.keys import java_hash
from escrowmq.parsing import did_you_mean

Bytes = bytes | memoryview
ByteOffsets = npt.NDArray[np.int64]

# --- fast path -----------------------------------------------------------------------------------

ROW_NUMBER_DIGITS: Final = 8  # hexadecimal, at the end of a key
_DIGITS: Final = np.frombuffer(b"0123456789ABCDEF", np.uint8)
_SHIFTS: Final = np.arange(4 * (ROW_NUMBER_DIGITS - 1), -1, -4)
_EMPTY_BINARY: Final = pa.scalar(b"", pa.large_binary())
_HEAD_DTYPE: Final = np.dtype(
    [(name, ">i4") for name in ("size", "magic", "crc", "flag", "body_bytes")]
)


class MessageBlock(NamedTuple):
    """Encoded messages: message n is data[offsets[n] : offsets[n + 1]]."""

    data: memoryview
    offsets: ByteOffsets


def encode_bodies(bodies: pa.Array[Any], first_row: int, key_property: bytes) -> MessageBlock:
    """Encode bodies as messages of a batch.

    `key_property` is the encoded property UNIQ_KEY up to the number of the row.
    """
    bodies = bodies.cast(pa.large_binary())
    count, tails = len(bodies), _tails(first_row, len(bodies), key_property)
    heads = np.zeros(count, _HEAD_DTYPE)
    heads["body_bytes"] = _offsets_of(bodies)[1:] - _offsets_of(bodies)[:-1]
    heads["size"] = heads["body_bytes"] + (_HEAD_DTYPE.itemsize + tails.shape[1])
    head_bytes = heads.view(np.uint8).reshape(count, _HEAD_DTYPE.itemsize)
    joined = pc.binary_join_element_wise(
        _binary_column(head_bytes), bodies, _binary_column(tails), _EMPTY_BINARY
    )
    return MessageBlock(memoryview(joined.buffers()[2]), _offsets_of(joined))


def _tails(first_row: int, count: int, key_property: bytes) -> npt.NDArray[np.uint8]:
    """Return the bytes behind each body: length of the properties, and the key with its number."""
    length = len(key_property) + ROW_NUMBER_DIGITS + 1
    prefix = struct.pack(">h", length) + key_property
    tails = np.empty((count, 2 + length), np.uint8)
    tails[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
    numbers = np.arange(first_row, first_row + count)[:, None]
    tails[:, len(prefix) : -1] = _DIGITS[numbers >> _SHIFTS & 0xF]
    tails[:, -1] = 2
    return tails


def _binary_column(table: npt.NDArray[np.uint8]) -> pa.Array[Any]:
    """Return the rows of a table of bytes as an Arrow column, without a copy."""
    count, width = table.shape
    offsets = np.arange(0, (count + 1) * width, width, dtype=np.int64)
    buffers: list[Any] = [None, pa.py_buffer(offsets), pa.py_buffer(table)]
    return pa.Array.from_buffers(pa.large_binary(), count, buffers)


def _offsets_of(column: pa.Array[Any]) -> ByteOffsets:
    _, offsets, _ = column.buffers()
    return np.frombuffer(offsets, np.int64)[column.offset : column.offset + len(column) + 1]


# --- columns -------------------------------------------------------------------------------------

_STRING_TYPES: Final = (StringType,)
_NUMBER_TYPES: Final = (IntegralType, FloatType, DoubleType, DecimalType)
_COLUMN_TYPES: Final[dict[str, tuple[tuple[type[DataType], ...], str]]] = {
    "body": ((BinaryType, StringType), "binary or string"),
    "topic": (_STRING_TYPES, "string"),
    "tags": (_STRING_TYPES, "string"),
    "keys": ((StringType, ArrayType), "string or array<string>"),
    "properties": ((MapType,), "map<string,string>"),
    "sharding_key": (_STRING_TYPES, "string"),
    "delay": (_NUMBER_TYPES, "a number of seconds"),
    "delay_level": ((IntegralType,), "int"),
}
# Columns of the source that the sink ignores, so that a table can be written as it was read.
READ_ONLY_COLUMNS: Final = frozenset(
    (
        *("broker", "queue_id", "queue_offset", "log_offset", "message_id", "born_time", "flag"),
        *("store_time", "born_host", "reconsume_times", "transaction_id", "prepared_offset"),
    )
)
# Properties that clients and brokers set. Messages that were read still have them.
RESERVED_PROPERTIES: Final = frozenset(
    (
        *("UNIQ_KEY", "WAIT", "MSG_REGION", "TRACE_ON", "CLUSTER", "TRAN_MSG", "PGROUP", "DELAY"),
        *("REAL_TOPIC", "REAL_QID", "__transactionId__", "MIN_OFFSET", "MAX_OFFSET", "POP_CK"),
        *("CONSUME_START_TIME", "RECONSUME_TIME", "ORIGIN_MESSAGE_ID", "RETRY_TOPIC", "TX_ID"),
        *("TRANSACTION_CHECK_TIMES", "TRAN_PREPARED_QUEUE_OFFSET", "INNER_MULTI_DISPATCH"),
    )
)
_RESERVED_PREFIXES: Final = ("ESCROW_", "TIMER_", "CHECK_IMMUNITY")
_SEPARATORS: Final = ("\x01", "\x02", "\0")
_MAX_PROPERTIES_BYTES: Final = 32_000  # the length is a signed 16-bit number


def check_columns(schema: StructType, topic: str) -> None:
    """Raise ConfigError unless rows of this schema can be messages."""
    for column in schema.fields:
        if column.name in READ_ONLY_COLUMNS:
            continue
        expected = _COLUMN_TYPES.get(column.name)
        if expected is None:
            raise ConfigError(
                f"the sink has no column {column.name}{did_you_mean(column.name, _COLUMN_TYPES)}; "
                "drop it, or put it into the properties or the body. "
                f"Columns: {', '.join(_COLUMN_TYPES)}"
            )
        types, description = expected
        if not isinstance(column.dataType, types) or not _has_string_elements(column.dataType):
            raise ConfigError(
                f"column {column.name} is {column.dataType.simpleString()}, but must be "
                f"{description}: cast it, as in df.withColumn('{column.name}', …)"
            )
    names = schema.fieldNames()
    if "body" not in names:
        raise ConfigError(
            "the table has no column body (binary or string): create it, as in "
            "df.selectExpr('to_json(struct(*)) AS body')"
        )
    if "topic" not in names and not topic:
        raise ConfigError("no topic: set .option('topic', …), or add a column topic to the table")


def _has_string_elements(data_type: DataType) -> bool:
    if isinstance(data_type, ArrayType):
        return isinstance(data_type.elementType, StringType)
    if isinstance(data_type, MapType):
        return isinstance(data_type.keyType, StringType) and isinstance(
            data_type.valueType, StringType
        )
    return True


@dataclass(slots=True)
class RowBatch:
    """The rows of one Arrow batch: one value per row, or None if the table has no such column."""

    bodies: pa.Array[Any]
    topics: list[str | None] | None
    sharding_keys: list[str | None] | None
    properties: list[str] | None  # encoded, without the unique key
    is_delayed: list[bool] | None


def read_rows(batch: pa.RecordBatch, first_row: int) -> RowBatch:
    """Return the rows of an Arrow batch.

    Raises RowRefused, with the number of the row, for the first that cannot be a message.
    """
    columns = {name: batch.column(name) for name in batch.schema.names if name in _COLUMN_TYPES}
    body = columns["body"]
    if body.null_count:
        row = first_row + body.is_null().index(pa.scalar(True)).as_py()
        raise RowRefused(f"row {row} has a null body: filter such rows, or coalesce the column")
    lists = {name: columns[name].to_pylist() for name in columns if name != "body"}
    topics, sharding_keys = lists.pop("topic", None), lists.get("sharding_key")
    is_delayed = None
    if "delay" in lists or "delay_level" in lists:
        nulls = [None] * len(batch)
        delays = zip(lists.get("delay", nulls), lists.get("delay_level", nulls), strict=True)
        is_delayed = [bool(seconds) or bool(level) for seconds, level in delays]
    properties = None
    if lists:
        names = list(lists)
        properties = [
            _encode_properties(dict(zip(names, values, strict=True)), first_row + index)
            for index, values in enumerate(zip(*lists.values(), strict=True))
        ]
    return RowBatch(body, topics, sharding_keys, properties, is_delayed)


def binary_values(column: pa.Array[Any]) -> list[Bytes]:
    """Return the values as views of the Arrow buffer, without a copy."""
    is_large = pa.types.is_large_binary(column.type) or pa.types.is_large_string(column.type)
    _, offsets, data = column.buffers()
    if data is None or offsets is None:
        return [b""] * len(column)
    size = 8 if is_large else 4
    begin, end = size * column.offset, size * (column.offset + len(column) + 1)
    positions = memoryview(offsets)[begin:end].cast("q" if is_large else "i").tolist()
    view = memoryview(data)
    return [view[low:high] for low, high in pairwise(positions)]


def _encode_properties(values: dict[str, Any], row: int) -> str:
    """Encode the properties of a row: name, 0x01, value, 0x02. Raises RowRefused."""
    properties: dict[str, str] = {}
    for name, value in values.get("properties") or ():
        if name not in RESERVED_PROPERTIES and not name.startswith(_RESERVED_PREFIXES) and value:
            properties[name] = value
    keys = values.get("keys")
    if isinstance(keys, list):
        keys = " ".join(key for key in keys if key)
    for name, value in (
        ("KEYS", keys),
        ("TAGS", values.get("tags")),
        ("__SHARDINGKEY", values.get("sharding_key")),
    ):
        if value:
            properties[name] = value
    seconds, level = values.get("delay"), values.get("delay_level")
    if seconds and level:
        raise RowRefused(f"row {row} has a delay and a delay_level: use one of them")
    if (seconds or 0) < 0 or (level or 0) < 0:
        raise RowRefused(f"row {row} has a negative delay: use 0 or null for none")
    if seconds:
        properties["TIMER_DELAY_MS"] = str(int(seconds * 1000))
    if level:
        properties["DELAY"] = str(level)
    for name, value in properties.items():
        if not name or any(mark in name or mark in value for mark in _SEPARATORS):
            raise RowRefused(
                f"row {row}: property {name!r} is empty or contains 0x00, 0x01 or 0x02"
            )
    text = "".join(f"{name}\x01{value}\x02" for name, value in properties.items())
    encoded_bytes = len(text.encode())
    if encoded_bytes > _MAX_PROPERTIES_BYTES:
        raise RowRefused(
            f"row {row} has properties of {encoded_bytes} bytes, the limit is "
            f"{_MAX_PROPERTIES_BYTES}"
        )
    return text


# --- batches -------------------------------------------------------------------------------------

_pack_head = struct.Struct(">iiiii").pack
_FIXED_BYTES: Final = 22  # of a message in a batch, besides body and properties
_KEY_BYTES: Final = len("UNIQ_KEY\x01") + 32 + 1
_PLAIN_OVERHEAD_BYTES: Final = _FIXED_BYTES + _KEY_BYTES
MAX_MESSAGE_BYTES: Final = (4 << 20) - 64_000  # maxMessageSize of a broker is 4 MiB by default


class SendBatch(NamedTuple):
    """The body of one request: a batch of messages for one queue, or a single message."""

    queue: MessageQueue
    body_parts: list[Bytes]  # encoded messages of the batch; the body of a single message
    body_bytes: int
    message_count: int
    single_properties: bytes | None = None  # the properties of a single message


QueueLookup = Callable[[str], Sequence[MessageQueue]]  # topic -> its writable queues


def key_prefix(*names: object) -> str:
    """Return 24 hexadecimal digits that identify these names; a key has eight more."""
    return blake2b("\0".join(map(str, names)).encode(), digest_size=12).hexdigest().upper()


@dataclass(slots=True)
class _QueueBuffer:
    """The messages that wait to be sent to one queue."""

    queue: MessageQueue
    body_parts: list[Bytes] = field(default_factory=list)
    body_bytes: int = 0
    message_count: int = 0

    def add(self, messages: Bytes, count: int) -> None:
        self.body_parts.append(messages)
        self.body_bytes += len(messages)
        self.message_count += count

    def take(self) -> SendBatch:
        batch = SendBatch(self.queue, self.body_parts, self.body_bytes, self.message_count)
        self.body_parts, self.body_bytes, self.message_count = [], 0, 0
        return batch


class BatchEncoder:
    """Distributes rows to queues, and encodes them as batches of about `batch_bytes`.

    Rows without a sharding key fill one queue at a time, starting with `first_queue`. Rows with
    the same sharding key go to the same queue, in their order. With `send_delayed_singly`, a
    delayed message is not put into a batch, because RocketMQ refuses it there.
    """

    def __init__(
        self,
        find_queues: QueueLookup,
        topic: str,
        key_prefix: str,
        *,
        batch_bytes: int,
        first_queue: int,
        send_delayed_singly: bool,
    ) -> None:
        self.row_count = 0
        self._find_queues = find_queues
        self._topic = topic
        self._key_prefix = key_prefix
        self._key_property = b"UNIQ_KEY\x01" + key_prefix.encode()
        self._batch_bytes = batch_bytes
        self._next_queue = first_queue
        self._send_delayed_singly = send_delayed_singly
        # By topic: one queue at a time, and the next one when a batch is full.
        self._sticky_buffers: dict[str, _QueueBuffer] = {}
        self._sharded_buffers: dict[MessageQueue, _QueueBuffer] = {}
        self._buffers_by_shard: dict[tuple[str, str], _QueueBuffer] = {}  # topic, sharding key

    def add(self, rows: RowBatch) -> Iterator[SendBatch]:
        """Encode rows, and yield the batches that are full. Raises RowRefused."""
        if rows.topics is None and rows.properties is None:
            return self._add_plain(rows.bodies)
        return self._add_any(rows)

    def flush(self) -> Iterator[SendBatch]:
        """Yield the batches that are not full."""
        for buffer in (*self._sticky_buffers.values(), *self._sharded_buffers.values()):
            if buffer.message_count:
                yield buffer.take()

    def _add_plain(self, bodies: pa.Array[Any]) -> Iterator[SendBatch]:
        """Add rows that have nothing but a body, as most rows of most jobs."""
        buffer, limit = self._buffer(self._topic), self._batch_bytes
        data, offsets = encode_bodies(bodies, self.row_count, self._key_property)
        sizes = np.diff(offsets)
        if len(sizes) and sizes.max() > MAX_MESSAGE_BYTES:
            row = int(np.argmax(sizes > MAX_MESSAGE_BYTES))
            raise RowRefused(
                _body_too_large(self.row_count + row, int(sizes[row]) - _PLAIN_OVERHEAD_BYTES)
            )
        index = 0
        while index < len(sizes):
            begin = int(offsets[index])
            last_offset = begin + limit - buffer.body_bytes
            end_index = int(offsets.searchsorted(last_offset, side="right")) - 1
            end_index = min(end_index, index + BULK_MESSAGES_MAX - buffer.message_count)
            if end_index <= index and buffer.message_count:
                yield buffer.take()
                self._rotate_queue(buffer)
                continue
            end_index = max(end_index, index + 1)  # a large message is a batch by itself
            buffer.add(data[begin : int(offsets[end_index])], end_index - index)
            self.row_count += end_index - index
            index = end_index

    def _add_any(self, rows: RowBatch) -> Iterator[SendBatch]:
        """Add rows of any table, one by one."""
        topics, properties, is_delayed = rows.topics, rows.properties, rows.is_delayed
        sharding_keys = rows.sharding_keys
        for index, body in enumerate(binary_values(rows.bodies)):
            topic = (topics[index] if topics else None) or self._topic
            if not topic:
                raise RowRefused(f"row {self.row_count} has no topic, and there is no option topic")
            shard = sharding_keys[index] if sharding_keys else None
            buffer = self._shard_buffer(topic, shard) if shard else self._buffer(topic)
            tail = b"%b%08X\x02%b" % (
                self._key_property,
                self.row_count,
                properties[index].encode() if properties else b"",
            )
            size = _FIXED_BYTES + len(body) + len(tail)
            if size > MAX_MESSAGE_BYTES:
                raise RowRefused(_body_too_large(self.row_count, len(body)))
            if self._send_delayed_singly and is_delayed and is_delayed[index]:
                yield SendBatch(buffer.queue, [body], len(body), 1, tail)
                self.row_count += 1
                continue
            is_full = (
                buffer.body_bytes + size > self._batch_bytes
                or buffer.message_count >= BATCH_MESSAGES_MAX
            )
            if is_full and buffer.message_count:
                yield buffer.take()
                if not shard:
                    self._rotate_queue(buffer)
            head = _pack_head(size, 0, 0, 0, len(body))
            buffer.body_parts += (head, body, struct.pack(">h", len(tail)), tail)
            buffer.body_bytes += size
            buffer.message_count += 1
            self.row_count += 1

    def _buffer(self, topic: str) -> _QueueBuffer:
        buffer = self._sticky_buffers.get(topic)
        if buffer is None:
            queues = self._find_queues(topic)
            buffer = _QueueBuffer(queues[self._next_queue % len(queues)])
            self._sticky_buffers[topic] = buffer
        return buffer

    def _shard_buffer(self, topic: str, shard: str) -> _QueueBuffer:
        buffer = self._buffers_by_shard.get((topic, shard))
        if buffer is None:
            queues = self._find_queues(topic)
            queue = queues[java_hash(shard) % len(queues)]
            buffer = self._sharded_buffers.setdefault(queue, _QueueBuffer(queue))
            self._buffers_by_shard[topic, shard] = buffer
        return buffer

    def _rotate_queue(self, buffer: _QueueBuffer) -> None:
        self._next_queue += 1
        queues = self._find_queues(buffer.queue.topic)
        buffer.queue = queues[self._next_queue % len(queues)]


def _body_too_large(row: int, length: int) -> str:
    return f"row {row} has a body of {length} bytes, the limit is {MAX_MESSAGE_BYTES}"
