"""Ledgers and the databases that belong to them, with differences planted where we know.

    bank = Bank(directory, transactions=20_000, seed=1)
    bank.planted       # (kind, transaction id)
    bank.ledger        # what `pipeline ledger` must make of the log in bank.data

Two banks: Bob's has markers and what left, Smith's an inbox and what came. Group `shop` has no
database here. Much of it is no difference but looks like one: messages that are under way, and a
message that was delivered again where an inbox takes it once.
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

from tests.support.ledger_logs import PEER, LifeLog

NOW_MS: Final = 1_790_000_000_000
GRACE_MS: Final = 600_000
OPEN_MS: Final = 3_600_000
SPAN_MS: Final = 2 * 86_400_000
ROWS_AT_ONCE: Final = 50_000

FINAL = pa.struct(
    [
        ("topic", pa.string()),
        ("broker", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
    ]
)
MOMENT = pa.timestamp("us", tz="UTC")
LEDGER: Final = pa.schema(
    [
        ("transaction_id", pa.string()),
        ("marker_id", pa.string()),
        ("group", pa.string()),
        ("topics", pa.list_(pa.string())),
        ("messages", pa.int32()),
        ("message_ids", pa.list_(pa.string())),
        ("brokers", pa.list_(pa.string())),
        ("parked_at", MOMENT),
        ("first_check", MOMENT),
        ("last_check", MOMENT),
        ("checks", pa.int32()),
        ("answered_by", pa.string()),
        ("outcome", pa.string()),
        ("decided_at", MOMENT),
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
# In this order, so that the first transactions have one of each, however few there are.
PLANTS: Final = (
    "lost",  # committed in the database, the ledger does not know it
    "rolled back",  # committed in the database, rolled back at the broker
    "cut short",  # two messages, one is there
    "never delivered",  # committed at the broker, its message is nowhere
    "no row",  # committed at the broker, no marker
    "tombstone",  # committed at the broker, the database says it never was
    "no id",  # committed without TX_ID
    "twice unguarded",  # delivered twice into a topic without an inbox
    "twice booked",  # both databases have an inbox row for it
    "no effect",
    "ghost",  # rolled back, but it had an effect
    "stranded",
    "still open",
    "wrong amount",
    # and what is no difference
    "young row",
    "young message",
    "young open",
    "young effect",
    "twice guarded",
    "two guarded",
    "other group",
)
UNSEEN: Final = ("no effect", "young effect", "lost", "never delivered", "young row")  # by Smith
KIND_OF: Final = {
    "lost": ("row_without_message",),
    "rolled back": ("row_without_message",),
    "cut short": ("row_without_message",),
    "never delivered": ("row_without_message",),
    "no row": ("message_without_row",),
    "tombstone": ("message_without_row",),
    "no id": ("message_without_row",),
    "twice unguarded": ("delivered_twice",),
    "twice booked": ("delivered_twice",),
    "no effect": ("consumed_without_effect",),
    "ghost": ("message_without_row",),
    "stranded": ("stranded",),
    "still open": ("still_open",),
    "wrong amount": ("amount_differs",),
}


class Bank:
    """`planted` is what must be found, and nothing else."""

    def __init__(self, directory: Path, *, transactions: int, seed: int, planted: bool = True):
        self.ledger = directory / "ledger"
        self.data = directory / "data"  # of its broker
        self.bob, self.smith = directory / "bob.db", directory / "smith.db"
        self.planted: set[tuple[str, str]] = set()
        self._choose = random.Random(seed)
        self._plants = planted
        databases = [sqlite3.connect(path) for path in (self.bob, self.smith)]
        for database in databases:
            for name, columns in TABLES.items():
                database.execute(f"CREATE TABLE {name} ({columns})")
        log = LifeLog(self.data)
        for first in range(0, transactions, ROWS_AT_ONCE):
            numbers = range(first, min(transactions, first + ROWS_AT_ONCE))
            lives = [self._one(number) for number in numbers]
            self._write(databases, lives)
            for life in lives:
                if life.is_known:
                    log.add(life)
        log.close()
        for database in databases:
            database.commit()
            database.close()

    def _one(self, number: int) -> Life:
        plants = len(PLANTS)
        is_planted = self._plants and (number < plants or self._choose.random() < 0.02)
        plant = PLANTS[number % plants] if is_planted else ""
        life = Life(number, plant, self._choose, str(self.data))
        self.planted |= {(kind, life.id) for kind in KIND_OF.get(plant, ())}
        return life

    def _write(self, databases: list[sqlite3.Connection], lives: list[Life]) -> None:
        bob, smith = databases
        _insert(bob, "escrowmq_marker", (row for life in lives for row in life.markers()))
        _insert(bob, "transfer", (row for life in lives for row in life.sent()))
        _insert(smith, "escrowmq_inbox", (row for life in lives for row in life.inbox()))
        _insert(smith, "transfer", (row for life in lives for row in life.received()))
        _insert(
            bob,
            "escrowmq_inbox",
            (row for life in lives if life.plant == "twice booked" for row in life.inbox()),
        )
        rows = [row for life in lives for row in life.ledger()]
        write_ledger(self.ledger, rows)


def write_ledger(directory: Path, rows: list[dict[str, Any]]) -> None:
    """One more file in each day."""
    table = pa.Table.from_pylist(rows, schema=LEDGER)
    before = sum(1 for _ in directory.rglob("*.parquet")) if directory.exists() else 0
    pq.write_to_dataset(
        table,
        directory,
        partition_cols=["day"],
        basename_template=f"part-{before}-{{i}}.parquet",
    )


def ledger_row(transaction_id: str, at_ms: int, **changes: Any) -> dict[str, Any]:
    """Return a transaction of group `bank` that its producer committed 5 ms after `at_ms`, with one
    message in topic `transfers`. `changes` replaces columns."""
    parked = _moment(at_ms)
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
        "decided_at": _moment(at_ms + 5),
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
    marks = ", ".join("?" * {"escrowmq_marker": 5}.get(table, 3))
    database.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)


class Delivered(NamedTuple):
    """A delivered message: which of the transaction's it is, and where it lies."""

    of: int
    topic: str
    queue_offset: int


class Life:
    """One transaction, and what each side knows about it."""

    def __init__(self, number: int, plant: str, choose: random.Random, broker: str) -> None:
        self.plant = plant
        self.broker = broker
        self.number = number
        self.id = f"escrow-{choose.getrandbits(128):032x}"
        self.group = "shop" if plant == "other group" else "bank"
        self.is_young = plant.startswith("young")
        age = choose.randrange(0, GRACE_MS // 2) if self.is_young else 0
        self.at_ms = NOW_MS - age
        if not self.is_young:
            self.at_ms -= choose.randrange(OPEN_MS + 1, SPAN_MS)
        self.cents = choose.randrange(1, 100_000)
        self.checks = choose.choice((0, 0, 0, 0, 0, 0, 1, 2))
        self.latency_ms = 2000 * self.checks + choose.randrange(1, 400)
        self.outcome = self._outcome(choose)
        self.topics = self._topics(choose)
        self.ids = [f"{number:08X}{place:04X}" for place in range(len(self.topics))]
        if plant == "no id":
            self.id = self.ids[0]

    def _outcome(self, choose: random.Random) -> str:
        fixed = {
            "": "rolled_back" if choose.random() < 0.08 else "committed",
            "rolled back": "rolled_back",
            "ghost": "rolled_back",
            "stranded": "stranded",
            "still open": "open",
            "young open": "open",
        }
        return fixed.get(self.plant, "committed")

    def _topics(self, choose: random.Random) -> list[str]:
        fixed = {
            "no id": ["transfers"],  # two would be two transactions: nothing holds them together
            "cut short": ["receipts", "receipts"],
            "never delivered": ["transfers"],
            "twice unguarded": choose.choice((["receipts"], ["transfers", "receipts"])),
            "twice guarded": ["transfers"],
            "two guarded": ["transfers", "receipts"],
        }
        usual = choose.choices(
            (["transfers"], ["transfers", "receipts"], ["transfers", "transfers"]), (95, 3, 2)
        )[0]
        return fixed.get(self.plant, usual)

    @property
    def is_known(self) -> bool:
        return self.plant not in ("lost", "young row")

    def markers(self) -> Iterator[tuple[object, ...]]:
        if self.plant in ("no row", "no id", "young message", "other group", "ghost"):
            return
        if self.plant == "tombstone" or (
            self.outcome == "rolled_back" and self.plant == "" and self.number % 3 == 0
        ):
            yield self.id, "tombstone", self.at_ms, "bank", 0
        elif self.outcome != "rolled_back" or self.plant == "rolled back":
            yield self.id, "committed", self.at_ms, "bank", len(self.topics)

    def sent(self) -> Iterator[tuple[object, ...]]:
        for _, outcome, *_ in self.markers():
            if outcome == "committed":
                yield self.id, self.cents, self.at_ms

    def received(self) -> Iterator[tuple[object, ...]]:
        is_lacking = self.plant in UNSEEN
        if self.group == "bank" and self.outcome == "committed" and not is_lacking:
            wrong = 1 if self.plant == "wrong amount" else 0
            yield self.id, self.cents + wrong, self.at_ms

    def inbox(self) -> Iterator[tuple[object, ...]]:
        if self.plant in UNSEEN:
            return
        if self.outcome != "committed" and self.plant != "ghost":
            return
        for topic, message_id in zip(self.topics, self.ids, strict=True):
            if topic == "transfers":
                yield "smith-bank", message_id, self.at_ms

    def ledger(self) -> Iterator[dict[str, Any]]:
        if not self.is_known:
            return
        decided = self.outcome in ("committed", "rolled_back")
        parked = _moment(self.at_ms)
        yield {
            "transaction_id": self.id,
            "marker_id": None if self.plant == "no id" else self.id,
            "group": self.group,
            "topics": sorted(set(self.topics)),
            "messages": len(self.topics),
            "message_ids": self.ids,
            "brokers": [self.broker],
            "parked_at": parked,
            "first_check": _moment(self.at_ms + 2000) if self.checks else None,
            "last_check": _moment(self.at_ms + 2000 * self.checks) if self.checks else None,
            "checks": self.checks,
            "answered_by": PEER if self.checks and decided else None,
            "outcome": self.outcome,
            "decided_at": _moment(self.at_ms + self.latency_ms) if decided else None,
            "decided_by": ("check" if self.checks else "producer") if decided else None,
            "decision_ms": self.latency_ms if decided else None,
            "reason": None,
            "finals": [
                {"topic": topic, "broker": self.broker, "queue_id": 0, "queue_offset": offset}
                for _, topic, offset in sorted(self.finals(), key=lambda one: one[1:])
                if self.outcome == "committed"
            ],
            "visible_ms": 1 if self.outcome == "committed" and self.finals() else None,
            "day": parked.date(),
        }

    def finals(self) -> list[Delivered]:
        """If it was committed."""
        numbers = list(range(len(self.topics)))
        if self.plant in ("cut short", "never delivered"):
            numbers.pop()
        elif self.plant == "twice unguarded":
            numbers.append(self.topics.index("receipts"))
        elif self.plant in ("twice guarded", "two guarded"):
            numbers.append(self.topics.index("transfers"))
        return [
            Delivered(of, self.topics[of], at) for at, of in enumerate(numbers, self.number * 4)
        ]


def _moment(at_ms: int) -> datetime:
    return datetime.fromtimestamp(at_ms / 1000, tz=UTC)
