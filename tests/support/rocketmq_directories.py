"""Store directories that RocketMQ has written: its halves, copies, finals and ops.

rocketmq = RocketMQDirectory()
half = rocketmq.half("k")
rocketmq.deliver(half)
bench = rocketmq.opened()
"""

from __future__ import annotations

from escrowmq.message import names
from escrowmq.message.properties import change_properties, encode_properties
from escrowmq.message.record import NewRecord, StoredRecord, copy_record
from tests.support.escrows import CURSOR_GROUP, EscrowBench, HalfPosition
from tests.support.stores import HOST, NOW_MS


class RocketMQDirectory:
    """A directory to which records are appended as RocketMQ appends them."""

    def __init__(self) -> None:
        self.bench = EscrowBench()
        self.store = self.bench.store

    def half(self, key: str, **properties: str) -> StoredRecord:
        """Park a half."""
        values = {"TRAN_MSG": "true", "PGROUP": "p", "UNIQ_KEY": key, **properties}
        values |= {"REAL_TOPIC": "T", "REAL_QID": "0"}
        encoded = encode_properties(values)
        return self.append(NewRecord(names.HALF_TOPIC, 0, key.encode(), encoded, born_host=HOST))

    def put_back(self, half: StoredRecord, checks: int = 1) -> StoredRecord:
        """Append a copy to the half queue, as RocketMQ does for every check."""
        properties = change_properties(
            half.properties, update={"TRANSACTION_CHECK_TIMES": str(checks)}
        )
        return self._append_copy(half, names.HALF_TOPIC, properties)

    def discard(self, half: StoredRecord) -> None:
        """Append a copy to the topic of halves that were checked too often."""
        self._append_copy(half, names.STRANDED_TOPIC, half.properties)

    def deliver(self, half: StoredRecord) -> None:
        """Append the final, which RocketMQ does before it appends the op."""
        self.append(
            NewRecord(
                "T",
                0,
                bytes(half.body),
                half.properties,
                sys_flag=8,
                born_ms=half.born_ms,
                born_host=half.born_host,
                prepared_offset=half.log_offset,
            )
        )

    def op(self, *halves: StoredRecord, commas: bool = True) -> None:
        """Append an op; RocketMQ 5 ends each offset with a comma, RocketMQ 4 has only one."""
        body = "".join(f"{half.queue_offset}," for half in halves)
        body = body if commas else body.rstrip(",")
        self.append(NewRecord(names.OP_TOPIC, 0, body.encode(), b"TAGS\x01d\x02"))

    def opened(self, half_cursor: int = 0, op_cursor: int = 0) -> EscrowBench:
        """Save RocketMQ's cursors, and open the directory as EscrowMQ does after a crash."""
        offsets = self.bench.broker.offsets
        offsets.commit(names.HALF_TOPIC, CURSOR_GROUP, 0, half_cursor)
        offsets.commit(names.OP_TOPIC, CURSOR_GROUP, 0, op_cursor)
        self.bench.broker.save()
        opened = self.bench.killed()
        opened.heartbeat(opened.channel, "p")
        return opened

    def append(self, record: NewRecord) -> StoredRecord:
        [position] = self.store.append([record], now_ms=NOW_MS)
        return self.store.record_at(position.log_offset)

    def _append_copy(self, half: StoredRecord, topic: str, properties: bytes) -> StoredRecord:
        return self.append(copy_record(half, topic=topic, queue_id=0, properties=properties))


def record_position(record: StoredRecord) -> HalfPosition:
    return HalfPosition(record.queue_offset, record.log_offset)
