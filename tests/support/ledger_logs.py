"""Write the commit log of a broker that handled sample transactions, as `pipeline ledger` reads it.

    log = TransactionLog(directory / "data")
    log.add(transaction)
    log.close()

The store's own codec encodes the records; the transaction says which queue offsets its finals have.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

from escrowmq.escrow.records import JournalEntry, make_half, make_journal_record, make_op
from escrowmq.message.keys import encode_host
from escrowmq.message.record import (
    BLANK,
    TRANSACTION_COMMIT,
    NewRecord,
    encode_blank,
    encode_record,
)
from escrowmq.message.transaction import TransactionState

if TYPE_CHECKING:
    from tests.support.ledgers import SampleTransaction

FILE_BYTES: Final = 64 << 20
PEER: Final = "127.0.0.1:5000"
_BORN: Final = encode_host("127.0.0.1", 5000)
_HOST: Final = encode_host("127.0.0.1", 10911)
_STATES: Final = {
    "committed": TransactionState.COMMITTED,
    "rolled_back": TransactionState.ROLLED_BACK,
    "stranded": TransactionState.STRANDED,
}


class TransactionLog:
    """A log of several files, because readers divide a log by bytes."""

    def __init__(self, data: Path) -> None:
        self._directory = data / "commitlog"
        self._directory.mkdir(parents=True)
        self._file: BinaryIO | None = None
        self._file_end = 0
        self._end = 0
        self._half_count = 0
        self._other_count = 0

    def add(self, transaction: SampleTransaction) -> None:
        half_offsets = range(self._half_count, self._half_count + len(transaction.ids))
        half_log_offsets = [
            self._append(make_half(_message(transaction, number)), offset, transaction.at_ms)
            for number, offset in enumerate(half_offsets)
        ]
        self._half_count = half_offsets.stop
        for number in range(1, transaction.checks + 1):
            at_ms = transaction.at_ms + 2000 * number
            for offset in half_offsets:
                entry = JournalEntry(offset, "asked", number, PEER)
                record = make_journal_record(entry, now_ms=at_ms)
                self._append(record, self._next_queue_offset(), at_ms)
        if transaction.outcome == "open":
            return
        at_ms = transaction.at_ms + transaction.latency_ms
        for final in transaction.finals() if transaction.outcome == "committed" else ():
            half = half_log_offsets[final.message_number]
            record = _message(transaction, final.message_number, half_log_offset=half)
            self._append(record, final.queue_offset, at_ms + 1)
        by = "check" if transaction.checks else "producer"
        for offset in half_offsets:
            op = make_op(offset, _STATES[transaction.outcome], by, born_host=_BORN, now_ms=at_ms)
            self._append(op, self._next_queue_offset(), at_ms)

    def _next_queue_offset(self) -> int:
        """Return an offset for a record of the journal or an op, which only has to be unique."""
        self._other_count += 1
        return self._other_count

    def _append(self, record: NewRecord, queue_offset: int, at_ms: int) -> int:
        """Append a record and return its log offset."""
        encoded = encode_record(record, queue_offset, self._end, at_ms, _HOST)
        if self._end + len(encoded) + BLANK.size > self._file_end:
            self._start_file()
            encoded = encode_record(record, queue_offset, self._end, at_ms, _HOST)
        assert self._file is not None
        self._file.write(encoded)
        log_offset, self._end = self._end, self._end + len(encoded)
        return log_offset

    def _start_file(self) -> None:
        if self._file is not None:
            self._file.write(encode_blank(self._file_end - self._end))
            self.close()
        self._end = self._file_end
        self._file = (self._directory / f"{self._end:020d}").open("wb")
        self._file_end += FILE_BYTES

    def close(self) -> None:
        if self._file is not None:
            self._file.truncate(FILE_BYTES)
            self._file.close()


def _message(
    transaction: SampleTransaction, number: int, half_log_offset: int | None = None
) -> NewRecord:
    """Return a message of a transaction as it was sent, or the final if its half is given."""
    properties = f"UNIQ_KEY\x01{transaction.ids[number]}\x02PGROUP\x01{transaction.group}\x02"
    if transaction.case != "no id":
        properties += f"TX_ID\x01{transaction.id}\x02"
    return NewRecord(
        topic=transaction.topics[number],
        queue_id=0,
        body=b"x",
        properties=properties.encode(),
        sys_flag=0 if half_log_offset is None else TRANSACTION_COMMIT,
        born_ms=transaction.at_ms,
        born_host=_BORN,
        prepared_offset=half_log_offset or 0,
    )
