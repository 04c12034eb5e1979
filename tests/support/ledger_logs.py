"""The log of a broker that saw these lives: what `pipeline ledger` reads.

    log = LifeLog(directory / "data")
    log.add(life)
    log.close()

Records are encoded by the store's own codec; where finals lie is what the life says.
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
    """Many log files, since readers share them out by bytes."""

    def __init__(self, data: Path) -> None:
        self._directory = data / "commitlog"
        self._directory.mkdir(parents=True)
        self._file: BinaryIO | None = None
        self._file_end = 0
        self._end = 0
        self._halves = 0
        self._others = 0

    def add(self, life: SampleTransaction) -> None:
        offsets = range(self._halves, self._halves + len(life.ids))
        places = [
            self._append(make_half(_message(life, number)), offset, life.at_ms)
            for number, offset in enumerate(offsets)
        ]
        self._halves = offsets.stop
        for number in range(1, life.checks + 1):
            at_ms = life.at_ms + 2000 * number
            for offset in offsets:
                step = JournalEntry(offset, "asked", number, PEER)
                self._append(make_journal_record(step, now_ms=at_ms), self._next(), at_ms)
        if life.outcome == "open":
            return
        at_ms = life.at_ms + life.latency_ms
        for final in life.finals() if life.outcome == "committed" else ():
            number = final.of
            record = _message(life, number, half=places[number])
            self._append(record, final.queue_offset, at_ms + 1)
        by = "check" if life.checks else "producer"
        for offset in offsets:
            op = make_op(offset, _STATES[life.outcome], by, born_host=_BORN, now_ms=at_ms)
            self._append(op, self._next(), at_ms)

    def _next(self) -> int:
        self._others += 1
        return self._others

    def _append(self, record: NewRecord, offset: int, at_ms: int) -> int:
        encoded = encode_record(record, offset, self._end, at_ms, _HOST)
        if self._end + len(encoded) + BLANK.size > self._file_end:
            self._next_file()
            encoded = encode_record(record, offset, self._end, at_ms, _HOST)
        assert self._file is not None
        self._file.write(encoded)
        place, self._end = self._end, self._end + len(encoded)
        return place

    def _next_file(self) -> None:
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


def _message(life: SampleTransaction, number: int, half: int | None = None) -> NewRecord:
    """One of its messages as it was sent; with its half's place as it was delivered."""
    text = f"UNIQ_KEY\x01{life.ids[number]}\x02PGROUP\x01{life.group}\x02"
    if life.plant != "no id":
        text += f"TX_ID\x01{life.id}\x02"
    return NewRecord(
        *(life.topics[number], 0, b"x", text.encode(), 0),
        *(0 if half is None else TRANSACTION_COMMIT, life.at_ms, _BORN, 0, half or 0),
    )
