"""Input for the pipelines: a log of very many transactions, and the books of two banks.

Records of one kind differ only in a few numbers of fixed width, so each kind is encoded once by the
store's codec, and the numbers are written into ten thousand copies at a time. The first and last
copies are compared with the codec's output. SQLite itself generates the books.

Of a thousand transactions about seventy are rolled back, thirty were checked and eight differ.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import msgspec
import numpy as np
from numpy.typing import NDArray

from escrowmq.escrow.records import JournalEntry, make_half, make_journal_record, make_op
from escrowmq.message.keys import encode_host
from escrowmq.message.record import (
    CRC_MASK,
    TRANSACTION_COMMIT,
    NewRecord,
    encode_blank,
    encode_record,
)
from escrowmq.message.transaction import TransactionState

Longs = NDArray[np.int64]

HOST = encode_host("127.0.0.1", 10911)
BORN = encode_host("127.0.0.1", 50_000)
FILE_BYTES = 1 << 30
BEGAN_MS = 1_700_000_000_000
SPAN_MS = 2 * 86_400_000
FIRST_HALF = 10_000_000  # first queue offset, as if older ones had expired; all have eight digits
COUNT_MAX = 90_000_000
QUEUES = 8
AT_ONCE = 10_000
BODY = b"x" * 100
GROUP = "bank"
TOPIC = "transfers"
ASKED_MS = 60_000
PLANTED = {  # number within each thousand: its planted difference
    11: "row_without_message",  # the database committed, the broker rolled back
    222: "row_without_message",  # the message is missing
    333: "message_without_row",
    444: "delivered_twice",  # both databases have an inbox row
    555: "consumed_without_effect",
    666: "still_open",
    777: "amount_differs",
}
BOOKS = "SELECT transaction_id, cents AS amount, at_ms FROM transfer"


def make_input(work: Path, count: int) -> int:
    """Write a broker's directory to `work`/data and the books beside it; return the log's end."""
    assert count <= COUNT_MAX
    log = Log(work / "data" / "commitlog")
    for first in range(0, count, AT_ONCE):
        log.append(np.arange(first, min(count, first + AT_ONCE), dtype=np.int64), count)
    log.close()
    make_books(work, count)
    return log.end


def expected(count: int) -> dict[str, int]:
    """Return how many differences of each kind are planted."""
    counts: dict[str, int] = dict.fromkeys(PLANTED.values(), 0)
    for at, kind in PLANTED.items():
        counts[kind] += count // 1000 + (count % 1000 > at)
    return counts


# --- one transaction -----------------------------------------------------------------------------


def name_of(number: int) -> str:
    """Return a scattered id, so that nothing is sorted by chance."""
    return f"escrow-{number * 2654435761 % (1 << 32):08x}{number:024x}"


def _unique(number: int) -> str:
    return f"7F0000012A9F18B4AAC2{number:012X}"


def parked_ms(numbers: Any, count: int) -> Any:
    return BEGAN_MS + numbers * SPAN_MS // count


def _decided_ms(numbers: Any, count: int) -> Any:
    asked = np.where(_is_asked(numbers), ASKED_MS, 0)
    return parked_ms(numbers, count) + 5 + numbers % 200 + asked


def _is_asked(numbers: Any) -> Any:
    return numbers % 33 == 5


def _is_rolled_back(numbers: Any) -> Any:
    return (numbers % 100 < 7) | (numbers % 1000 == 11)


def _is_open(numbers: Any) -> Any:
    return numbers % 1000 == 666


def _plain(number: int, at_ms: int) -> NewRecord:
    text = f"UNIQ_KEY\x01{_unique(number)}\x02PGROUP\x01{GROUP}\x02TX_ID\x01{name_of(number)}\x02"
    return NewRecord(TOPIC, number % QUEUES, BODY, text.encode(), 0, 0, at_ms, BORN)


def _half(number: int, at_ms: int) -> NewRecord:
    return make_half(_plain(number, at_ms))


def _final(number: int, at_ms: int) -> NewRecord:
    plain = _plain(number, at_ms)
    return NewRecord(
        *(TOPIC, plain.queue_id, BODY, plain.properties, 0, TRANSACTION_COMMIT, at_ms, BORN)
    )


def _question(number: int, at_ms: int) -> NewRecord:
    step = JournalEntry(FIRST_HALF + number, "asked", 1, "127.0.0.1:50000")
    return make_journal_record(step, now_ms=at_ms)


def _op(state: TransactionState, by: str) -> Callable[[int, int], NewRecord]:
    return lambda number, at_ms: make_op(
        FIRST_HALF + number, state, by, born_host=BORN, now_ms=at_ms
    )


# --- the log -------------------------------------------------------------------------------------


class Stamp:
    """Many records of one kind, copied from one that the codec encoded."""

    def __init__(self, make: Callable[[int, int], NewRecord]) -> None:
        self._make = make
        self._record = make(0, 0)
        self._one = encode_record(self._record, 0, 0, 0, HOST)
        self.size = len(self._one)

    @property
    def topic(self) -> str:
        return self._record.topic

    def rows(
        self, numbers: Longs, place: int, offsets: Longs, at_ms: Longs, prepared: Longs
    ) -> NDArray[np.uint8]:
        """Return records from this log offset on; `offsets` are their queue offsets."""
        rows = np.tile(np.frombuffer(self._one, np.uint8), (len(numbers), 1))
        log_offsets = place + np.arange(len(numbers), dtype=np.int64) * self.size
        if self.topic == TOPIC:
            _put(rows, 12, (numbers % QUEUES).astype(">i4"))
        for at, values in (
            (20, offsets),
            (28, log_offsets),
            (40, at_ms),
            (56, at_ms),
            (76, prepared),
        ):
            _put(rows, at, values.astype(">i8"))
        self._put_names(rows, numbers)
        if self._record.body != BODY:
            end = 88 + len(self._record.body)
            bodies = (crc32(row) & CRC_MASK for row in np.ascontiguousarray(rows[:, 88:end]))
            _put(rows, 8, np.fromiter(bodies, ">u4", len(rows)))
        for at in {0, len(numbers) - 1}:
            record = msgspec.structs.replace(
                self._make(int(numbers[at]), int(at_ms[at])), prepared_offset=int(prepared[at])
            )
            expected_bytes = encode_record(
                record, int(offsets[at]), int(log_offsets[at]), int(at_ms[at]), HOST
            )
            assert rows[at].tobytes() == expected_bytes
        return rows

    def _put_names(self, rows: NDArray[np.uint8], numbers: Longs) -> None:
        for at in self._behind(b"escrow-"):
            _put_digits(rows, at, numbers * 2654435761 % (1 << 32), 8, LOWER)
            _put_digits(rows, at + 8, numbers, 24, LOWER)
        for at in self._behind(_unique(0)[:20].encode()):
            _put_digits(rows, at, numbers, 12, UPPER)
        for at in self._behind(b"REAL_QID\x01"):
            _put_digits(rows, at, numbers % QUEUES, 1, LOWER)
        for at in self._behind(b"%d" % FIRST_HALF):
            _put_digits(rows, at - 8, FIRST_HALF + numbers, 8, DECIMAL)
        for at in self._behind(FIRST_HALF.to_bytes(8, "big")):
            _put(rows, at - 8, (FIRST_HALF + numbers).astype(">i8"))

    def _behind(self, sign: bytes) -> Iterator[int]:
        at = self._one.find(sign)
        while at >= 0:
            yield at + len(sign)
            at = self._one.find(sign, at + 1)


LOWER, UPPER, DECIMAL = b"0123456789abcdef", b"0123456789ABCDEF", b"0123456789"


def _put(rows: NDArray[np.uint8], at: int, values: NDArray[Any]) -> None:
    rows[:, at : at + values.itemsize] = values.view(np.uint8).reshape(len(values), -1)


def _put_digits(rows: NDArray[np.uint8], at: int, values: Longs, width: int, digits: bytes) -> None:
    digit_values = np.frombuffer(digits, np.uint8)
    for place in range(at + width - 1, at - 1, -1):
        values, digit = np.divmod(values, len(digits))
        rows[:, place] = digit_values[digit]


HALF, FINAL, QUESTION = Stamp(_half), Stamp(_final), Stamp(_question)
OPS = [
    (state, by, Stamp(_op(state, by)))
    for state in (TransactionState.COMMITTED, TransactionState.ROLLED_BACK)
    for by in ("producer", "check")
]


class Log:
    """Write the files of a broker: ten thousand halves, then their outcomes, by kind."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self._file: BinaryIO | None = None
        self._file_end = 0
        self._lengths = {HALF.topic: FIRST_HALF}  # next offsets of the queues
        self.end = 0

    def append(self, numbers: Longs, count: int) -> None:
        if self.end + len(numbers) * 1_200 > self._file_end:
            self._next_file()
        halves = self._write(HALF, numbers, parked_ms(numbers, count))
        is_open, is_back = _is_open(numbers), _is_rolled_back(numbers)
        is_asked = _is_asked(numbers)
        at_ms = _decided_ms(numbers, count)
        self._write(QUESTION, numbers[is_asked], at_ms[is_asked])
        is_there = ~is_open & ~is_back & (numbers % 1000 != 222)
        for queue in range(QUEUES):
            its = is_there & (numbers % QUEUES == queue)
            self._write(FINAL, numbers[its], at_ms[its], halves[its], queue)
        for state, by, stamp in OPS:
            its = ~is_open & (is_back == (state is TransactionState.ROLLED_BACK))
            its &= is_asked == (by == "check")
            self._write(stamp, numbers[its], at_ms[its])

    def _write(
        self,
        stamp: Stamp,
        numbers: Longs,
        at_ms: Longs,
        halves: Longs | None = None,
        queue: int = 0,
    ) -> Longs:
        """Return the positions of the records."""
        if not len(numbers):
            return numbers
        name = f"{stamp.topic}/{queue}" if queue else stamp.topic
        first = self._lengths.get(name, 0)
        self._lengths[name] = first + len(numbers)
        each = np.arange(len(numbers), dtype=np.int64)
        prepared = np.zeros(len(numbers), np.int64) if halves is None else halves
        assert self._file is not None
        self._file.write(stamp.rows(numbers, self.end, first + each, at_ms, prepared).data)
        log_offsets = self.end + each * stamp.size
        self.end += len(numbers) * stamp.size
        return log_offsets

    def _next_file(self) -> None:
        if self._file is not None:
            self._file.write(encode_blank(self._file_end - self.end))
            self.close()
        self.end = self._file_end
        self._file = (self._directory / f"{self.end:020d}").open("wb")
        self._file_end += FILE_BYTES

    def close(self) -> None:
        assert self._file is not None
        self._file.truncate(FILE_BYTES)
        self._file.close()


# --- the books -----------------------------------------------------------------------------------

TABLES = (
    "CREATE TABLE escrowmq_marker (id varchar(64), outcome varchar(16), at_ms bigint, "
    "producer_group varchar(255), messages integer)",
    "CREATE TABLE escrowmq_inbox (consumer_group varchar(255), message_id varchar(128), "
    "at_ms bigint)",
    "CREATE TABLE transfer (transaction_id varchar(64), cents bigint, at_ms bigint)",
)
INDEXES = (
    "CREATE INDEX marker_at ON escrowmq_marker (at_ms)",
    "CREATE INDEX inbox_at ON escrowmq_inbox (at_ms)",
)
EACH = """
WITH RECURSIVE number(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM number WHERE n < {last}),
each AS (
    SELECT n, n % 1000 AS place, {began} + n * {span} / ({last} + 1) AS at_ms,
    printf('escrow-%08x%024x', n * 2654435761 % 4294967296, n) AS id,
    printf('7F0000012A9F18B4AAC2%012X', n) AS message_id FROM number
    WHERE n % 100 >= 7 AND n % 1000 <> 666)
"""
SENT = "place <> 333"
TAKEN = "place NOT IN (11, 222, 555)"


def make_books(work: Path, count: int) -> None:
    each = EACH.format(last=count - 1, began=BEGAN_MS, span=SPAN_MS)
    inbox = "INSERT INTO escrowmq_inbox {} SELECT 'smith-bank', message_id, at_ms FROM each WHERE "
    _make_bank(
        work / "bob.db",
        f"INSERT INTO escrowmq_marker {each} "
        f"SELECT id, 'committed', at_ms, '{GROUP}', 1 FROM each WHERE {SENT}",
        f"INSERT INTO transfer {each} SELECT id, n, at_ms FROM each WHERE {SENT}",
        inbox.format(each) + "place = 444",
    )
    _make_bank(
        work / "smith.db",
        inbox.format(each) + TAKEN,
        f"INSERT INTO transfer {each} SELECT id, n + (place = 777), at_ms FROM each WHERE {TAKEN}",
    )


def _make_bank(path: Path, *inserts: str) -> None:
    with sqlite3.connect(path, isolation_level=None) as bank:
        for way in ("journal_mode = OFF", "synchronous = OFF", "locking_mode = EXCLUSIVE"):
            bank.execute(f"PRAGMA {way}")
        bank.execute("BEGIN")
        for sentence in (*TABLES, *inserts, *INDEXES):
            bank.execute(sentence)
        bank.execute("COMMIT")
    bank.close()
