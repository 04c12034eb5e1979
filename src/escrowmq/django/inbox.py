"""The consuming side: a message that is delivered again has no second effect."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from itertools import islice

from django.db import DEFAULT_DB_ALIAS, IntegrityError, close_old_connections, transaction

from escrowmq.blocking import Consumer
from escrowmq.client.messages import ReceivedMessage
from escrowmq.clock import Clock, SystemClock
from escrowmq.database.marker import INBOX_RETENTION_MS, INBOX_TABLE
from escrowmq.database.transaction import CleanupQueue
from escrowmq.django import statements

log = logging.getLogger(__name__)

Effect = Callable[[ReceivedMessage], None]
IdempotentHandler = Callable[[ReceivedMessage], bool]


class _AlreadyReceived(Exception):
    """Leaves the atomic block, which rolls back what there is: nothing."""


class Inbox:
    """`kept_ms`: rows that are older are removed, by `forget` and now and then by `run`."""

    def __init__(
        self,
        *,
        group: str,
        using: str = DEFAULT_DB_ALIAS,
        retention_ms: int = INBOX_RETENTION_MS,
        clock: Clock | None = None,
    ) -> None:
        self._group = group
        self._using = using
        self._retention_ms = retention_ms
        self._clock = clock or SystemClock()
        self._cleanup_queue = CleanupQueue(self._clock)

    def effect(self, function: Effect) -> IdempotentHandler:
        """Runs it inside an atomic block that also holds the message's identity. The function that
        comes back takes a message and says whether it had its effect now."""

        @wraps(function)
        def once(message: ReceivedMessage) -> bool:
            try:
                with transaction.atomic(using=self._using):
                    self._insert_row(message)
                    function(message)
            except _AlreadyReceived:
                return False
            return True

        return once

    def _insert_row(self, message: ReceivedMessage) -> None:
        now_ms = self._clock.now_ms()
        try:
            statements.insert_inbox_row(
                self._using, message.message_id, group=self._group, now_ms=now_ms
            )
        except IntegrityError:
            raise _AlreadyReceived from None

    def run(
        self, consumer: Consumer, handler: IdempotentHandler, *, limit: int | None = None
    ) -> None:
        """Take messages for ever, or so many. One whose effect fails is given back: it comes again
        later, and in the end goes to the dead letters of the group."""
        for message in islice(consumer, limit):
            close_old_connections()
            try:
                handler(message)
            except Exception:
                log.exception("effect failed, it will come again message=%s", message.message_id)
                consumer.retry_later(message)
            if self._cleanup_queue.is_cleanup_due():
                self.purge()

    def purge(self, *, older_than_ms: int | None = None) -> int:
        """Remove rows of messages that can no longer come again: how many."""
        age_ms = self._retention_ms if older_than_ms is None else older_than_ms
        return statements.purge_before(self._using, INBOX_TABLE, self._clock.now_ms() - age_ms)
