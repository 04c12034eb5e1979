"""A branch of Bob's bank that cannot answer checks, and what an operator does about it.

Three transfers lose their decisions. While the database of the branch is being repaired, its
process answers every check with UNKNOWN. After the last check the transactions are *stranded*: the
broker sets them aside and drops nothing. An operator reads why, and then

    resumes the first          the branch is back: the broker checks again, and the database decides
    decides the others by hand by Bob's books: commit if the debit is there, roll back if it is not
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Final

from sqlalchemy import Engine, select

from escrowmq import Message, Rollback, Verdict
from escrowmq.blocking import Producer
from escrowmq.clock import SystemClock
from escrowmq.sql import Escrow
from examples.bank.banks import BOB, TOPIC, book_transfer, transfer
from examples.bank.processes import DemoFailed

GROUP: Final = "bob-branch"
TRANSFER_COUNT: Final = 3
CENTS: Final = 100_00
# The branch is checked sooner and more often than the rest of the bank, so that the demo is short.
# The first check leaves time to lose the decisions.
BROKER_SETTINGS: Final[dict[str, object]] = {
    "escrowTimeOuts": f"{GROUP}=3000",
    "escrowCheckIntervals": f"{GROUP}=200",
}
COMMAND_TIMEOUT_S: Final = 120.0
SHOWN_LINES_MAX, HEAD_LINES, TAIL_LINES = 14, 5, 7


class Branch:
    def __init__(self, bob: Engine, servers: str, show: Callable[[str], None]) -> None:
        """`show` prints a line for the audience."""
        self._bob = bob
        self._servers = servers
        self._show = show
        self._transfer_by_message: dict[str, int] = {}

    def pay(self, first_transfer: int) -> None:
        """Pay three times, the last one in vain, and lose every decision."""
        with Escrow(self._bob, self._servers, group=GROUP, create_tables=False) as escrow:
            for number in range(first_transfer, first_transfer + TRANSFER_COUNT):
                with escrow.transaction() as (session, tx):
                    connection, now_ms = session.connection(), SystemClock().now_ms()
                    book_transfer(
                        connection, BOB, number, -CENTS, transaction_id=tx.id, at_ms=now_ms
                    )
                    half = tx.send(Message(TOPIC, b"%d %d" % (number, CENTS)))
                    self._transfer_by_message[half.message_id] = number
                    tx.end = lose_decision  # type: ignore[method-assign]
                    if number == first_transfer + TRANSFER_COUNT - 1:
                        raise Rollback("the customer changed his mind")

    def wait_until_stranded(self, count_open: Callable[[], int], timeout_s: float) -> None:
        """Answer checks with UNKNOWN until the broker has set all transactions aside."""
        with Producer(self._servers, group=GROUP) as producer:

            @producer.checker("*")
            def cannot_say(message: object) -> Verdict:
                raise ConnectionError("the database of the branch is being repaired")

            wait_for(lambda: not count_open(), timeout_s, "the transactions to be stranded")

    def operate(self, stranded_ids: Sequence[str]) -> None:
        """Explain the first stranded transaction and resume it; decide the others by hand."""
        first, *others = stranded_ids
        self._run("explain", first)
        self._run("resume", first, "--reason", "the branch is back")
        for message_id in others:
            if self._is_in_books(self._transfer_by_message[message_id]):
                self._run("commit", message_id, "--reason", "the debit is in Bob's books")
            else:
                self._run("rollback", message_id, "--reason", "there is no debit in Bob's books")

    def wait_until_decided(self, count_open: Callable[[], int], timeout_s: float) -> None:
        """Answer the check of the resumed transaction, now that the branch is back."""
        with Escrow(self._bob, self._servers, group=GROUP, create_tables=False):
            wait_for(lambda: not count_open(), timeout_s, "the resumed transaction")

    def _is_in_books(self, number: int) -> bool:
        with self._bob.connect() as connection:
            rows = connection.execute(select(transfer).where(transfer.c.transfer_id == number))
            return rows.first() is not None

    def _run(self, command: str, *arguments: str) -> None:
        """Run a command as an operator would, and show it with its output."""
        words = ["transaction", command, *arguments]
        quoted = " ".join(f'"{word}"' if " " in word else word for word in words)
        self._show(f"$ escrowmq {quoted}")
        confirmed = [] if command == "explain" else ["--yes"]
        done = subprocess.run(
            [sys.executable, "-m", "escrowmq", *words, *confirmed, "-n", self._servers],
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_TIMEOUT_S,
        )
        if done.returncode:
            raise DemoFailed(f"escrowmq {quoted}: {done.stderr.strip()}")
        lines = done.stdout.splitlines()
        if len(lines) > SHOWN_LINES_MAX:  # fifteen checks, all alike
            lines[HEAD_LINES:-TAIL_LINES] = ["  …"]
        for line in lines:
            self._show(line)


def lose_decision(verdict: Verdict) -> None:
    """Replace `tx.end`: drop the decision, as if it never reached the broker."""


def wait_for(is_done: Callable[[], bool], timeout_s: float, subject: str) -> None:
    """Poll until it is done. Raise DemoFailed after the timeout."""
    clock = SystemClock()
    deadline_s = clock.elapsed_s() + timeout_s
    while not is_done():
        if clock.elapsed_s() > deadline_s:
            raise DemoFailed(f"waited {timeout_s:g} s in vain for {subject}")
        threading.Event().wait(0.1)
