"""The consuming side: a message that is delivered again has no second effect.

The effect's transaction begins with the message's identity. If that is there already, nothing has
happened yet, and the transaction is rolled back as a whole: no savepoint is needed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from itertools import islice
from typing import Final

from sqlalchemy import Connection, Engine, insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from escrowmq.binding.caretaker import Chores
from escrowmq.binding.marker import INBOX_KEPT_MS
from escrowmq.blocking import Consumer
from escrowmq.client.messages import ReceivedMessage
from escrowmq.clock import Clock, SystemClock
from escrowmq.sql import marker
from escrowmq.sql.tables import inbox
from escrowmq.sql.tables import make_tables as make_missing_tables

log = logging.getLogger(__name__)

_INSERT: Final = insert(inbox)
Effect = Callable[[Session, ReceivedMessage], None]
Once = Callable[[ReceivedMessage], bool]


def is_first(connection: Connection, message: ReceivedMessage, *, group: str, now_ms: int) -> bool:
    """The first statement of a transaction; if it is false, the transaction can only be ended."""
    row = {"consumer_group": group, "message_id": message.message_id, "at_ms": now_ms}
    try:
        connection.execute(_INSERT, row)
    except IntegrityError:
        return False
    return True


class Inbox:
    """`kept_ms`: rows that are older are removed, by `forget` and now and then by `run`; longer
    than a message may come again."""

    def __init__(
        self,
        engine: Engine,
        *,
        group: str,
        sessions: Callable[..., Session] = Session,
        make_tables: bool = True,
        kept_ms: int = INBOX_KEPT_MS,
        clock: Clock | None = None,
    ) -> None:
        self._engine = engine
        self._group = group
        self._sessions = sessions
        self._kept_ms = kept_ms
        self._clock = clock or SystemClock()
        self._chores = Chores(self._clock)
        if make_tables:
            with engine.connect() as connection:
                make_missing_tables(connection)

    def effect(self, function: Effect) -> Once:
        """Runs it inside a database transaction that also holds the message's identity. The
        function that comes back takes a message and says whether it had its effect now."""

        @wraps(function)
        def once(message: ReceivedMessage) -> bool:
            with self._sessions(bind=self._engine) as session:
                connection = session.connection()
                now_ms = self._clock.now_ms()
                if not is_first(connection, message, group=self._group, now_ms=now_ms):
                    session.rollback()
                    return False
                function(session, message)
                session.commit()
            return True

        return once

    def run(self, consumer: Consumer, once: Once, *, limit: int | None = None) -> None:
        """Take messages for ever, or so many. One whose effect fails is given back: it comes again
        later, and in the end goes to the dead letters of the group."""
        for message in islice(consumer, limit):
            try:
                once(message)
            except Exception:
                log.exception("effect failed, it will come again message=%s", message.message_id)
                consumer.later(message)
            if self._chores.is_time():
                self.forget()

    def forget(self, *, older_than_ms: int | None = None) -> int:
        """Remove rows of messages that can no longer come again: how many."""
        age_ms = self._kept_ms if older_than_ms is None else older_than_ms
        with self._engine.connect() as connection:
            return marker.forget_before(connection, inbox, self._clock.now_ms() - age_ms)
