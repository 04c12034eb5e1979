"""The database binding: one call that commits the database and sends the messages, or does neither.

escrow = Escrow(engine, "127.0.0.1:9876", group="bank")
with escrow.transaction() as (session, tx):
    session.execute(...)
    tx.send(Message("transfers", payload))

inbox = Inbox(engine, group="bank-b")

@inbox.effect
def credit(session, message): ...      # a message that comes again has no second effect
"""

from __future__ import annotations

from escrowmq.sql.escrow import AsyncEscrow, Escrow
from escrowmq.sql.inbox import AsyncInbox, Inbox
from escrowmq.sql.statements import metadata

__all__ = ["AsyncEscrow", "AsyncInbox", "Escrow", "Inbox", "metadata"]
