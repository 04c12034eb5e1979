"""Two small tables in the application's own database. Their columns are a contract: docs/sql.md."""

from __future__ import annotations

from typing import Final

from sqlalchemy import BigInteger, Column, Connection, Integer, MetaData, String, Table
from sqlalchemy.dialects.mysql import VARCHAR
from sqlalchemy.exc import DBAPIError

from escrowmq.binding.marker import INBOX, MARKERS

metadata = MetaData()
_EXACT: Final = "utf8mb4_bin"


def _name(length: int) -> String:
    """Text that is compared as it is: MariaDB would take "Bank" and "bank" for the same."""
    exact = VARCHAR(length, charset="utf8mb4", collation=_EXACT)
    return String(length).with_variant(exact, "mysql", "mariadb")


# One row per local transaction: it is there if and only if that transaction committed, or a checker
# has ruled that it never will.
markers = Table(
    MARKERS,
    metadata,
    Column("id", _name(64), primary_key=True),
    Column("outcome", String(16), nullable=False),
    Column("at_ms", BigInteger, nullable=False, index=True),
    Column("producer_group", _name(255), nullable=False),
    Column("messages", Integer, nullable=False),
)

# One row per message that had its effect.
inbox = Table(
    INBOX,
    metadata,
    Column("consumer_group", _name(255), primary_key=True),
    Column("message_id", _name(128), primary_key=True),
    Column("at_ms", BigInteger, nullable=False, index=True),
)


def make_tables(connection: Connection) -> None:
    """Those that are not there. Another process may do the same at the same time."""
    try:
        with connection.begin():
            metadata.create_all(connection)
    except DBAPIError:
        with connection.begin():
            metadata.create_all(connection)  # it finds what the other one has made, or says why not
