"""A program that kills or freezes itself at one point of a database transaction.

    python -m tests.support.sql_crashes URL NAMESRV NAME POINT kill|freeze

NAME is the group, the topic and the id of the row. The program observes the library from outside,
by events of SQLAlchemy and one wrapped method. A frozen program continues when it is resumed. Exit
code 3 means that the database refused the transaction.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from sqlalchemy import create_engine, event, insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from escrowmq import Message, blocking
from escrowmq.client.producer.transaction import TransactionOutcome
from escrowmq.message.transaction import Verdict
from escrowmq.sql import Escrow
from tests.support.sql_bank import transfers

BEFORE_MARKER, AFTER_MARKER = "before marker", "after marker"
BEFORE_HALF, AFTER_HALF = "before half", "after half"
BEFORE_COMMIT, AFTER_COMMIT = "before commit", "after commit"
BEFORE_END, AFTER_END = "before end", "after end"
POINTS = (
    *(BEFORE_MARKER, AFTER_MARKER, BEFORE_HALF, AFTER_HALF),
    *(BEFORE_COMMIT, AFTER_COMMIT, BEFORE_END, AFTER_END),
)
SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
REFUSED = 3


def main(url: str, namesrv: str, name: str, point: str, action: str) -> int:
    engine = create_engine(url)
    has_stopped = False

    def reach(current_point: str) -> None:
        nonlocal has_stopped
        if current_point == point and not has_stopped:
            has_stopped = True  # a frozen process that is resumed may reach the point again
            os.kill(os.getpid(), SIGNALS[action])

    with Escrow(engine, namesrv, group=name) as escrow:
        watch(engine, reach)
        try:
            with escrow.transaction() as (session, tx):
                session.execute(insert(transfers).values(id=name, amount=1))
                reach(BEFORE_HALF)
                tx.send(Message(name, b"paid"))
                reach(AFTER_HALF)
        except DBAPIError:
            return REFUSED
        reach(AFTER_END)
    return 0


def watch(engine: Any, reach: Any) -> None:
    """Call `reach` at the points that are inside the library."""

    def is_marker(arguments: tuple[Any, ...]) -> bool:
        return "INSERT INTO escrowmq_marker" in str(arguments[2])

    @event.listens_for(engine, "before_cursor_execute")
    def before_execute(*arguments: Any) -> None:
        if is_marker(arguments):
            reach(BEFORE_MARKER)

    @event.listens_for(engine, "after_cursor_execute")
    def after_execute(*arguments: Any) -> None:
        if is_marker(arguments):
            reach(AFTER_MARKER)

    @event.listens_for(engine, "commit")
    def before_commit(_: Any) -> None:
        reach(BEFORE_COMMIT)

    @event.listens_for(Session, "after_commit")
    def after_commit(_: Any) -> None:
        reach(AFTER_COMMIT)

    end = blocking.Transaction.end

    def watched_end(
        self: blocking.Transaction, verdict: Verdict, *, remark: str = ""
    ) -> TransactionOutcome:
        reach(BEFORE_END)
        return end(self, verdict, remark=remark)

    blocking.Transaction.end = watched_end  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
