"""The application of these tests: transfers, and what became of their messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import count

from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, insert, select
from sqlalchemy.orm import DeclarativeBase

from escrowmq import Message, ReceivedMessage
from escrowmq.sql import Escrow
from tests.support.brokers import Served

WAIT_S = 60.0
LOOK_S = 0.05  # between two looks
tables = MetaData()
transfers = Table(
    "transfer", tables, Column("id", String(64), primary_key=True), Column("amount", Integer)
)
_numbers = count()


class _Mapped(DeclarativeBase):
    metadata = tables


class Transfer(_Mapped):
    """A row that a session holds back until it is flushed."""

    __table__ = transfers


def new_topic(word: str) -> str:
    """No test sees another's messages."""
    return f"{word}-{next(_numbers)}"


def saved(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(select(transfers.c.id).order_by(transfers.c.id)).scalars())


def delivered(served: Served, topic: str) -> list[bytes]:
    with served.client() as reader:
        return sorted(record.body for queue in range(4) for record in reader.pull_all(topic, queue))


def open_halves(served: Served) -> int:
    with served.client() as asker:
        answer = asker.expect(3711, {"countMax": 1000})
    return answer.body.count(b'"transactionId"')


def wait_until(what: Callable[[], bool], why: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < deadline_s, f"in vain: {why}"
        threading.Event().wait(LOOK_S)


def settled(served: Served) -> None:
    wait_until(lambda: open_halves(served) == 0, "no transaction is open")


def pay(escrow: Escrow, topic: str, name: str, *, fails: BaseException | None = None) -> None:
    with escrow.transaction() as (session, tx):
        session.execute(insert(transfers).values(id=name, amount=1))
        tx.send(Message(topic, name.encode()))
        tx.send(Message(topic, name.encode() + b" again"))
        if fails is not None:
            raise fails


def message_called(message_id: str, body: bytes = b"") -> ReceivedMessage:
    """As a consumer would get it."""
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
