"""The consuming side: a message that is delivered again has no second effect."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from sqlalchemy import Engine, insert
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from escrowmq.client.messages import ReceivedMessage
from escrowmq.clock import Clock, SystemClock
from escrowmq.sql.tables import inbox, metadata

Effect = Callable[[Session, ReceivedMessage], None]


class Inbox:
    def __init__(
        self,
        engine: Engine,
        *,
        group: str,
        make_tables: bool = True,
        clock: Clock | None = None,
    ) -> None:
        self._engine = engine
        self._group = group
        self._clock = clock or SystemClock()
        if make_tables:
            metadata.create_all(engine)

    def effect(self, function: Effect) -> Callable[[ReceivedMessage], bool]:
        """Runs it inside a database transaction that also holds the message's identity. The
        function that comes back takes a message and says whether it had its effect now."""

        @wraps(function)
        def once(message: ReceivedMessage) -> bool:
            with Session(self._engine) as session, session.begin():
                try:
                    with session.begin_nested():
                        session.execute(
                            insert(inbox).values(
                                consumer_group=self._group,
                                message_id=message.message_id,
                                at_ms=self._clock.now_ms(),
                            )
                        )
                except IntegrityError:
                    return False  # it had it before
                function(session, message)
            return True

        return once
