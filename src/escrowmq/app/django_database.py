"""Django's database: every handler runs in an atomic block with the inbox row of its message.

    app = App("127.0.0.1:9876", group="smith-bank", database=DjangoDatabase())

    @app.on("transfers")
    def credit(transfer: Transfer) -> None:
        Account.objects.filter(...).update(...)

Run it with `manage.py escrowmq_worker bank.messages:app`. Messages are sent by
`escrowmq.django.escrow`, so a handler that sends needs settings.ESCROWMQ.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from django.db import (
    DEFAULT_DB_ALIAS,
    IntegrityError,
    close_old_connections,
    connections,
    transaction,
)

from escrowmq.app.databases import BlockingDatabase, HandlerScope, ProducerSettings
from escrowmq.app.handlers import AppHandler
from escrowmq.client.messages import ReceivedMessage
from escrowmq.database import statements
from escrowmq.database.retention import CleanupThread
from escrowmq.django.connection import AliasConnection
from escrowmq.django.escrow import escrow
from escrowmq.django.inbox import Inbox
from escrowmq.errors import Rollback


class _NothingNew(Exception):
    """Leaves the atomic block, which is rolled back."""


class DjangoDatabase(BlockingDatabase):
    """The database of a Django site; `using` is its alias.

    All handlers run in atomic blocks, in threads.
    """

    name = "Django"
    session_type = None

    def __init__(self, using: str = DEFAULT_DB_ALIAS) -> None:
        self._using = using
        self._connection = AliasConnection(using)
        self._group = ""
        self._cleanup_thread: CleanupThread | None = None

    def uses_transaction(self, handler: AppHandler) -> bool:
        return True  # a handler need not ask for what Django's models use anyway

    async def open(self, producer: ProducerSettings, *, sends: bool) -> None:
        self._group = producer.group
        self._inbox = Inbox(group=self._group, using=self._using)
        if sends:
            await asyncio.to_thread(escrow.start)
        self._cleanup_thread = CleanupThread(self._clean_up, name=f"escrowmq-{self._group}-inbox")

    def _clean_up(self) -> None:
        try:
            self._inbox.clean_up()
        finally:
            connections.close_all()  # they belong to this thread

    async def close(self) -> None:
        if self._cleanup_thread is not None:
            await asyncio.to_thread(self._cleanup_thread.stop)
        await asyncio.to_thread(escrow.close)

    @contextmanager
    def transaction(
        self, messages: Sequence[ReceivedMessage], *, sends: bool
    ) -> Iterator[HandlerScope]:
        close_old_connections()
        try:
            if sends:
                with escrow.atomic(using=self._using) as tx:
                    new_ids = self._insert_inbox_rows(messages)
                    yield HandlerScope(None, tx, new_ids)
                    if not new_ids:
                        raise Rollback
            else:
                with transaction.atomic(using=self._using):
                    new_ids = self._insert_inbox_rows(messages)
                    yield HandlerScope(None, None, new_ids)
                    if not new_ids:
                        raise _NothingNew
        except _NothingNew:
            pass
        finally:
            close_old_connections()

    def _insert_inbox_rows(self, messages: Sequence[ReceivedMessage]) -> frozenset[str]:
        if len(messages) > 1:
            return statements.insert_inbox_rows(
                self._connection, [message.message_id for message in messages], group=self._group
            )
        message_id = messages[0].message_id
        try:
            statements.insert_inbox_row(self._connection, message_id, group=self._group)
        except IntegrityError:
            return frozenset()
        return frozenset((message_id,))
