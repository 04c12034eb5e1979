"""Effects in a transaction keep the order of their key while workers join and leave."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial

import pytest
from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from escrowmq import Message, Producer
from escrowmq.app import App, Retry, encode_payload
from tests.support.apps import outcomes, running
from tests.support.brokers import Server
from tests.support.clients import send
from tests.support.sql_bank import new_topic
from tests.support.waiting import wait_until_async

pytestmark = pytest.mark.slow

KEYS = ("a", "b", "c", "d", "e", "f", "g", "h")


@dataclass
class Step:
    key: str
    number: int


def last_numbers(engine: Engine) -> dict[str, int]:
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT name, last FROM progress")).all()
    return {row[0]: row[1] for row in rows}


def is_reached(engine: Engine, number: int) -> bool:
    """Return whether all keys are at this number or behind it."""
    return min(last_numbers(engine).values()) >= number


def stepping_app(server: Server, engine: Engine, topic: str, violations: list[str]) -> App:
    """Return an app that notes every step that does not follow the one before it."""
    app = App(server.namesrv_address, group=f"g-{topic}", database=engine)

    @app.on(topic, ordered=True, concurrency=4, retry=Retry(times=100, first_s=0.05, factor=1))
    def advance(session: Session, step: Step) -> None:
        row = {"name": step.key, "number": step.number, "before": step.number - 1}
        query = "UPDATE progress SET last = :number WHERE name = :name AND last = :before"
        is_next = session.execute(text(query), row).rowcount == 1  # type: ignore[attr-defined]
        if not is_next:
            violations.append(f"{step} after {last_numbers(engine)[step.key]}")
            raise AssertionError(violations[-1])

    return app


async def send_steps(server: Server, engine: Engine, topic: str, stopped: asyncio.Event) -> int:
    """Send the steps of all keys until the event is set, and return how many each key has.

    The handlers are at most twenty steps behind.
    """
    number = 0
    async with Producer(server.namesrv_address, group="p") as producer:
        while not stopped.is_set():
            number += 1
            await wait_until_async(partial(is_reached, engine, number - 20))
            for key in KEYS:
                body = encode_payload(Step(key, number))
                await producer.send(Message(topic, body, sharding_key=key))
    return number


async def test_effects_keep_the_order_of_their_key_while_workers_join_and_leave(
    server: Server, engine: Engine
) -> None:
    topic, violations = new_topic("steps"), list[str]()
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE progress (name VARCHAR(9) PRIMARY KEY, last INT)"))
        for key in KEYS:
            connection.execute(text("INSERT INTO progress VALUES (:key, 0)"), {"key": key})
    await send(server, f"{topic}-unused", b"x")  # the broker is up
    stopped = asyncio.Event()
    sending = asyncio.create_task(send_steps(server, engine, topic, stopped))
    first, second = (stepping_app(server, engine, topic, violations) for _ in range(2))
    async with running(first):
        await wait_until_async(lambda: outcomes(first)["done"] >= 40)
        async with running(second):
            await wait_until_async(lambda: outcomes(second)["done"] >= 40)
            first.stop()
            done = outcomes(second)["done"]
            await wait_until_async(lambda: outcomes(second)["done"] >= done + 40)
            stopped.set()
            steps = await sending
            await wait_until_async(
                lambda: set(last_numbers(engine).values()) == {steps},
                lambda: f"all have {steps} steps: {last_numbers(engine)}",
            )
    assert violations == []
