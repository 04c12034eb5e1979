"""Two small tables in the application's own database."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, MetaData, String, Table

metadata = MetaData()

# One row per local transaction: it is there if and only if that transaction committed, or a checker
# has ruled that it never will.
markers = Table(
    "escrowmq_marker",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("outcome", String(16), nullable=False),
    Column("at_ms", BigInteger, nullable=False),
)

# One row per message that had its effect.
inbox = Table(
    "escrowmq_inbox",
    metadata,
    Column("consumer_group", String(255), primary_key=True),
    Column("message_id", String(128), primary_key=True),
    Column("at_ms", BigInteger, nullable=False),
)
