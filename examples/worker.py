"""Background tasks as in Celery: functions that other processes call later.

python examples/worker.py work       any number of them; Ctrl-C finishes the running tasks
python examples/worker.py sign-up ann@example.org bob@example.org

Two things are better than with a task queue beside the database. A task is enqueued in the
transaction that needs it: there is no task for a user that was not saved, and no user without a
task. And a task changes the database once, even if its message is delivered twice.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from escrowmq import Message, ReceivedMessage
from escrowmq.blocking import Consumer
from escrowmq.sql import Escrow, Inbox, TransactionMessages

SERVERS = os.environ.get("SERVERS", "127.0.0.1:9876")
engine = create_engine(os.environ.get("DATABASE", "sqlite:///worker.db"))
TOPIC, GROUP = "tasks", "workers"
inbox = Inbox(engine, group=GROUP)

Task = Callable[[Session, str], None]
tasks: dict[str, Task] = {}


def task(function: Task) -> Task:
    tasks[function.__name__] = function
    return function


def enqueue(tx: TransactionMessages, function: Task, argument: str) -> None:
    """Have a worker call the function when the transaction has committed, and only then."""
    call = {"task": function.__name__, "argument": argument}
    tx.send(Message(TOPIC, json.dumps(call).encode(), tags=function.__name__))


@task
def welcome(session: Session, address: str) -> None:
    session.execute(text("INSERT INTO letter VALUES (:address)"), {"address": address})
    print(f"welcomed {address}", flush=True)


@inbox.effect
def perform(session: Session, message: ReceivedMessage) -> None:
    """Run a task. If it raises, the message comes again after a growing delay."""
    call = json.loads(message.body)
    tasks[call["task"]](session, call["argument"])


def sign_up(addresses: list[str]) -> None:
    with Escrow(engine, SERVERS, group="web") as escrow:
        for address in addresses:
            with escrow.transaction() as (session, tx):
                session.execute(text("INSERT INTO user VALUES (:address)"), {"address": address})
                enqueue(tx, welcome, address)


def work() -> None:
    consumer = Consumer(SERVERS, group=GROUP, concurrency=4)
    consumer.on(TOPIC)(perform)
    consumer.run()  # until SIGTERM or SIGINT


def create_tables() -> None:
    with engine.begin() as connection:
        connection.execute(
            text("CREATE TABLE IF NOT EXISTS user (address VARCHAR(100) PRIMARY KEY)")
        )
        connection.execute(text("CREATE TABLE IF NOT EXISTS letter (address VARCHAR(100))"))


if __name__ == "__main__":
    create_tables()
    match sys.argv[1:]:
        case ["work"]:
            work()
        case ["sign-up", *addresses]:
            sign_up(addresses)
        case _:
            sys.exit(__doc__)
