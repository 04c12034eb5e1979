"""A half that holds many messages: parked in one piece, delivered one by one.

Its body is that of a batch (`message/batch.py`), all for one queue. A writer who sends millions
pays for a place in the escrow once for some hundred of them. Each message has a unique key of
its own, unlike those beside it: after a crash it says how many of them had been delivered.
"""

from __future__ import annotations

from typing import Final

from escrowmq.escrow.shapes import PACKED, final_of
from escrowmq.message.batch import decode_batch
from escrowmq.message.properties import find_property, lone_key
from escrowmq.message.record import NewRecord, StoredRecord
from escrowmq.message.sysflag import TRANSACTION_COMMIT, with_transaction_type

_MARK: Final = f"{PACKED}\x01".encode()
_MARKS_OF_THE_BROKER: Final = (b"MSG_REGION", b"TRACE_ON", b"CLUSTER")


def is_packed(properties: bytes) -> bool:
    return properties.find(_MARK) >= 0


def finals_of(half: StoredRecord, topic: str, queue_id: int) -> list[NewRecord]:
    """The messages as their consumers will see them; each names the half that it came from."""
    if not is_packed(half.properties):
        return [final_of(half, topic, queue_id)]
    added = b"".join(
        b"%b\x01%b\x02" % (name, find_property(half.properties, name) or b"")
        for name in _MARKS_OF_THE_BROKER
    )
    sys_flag = with_transaction_type(half.sys_flag, TRANSACTION_COMMIT)
    born_ms, born_host, times = half.born_ms, half.born_host, half.reconsume_times
    log_offset = half.log_offset
    finals = []
    for item in decode_batch(half.body):
        properties = bytes(item.properties)
        finals.append(
            NewRecord(
                topic,
                queue_id,
                item.body,  # type: ignore[arg-type]  # a view: it is appended before this turn ends
                properties + added,
                item.flag,
                sys_flag,
                born_ms,
                born_host,
                times,
                log_offset,
                lone_key(properties),
            )
        )
    return finals
