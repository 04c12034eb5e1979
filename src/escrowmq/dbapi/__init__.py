"""The binding for plain DB-API connections: psycopg 3, sqlite3 and PyMySQL, without SQLAlchemy.

    escrow = Escrow(lambda: psycopg.connect("dbname=bank"), "127.0.0.1:9876", group="bank")

    with escrow.join(connection) as tx:
        connection.execute("UPDATE account SET balance = balance - 10 WHERE owner = 'bob'")
        tx.send(Message("transfers", b"bob pays smith 10"))

Leaving the block commits the connection and then the messages; an exception rolls both back. The
table of markers is that of `escrowmq.sql`, so both bindings can share a database.

    escrow.py       Escrow, and what `join` returns: `escrowmq.database.transaction` on a connection
    connection.py   what differs between the drivers
"""

from __future__ import annotations

from escrowmq.dbapi.connection import DatabaseConnection
from escrowmq.dbapi.escrow import Escrow, JoinedMessages

__all__ = ["DatabaseConnection", "Escrow", "JoinedMessages"]
