"""Inbox: a message that is delivered again has no second effect."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from django.db import DEFAULT_DB_ALIAS, IntegrityError, close_old_connections, transaction

from escrowmq.client.messages import ReceivedMessage
from escrowmq.clock import Clock
from escrowmq.database import statements
from escrowmq.database.marker import INBOX_RETENTION_MS, INBOX_TABLE
from escrowmq.database.retention import BlockingInbox, IdempotentHandler, check_effect
from escrowmq.django.connection import AliasConnection

Effect = Callable[[ReceivedMessage], None]


class _AlreadyReceived(Exception):
    """Leaves the atomic block, which is empty and rolled back."""


class Inbox(BlockingInbox):
    """Runs the effect of each message once, however often the message is delivered.

        inbox = Inbox(group="bank-b")

        @inbox.effect
        def credit(message):
            Account.objects.filter(...).update(...)

        with Consumer(servers, group="bank-b", subscribe={"transfers": "*"}) as consumer:
            inbox.run(consumer, credit)

    `group`: the consumer group; different groups process the same message independently.
    `using`: the alias of the database.
    `retention_ms`: rows are deleted when they are older. It must be longer than a message can
    be delivered again, including dead letters that are sent again.
    """

    def __init__(
        self,
        *,
        group: str,
        using: str = DEFAULT_DB_ALIAS,
        retention_ms: int = INBOX_RETENTION_MS,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(group=group, retention_ms=retention_ms, clock=clock)
        self._using = using
        self._connection = AliasConnection(using)

    def effect(self, function: Effect) -> IdempotentHandler:
        """Make a function idempotent; a decorator.

        The function runs in an atomic block that also contains the message's id. The decorated
        function takes a message, and returns True if it had its effect now and False if it had it
        before. It raises what the function or the database raises; nothing has happened then.
        Raises TypeError for a coroutine function, or one with other parameters.
        """
        check_effect(function, ("message",))

        @wraps(function)
        def handle_once(message: ReceivedMessage) -> bool:
            try:
                with transaction.atomic(using=self._using):
                    self._insert_row(message)
                    function(message)
            except _AlreadyReceived:
                return False
            return True

        return handle_once

    def purge(self, *, older_than_ms: int | None = None) -> int:
        """Delete rows older than `retention_ms`, or another age, and return how many."""
        return statements.purge_older(
            self._connection, INBOX_TABLE, self._purge_age_ms(older_than_ms), self._database_time
        )

    def _before_message(self) -> None:
        close_old_connections()

    def _insert_row(self, message: ReceivedMessage) -> None:
        try:
            statements.insert_inbox_row(self._connection, message.message_id, group=self._group)
        except IntegrityError:
            raise _AlreadyReceived from None
