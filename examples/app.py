"""Handlers of messages: typed payloads, one transaction, results that are sent on.

escrowmq worker examples.app:app      any number of them; Ctrl-C finishes what runs
python examples/app.py 30 20 oops     send two transfers and a message that is none

Each transfer is credited once and answered with one receipt, whatever is killed in between. The
message that is no transfer moves to the dead letters: see `escrowmq message dead list`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from escrowmq import Message
from escrowmq.app import App, Retry, encode_payload
from escrowmq.blocking import Producer

SERVERS = os.environ.get("SERVERS", "127.0.0.1:9876")
engine = create_engine(os.environ.get("DATABASE", "sqlite:///app.db"))
app = App(SERVERS, group="receiving-bank", database=engine)


@dataclass
class Transfer:
    name: str
    cents: int


@dataclass
class Receipt:
    name: str
    balance: int


@app.on("app-transfers", retry=Retry(times=5, first_s=1, factor=2), send_to="app-receipts")
def credit(session: Session, transfer: Transfer) -> Receipt:
    """Credit an account. The inbox row, the credit and the receipt commit together."""
    row = {"name": transfer.name, "cents": transfer.cents}
    session.execute(
        text(
            "INSERT INTO account VALUES (:name, :cents) "
            "ON CONFLICT (name) DO UPDATE SET cents = account.cents + :cents"
        ),
        row,
    )
    balance = session.execute(text("SELECT cents FROM account WHERE name = :name"), row)
    return Receipt(transfer.name, balance.scalar_one())


@app.on("app-receipts", concurrency=2)
async def print_receipt(receipt: Receipt) -> None:
    print(f"{receipt.name} has {receipt.balance} cents", flush=True)


with engine.begin() as connection:
    connection.execute(
        text("CREATE TABLE IF NOT EXISTS account (name VARCHAR(20) PRIMARY KEY, cents INTEGER)")
    )


if __name__ == "__main__":
    with Producer(SERVERS, group="sending-bank") as producer:
        for word in sys.argv[1:]:
            payload = Transfer("smith", int(word)) if word.isdecimal() else word
            producer.send(Message("app-transfers", encode_payload(payload)))
