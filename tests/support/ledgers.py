"""Ledgers and matching databases of two banks, with planted differences for `pipeline reconcile`.

    bank = Bank(directory, transactions=20_000, seed=1)
    bank.expected_differences  # (kind, transaction id)
    bank.ledger                # what `pipeline ledger` must make of the log in bank.data

Bob's bank has markers and sent transfers; Smith's has an inbox and received transfers. Group `shop`
has no database here. Some cases only look like a difference and must not be reported: messages that
are still on their way, and a message that was delivered twice but that an inbox accepts once.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.ledger_logs import PEER, TransactionLog

NOW_MS: Final = 1_790_000_000_000
GRACE_MS: Final = 600_000
OPEN_MS: Final = 3_600_000
SPAN_MS: Final = 2 * 86_400_000
CHUNK_ROWS: Final = 50_000

FINAL = pa.struct(
    [
        ("topic", pa.string()),
        ("broker", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
    ]
)
TIMESTAMP = pa.timestamp("us", tz="UTC")
LEDGER: Final = pa.schema(
    [
        ("transaction_id", pa.string()),
        ("marker_id", pa.string()),
        ("group", pa.string()),
        ("topics", pa.list_(pa.string())),
        ("messages", pa.int32()),
        ("message_ids", pa.list_(pa.string())),
        ("brokers", pa.list_(pa.string())),
        ("parked_at", TIMESTAMP),
        ("first_check", TIMESTAMP),
        ("last_check", TIMESTAMP),
        ("checks", pa.int32()),
        ("answered_by", pa.string()),
        ("outcome", pa.string()),
        ("decided_at", TIMESTAMP),
        ("decided_by", pa.string()),
        ("decision_ms", pa.int64()),
        ("reason", pa.string()),
        ("finals", pa.list_(FINAL)),
        ("visible_ms", pa.int64()),
        ("day", pa.date32()),
    ]
)
TABLES: Final = {
    "escrowmq_marker": (
        "id varchar(64) primary key, outcome varchar(16), at_ms bigint, "
        "producer_group varchar(255), messages integer"
    ),
    "escrowmq_inbox": (
        "consumer_group varchar(255), message_id varchar(128), at_ms bigint, "
        "primary key (consumer_group, message_id)"
    ),
    "transfer": "transaction_id varchar(64), cents bigint, at_ms bigint",
}
# The first transactions have these cases in this order, so that a small bank has each of them too.
CASES: Final = (
    "lost",  # committed in the database, not in the ledger
    "rolled back",  # committed in the database, rolled back at the broker
    "cut short",  # committed with two messages, of which one was delivered
    "never delivered",  # committed at the broker, no message was delivered
    "no row",  # committed at the broker, no marker in the database
    "tombstone",  # committed at the broker, a tombstone in the database
    "no id",  # committed without TX_ID
    "twice without inbox",  # delivered twice to a topic that no inbox guards
    "twice booked",  # both databases have an inbox row for it
    "no effect",  # delivered, but the receiver has no row
    "effect of rollback",  # rolled back, but the receiver has a row
    "stranded",
    "still open",
    "wrong amount",
    # These are no differences.
    "recent row",
    "recent message",
    "recent open",
    "recent effect",
    "twice with inbox",
    "two, one twice with inbox",
    "other group",
)
# Smith's bank has no row for these.
NOT_CONSUMED: Final = ("no effect", "recent effect", "lost", "never delivered", "recent row")
DIFFERENCE_KINDS: Final = {
    "lost": ("row_without_message",),
    "rolled back": ("row_without_message",),
    "cut short": ("row_without_message",),
    "never delivered": ("row_without_message",),
    "no row": ("message_without_row",),
    "tombstone": ("message_without_row",),
    "no id": ("message_without_row",),
    "twice without inbox": ("delivered_twice",),
    "twice booked": ("delivered_twice",),
    "no effect": ("consumed_without_effect",),
    "effect of rollback": ("message_without_row",),
    "stranded": ("stranded",),
    "still open": ("still_open",),
    "wrong amount": ("amount_differs",),
}


class Bank:
    """Reconciliation must find exactly `expected_differences`."""

    def __init__(
        self, directory: Path, *, transactions: int, seed: int, with_differences: bool = True
    ):
        self.ledger = directory / "ledger"
        self.data = directory / "data"  # of its broker
        self.bob, self.smith = directory / "bob.db", directory / "smith.db"
        self.expected_differences: set[tuple[str, str]] = set()
        self._rng = random.Random(seed)
        self._with_differences = with_differences
        databases = [sqlite3.connect(path) for path in (self.bob, self.smith)]
        for database in databases:
            for name, columns in TABLES.items():
                database.execute(f"CREATE TABLE {name} ({columns})")
        log = TransactionLog(self.data)
        for first in range(0, transactions, CHUNK_ROWS):
            numbers = range(first, min(transactions, first + CHUNK_ROWS))
            chunk = [self._new_transaction(number) for number in numbers]
            self._write(databases, chunk)
            for transaction in chunk:
                if transaction.is_in_ledger:
                    log.add(transaction)
        log.close()
        for database in databases:
            database.commit()
            database.close()

    def _new_transaction(self, number: int) -> SampleTransaction:
        is_special = self._with_differences and (number < len(CASES) or self._rng.random() < 0.02)
        case = CASES[number % len(CASES)] if is_special else ""
        transaction = SampleTransaction(number, case, self._rng, str(self.data))
        kinds = DIFFERENCE_KINDS.get(case, ())
        self.expected_differences |= {(kind, transaction.id) for kind in kinds}
        return transaction

    def _write(self, databases: list[sqlite3.Connection], chunk: list[SampleTransaction]) -> None:
        bob, smith = databases
        _insert(bob, "escrowmq_marker", (row for tx in chunk for row in tx.markers()))
        _insert(bob, "transfer", (row for tx in chunk for row in tx.sent()))
        _insert(smith, "escrowmq_inbox", (row for tx in chunk for row in tx.inbox()))
        _insert(smith, "transfer", (row for tx in chunk for row in tx.received()))
        _insert(
            bob,
            "escrowmq_inbox",
            (row for tx in chunk if tx.case == "twice booked" for row in tx.inbox()),
        )
        write_ledger(self.ledger, [row for tx in chunk for row in tx.ledger()])


def write_ledger(directory: Path, rows: list[dict[str, Any]]) -> None:
    """Add a file with these rows to each day of a ledger."""
    table = pa.Table.from_pylist(rows, schema=LEDGER)
    file_count = sum(1 for _ in directory.rglob("*.parquet")) if directory.exists() else 0
    pq.write_to_dataset(
        table,
        directory,
        partition_cols=["day"],
        basename_template=f"part-{file_count}-{{i}}.parquet",
    )


def ledger_row(transaction_id: str, at_ms: int, **changes: Any) -> dict[str, Any]:
    """Return a transaction of group `bank` that its producer committed 5 ms after `at_ms`, with one
    message in topic `transfers`. `changes` replaces columns."""
    parked = _utc(at_ms)
    columns = {
        "transaction_id": transaction_id,
        "marker_id": transaction_id,
        "group": "bank",
        "topics": ["transfers"],
        "messages": 1,
        "message_ids": [f"message of {transaction_id}"],
        "brokers": ["broker-a"],
        "parked_at": parked,
        "first_check": None,
        "last_check": None,
        "checks": 0,
        "answered_by": None,
        "outcome": "committed",
        "decided_at": _utc(at_ms + 5),
        "decided_by": "producer",
        "decision_ms": 5,
        "reason": None,
        "finals": [
            {"topic": "transfers", "broker": "broker-a", "queue_id": 0, "queue_offset": 0},
        ],
        "visible_ms": 1,
        "day": parked.date(),
    }
    return columns | changes


def _insert(database: sqlite3.Connection, table: str, rows: Iterable[tuple[object, ...]]) -> None:
    placeholders = ", ".join("?" * {"escrowmq_marker": 5}.get(table, 3))
    database.executemany(f"INSERT INTO {table} VALUES ({placeholders})", rows)


class FinalMessage(NamedTuple):
    """A delivered message. `message_number` says which message of its transaction it is."""

    message_number: int
    topic: str
    queue_offset: int


class SampleTransaction:
    """A transaction, and the rows that each database and the ledger have about it."""

    def __init__(self, number: int, case: str, rng: random.Random, broker: str) -> None:
        self.case = case
        self.broker = broker
        self.number = number
        self.id = f"escrow-{rng.getrandbits(128):032x}"
        self.group = "shop" if case == "other group" else "bank"
        is_recent = case.startswith("recent")
        age_range_ms = (0, GRACE_MS // 2) if is_recent else (OPEN_MS + 1, SPAN_MS)
        self.at_ms = NOW_MS - rng.randrange(*age_range_ms)
        self.cents = rng.randrange(1, 100_000)
        self.checks = rng.choice((0, 0, 0, 0, 0, 0, 1, 2))
        self.latency_ms = 2000 * self.checks + rng.randrange(1, 400)
        self.outcome = self._outcome(rng)
        self.topics = self._topics(rng)
        self.ids = [f"{number:08X}{index:04X}" for index in range(len(self.topics))]
        if case == "no id":
            self.id = self.ids[0]

    def _outcome(self, rng: random.Random) -> str:
        fixed = {
            "": "rolled_back" if rng.random() < 0.08 else "committed",
            "rolled back": "rolled_back",
            "effect of rollback": "rolled_back",
            "stranded": "stranded",
            "still open": "open",
            "recent open": "open",
        }
        return fixed.get(self.case, "committed")

    def _topics(self, rng: random.Random) -> list[str]:
        fixed = {
            "no id": ["transfers"],  # without an id, two messages would be two transactions
            "cut short": ["receipts", "receipts"],
            "never delivered": ["transfers"],
            "twice without inbox": rng.choice((["receipts"], ["transfers", "receipts"])),
            "twice with inbox": ["transfers"],
            "two, one twice with inbox": ["transfers", "receipts"],
        }
        default = rng.choices(
            (["transfers"], ["transfers", "receipts"], ["transfers", "transfers"]), (95, 3, 2)
        )[0]
        return fixed.get(self.case, default)

    @property
    def is_in_ledger(self) -> bool:
        return self.case not in ("lost", "recent row")

    def markers(self) -> Iterator[tuple[object, ...]]:
        """Yield the marker row in the sender's database."""
        if self.case in ("no row", "no id", "recent message", "other group", "effect of rollback"):
            return
        if self.case == "tombstone" or (
            self.outcome == "rolled_back" and self.case == "" and self.number % 3 == 0
        ):
            yield self.id, "tombstone", self.at_ms, "bank", 0
        elif self.outcome != "rolled_back" or self.case == "rolled back":
            yield self.id, "committed", self.at_ms, "bank", len(self.topics)

    def sent(self) -> Iterator[tuple[object, ...]]:
        """Yield the transfer in the sender's database."""
        for _, outcome, *_ in self.markers():
            if outcome == "committed":
                yield self.id, self.cents, self.at_ms

    def received(self) -> Iterator[tuple[object, ...]]:
        """Yield the transfer in the receiver's database."""
        is_consumed = self.case not in NOT_CONSUMED
        if self.group == "bank" and self.outcome == "committed" and is_consumed:
            error_cents = 1 if self.case == "wrong amount" else 0
            yield self.id, self.cents + error_cents, self.at_ms

    def inbox(self) -> Iterator[tuple[object, ...]]:
        """Yield the inbox rows in the receiver's database."""
        if self.case in NOT_CONSUMED:
            return
        if self.outcome != "committed" and self.case != "effect of rollback":
            return
        for topic, message_id in zip(self.topics, self.ids, strict=True):
            if topic == "transfers":
                yield "smith-bank", message_id, self.at_ms

    def ledger(self) -> Iterator[dict[str, Any]]:
        """Yield the row of the ledger."""
        if not self.is_in_ledger:
            return
        is_decided = self.outcome in ("committed", "rolled_back")
        parked = _utc(self.at_ms)
        yield {
            "transaction_id": self.id,
            "marker_id": None if self.case == "no id" else self.id,
            "group": self.group,
            "topics": sorted(set(self.topics)),
            "messages": len(self.topics),
            "message_ids": self.ids,
            "brokers": [self.broker],
            "parked_at": parked,
            "first_check": _utc(self.at_ms + 2000) if self.checks else None,
            "last_check": _utc(self.at_ms + 2000 * self.checks) if self.checks else None,
            "checks": self.checks,
            "answered_by": PEER if self.checks and is_decided else None,
            "outcome": self.outcome,
            "decided_at": _utc(self.at_ms + self.latency_ms) if is_decided else None,
            "decided_by": ("check" if self.checks else "producer") if is_decided else None,
            "decision_ms": self.latency_ms if is_decided else None,
            "reason": None,
            "finals": [
                {"topic": topic, "broker": self.broker, "queue_id": 0, "queue_offset": offset}
                for _, topic, offset in sorted(self.finals(), key=lambda final: final[1:])
                if self.outcome == "committed"
            ],
            "visible_ms": 1 if self.outcome == "committed" and self.finals() else None,
            "day": parked.date(),
        }

    def finals(self) -> list[FinalMessage]:
        """Return the messages that are delivered if the transaction is committed."""
        numbers = list(range(len(self.topics)))
        if self.case in ("cut short", "never delivered"):
            numbers.pop()
        elif self.case == "twice without inbox":
            numbers.append(self.topics.index("receipts"))
        elif self.case in ("twice with inbox", "two, one twice with inbox"):
            numbers.append(self.topics.index("transfers"))
        return [
            FinalMessage(number, self.topics[number], queue_offset)
            for queue_offset, number in enumerate(numbers, self.number * 4)
        ]


def _utc(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, tz=UTC)
