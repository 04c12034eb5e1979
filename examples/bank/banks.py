"""The two banks: the tables of their databases, and the comparison of their books.

No constraint of Smith's database prevents a second credit for the same transfer. A second credit
would be a failure of the messaging, and `BankComparison.doubled` would show it.
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
RECEIPTS_TOPIC: Final = "receipts"
START_CENTS: Final = 1_000_000_000

_tables = MetaData()
account = Table(
    "account",
    _tables,
    Column("name", String(20), primary_key=True),
    Column("cents", BigInteger, nullable=False),
)
# In Bob's bank: the transfers that left. In Smith's bank: the transfers that arrived.
transfer = Table(
    "transfer",
    _tables,
    Column("transfer_id", Integer, nullable=False, index=True),
    Column("transaction_id", String(64), nullable=False),  # joins it with the ledger
    Column("cents", BigInteger, nullable=False),
    Column("at_ms", BigInteger, nullable=False),
)


def database_url(bank: str, directory: Path, server: str | None) -> str:
    """Return the URL of a bank's database: a SQLite file, or a schema in a PostgreSQL database."""
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
        def configure(connection: object, _: object) -> None:
            # Readers do not wait for the writer; writers wait for each other.
            cursor = connection.cursor()  # type: ignore[attr-defined]
            for pragma in ("journal_mode = WAL", "synchronous = NORMAL", "busy_timeout = 20000"):
                cursor.execute(f"PRAGMA {pragma}")
            cursor.close()

    return engine


def create_bank(bank: str, url: str) -> None:
    """Create a bank with empty books. Data of an earlier demo is removed."""
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
    """Change the balance and add the transfer's row. Negative `cents` leave the bank."""
    is_bank = account.c.name == bank
    connection.execute(update(account).where(is_bank).values(cents=account.c.cents + cents))
    ids = {"transfer_id": transfer_id, "transaction_id": transaction_id}
    connection.execute(insert(transfer).values(**ids, cents=abs(cents), at_ms=at_ms))


def transfer_count(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.execute(select(func.count()).select_from(transfer)).scalar_one()


@dataclass(frozen=True, slots=True)
class BankComparison:
    """What a comparison of both banks found."""

    debits: int
    credits_booked: int
    lost: int  # left Bob's bank and never arrived at Smith's
    doubled: int
    invented: int  # arrived at Smith's bank and never left Bob's
    cents_before: int
    cents_after: int

    @property
    def is_consistent(self) -> bool:
        return not (self.lost or self.doubled or self.invented) and (
            self.cents_before == self.cents_after
        )


def compare_banks(bob: Engine, smith: Engine) -> BankComparison:
    with bob.connect() as bob_connection, smith.connect() as smith_connection:
        sent = dict(_read_transfers(bob_connection))
        received = _read_transfers(smith_connection)
        numbers = {number for number, _ in received}
        return BankComparison(
            debits=len(sent),
            credits_booked=len(received),
            lost=len(sent.keys() - numbers),
            doubled=len(received) - len(numbers),
            invented=sum(sent.get(number) != cents for number, cents in received),
            cents_before=START_CENTS,
            cents_after=_balance(bob_connection) + _balance(smith_connection),
        )


def _read_transfers(connection: Connection) -> list[tuple[int, int]]:
    rows = connection.execute(select(transfer.c.transfer_id, transfer.c.cents))
    return [(number, cents) for number, cents in rows]


def _balance(connection: Connection) -> int:
    return int(connection.execute(select(func.sum(account.c.cents))).scalar_one())
