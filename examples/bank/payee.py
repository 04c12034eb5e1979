"""Smith's bank: credit each transfer once. The inbox recognises a repeated message."""

from __future__ import annotations

import click
from sqlalchemy.orm import Session

from escrowmq.blocking import Consumer
from escrowmq.client.messages import ReceivedMessage
from escrowmq.clock import SystemClock
from escrowmq.sql import Inbox
from examples.bank.banks import SMITH, TOPIC, book_transfer, open_bank


@click.command()
@click.argument("database")
@click.argument("servers")
def main(database: str, servers: str) -> None:
    inbox = Inbox(open_bank(database), group="smith-bank", create_tables=False)

    @inbox.effect
    def credit(session: Session, message: ReceivedMessage) -> None:
        number, cents = map(int, message.body.split())
        connection, now_ms = session.connection(), SystemClock().now_ms()
        transaction_id = message.transaction_id
        book_transfer(connection, SMITH, number, cents, transaction_id=transaction_id, at_ms=now_ms)

    with Consumer(servers, group="smith-bank", subscribe={TOPIC: "*"}) as consumer:
        for message in consumer:
            credit(message)


if __name__ == "__main__":
    main()
