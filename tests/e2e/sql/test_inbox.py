"""A redelivered message has no second effect, and one whose effect failed is not lost."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import Engine, insert, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from escrowmq import Message, ReceivedMessage
from escrowmq.blocking import Consumer
from escrowmq.clock import ManualClock
from escrowmq.sql import Escrow, Inbox
from escrowmq.sql.statements import inbox_table as rows
from tests.support.brokers import Server
from tests.support.sql_bank import new_topic, received_message, saved_ids, transfers

pytestmark = pytest.mark.slow


def credit(session: Session, message: ReceivedMessage) -> None:
    session.execute(insert(transfers).values(id=message.body.decode(), amount=1))


def seen(engine: Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.execute(select(rows.c.message_id)).scalars())


def test_a_message_that_comes_again_has_no_second_effect(engine: Engine) -> None:
    once = Inbox(engine, group="g").effect(credit)
    assert once(received_message("m1", b"a")) is True
    assert once(received_message("m1", b"a")) is False
    assert once(received_message("M1", b"b")) is True
    other = Inbox(engine, group="G").effect(credit)
    assert other(received_message("m1", b"c")) is True
    assert saved_ids(engine) == ["a", "b", "c"]


def test_an_effect_that_failed_runs_again(engine: Engine) -> None:
    once = Inbox(engine, group="g").effect(credit)

    def fails(session: Session, message: ReceivedMessage) -> None:
        credit(session, message)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Inbox(engine, group="g").effect(fails)(received_message("m1", b"a"))
    assert seen(engine) == []
    assert saved_ids(engine) == []
    assert once(received_message("m1", b"a")) is True


def test_an_integrity_error_of_the_effect_is_raised(engine: Engine) -> None:
    once = Inbox(engine, group="g").effect(credit)
    once(received_message("m1", b"a"))
    with pytest.raises(IntegrityError):
        once(received_message("m2", b"a"))
    assert seen(engine) == ["m1"]


def test_of_two_concurrent_deliveries_one_has_its_effect(engine: Engine) -> None:
    begun = threading.Barrier(2)
    box = Inbox(engine, group="g")
    answers: list[bool] = []

    def take() -> None:
        begun.wait(20)
        answers.append(box.effect(credit)(received_message("m1", b"a")))

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [False, True]
    assert saved_ids(engine) == ["a"]


def test_old_rows_are_purged(sqlite: Engine) -> None:
    clock = ManualClock()
    box = Inbox(sqlite, group="g", retention_ms=1000, clock=clock)
    once = box.effect(credit)
    once(received_message("m1", b"a"))
    clock.advance(ms=1001)
    once(received_message("m2", b"b"))
    assert box.purge() == 1
    assert seen(sqlite) == ["m2"]


def test_a_consumer_is_run_through_it(served: Server, sqlite: Engine) -> None:
    topic = new_topic("credits")
    failed: list[str] = []
    box = Inbox(sqlite, group=topic)

    @box.effect
    def flaky(session: Session, message: ReceivedMessage) -> None:
        credit(session, message)
        if not failed:
            failed.append(message.message_id)
            raise ZeroDivisionError

    with Escrow(sqlite, served.namesrv_address, group=f"{topic}-p") as escrow:
        for body in (b"a", b"b"):
            with escrow.transaction() as (_, tx):
                tx.send(Message(topic, body))
    with Consumer(served.namesrv_address, group=topic, subscribe={topic: "*"}) as consumer:
        box.run(consumer, flaky, limit=2)
    assert len(failed) == 1
    assert len(saved_ids(sqlite)) == 1
    assert failed[0] not in seen(sqlite)
