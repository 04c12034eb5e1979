"""Which rows of the markers and of the inboxes may be deleted, and the clean-up that does it.

Both are aged by the clock of the database. The part of the inboxes that SQLAlchemy and Django share
is here too, because their loop over messages cleans up.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final

from escrowmq import blocking
from escrowmq.client.messages import ReceivedMessage
from escrowmq.client.mistakes import check_callable
from escrowmq.clock import Clock, SystemClock
from escrowmq.database.marker import (
    HOUR_MS,
    PURGE_BATCH_ROWS,
    DatabaseTime,
    check_retention_ms,
)
from escrowmq.database.transaction import BaseTransactionMessages
from escrowmq.errors import ConfigError, WrongProcess
from escrowmq.message.transaction import Verdict

log = logging.getLogger(__name__)

# --- retention and clean-up ----------------------------------------------------------------------

CLEANUP_INTERVAL_S: Final = 10.0
ACKNOWLEDGED_MAX: Final = 100_000  # ids that wait to be purged; beyond that, rows go by age


class CleanupQueue:
    """Markers to delete, and the time of the next deletion by age."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last_cleanup_s = clock.elapsed_s()  # none at the start, when there is enough to do
        self._acknowledged: deque[str] = deque(maxlen=ACKNOWLEDGED_MAX)

    def add_acknowledged(self, transaction_id: str) -> None:
        self._acknowledged.append(transaction_id)

    def take_acknowledged(self) -> list[str]:
        """Return up to PURGE_BATCH_ROWS ids whose markers may be deleted now."""
        count = min(len(self._acknowledged), PURGE_BATCH_ROWS)
        return [self._acknowledged.popleft() for _ in range(count)]

    def is_cleanup_due(self) -> bool:
        """Return True once an hour."""
        if self._clock.elapsed_s() - self._last_cleanup_s < HOUR_MS / 1000:
            return False
        self._last_cleanup_s = self._clock.elapsed_s()
        return True


class CleanupThread:
    """A thread that calls a function every `interval_s` until it is stopped.

    An exception is logged, and the next round tries again.
    """

    def __init__(
        self, work: Callable[[], None], *, name: str, interval_s: float = CLEANUP_INTERVAL_S
    ) -> None:
        self._work = work
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop, and wait for a round that runs."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            try:
                self._work()
            except BaseException:  # nothing may end the thread without a word
                log.exception("clean-up failed, will retry")


class RowRetention:
    """The part of every Escrow and Inbox that decides which rows may be deleted.

    `clock` only measures how long something took: rows are aged by the clock of the database.
    """

    def __init__(self, *, group: str, retention_ms: int, clock: Clock | None) -> None:
        self._group = group
        self._retention_ms = retention_ms
        self._clock = clock or SystemClock()
        self._cleanup_queue = CleanupQueue(self._clock)
        self._database_time = DatabaseTime(self._clock)

    def _purge_age_ms(self, older_than_ms: int | None) -> int:
        return self._retention_ms if older_than_ms is None else older_than_ms


class MarkerRetention(RowRetention):
    """The part of Escrow and AsyncEscrow that decides which markers may be deleted."""

    def __init__(
        self, *, group: str, retention_ms: int, purge_acknowledged: bool, clock: Clock | None
    ) -> None:
        super().__init__(group=group, retention_ms=check_retention_ms(retention_ms), clock=clock)
        self._purges_acknowledged = purge_acknowledged
        self._process_id = os.getpid()

    def _check_process(self) -> None:
        """Raise WrongProcess after a fork: the connections of the engine belong to the parent."""
        if os.getpid() != self._process_id:
            raise WrongProcess(
                f"this {type(self).__name__} was created before a fork; create one in each child, "
                "with an engine of its own"
            )

    def _transaction_ended(self, tx: BaseTransactionMessages) -> None:
        """Queue the markers for deletion if the broker has acknowledged that they committed."""
        if self._purges_acknowledged and tx.outcome is not None and tx.outcome.acknowledged:
            for scope in tx.scopes:
                if scope.verdict is Verdict.COMMIT:
                    self._cleanup_queue.add_acknowledged(scope.id)

    def _purge_age_ms(self, older_than_ms: int | None) -> int:
        if older_than_ms is not None and older_than_ms < self._retention_ms:
            raise ConfigError(
                f"older_than_ms={older_than_ms} is less than retention_ms={self._retention_ms}; "
                "checkers rely on markers being kept for that long"
            )
        return super()._purge_age_ms(older_than_ms)


# --- inboxes -------------------------------------------------------------------------------------

IdempotentHandler = Callable[[ReceivedMessage], bool]


def check_effect(
    function: Callable[..., Any], parameters: Sequence[str], *, is_async: bool = False
) -> None:
    """Raise TypeError for an effect that the inbox could not call.

    The coroutine of an `async def` function would never run, and its message would count as done.
    """
    check_callable(function, "an effect of an inbox", parameters)
    if inspect.iscoroutinefunction(function) and not is_async:
        raise TypeError("an effect is a plain function; AsyncInbox takes `async def` functions")
    if is_async and not inspect.iscoroutinefunction(function):
        raise TypeError(
            "an effect of AsyncInbox is an `async def` function; Inbox takes plain ones"
        )


class BlockingInbox(RowRetention):
    """What the inboxes of SQLAlchemy and Django share: `run`."""

    def run(
        self, consumer: blocking.Consumer, handler: IdempotentHandler, *, limit: int | None = None
    ) -> None:
        """Handle the messages of a consumer until it is closed, or `limit` messages.

        A message whose effect raises comes again later, and moves to the dead letters of the group
        in the end. Deletes old rows once an hour.
        """
        for message in islice(consumer, limit):
            self._before_message()
            try:
                handler(message)
            except Exception as error:
                log.exception("effect failed, will retry message=%s", message.message_id)
                consumer.retry_later(message, cause=error)
            self.clean_up()

    def clean_up(self) -> None:
        """Delete old rows if it is due, once an hour."""
        if self._cleanup_queue.is_cleanup_due():
            self.purge()

    def purge(self, *, older_than_ms: int | None = None) -> int:
        """Delete rows older than `retention_ms`, or another age, and return how many."""
        raise NotImplementedError

    def _before_message(self) -> None:
        """Prepare the binding for the next message."""
