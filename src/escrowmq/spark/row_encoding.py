"""Rows to packets: some hundred messages for one queue, as the body of one request.

A row's unique key says which row it is: sink, epoch and partition, hashed, and its number. Who
gets the same row twice sees the same key.

Many rows that are nothing but bodies, encoded at once: one copy, and no Python object for a row.

    size 4 | 0 4 | 0 4 | flag 4 | body length 4 | body | properties length 2 | UNIQ_KEY 01 key 02

What stands before and behind the bodies has the same length in every row, so numpy makes it as two
tables; Arrow weaves them with the bodies into one buffer, in which the messages lie end to end.

Which columns a table to be written may have, and their values as Python sees them.
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

from escrowmq.errors import ConfigError, RowRefused
from escrowmq.message.keys import java_hash
from escrowmq.parsing import did_you_mean

ByteOffsets = npt.NDArray[np.int64]

ROW_NUMBER_DIGITS: Final = 8  # of a row, at the end of its key
_DIGITS: Final = np.frombuffer(b"0123456789ABCDEF", np.uint8)
_SHIFTS: Final = np.arange(4 * (ROW_NUMBER_DIGITS - 1), -1, -4)
_EMPTY_BINARY: Final = pa.scalar(b"", pa.large_binary())
_HEAD_DTYPE: Final = np.dtype(
    [(name, ">i4") for name in ("size", "magic", "crc", "flag", "body_bytes")]
)


class MessageBlock(NamedTuple):
    """Message n lies at data[edges[n]:edges[n + 1]]."""

    data: memoryview
    offsets: ByteOffsets


def encode_bodies(bodies: pa.Array[Any], first_row: int, key_property: bytes) -> MessageBlock:
    """`key`: the property up to the number of the row, which is its end."""
    bodies = bodies.cast(pa.large_binary())
    count, tails = len(bodies), _tails(first_row, len(bodies), key_property)
    heads = np.zeros(count, _HEAD_DTYPE)
    heads["body_bytes"] = _offsets_of(bodies)[1:] - _offsets_of(bodies)[:-1]
    heads["size"] = heads["body_bytes"] + (_HEAD_DTYPE.itemsize + tails.shape[1])
    before = heads.view(np.uint8).reshape(count, _HEAD_DTYPE.itemsize)
    woven = pc.binary_join_element_wise(
        _binary_column(before), bodies, _binary_column(tails), _EMPTY_BINARY
    )
    return MessageBlock(memoryview(woven.buffers()[2]), _offsets_of(woven))


def _tails(first_row: int, count: int, key_property: bytes) -> npt.NDArray[np.uint8]:
    """Length, property and number of each row."""
    length = len(key_property) + ROW_NUMBER_DIGITS + 1
    before = struct.pack(">h", length) + key_property
    tails = np.empty((count, 2 + length), np.uint8)
    tails[:, : len(before)] = np.frombuffer(before, np.uint8)
    numbers = np.arange(first_row, first_row + count)[:, None]
    tails[:, len(before) : -1] = _DIGITS[numbers >> _SHIFTS & 0xF]
    tails[:, -1] = 2
    return tails


def _binary_column(table: npt.NDArray[np.uint8]) -> pa.Array[Any]:
    count, width = table.shape
    edges = np.arange(0, (count + 1) * width, width, dtype=np.int64)
    buffers: list[Any] = [None, pa.py_buffer(edges), pa.py_buffer(table)]
    return pa.Array.from_buffers(pa.large_binary(), count, buffers)


def _offsets_of(column: pa.Array[Any]) -> ByteOffsets:
    _, edges, _ = column.buffers()
    return np.frombuffer(edges, np.int64)[column.offset : column.offset + len(column) + 1]


Bytes = bytes | memoryview

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
# What the source gives and a sink cannot set: a table that was read can be written as it is.
READ_ONLY_COLUMNS: Final = frozenset(
    (
        *("broker", "queue_id", "queue_offset", "log_offset", "message_id", "born_time", "flag"),
        *("store_time", "born_host", "reconsume_times", "transaction_id", "prepared_offset"),
    )
)
# Properties that the client or the broker sets, and that a message which was read still has.
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


def check_columns(schema: StructType, topic: str) -> None:
    """Raises ConfigError unless rows of this schema can be messages."""
    for column in schema.fields:
        if column.name in READ_ONLY_COLUMNS:
            continue
        kind = _COLUMN_TYPES.get(column.name)
        if kind is None:
            raise ConfigError(
                f"the sink has no column {column.name}{did_you_mean(column.name, _COLUMN_TYPES)}; "
                "drop it, or put it into the properties or the body. "
                f"Columns: {', '.join(_COLUMN_TYPES)}"
            )
        if not isinstance(column.dataType, kind[0]) or not _has_string_elements(column.dataType):
            raise ConfigError(
                f"column {column.name} is {column.dataType.simpleString()}, "
                f"and should be {kind[1]}: cast it, as in df.withColumn('{column.name}', …)"
            )
    names = schema.fieldNames()
    if "body" not in names:
        raise ConfigError(
            "the table has no column body (binary or string): make one, as in "
            "df.selectExpr('to_json(struct(*)) AS body')"
        )
    if "topic" not in names and not topic:
        raise ConfigError("no topic: set .option('topic', …), or give the table a column topic")


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
    """One Arrow batch. What is None is not in the table; else one value per row."""

    bodies: pa.Array[Any]
    topics: list[str | None] | None
    sharding_keys: list[str | None] | None
    properties: list[str] | None  # encoded, without the unique key
    is_delayed: list[bool] | None


def read_rows(batch: pa.RecordBatch, first_row: int) -> RowBatch:
    """Raises RowRefused for the first row that cannot be a message, by its number."""
    columns = {name: batch.column(name) for name in batch.schema.names if name in _COLUMN_TYPES}
    body = columns["body"]
    if body.null_count:
        at = first_row + body.is_null().index(pa.scalar(True)).as_py()
        raise RowRefused(f"row {at} has no body (it is null): filter it, or coalesce the column")
    texts = {name: columns[name].to_pylist() for name in columns if name != "body"}
    topics, sharding_keys = texts.pop("topic", None), texts.get("sharding_key")
    delayed = None
    if "delay" in texts or "delay_level" in texts:
        nothing = [None] * len(batch)
        delays = zip(texts.get("delay", nothing), texts.get("delay_level", nothing), strict=True)
        delayed = [bool(seconds) or bool(level) for seconds, level in delays]
    properties = None
    if texts:
        names = list(texts)
        properties = [
            _encode_properties(dict(zip(names, values, strict=True)), first_row + at)
            for at, values in enumerate(zip(*texts.values(), strict=True))
        ]
    return RowBatch(body, topics, sharding_keys, properties, delayed)


def binary_values(column: pa.Array[Any]) -> list[Bytes]:
    """The values as views of the Arrow buffer: nothing is copied."""
    wide = pa.types.is_large_binary(column.type) or pa.types.is_large_string(column.type)
    _, offsets, data = column.buffers()
    if data is None or offsets is None:
        return [b""] * len(column)
    size = 8 if wide else 4
    begin, end = size * column.offset, size * (column.offset + len(column) + 1)
    places = memoryview(offsets)[begin:end].cast("q" if wide else "i").tolist()
    view = memoryview(data)
    return [view[at:to] for at, to in pairwise(places)]


def _encode_properties(values: dict[str, Any], row: int) -> str:
    """As they travel: name, 0x01, value, 0x02."""
    found: dict[str, str] = {}
    for name, value in values.get("properties") or ():
        if name not in RESERVED_PROPERTIES and not name.startswith(_RESERVED_PREFIXES) and value:
            found[name] = value
    keys = values.get("keys")
    if isinstance(keys, list):
        keys = " ".join(key for key in keys if key)
    for name, value in (
        ("KEYS", keys),
        ("TAGS", values.get("tags")),
        ("__SHARDINGKEY", values.get("sharding_key")),
    ):
        if value:
            found[name] = value
    seconds, level = values.get("delay"), values.get("delay_level")
    if seconds and level:
        raise RowRefused(f"row {row} has a delay and a delay_level: give one of them")
    if (seconds or 0) < 0 or (level or 0) < 0:
        raise RowRefused(f"row {row} has a negative delay: use 0 or null for none")
    if seconds:
        found["TIMER_DELAY_MS"] = str(int(seconds * 1000))
    if level:
        found["DELAY"] = str(level)
    for name, value in found.items():
        if not name or any(mark in name or mark in value for mark in _SEPARATORS):
            raise RowRefused(
                f"row {row}: property {name!r} contains 0x00, 0x01 or 0x02, which no property may"
            )
    text = "".join(f"{name}\x01{value}\x02" for name, value in found.items())
    if len(text.encode()) > 32_000:
        raise RowRefused(f"row {row} has properties of {len(text)} characters, limit 32,000")
    return text


_pack_head = struct.Struct(">iiiii").pack
_FIXED_BYTES: Final = 22  # of a message in a batch, besides body and properties
_KEY_BYTES: Final = len("UNIQ_KEY\x01") + 32 + 1
_PLAIN_OVERHEAD_BYTES: Final = _FIXED_BYTES + _KEY_BYTES
MAX_MESSAGE_BYTES: Final = (4 << 20) - 64_000  # brokers take 4 MiB, unless they are told otherwise


class QueueAddress(NamedTuple):
    """One queue."""

    topic: str
    broker: str
    address: str
    queue_id: int


class SendBatch(NamedTuple):
    queue: QueueAddress
    body_parts: list[Bytes]  # of a batch's body; of a single message, its body
    body_bytes: int
    message_count: int
    single_properties: bytes | None = None  # the properties, of a message that travels alone


QueueLookup = Callable[[str], Sequence[QueueAddress]]


def key_prefix(*names: object) -> str:
    """24 hexadecimal digits for these names; eight more are for a number."""
    return blake2b("\0".join(map(str, names)).encode(), digest_size=12).hexdigest().upper()


@dataclass(slots=True)
class _QueueBuffer:
    """What waits for one queue."""

    queue: QueueAddress
    body_parts: list[Bytes] = field(default_factory=list)
    body_bytes: int = 0
    message_count: int = 0

    def add(self, messages: Bytes, count: int) -> None:
        self.body_parts.append(messages)
        self.body_bytes += len(messages)
        self.message_count += count

    def take(self) -> SendBatch:
        packet = SendBatch(self.queue, self.body_parts, self.body_bytes, self.message_count)
        self.body_parts, self.body_bytes, self.message_count = [], 0, 0
        return packet


class BatchEncoder:
    """`delayed_alone`: brokers other than ours take no delayed message in a batch."""

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
        self._sticky_buffers: dict[
            str, _QueueBuffer
        ] = {}  # one queue at a time, the next when it is full
        self._sharded_buffers: dict[QueueAddress, _QueueBuffer] = {}
        self._buffers_by_shard: dict[
            tuple[str, str], _QueueBuffer
        ] = {}  # by topic and sharding key

    def add(self, rows: RowBatch) -> Iterator[SendBatch]:
        if rows.topics is None and rows.properties is None:
            return self._add_plain(rows.bodies)
        return self._add_any(rows)

    def flush(self) -> Iterator[SendBatch]:
        for lane in (*self._sticky_buffers.values(), *self._sharded_buffers.values()):
            if lane.message_count:
                yield lane.take()

    def _add_plain(self, bodies: pa.Array[Any]) -> Iterator[SendBatch]:
        """Nothing but bodies: most rows of most jobs come by here."""
        lane, limit = self._buffer(self._topic), self._batch_bytes
        data, edges = encode_bodies(bodies, self.row_count, self._key_property)
        sizes = np.diff(edges)
        if len(sizes) and sizes.max() > MAX_MESSAGE_BYTES:
            row = int(np.argmax(sizes > MAX_MESSAGE_BYTES))
            raise RowRefused(
                _body_too_large(self.row_count + row, int(sizes[row]) - _PLAIN_OVERHEAD_BYTES)
            )
        at = 0
        while at < len(sizes):
            begin = int(edges[at])
            upto = int(np.searchsorted(edges, begin + limit - lane.body_bytes, side="right")) - 1
            if upto <= at and lane.message_count:
                yield lane.take()
                self._rotate_queue(lane)
                continue
            upto = max(upto, at + 1)  # one message at the least
            lane.add(data[begin : int(edges[upto])], upto - at)
            self.row_count += upto - at
            at = upto

    def _add_any(self, rows: RowBatch) -> Iterator[SendBatch]:
        topics, texts, shards, delayed = (
            rows.topics,
            rows.properties,
            rows.sharding_keys,
            rows.is_delayed,
        )
        for at, body in enumerate(binary_values(rows.bodies)):
            topic = (topics[at] if topics else None) or self._topic
            if not topic:
                raise RowRefused(f"row {self.row_count} has no topic, and there is no option topic")
            shard = shards[at] if shards else None
            lane = self._shard_buffer(topic, shard) if shard else self._buffer(topic)
            tail = b"%b%08X\x02%b" % (
                self._key_property,
                self.row_count,
                texts[at].encode() if texts else b"",
            )
            size = _FIXED_BYTES + len(body) + len(tail)
            if size > MAX_MESSAGE_BYTES:
                raise RowRefused(_body_too_large(self.row_count, len(body)))
            if self._send_delayed_singly and delayed and delayed[at]:
                yield SendBatch(lane.queue, [body], len(body), 1, tail)
                self.row_count += 1
                continue
            if lane.body_bytes + size > self._batch_bytes and lane.message_count:
                yield lane.take()
                if not shard:
                    self._rotate_queue(lane)
            head = _pack_head(size, 0, 0, 0, len(body))
            lane.body_parts += (head, body, struct.pack(">h", len(tail)), tail)
            lane.body_bytes += size
            lane.message_count += 1
            self.row_count += 1

    def _buffer(self, topic: str) -> _QueueBuffer:
        lane = self._sticky_buffers.get(topic)
        if lane is None:
            queues = self._find_queues(topic)
            lane = self._sticky_buffers[topic] = _QueueBuffer(
                queues[self._next_queue % len(queues)]
            )
        return lane

    def _shard_buffer(self, topic: str, shard: str) -> _QueueBuffer:
        lane = self._buffers_by_shard.get((topic, shard))
        if lane is None:
            queues = self._find_queues(topic)
            target = queues[java_hash(shard) % len(queues)]
            lane = self._sharded_buffers.setdefault(target, _QueueBuffer(target))
            self._buffers_by_shard[topic, shard] = lane
        return lane

    def _rotate_queue(self, buffer: _QueueBuffer) -> None:
        self._next_queue += 1
        queues = self._find_queues(buffer.queue.topic)
        buffer.queue = queues[self._next_queue % len(queues)]


def _body_too_large(row: int, length: int) -> str:
    return f"row {row} has a body of {length} bytes: a message has at most {MAX_MESSAGE_BYTES}"
