"""Bob's bank: debit the account and send the message to Smith's bank in one transaction.

The process prints the number of each transfer before it begins. When it is killed, the scenario
reads the last number and starts the next process behind it.
"""

from __future__ import annotations

import logging
import random
import signal
import sys
import threading

import click
from sqlalchemy.exc import OperationalError

from escrowmq import Message, Rollback
from escrowmq.clock import SystemClock
from escrowmq.errors import EscrowError
from escrowmq.sql import Escrow
from examples.bank.banks import BOB, RECEIPTS_TOPIC, TOPIC, book_transfer, open_bank
from examples.bank.branch import lose_decision

log = logging.getLogger(__name__)

RETRY_DELAY_S = 0.2
FAILURE_RATIO = 0.05  # of the local transactions
LOST_DECISION_RATIO = 0.03  # of the decisions, on their way to the broker
RECEIPT_RATIO = 0.02  # of the transfers: a second message for the archive, in one decision


def pay(escrow: Escrow, number: int, rng: random.Random) -> None:
    cents = rng.randrange(1, 100_00)
    fails, is_lost = rng.random() < FAILURE_RATIO, rng.random() < LOST_DECISION_RATIO
    with escrow.transaction() as (session, tx):
        connection, now_ms = session.connection(), SystemClock().now_ms()
        book_transfer(connection, BOB, number, -cents, transaction_id=tx.id, at_ms=now_ms)
        tx.send(Message(TOPIC, b"%d %d" % (number, cents), keys=f"transfer-{number}"))
        if rng.random() < RECEIPT_RATIO:
            tx.send(Message(RECEIPTS_TOPIC, b"%d" % number, keys=f"transfer-{number}"))
        if fails:
            raise Rollback(f"transfer {number} is over the limit of the day")
        if is_lost:
            tx.end = lose_decision  # type: ignore[method-assign]


def pay_with_retries(escrow: Escrow, number: int, seed: int) -> None:
    """Pay, and retry while the broker or the database is away.

    A transfer that failed took effect on neither side, so it can be retried as it is.
    """
    while True:
        try:
            pay(escrow, number, random.Random(seed * 1_000_003 + number))
            return
        except (EscrowError, OperationalError) as error:
            log.info("transfer failed, retrying transfer=%d: %s", number, error)
            threading.Event().wait(RETRY_DELAY_S)


@click.command()
@click.argument("database")
@click.argument("servers")
@click.argument("first", type=int)
@click.argument("last", type=int)
@click.argument("seed", type=int)
@click.option(
    "--wait",
    is_flag=True,
    help="Then stay and answer checks for the transactions that other payers left open.",
)
def main(database: str, servers: str, first: int, last: int, seed: int, wait: bool) -> None:
    logging.basicConfig(level=logging.INFO)
    with Escrow(open_bank(database), servers, group="bob-bank", create_tables=False) as escrow:
        for number in range(first, last):
            sys.stdout.write(f"{number}\n")
            sys.stdout.flush()
            pay_with_retries(escrow, number, seed)
        if wait:
            signal.pause()


if __name__ == "__main__":
    main()
