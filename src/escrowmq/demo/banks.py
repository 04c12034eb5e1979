"""The two banks: what is in their databases, and how the books are compared in the end.

Smith's bank does not forbid a second credit for the same transfer. If one is ever booked, it is
the messaging that has failed, and `Books.doubled` shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import click
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    event,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.engine import make_url

from escrowmq.sql import metadata as escrow_tables

BOB: Final = "bob"
SMITH: Final = "smith"
TOPIC: Final = "transfers"
START_CENTS: Final = 1_000_000_000

_tables = MetaData()
account = Table(
    "account",
    _tables,
    Column("name", String(20), primary_key=True),
    Column("cents", BigInteger, nullable=False),
)
# In Bob's bank what left, in Smith's what came.
transfer = Table(
    "transfer",
    _tables,
    Column("transfer_id", Integer, nullable=False, index=True),
    Column("transaction_id", String(64), nullable=False),  # by which Spark finds it in the ledger
    Column("cents", BigInteger, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
)


def database_url(bank: str, directory: Path, server: str | None) -> str:
    """A file of its own for each bank, or a schema of its own in a PostgreSQL database."""
    if server is None:
        return f"sqlite:///{directory / bank}.db"
    url = make_url(server)
    if url.get_backend_name() != "postgresql":
        raise click.UsageError(f"--db takes a postgresql://… address, not {url.drivername}://…")
    schema = f"-csearch_path={schema_of(bank)}"
    url = url.set(drivername="postgresql+psycopg").update_query_dict({"options": schema})
    return url.render_as_string(hide_password=False)


def schema_of(bank: str) -> str:
    return f"escrowmq_demo_{bank}"


def open_bank(url: str) -> Engine:
    engine = create_engine(url)
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine, "connect")
        def ready(connection: object, _: object) -> None:
            # Readers do not wait for the writer; writers wait for each other.
            cursor = connection.cursor()  # type: ignore[attr-defined]
            for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "busy_timeout = 20000"):
                cursor.execute(f"PRAGMA {pragma}")
            cursor.close()

    return engine


def create_bank(bank: str, url: str) -> None:
    """Empty books: whatever an earlier demo left goes."""
    engine = open_bank(url)
    with engine.begin() as connection:
        if engine.dialect.name == "postgresql":
            schema = schema_of(bank)
            connection.execute(text(f"DROP SCHEMA IF EXISTS {schema} CASCADE"))
            connection.execute(text(f"CREATE SCHEMA {schema}"))
        _tables.create_all(connection)
        escrow_tables.create_all(connection)
        cents = START_CENTS if bank == BOB else 0
        connection.execute(insert(account).values(name=bank, cents=cents))
    engine.dispose()


def book_transfer(
    connection: Connection,
    bank: str,
    transfer_id: int,
    cents: int,
    *,
    transaction_id: str,
    at_ms: int,
) -> None:
    """Book a transfer: the balance, and the line that says why. Negative: it leaves."""
    row = account.c.name == bank
    connection.execute(update(account).where(row).values(cents=account.c.cents + cents))
    line = {"transfer_id": transfer_id, "transaction_id": transaction_id}
    connection.execute(insert(transfer).values(**line, cents=abs(cents), at_ms=at_ms))


def transfer_count(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(select(func.count()).select_from(transfer)).scalar_one()


@dataclass(frozen=True, slots=True)
class BankComparison:
    """Both banks side by side."""

    debits: int
    credits_booked: int
    lost: int  # left Bob's bank and never came to Smith's
    doubled: int
    invented: int  # came to Smith's bank and never left Bob's
    cents_before: int
    cents_after: int

    @property
    def is_consistent(self) -> bool:
        return not (self.lost or self.doubled or self.invented) and (
            self.cents_before == self.cents_after
        )


def compare_banks(bob: Engine, smith: Engine) -> BankComparison:
    with bob.connect() as ours, smith.connect() as theirs:
        sent = dict(_read_transfers(ours))
        came = _read_transfers(theirs)
        numbers = {number for number, _ in came}
        return BankComparison(
            debits=len(sent),
            credits_booked=len(came),
            lost=len(sent.keys() - numbers),
            doubled=len(came) - len(numbers),
            invented=sum(sent.get(number) != cents for number, cents in came),
            cents_before=START_CENTS,
            cents_after=_balance(ours) + _balance(theirs),
        )


def _read_transfers(connection: Connection) -> list[tuple[int, int]]:
    rows = connection.execute(select(transfer.c.transfer_id, transfer.c.cents))
    return [(number, cents) for number, cents in rows]


def _balance(connection: Connection) -> int:
    return int(connection.execute(select(func.sum(account.c.cents))).scalar_one())
