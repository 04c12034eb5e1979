"""A database and a broker, both real: whatever happens in between, they agree in the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import (
    Column,
    Engine,
    Integer,
    MetaData,
    String,
    Table,
    create_engine,
    insert,
    select,
)
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from escrowmq import Message, Verdict
from escrowmq.blocking import Consumer
from escrowmq.client.messages import ReceivedMessage
from escrowmq.sql import Escrow, Inbox
from escrowmq.sql.marker import ask, claim
from tests.brokers import Served

pytestmark = pytest.mark.slow

NOW_MS = 1_700_000_000_000
WAIT_S = 20.0
tables = MetaData()
transfers = Table(
    "transfer", tables, Column("id", String(32), primary_key=True), Column("amount", Integer)
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    conf = {"transactionTimeOut": 500, "transactionCheckInterval": 500}
    with Served(tmp_path_factory.mktemp("sql"), conf=conf) as served:
        yield served


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path / 'bank.db'}")
    tables.create_all(engine)
    yield engine
    engine.dispose()


def saved(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(select(transfers.c.id).order_by(transfers.c.id)).scalars())


def delivered(served: Served, topic: str) -> list[bytes]:
    with served.client() as reader:
        return sorted(record.body for queue in range(4) for record in reader.pull_all(topic, queue))


def pay(escrow: Escrow, topic: str, name: str, *, fails: bool = False) -> None:
    with escrow.transaction() as (session, tx):
        session.execute(insert(transfers).values(id=name, amount=1))
        tx.send(Message(topic, name.encode()))
        tx.send(Message(topic, name.encode() + b" again"))
        if fails:
            raise ZeroDivisionError


def test_both_or_neither(served: Served, engine: Engine) -> None:
    with Escrow(engine, served.namesrv_address, group="g-both") as escrow:
        pay(escrow, "both", "a")
        with pytest.raises(ZeroDivisionError):
            pay(escrow, "both", "b", fails=True)
    assert saved(engine) == ["a"]
    assert delivered(served, "both") == [b"a", b"a again"]


@pytest.mark.parametrize("dies", ["before the commit", "after the commit"])
def test_an_owner_that_dies_is_answered_for(served: Served, engine: Engine, dies: str) -> None:
    topic = dies.replace(" ", "-")
    with Escrow(engine, served.namesrv_address, group=f"g-{topic}") as escrow:
        producer = escrow._producer
        session = Session(engine)
        tx = producer.transaction(id=topic)
        claim(session.connection(), topic, now_ms=NOW_MS)
        session.execute(insert(transfers).values(id=topic, amount=1))
        tx.send(Message(topic, b"paid"))
        if dies == "after the commit":
            session.commit()
        session.close()  # and nobody ever ends it: the broker asks
        deadline = time.monotonic() + WAIT_S
        while _open(served) and time.monotonic() < deadline:
            pass  # each look is a request
        assert _open(served) == 0
    expected = [b"paid"] if dies == "after the commit" else []
    assert delivered(served, topic) == expected
    assert saved(engine) == ([topic] if expected else [])


def _open(served: Served) -> int:
    with served.client() as asker:
        answer = asker.expect(3711, {"countMax": 10})
    return answer.body.count(b'"transactionId"')


def test_the_first_writer_of_a_marker_wins(engine: Engine) -> None:
    Inbox(engine, group="makes the tables")
    with Session(engine) as owner:
        claim(owner.connection(), "t1", now_ms=NOW_MS)
        assert ask(engine, "t1", now_ms=NOW_MS) is Verdict.UNKNOWN  # it is at work
        owner.commit()
    assert ask(engine, "t1", now_ms=NOW_MS) is Verdict.COMMIT
    assert ask(engine, "t2", now_ms=NOW_MS) is Verdict.ROLLBACK  # it never began
    assert ask(engine, "t2", now_ms=NOW_MS) is Verdict.ROLLBACK
    with Session(engine) as late, pytest.raises(IntegrityError):
        claim(late.connection(), "t2", now_ms=NOW_MS)


def test_a_message_that_comes_again_has_no_second_effect(served: Served, engine: Engine) -> None:
    inbox = Inbox(engine, group="bank-b")

    @inbox.effect
    def credit(session: Session, message: ReceivedMessage) -> None:
        session.execute(insert(transfers).values(id=message.body.decode(), amount=1))

    with Escrow(engine, served.namesrv_address, group="g-inbox") as escrow:
        with escrow.transaction() as (_, tx):
            tx.send(Message("credits", b"c-1"))
        with Consumer(
            served.namesrv_address, group="bank-b", subscribe={"credits": "*"}
        ) as consumer:
            message = consumer.receive()
    assert credit(message) is True
    assert credit(message) is False
    assert saved(engine) == ["c-1"]
