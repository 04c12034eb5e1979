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

import difflib
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

Edges = npt.NDArray[np.int64]

NUMBER_DIGITS: Final = 8  # of a row, at the end of its key
_DIGITS: Final = np.frombuffer(b"0123456789ABCDEF", np.uint8)
_SHIFTS: Final = np.arange(4 * (NUMBER_DIGITS - 1), -1, -4)
_NOTHING: Final = pa.scalar(b"", pa.large_binary())
_HEAD_DTYPE: Final = np.dtype(
    [(name, ">i4") for name in ("size", "magic", "crc", "flag", "body_bytes")]
)


class Block(NamedTuple):
    """Message n lies at data[edges[n]:edges[n + 1]]."""

    data: memoryview
    edges: Edges


def encode_rows(bodies: pa.Array[Any], first_row: int, key: bytes) -> Block:
    """`key`: the property up to the number of the row, which is its end."""
    bodies = bodies.cast(pa.large_binary())
    count, tails = len(bodies), _tails(first_row, len(bodies), key)
    heads = np.zeros(count, _HEAD_DTYPE)
    heads["body_bytes"] = _edges_of(bodies)[1:] - _edges_of(bodies)[:-1]
    heads["size"] = heads["body_bytes"] + (_HEAD_DTYPE.itemsize + tails.shape[1])
    before = heads.view(np.uint8).reshape(count, _HEAD_DTYPE.itemsize)
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


Bytes = bytes | memoryview

_TEXT: Final = (StringType,)
_NUMBER: Final = (IntegralType, FloatType, DoubleType, DecimalType)
_KINDS: Final[dict[str, tuple[tuple[type[DataType], ...], str]]] = {
    "body": ((BinaryType, StringType), "binary or string"),
    "topic": (_TEXT, "string"),
    "tags": (_TEXT, "string"),
    "keys": ((StringType, ArrayType), "string or array<string>"),
    "properties": ((MapType,), "map<string,string>"),
    "sharding_key": (_TEXT, "string"),
    "delay": (_NUMBER, "a number of seconds"),
    "delay_level": ((IntegralType,), "int"),
}
# What the source gives and a sink cannot set: a table that was read can be written as it is.
READ_ONLY: Final = frozenset(
    (
        *("broker", "queue_id", "queue_offset", "log_offset", "message_id", "born_time", "flag"),
        *("store_time", "born_host", "reconsume_times", "transaction_id", "prepared_offset"),
    )
)
# Properties that the client or the broker sets, and that a message which was read still has.
RESERVED: Final = frozenset(
    (
        *("UNIQ_KEY", "WAIT", "MSG_REGION", "TRACE_ON", "CLUSTER", "TRAN_MSG", "PGROUP", "DELAY"),
        *("REAL_TOPIC", "REAL_QID", "__transactionId__", "MIN_OFFSET", "MAX_OFFSET", "POP_CK"),
        *("CONSUME_START_TIME", "RECONSUME_TIME", "ORIGIN_MESSAGE_ID", "RETRY_TOPIC", "TX_ID"),
        *("TRANSACTION_CHECK_TIMES", "TRAN_PREPARED_QUEUE_OFFSET", "INNER_MULTI_DISPATCH"),
    )
)
_RESERVED_BEGINNINGS: Final = ("ESCROW_", "TIMER_", "CHECK_IMMUNITY")
_SEPARATORS: Final = ("\x01", "\x02", "\0")


def check_columns(schema: StructType, topic: str) -> None:
    """Raises ConfigError unless rows of this schema can be messages."""
    for column in schema.fields:
        if column.name in READ_ONLY:
            continue
        kind = _KINDS.get(column.name)
        if kind is None:
            close = difflib.get_close_matches(column.name, _KINDS, n=1)
            hint = f"did you mean {close[0]}? Else" if close else ""
            raise ConfigError(
                f"the sink has no column {column.name}; {hint} drop it, or put it into the "
                f"properties or the body. Columns: {', '.join(_KINDS)}".replace("; Else", "; else")
            )
        if not isinstance(column.dataType, kind[0]) or not _is_of_text(column.dataType):
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


def _is_of_text(kind: DataType) -> bool:
    if isinstance(kind, ArrayType):
        return isinstance(kind.elementType, StringType)
    if isinstance(kind, MapType):
        return isinstance(kind.keyType, StringType) and isinstance(kind.valueType, StringType)
    return True


@dataclass(slots=True)
class Rows:
    """One Arrow batch. What is None is not in the table; else one value per row."""

    bodies: pa.Array[Any]
    topics: list[str | None] | None
    sharding_keys: list[str | None] | None
    properties: list[str] | None  # encoded, without the unique key
    delayed: list[bool] | None


def rows_of(batch: pa.RecordBatch, first_row: int) -> Rows:
    """Raises RowRefused for the first row that cannot be a message, by its number."""
    columns = {name: batch.column(name) for name in batch.schema.names if name in _KINDS}
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
            _encoded(dict(zip(names, values, strict=True)), first_row + at)
            for at, values in enumerate(zip(*texts.values(), strict=True))
        ]
    return Rows(body, topics, sharding_keys, properties, delayed)


def bytes_of(column: pa.Array[Any]) -> list[Bytes]:
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


def _encoded(values: dict[str, Any], row: int) -> str:
    """As they travel: name, 0x01, value, 0x02."""
    found: dict[str, str] = {}
    for name, value in values.get("properties") or ():
        if name not in RESERVED and not name.startswith(_RESERVED_BEGINNINGS) and value:
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


_HEAD = struct.Struct(">iiiii").pack
_FIXED: Final = 22  # of a message in a batch, besides body and properties
_KEY_BYTES: Final = len("UNIQ_KEY\x01") + 32 + 1
_PLAIN: Final = _FIXED + _KEY_BYTES
MESSAGE_BYTES_MAX: Final = (4 << 20) - 64_000  # brokers take 4 MiB, unless they are told otherwise


class Target(NamedTuple):
    """One queue."""

    topic: str
    broker: str
    address: str
    queue_id: int


class Packet(NamedTuple):
    target: Target
    pieces: list[Bytes]  # of a batch's body; of a single message, its body
    size: int
    messages: int
    single: bytes | None = None  # the properties, of a message that travels alone


Queues = Callable[[str], Sequence[Target]]


def key_prefix(*names: object) -> str:
    """24 hexadecimal digits for these names; eight more are for a number."""
    return blake2b("\0".join(map(str, names)).encode(), digest_size=12).hexdigest().upper()


@dataclass(slots=True)
class _Lane:
    """What waits for one queue."""

    target: Target
    pieces: list[Bytes] = field(default_factory=list)
    size: int = 0
    count: int = 0

    def add(self, messages: Bytes, count: int) -> None:
        self.pieces.append(messages)
        self.size += len(messages)
        self.count += count

    def take(self) -> Packet:
        packet = Packet(self.target, self.pieces, self.size, self.count)
        self.pieces, self.size, self.count = [], 0, 0
        return packet


class Packer:
    """`delayed_alone`: brokers other than ours take no delayed message in a batch."""

    def __init__(
        self,
        queues: Queues,
        topic: str,
        prefix: str,
        *,
        batch_bytes: int,
        first_queue: int,
        delayed_alone: bool,
    ) -> None:
        self.rows = 0
        self._queues = queues
        self._topic = topic
        self._prefix = prefix
        self._key = b"UNIQ_KEY\x01" + prefix.encode()
        self._batch_bytes = batch_bytes
        self._next_queue = first_queue
        self._delayed_alone = delayed_alone
        self._sticky: dict[str, _Lane] = {}  # one queue at a time, the next when it is full
        self._sharded: dict[Target, _Lane] = {}
        self._shards: dict[tuple[str, str], _Lane] = {}  # by topic and sharding key

    def add(self, rows: Rows) -> Iterator[Packet]:
        if rows.topics is None and rows.properties is None:
            return self._add_plain(rows.bodies)
        return self._add_any(rows)

    def rest(self) -> Iterator[Packet]:
        for lane in (*self._sticky.values(), *self._sharded.values()):
            if lane.count:
                yield lane.take()

    def _add_plain(self, bodies: pa.Array[Any]) -> Iterator[Packet]:
        """Nothing but bodies: most rows of most jobs come by here."""
        lane, limit = self._lane(self._topic), self._batch_bytes
        data, edges = encode_rows(bodies, self.rows, self._key)
        sizes = np.diff(edges)
        if len(sizes) and sizes.max() > MESSAGE_BYTES_MAX:
            row = int(np.argmax(sizes > MESSAGE_BYTES_MAX))
            raise RowRefused(_too_long(self.rows + row, int(sizes[row]) - _PLAIN))
        at = 0
        while at < len(sizes):
            begin = int(edges[at])
            upto = int(np.searchsorted(edges, begin + limit - lane.size, side="right")) - 1
            if upto <= at and lane.count:
                yield lane.take()
                self._turn(lane)
                continue
            upto = max(upto, at + 1)  # one message at the least
            lane.add(data[begin : int(edges[upto])], upto - at)
            self.rows += upto - at
            at = upto

    def _add_any(self, rows: Rows) -> Iterator[Packet]:
        topics, texts, shards, delayed = (
            rows.topics,
            rows.properties,
            rows.sharding_keys,
            rows.delayed,
        )
        for at, body in enumerate(bytes_of(rows.bodies)):
            topic = (topics[at] if topics else None) or self._topic
            if not topic:
                raise RowRefused(f"row {self.rows} has no topic, and there is no option topic")
            shard = shards[at] if shards else None
            lane = self._lane_of_shard(topic, shard) if shard else self._lane(topic)
            tail = b"%b%08X\x02%b" % (self._key, self.rows, texts[at].encode() if texts else b"")
            size = _FIXED + len(body) + len(tail)
            if size > MESSAGE_BYTES_MAX:
                raise RowRefused(_too_long(self.rows, len(body)))
            if self._delayed_alone and delayed and delayed[at]:
                yield Packet(lane.target, [body], len(body), 1, tail)
                self.rows += 1
                continue
            if lane.size + size > self._batch_bytes and lane.count:
                yield lane.take()
                if not shard:
                    self._turn(lane)
            head = _HEAD(size, 0, 0, 0, len(body))
            lane.pieces += (head, body, struct.pack(">h", len(tail)), tail)
            lane.size += size
            lane.count += 1
            self.rows += 1

    def _lane(self, topic: str) -> _Lane:
        lane = self._sticky.get(topic)
        if lane is None:
            queues = self._queues(topic)
            lane = self._sticky[topic] = _Lane(queues[self._next_queue % len(queues)])
        return lane

    def _lane_of_shard(self, topic: str, shard: str) -> _Lane:
        lane = self._shards.get((topic, shard))
        if lane is None:
            queues = self._queues(topic)
            target = queues[java_hash(shard) % len(queues)]
            lane = self._sharded.setdefault(target, _Lane(target))
            self._shards[topic, shard] = lane
        return lane

    def _turn(self, lane: _Lane) -> None:
        self._next_queue += 1
        queues = self._queues(lane.target.topic)
        lane.target = queues[self._next_queue % len(queues)]


def _too_long(row: int, length: int) -> str:
    return f"row {row} has a body of {length} bytes: a message has at most {MESSAGE_BYTES_MAX}"
