"""A redelivered message has no second effect; a message whose effect failed is not lost."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import Engine, insert, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from escrowmq import Message, ReceivedMessage
from escrowmq.blocking import Consumer
from escrowmq.clock import ManualClock
from escrowmq.database.marker import HOUR_MS
from escrowmq.sql import Escrow, Inbox
from escrowmq.sql.statements import inbox_table
from tests.support.brokers import LocalServer
from tests.support.sql_bank import new_topic, received_message, saved_ids, transfers

pytestmark = pytest.mark.slow


def credit(session: Session, message: ReceivedMessage) -> None:
    session.execute(insert(transfers).values(id=message.body.decode(), amount=1))


def inbox_ids(engine: Engine) -> list[str]:
    """Return the ids of the messages whose effect is committed."""
    with engine.connect() as connection:
        return list(connection.execute(select(inbox_table.c.message_id)).scalars())


def test_a_redelivered_message_has_no_second_effect(engine: Engine) -> None:
    credit_once = Inbox(engine, group="g").effect(credit)
    assert credit_once(received_message("m1", b"a")) is True
    assert credit_once(received_message("m1", b"a")) is False
    assert credit_once(received_message("M1", b"b")) is True
    other_group = Inbox(engine, group="G").effect(credit)
    assert other_group(received_message("m1", b"c")) is True
    assert saved_ids(engine) == ["a", "b", "c"]


def test_an_effect_that_failed_runs_again(engine: Engine) -> None:
    credit_once = Inbox(engine, group="g").effect(credit)

    def credit_and_fail(session: Session, message: ReceivedMessage) -> None:
        credit(session, message)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Inbox(engine, group="g").effect(credit_and_fail)(received_message("m1", b"a"))
    assert inbox_ids(engine) == []
    assert saved_ids(engine) == []
    assert credit_once(received_message("m1", b"a")) is True


def test_an_integrity_error_of_the_effect_is_raised(engine: Engine) -> None:
    credit_once = Inbox(engine, group="g").effect(credit)
    credit_once(received_message("m1", b"a"))
    with pytest.raises(IntegrityError):
        credit_once(received_message("m2", b"a"))
    assert inbox_ids(engine) == ["m1"]


def test_two_concurrent_deliveries_have_one_effect(engine: Engine) -> None:
    both_started = threading.Barrier(2)
    inbox = Inbox(engine, group="g")
    results: list[bool] = []

    def deliver() -> None:
        both_started.wait(20)
        results.append(inbox.effect(credit)(received_message("m1", b"a")))

    threads = [threading.Thread(target=deliver) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False, True]
    assert saved_ids(engine) == ["a"]


def test_old_rows_are_purged_by_the_clock_of_the_database(sqlite: Engine) -> None:
    clock = ManualClock()
    inbox = Inbox(sqlite, group="g", retention_ms=1000, clock=clock)
    handle = inbox.effect(credit)
    handle(received_message("m1", b"a"))
    clock.advance(ms=97 * HOUR_MS)
    assert inbox.purge() == 0
    with sqlite.begin() as connection:
        connection.execute(update(inbox_table).values(at_ms=inbox_table.c.at_ms - HOUR_MS))
    handle(received_message("m2", b"b"))
    assert inbox.purge() == 1
    assert inbox_ids(sqlite) == ["m2"]


def test_run_continues_after_an_effect_that_failed(server: LocalServer, sqlite: Engine) -> None:
    topic = new_topic("credits")
    failed: list[str] = []
    inbox = Inbox(sqlite, group=topic)

    @inbox.effect
    def fail_once(session: Session, message: ReceivedMessage) -> None:
        credit(session, message)
        if not failed:
            failed.append(message.message_id)
            raise ZeroDivisionError

    with Escrow(sqlite, server.namesrv_address, group=f"{topic}-p") as escrow:
        for body in (b"a", b"b"):
            with escrow.transaction() as (_, tx):
                tx.send(Message(topic, body))
    with Consumer(server.namesrv_address, group=topic, subscribe={topic: "*"}) as consumer:
        inbox.run(consumer, fail_once, limit=2)
    assert len(failed) == 1
    assert len(saved_ids(sqlite)) == 1
    assert failed[0] not in inbox_ids(sqlite)
