"""Buffers of records as in the response to a pull."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from escrowmq.message.record import NewRecord, encode_record
from escrowmq.spark.records import Records
from tests.support.stores import HOST, NOW_MS


def encode_block(
    records: Sequence[NewRecord], *, first: int = 0, store_host: bytes = HOST
) -> Records:
    """Encode records one after another. `first` is the queue offset of the first record."""
    data = b""
    for number, record in enumerate(records):
        data += encode_record(record, first + number, 1000 + len(data), NOW_MS + number, store_host)
    return Records.from_buffer(np.frombuffer(data, np.uint8))
