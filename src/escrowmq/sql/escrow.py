"""One database transaction and any number of messages: both, or neither."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from sqlalchemy import Engine
from sqlalchemy.orm import Session

from escrowmq.blocking import Producer, Transaction
from escrowmq.client.messages import ReceivedMessage
from escrowmq.client.transaction import TX_ID
from escrowmq.clock import Clock, SystemClock
from escrowmq.message.verdict import Verdict
from escrowmq.sql.marker import ask, claim
from escrowmq.sql.tables import markers, metadata

log = logging.getLogger(__name__)


class Escrow:
    """Answers the broker's questions from the database, in this and any other process of its group.

    The two tables are made if they are not there; `make_tables=False` leaves that to migrations.
    """

    def __init__(
        self,
        engine: Engine,
        servers: str,
        *,
        group: str,
        make_tables: bool = True,
        clock: Clock | None = None,
        **more: Any,
    ) -> None:
        self._engine = engine
        self._clock = clock or SystemClock()
        if make_tables:
            metadata.create_all(engine)
        self._producer = Producer(servers, group=group, **more)
        self._producer.checker("*")(self._check)
        self._producer.__enter__()

    def __enter__(self) -> Escrow:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self._producer.close()

    @contextmanager
    def transaction(self) -> Iterator[tuple[Session, Transaction]]:
        """A session in a transaction of its own, and where to send the messages that go with it.

        Leaving commits the database, then the messages. An exception rolls both back. If the
        database does not say whether it has committed, the marker does, when the broker asks.
        """
        transaction_id = secrets.token_hex(16)
        tx = self._producer.transaction(id=transaction_id)
        with Session(self._engine) as session:
            session.begin()
            try:
                claim(session.connection(), transaction_id, now_ms=self._clock.now_ms())
                yield session, tx
            except BaseException:
                session.rollback()
                if tx.halves:
                    tx.end(Verdict.ROLLBACK)
                raise
            session.commit()  # what it raises leaves the halves open: the marker knows
        if tx.halves:
            tx.end(Verdict.COMMIT)

    def forget(self, *, older_than_ms: int) -> int:
        """Remove markers that nobody can ask about any more: how many. Older than the broker keeps
        an open transaction, and than any transaction of the application takes."""
        before = self._clock.now_ms() - older_than_ms
        with self._engine.begin() as connection:
            return connection.execute(markers.delete().where(markers.c.at_ms < before)).rowcount

    def _check(self, message: ReceivedMessage) -> Verdict:
        transaction_id = message.properties.get(TX_ID)
        if transaction_id is None:
            log.error("a half of this group without a marker id=%s", message.message_id)
            return Verdict.UNKNOWN
        return ask(self._engine, transaction_id, now_ms=self._clock.now_ms())
