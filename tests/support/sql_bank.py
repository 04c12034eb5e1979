"""A small application for tests of the database bindings: transfers and their messages."""

from __future__ import annotations

from itertools import count

from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, insert, select
from sqlalchemy.orm import DeclarativeBase

from escrowmq import Message, ReceivedMessage
from escrowmq.sql import Escrow
from escrowmq.testing import BrokerAssertions

WAIT_S = 60.0
tables = MetaData()
transfers = Table(
    "transfer", tables, Column("id", String(64), primary_key=True), Column("amount", Integer)
)
_numbers = count()


class _Mapped(DeclarativeBase):
    metadata = tables


class Transfer(_Mapped):
    """A mapped row. A session writes it only when the session is flushed."""

    __table__ = transfers


def new_topic(word: str) -> str:
    """Return a topic that no other test uses."""
    return f"{word}-{next(_numbers)}"


def saved_ids(engine: Engine) -> list[str]:
    """Return the ids of all transfers in the database."""
    with engine.connect() as connection:
        return list(connection.execute(select(transfers.c.id).order_by(transfers.c.id)).scalars())


def delivered_bodies(server: BrokerAssertions, topic: str) -> list[bytes]:
    """Return the bodies of all messages that consumers of the topic can read."""
    return sorted(message.body for message in server.messages(topic))


def open_halves(server: BrokerAssertions) -> int:
    """Return the number of undecided half messages."""
    return len(server.open_transactions())


def pay(escrow: Escrow, topic: str, name: str, *, fails: BaseException | None = None) -> None:
    """Save a transfer and send two messages in one transaction, which may then fail."""
    with escrow.transaction() as (session, tx):
        session.execute(insert(transfers).values(id=name, amount=1))
        tx.send(Message(topic, name.encode()))
        tx.send(Message(topic, name.encode() + b" again"))
        if fails is not None:
            raise fails


def received_message(message_id: str, body: bytes = b"") -> ReceivedMessage:
    """Return a message of topic `credits` as a consumer receives it."""
    return ReceivedMessage(
        topic="credits",
        body=body,
        keys="",
        tags="",
        properties={},
        message_id=message_id,
        offset_id="",
        queue_id=0,
        queue_offset=0,
        born_ms=0,
        stored_ms=0,
        reconsume_times=0,
        flag=0,
        log_offset=0,
    )
