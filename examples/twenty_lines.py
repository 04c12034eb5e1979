r"""Pay for an order and notify shipping, or do neither. Kill it where it stops, and start it again.

escrowmq serve                      in one terminal
python examples/twenty_lines.py     in another; Ctrl-\ kills it, Enter continues
"""

import os
from typing import Any

from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import Session

from escrowmq import Message, ReceivedMessage
from escrowmq.blocking import Consumer
from escrowmq.sql import Escrow, Inbox

SERVERS = os.environ.get("SERVERS", "127.0.0.1:9876")
engine = create_engine(os.environ.get("DATABASE", "sqlite:///twenty_lines.db"))
with engine.begin() as connection:
    connection.execute(text("CREATE TABLE IF NOT EXISTS paid (id INTEGER PRIMARY KEY)"))
    connection.execute(text("CREATE TABLE IF NOT EXISTS shipped (id INTEGER)"))
inbox = Inbox(engine, group="shipping")


@inbox.effect  # an order is shipped once, even if its message is delivered twice
def ship(session: Session, message: ReceivedMessage) -> None:
    session.execute(text("INSERT INTO shipped VALUES (:id)"), {"id": int(message.body)})


def pay(escrow: Escrow) -> None:
    with escrow.transaction() as (session, tx):
        order = session.execute(text("INSERT INTO paid DEFAULT VALUES RETURNING id")).scalar_one()
        tx.send(Message("twenty-orders", str(order).encode()))
        stop_here("the message is in escrow, the database has not committed: neither will happen")
        event.listen(session, "after_commit", committed)


# --- only for this demonstration: stop in the middle, and compare ---------------------------------


def stop_here(state: str) -> None:
    print(f"KILL ME NOW (Ctrl-\\, or kill -9 {os.getpid()}), or press Enter: {state}", flush=True)
    input()


def committed(_: Any) -> None:
    stop_here("the database has committed, the broker does not know yet: both will happen")


def order_ids(engine: Engine) -> list[list[int]]:
    with engine.connect() as connection:
        return [
            list(connection.execute(text(f"SELECT id FROM {table} ORDER BY id")).scalars())
            for table in ("paid", "shipped")
        ]


def ship_all(consumer: Consumer) -> None:
    while order_ids(engine)[0] != order_ids(engine)[1]:
        print("waiting for a message; after a kill, a check comes first", flush=True)
        ship(consumer.receive())
    print("paid {}, shipped {}: they agree".format(*order_ids(engine)), flush=True)


if __name__ == "__main__":
    with (
        Escrow(engine, SERVERS, group="shop") as escrow,
        Consumer(SERVERS, group="shipping", subscribe={"twenty-orders": "*"}) as consumer,
    ):
        ship_all(consumer)  # orders of an earlier run
        pay(escrow)
        ship_all(consumer)
