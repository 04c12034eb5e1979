"""An App for tests of worker processes: `escrowmq worker tests.support.bank_app:app`.

A transfer is saved and answered with a receipt, in one transaction. The environment says where:
SERVERS, DATABASE, TOPIC. A transfer with the name of the file PAUSE waits until the file is gone.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from sqlalchemy import create_engine, insert
from sqlalchemy.orm import Session

from escrowmq import Message
from escrowmq.app import App, Retry
from tests.support.sql_bank import tables, transfers

TOPIC = os.environ["TOPIC"]
engine = create_engine(os.environ["DATABASE"])
tables.create_all(engine)
app = App(os.environ["SERVERS"], group=f"g-{TOPIC}", database=engine)


@app.on(TOPIC, retry=Retry(times=20, first_s=0.1, factor=1), concurrency=4)
def credit(session: Session, name: str) -> Message:
    sys.stdout.write(f"started {name}\n")
    session.execute(insert(transfers).values(id=name, amount=1))
    session.flush()
    pause = Path(os.environ.get("PAUSE", "/nonexistent"))
    while pause.exists() and pause.read_text() in ("*", name):
        threading.Event().wait(0.01)
    sys.stdout.write(f"credited {name}\n")
    return Message(f"{TOPIC}-receipts", name.encode())
