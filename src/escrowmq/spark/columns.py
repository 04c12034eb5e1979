"""Records to columns: one function for each column of a message, and none is called in vain."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from escrowmq.errors import EscrowError
from escrowmq.message.compression import decompress_body
from escrowmq.message.ids import decode_host, encode_offset_id
from escrowmq.message.sysflag import COMPRESSED, TRANSACTION_MASK
from escrowmq.spark.properties import PropertyTable, text
from escrowmq.spark.records import Records
from escrowmq.spark.schema import TIMESTAMP, Columns

BODY_BYTES_MAX: Final = 64 << 20


class MessageColumns:
    """The columns of some records of one broker. `topic` is None where records of many lie
    together, as they do in a log."""

    def __init__(self, records: Records, topic: str | None, broker: str | None) -> None:
        self._records = records
        self._topic = topic
        self._broker = broker

    def batch(self, columns: Columns) -> pa.RecordBatch:
        arrays = [_MAKERS[name](self) for name in columns.names]
        return pa.RecordBatch.from_arrays(arrays, schema=columns.arrow())

    def property(self, name: str) -> pa.Array:
        return self.properties.value_of(name)

    @cached_property
    def properties(self) -> PropertyTable:
        return PropertyTable(self._records.properties)

    def _topics(self) -> pa.Array:
        if self._topic is not None:
            return pa.repeat(pa.scalar(self._topic), len(self._records))
        return text(self._records.topic)

    def _brokers(self) -> pa.Array:
        return pa.repeat(pa.scalar(self._broker, pa.string()), len(self._records))

    def _message_ids(self) -> pa.Array:
        """What the sender called it; where that is missing, the place where it lies."""
        found = self.property("UNIQ_KEY")
        if not found.null_count:
            return found
        rows = Records(self._records.data, self._records.at[found.is_null().to_numpy(False)])
        places = zip(rows.store_host.to_pylist(), rows.log_offset.tolist(), strict=True)
        made = pa.array([encode_offset_id(host, at) for host, at in places], pa.string())
        return pc.replace_with_mask(found, found.is_null(), made)

    def _transaction_ids(self) -> pa.Array:
        """Null for a message that was not sent in a transaction."""
        named = pc.coalesce(self.property("TX_ID"), self.property("__transactionId__"))
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
            _decompressed(body, flag, at)
            for body, flag, at in zip(bodies.filter(mask).to_pylist(), flags, places, strict=True)
        ]
        return pc.replace_with_mask(bodies, mask, pa.array(whole, pa.binary()))


def _decompressed(body: bytes, sys_flag: int, log_offset: int) -> bytes:
    try:
        return decompress_body(body, sys_flag, body_bytes_max=BODY_BYTES_MAX)
    except EscrowError as error:
        raise type(error)(f"the message at log offset {log_offset}: {error}") from error


def numbers(values: Any, kind: pa.DataType) -> pa.Array:
    return pa.array(values, kind)


def times(values_ms: Any) -> pa.Array:
    return pa.array(values_ms * 1000, pa.int64()).cast(TIMESTAMP)


def hosts(encoded: pa.Array) -> pa.Array:
    """`address:port`. Messages are many, their senders few."""
    known = encoded.dictionary_encode()
    names = [_host_name(host) for host in known.dictionary.to_pylist()]
    return pa.array(names, pa.string()).take(known.indices)


def _host_name(host: bytes) -> str:
    address, port = decode_host(host)
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


_MAKERS: Final[dict[str, Callable[[MessageColumns], pa.Array]]] = {
    "topic": MessageColumns._topics,
    "broker": MessageColumns._brokers,
    "queue_id": lambda of: numbers(of._records.queue_id, pa.int32()),
    "queue_offset": lambda of: numbers(of._records.queue_offset, pa.int64()),
    "log_offset": lambda of: numbers(of._records.log_offset, pa.int64()),
    "message_id": MessageColumns._message_ids,
    "keys": lambda of: of.property("KEYS"),
    "tags": lambda of: of.property("TAGS"),
    "body": MessageColumns._bodies,
    "properties": lambda of: of.properties.as_map(),
    "born_time": lambda of: times(of._records.born_ms),
    "store_time": lambda of: times(of._records.stored_ms),
    "born_host": lambda of: hosts(of._records.born_host),
    "reconsume_times": lambda of: numbers(of._records.reconsume_times, pa.int32()),
    "transaction_id": MessageColumns._transaction_ids,
    "prepared_offset": lambda of: numbers(of._records.prepared_offset, pa.int64()),
    "flag": lambda of: numbers(of._records.flag, pa.int32()),
}
