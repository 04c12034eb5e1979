"""The database transaction around a handler: inbox row, changes and messages commit together.

    inbox row ──> handler(session, payload) ──> result sent by tx ──> commit ──> messages committed

If the inbox row is there already, the message had its effect before: the handler is not called. A
handler that sends uses the transaction of an `Escrow`, with a marker; one that does not needs none.

A BlockingDatabase is for handlers that are functions, an AsyncDatabase for coroutines. Those of
SQLAlchemy are in sql_database.py, that of Django in django_database.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

from escrowmq.app.handlers import AppHandler, Argument
from escrowmq.client.messages import ReceivedMessage
from escrowmq.database.transaction import AsyncTransactionMessages, TransactionMessages


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    """What an Escrow needs to send: addresses, its group, and options of its producer."""

    servers: str
    group: str
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class HandlerScope:
    """An open transaction. `new_ids` are the messages that had no effect before."""

    session: Any
    tx: Any
    new_ids: frozenset[str]


class HandlerDatabase(ABC):
    """What every database of an App has in common."""

    is_async: ClassVar[bool]
    name: ClassVar[str]
    session_type: ClassVar[type | None]
    messages_type: ClassVar[type]

    def uses_transaction(self, handler: AppHandler) -> bool:
        """Return whether a handler runs in a transaction of this database."""
        return handler.sends or Argument.SESSION in handler.signature.arguments

    def check(self, handler: AppHandler) -> None:
        """Raise InvalidHandler if a handler cannot run in a transaction of this database."""
        if not self.uses_transaction(handler):
            return
        if handler.signature.is_async is not self.is_async:
            kind = "`async def`" if self.is_async else "a plain function"
            raise handler.invalid(f"with {self.name} it must be {kind}")
        session = handler.signature.type_of(Argument.SESSION)
        if session is not None and (
            self.session_type is None or not issubclass(session, self.session_type)
        ):
            own = "no session" if self.session_type is None else self.session_type.__name__
            raise handler.invalid(f"with {self.name} it gets {own}, not {session.__name__}")
        messages = handler.signature.type_of(Argument.TRANSACTION_MESSAGES)
        if messages not in (None, self.messages_type):
            raise handler.invalid(
                f"with {self.name} it gets {self.messages_type.__name__}, not {messages.__name__}"
            )

    @abstractmethod
    async def open(self, producer: ProducerSettings, *, sends: bool) -> None:
        """Create the tables if they are missing, and connect to the brokers if it `sends`."""

    @abstractmethod
    async def close(self) -> None:
        """Stop what `open` has started."""


class BlockingDatabase(HandlerDatabase):
    """A database whose handlers run in threads."""

    is_async = False
    messages_type = TransactionMessages

    @abstractmethod
    def transaction(
        self, messages: Sequence[ReceivedMessage], *, sends: bool
    ) -> AbstractContextManager[HandlerScope]:
        """Run a block in a transaction that has the inbox rows of the messages.

        It is rolled back if the block raises, or if no message is new.
        """


class AsyncDatabase(HandlerDatabase):
    """A database whose handlers run on the event loop."""

    is_async = True
    messages_type = AsyncTransactionMessages

    @abstractmethod
    def transaction(
        self, messages: Sequence[ReceivedMessage], *, sends: bool
    ) -> AbstractAsyncContextManager[HandlerScope]:
        """Do the same as `BlockingDatabase.transaction`."""
