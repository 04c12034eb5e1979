"""Sends: check a message as RocketMQ does, make the record, and wait for the turn to end.

Whatever arrives in one turn of the event loop is appended in one write. So a send has two halves:
`accept` refuses it or puts its record into the batch, `settle` (once per turn) appends the batch
and answers everybody in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Final

import msgspec

from escrowmq.broker.line import Line
from escrowmq.broker.topics import (
    CLOSED_TO_SENDERS,
    WRITE,
    Topics,
    refuse_bad_topic_name,
)
from escrowmq.errors import BrokenBody, RequestRefused, StoreError
from escrowmq.message.batch import decode_batch
from escrowmq.message.ids import encode_offset_id
from escrowmq.message.properties import find_property
from escrowmq.message.record import NewRecord
from escrowmq.store.status import PutStatus, status_of
from escrowmq.store.store import MessageStore, Placed
from escrowmq.wire.answers import SendAnswers, answer, refuse
from escrowmq.wire.codes import ResponseCode
from escrowmq.wire.fastpath import Request
from escrowmq.wire.headers_send import SendMessage, SendMessageAnswer

# Properties that take a send off the straight path.
_SPECIAL: Final = ("DELAY\x01", "TIMER_D", "TRAN_MSG\x01", "POP_CK\x01", "MSG_REGION\x01")
_UNIQUE_KEY: Final = "UNIQ_KEY\x01"

_CODES: Final = {
    PutStatus.PUT_OK: ResponseCode.SUCCESS,
    PutStatus.FLUSH_DISK_TIMEOUT: ResponseCode.FLUSH_DISK_TIMEOUT,
    PutStatus.FLUSH_SLAVE_TIMEOUT: ResponseCode.FLUSH_SLAVE_TIMEOUT,
    PutStatus.SLAVE_NOT_AVAILABLE: ResponseCode.SLAVE_NOT_AVAILABLE,
    PutStatus.SERVICE_NOT_AVAILABLE: ResponseCode.SERVICE_NOT_AVAILABLE,
    PutStatus.MESSAGE_ILLEGAL: ResponseCode.MESSAGE_ILLEGAL,
    PutStatus.PROPERTIES_SIZE_EXCEEDED: ResponseCode.MESSAGE_ILLEGAL,
    PutStatus.OS_PAGE_CACHE_BUSY: ResponseCode.SYSTEM_BUSY,
}


class _Waiting(msgspec.Struct, gc=False):
    """A send whose records are in the batch: `count` of them from `first` on."""

    line: Line
    request: Request[Any]
    first: int
    count: int
    queue_id: int
    unique_key: str | None
    waits: bool  # until it is durable, if the broker flushes before it answers
