"""Tests of a service: a row and a message are saved together, also if the process is killed.

    pip install escrowmq[sql] pytest
    pytest test_transfer.py

`escrowmq_broker` and `escrowmq_topic` are fixtures of the pytest plugin that `escrowmq` installs.
The broker is a real one. It runs in a thread and is ready in a moment.
"""

from __future__ import annotations

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

from escrowmq import Message
from escrowmq.sql import Escrow
from escrowmq.testing import CrashPoint, LocalBroker, kill_at

tables = MetaData()
transfers = Table(
    "transfer", tables, Column("id", String(36), primary_key=True), Column("amount", Integer)
)

# --- the service ---------------------------------------------------------------------------------


def make_transfer(escrow: Escrow, topic: str, name: str, amount: int) -> None:
    with escrow.transaction() as (session, tx):
        session.execute(insert(transfers).values(id=name, amount=amount))
        tx.send(Message(topic, f"{name}: {amount}".encode(), keys=name))
        if amount <= 0:
            raise ValueError("a transfer is more than nothing")


def run_service(database: str, servers: str, topic: str) -> None:
    """Make one transfer, in a process of its own."""
    with Escrow(create_engine(database), servers, group=topic) as escrow:
        make_transfer(escrow, topic, "t-1", 30)


# --- its tests -----------------------------------------------------------------------------------


@pytest.fixture
def database(tmp_path: Path) -> str:
    url = f"sqlite:///{tmp_path / 'bank.db'}"
    tables.create_all(create_engine(url))
    return url


def saved_ids(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(select(transfers.c.id)).scalars())


def test_a_transfer_is_saved_and_announced(
    escrowmq_broker: LocalBroker, escrowmq_topic: str, database: str
) -> None:
    engine = create_engine(database)
    with Escrow(engine, escrowmq_broker.servers, group=escrowmq_topic) as escrow:
        make_transfer(escrow, escrowmq_topic, "t-1", 30)
    assert saved_ids(engine) == ["t-1"]
    escrowmq_broker.assert_delivered(escrowmq_topic, [b"t-1: 30"])


def test_a_transfer_that_fails_is_neither(
    escrowmq_broker: LocalBroker, escrowmq_topic: str, database: str
) -> None:
    engine = create_engine(database)
    with (
        Escrow(engine, escrowmq_broker.servers, group=escrowmq_topic) as escrow,
        pytest.raises(ValueError, match="more than nothing"),
    ):
        make_transfer(escrow, escrowmq_topic, "t-2", 0)
    assert saved_ids(engine) == []
    escrowmq_broker.assert_rolled_back("t-2")
    escrowmq_broker.assert_nothing_delivered(escrowmq_topic)


def test_the_end_is_repeated_if_its_response_is_lost(
    escrowmq_broker: LocalBroker, escrowmq_topic: str, database: str
) -> None:
    with (
        Escrow(create_engine(database), escrowmq_broker.servers, group=escrowmq_topic) as escrow,
        escrowmq_broker.lose_responses("end"),
    ):
        make_transfer(escrow, escrowmq_topic, "t-3", 30)
    escrowmq_broker.assert_delivered(escrowmq_topic, [b"t-3: 30"])


@pytest.mark.parametrize("point", CrashPoint)
def test_database_and_messages_agree_wherever_the_service_is_killed(
    escrowmq_broker: LocalBroker, escrowmq_topic: str, database: str, point: CrashPoint
) -> None:
    kill_at(point, run_service, database, escrowmq_broker.servers, escrowmq_topic)
    engine = create_engine(database)
    with Escrow(engine, escrowmq_broker.servers, group=escrowmq_topic):  # the service starts again
        escrowmq_broker.check_back_now(escrowmq_topic)
        escrowmq_broker.assert_settled(escrowmq_topic)
    expected = [b"t-1: 30"] if saved_ids(engine) else []
    escrowmq_broker.assert_delivered(escrowmq_topic, expected)
