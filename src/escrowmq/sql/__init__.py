"""The SQLAlchemy binding: commit the database and send the messages, or do neither.

    escrow = Escrow(engine, "127.0.0.1:9876", group="bank")
    with escrow.transaction() as (session, tx):
        session.execute(...)
        tx.send(Message("transfers", payload))

    tx = escrow.join(session)          # a transaction that you begin and end yourself
    tx.send(Message("transfers", payload))
    session.commit()

    inbox = Inbox(engine, group="bank-b")

    @inbox.effect
    def credit(session, message): ...      # runs once for each message, however often it arrives

The sending side is Escrow, the receiving side Inbox. AsyncEscrow and AsyncInbox are the same for
an AsyncEngine. Each has one small table in the application's own database. SQLite, PostgreSQL,
MySQL and MariaDB are supported.

    escrow.py       Escrow and AsyncEscrow: thin faces of `escrowmq.database.transaction`
    joined.py       what `join` adds: the events of sessions and connections
    inbox.py        Inbox and AsyncInbox
    statements.py   the two tables and all SQL statements
"""

from __future__ import annotations

from escrowmq.database.transaction import AsyncTransactionMessages, TransactionMessages
from escrowmq.sql.escrow import AsyncEscrow, Escrow
from escrowmq.sql.inbox import AsyncInbox, Inbox
from escrowmq.sql.statements import metadata

__all__ = [
    "AsyncEscrow",
    "AsyncInbox",
    "AsyncTransactionMessages",
    "Escrow",
    "Inbox",
    "TransactionMessages",
    "metadata",
]
