"""A plain script: Bob pays Smith. The debit sends a message, and the message makes the credit.

The two accounts could be in databases of two companies. Kill the script anywhere and start it
again: no money is lost, and nothing is booked twice.
"""

from __future__ import annotations

import os

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from escrowmq import Message, ReceivedMessage, Rollback
from escrowmq.blocking import Consumer
from escrowmq.sql import Escrow, Inbox

SERVERS = os.environ.get("SERVERS", "127.0.0.1:9876")
engine = create_engine(os.environ.get("DATABASE", "sqlite:///plain_script.db"))
inbox = Inbox(engine, group="smith-bank")
MOVE = text("UPDATE account SET cents = cents + :cents WHERE name = :name")
BALANCE = text("SELECT cents FROM account WHERE name = :name")


def open_accounts() -> None:
    with engine.begin() as connection:
        connection.execute(
            text("CREATE TABLE IF NOT EXISTS account (name VARCHAR(20) PRIMARY KEY, cents INTEGER)")
        )
        for name, cents in (("bob", 100), ("smith", 0)):
            connection.execute(
                text("INSERT INTO account VALUES (:name, :cents) ON CONFLICT DO NOTHING"),
                {"name": name, "cents": cents},
            )


def pay(escrow: Escrow, cents: int) -> None:
    """Debit Bob and send the message: both happen, or neither does."""
    with escrow.transaction() as (session, tx):
        session.execute(MOVE, {"name": "bob", "cents": -cents})
        tx.send(Message("transfers", str(cents).encode()))
        if session.execute(BALANCE, {"name": "bob"}).scalar_one() < 0:
            raise Rollback("not enough money")  # rolls back the debit and the message


@inbox.effect
def credit(session: Session, message: ReceivedMessage) -> None:
    """Credit Smith, once for each message, however often it is delivered."""
    session.execute(MOVE, {"name": "smith", "cents": int(message.body)})


def balance(name: str) -> int:
    with engine.connect() as connection:
        return int(connection.execute(BALANCE, {"name": name}).scalar_one())


def main() -> None:
    open_accounts()
    with (
        Escrow(engine, SERVERS, group="bob-bank") as escrow,
        Consumer(SERVERS, group="smith-bank", subscribe={"transfers": "*"}) as consumer,
    ):
        pay(escrow, 30)
        pay(escrow, 1_000_000)  # rolled back: this message is never delivered
        while balance("bob") + balance("smith") != 100:  # until no transfer is under way
            credit(consumer.receive())
    print(f"bob {balance('bob')}, smith {balance('smith')}")


if __name__ == "__main__":
    main()
