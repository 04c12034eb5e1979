"""A half that holds many messages: parked in one piece, delivered one by one.

Its body is that of a batch (`message/batch.py`), all for one queue. A writer who sends millions
pays for a place in the escrow once for some hundred of them. Each message has a unique key of
its own, unlike those beside it: after a crash it says how many of them had been delivered.
"""

from __future__ import annotations

from typing import Final

from escrowmq.escrow.shapes import PACKED, final_of
from escrowmq.message.batch import decode_batch
from escrowmq.message.newrun import ToAppend, decode_bulk
from escrowmq.message.properties import find_property
from escrowmq.message.record import NewRecord, StoredRecord
from escrowmq.message.sysflag import TRANSACTION_COMMIT, with_transaction_type

_MARK: Final = f"{PACKED}\x01".encode()
_MARKS_OF_THE_BROKER: Final = (b"MSG_REGION", b"TRACE_ON", b"CLUSTER")


def is_packed(properties: bytes) -> bool:
    return properties.find(_MARK) >= 0


def finals_of(half: StoredRecord, topic: str, queue_id: int) -> list[ToAppend]:
    """The messages as their consumers will see them; each names the half that it came from."""
    if not is_packed(half.properties):
        return [final_of(half, topic, queue_id)]
    marks = b"".join(
        b"%b\x01%b\x02" % (name, find_property(half.properties, name) or b"")
        for name in _MARKS_OF_THE_BROKER
    )
    sys_flag = with_transaction_type(half.sys_flag, TRANSACTION_COMMIT)
    born = half.born_ms, half.born_host, half.reconsume_times, half.log_offset
    bulk = decode_bulk(half.body)
    if bulk is not None:
        return [bulk.run(topic, queue_id, marks, sys_flag, *born)]
    return [
        NewRecord(
            topic,
            queue_id,
            item.body,  # type: ignore[arg-type]  # a view: it is appended before this turn ends
            item.properties + marks,
            item.flag,
            sys_flag,
            *born,
        )
        for item in decode_batch(half.body)
    ]
