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

import importlib
from typing import TYPE_CHECKING, Any

from escrowmq.sql.escrow import Escrow
from escrowmq.sql.inbox import Inbox
from escrowmq.sql.tables import metadata

if TYPE_CHECKING:
    from escrowmq.sql.async_escrow import AsyncEscrow
    from escrowmq.sql.async_inbox import AsyncInbox

__all__ = ["AsyncEscrow", "AsyncInbox", "Escrow", "Inbox", "metadata"]

# Loaded when they are first wanted: they need SQLAlchemy's asyncio extra.
_ASYNC = {
    "AsyncEscrow": "escrowmq.sql.async_escrow",
    "AsyncInbox": "escrowmq.sql.async_inbox",
}


def __getattr__(name: str) -> Any:
    if name not in _ASYNC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ASYNC[name]), name)
