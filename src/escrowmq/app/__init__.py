"""Functions that get messages: typed payloads, one transaction, retries, dead letters, workers.

    app = App("127.0.0.1:9876", group="smith-bank", database=engine)

    @app.on("transfers", retry=Retry(times=5, first_s=1, factor=2), concurrency=8)
    def credit(session: Session, transfer: Transfer) -> None:
        session.execute(...)

    escrowmq worker bank.messages:app --processes 4

A function is registered with what its annotations say. A worker joins the consumer group and runs
it for each message, in a database transaction that has the inbox row, the changes and the messages
that it sends. A message that cannot be decoded is a dead letter; one whose handler raises comes
again after growing delays, and is a dead letter in the end.

    module:app ──> worker.py ──> App.run ──> Consumer ──> Dispatcher ──> handler ──> acknowledge
                   processes,                             queues,        transaction,
                   signals, HTTP                          retries        results

Modules, in reading order:

    app.py              App: handlers of a consumer group
    handlers.py         AppHandler and Retry: what a signature says
    payloads.py         types to bytes and back
    dispatch.py         concurrency, order, batches, failures
    databases.py        what a transaction around a handler is
    sql_database.py     SQLAlchemy: Engine and AsyncEngine
    django_database.py  Django
    worker.py           `escrowmq worker`: one process, with signals, health and metrics
    supervisor.py       several processes: restarts, reload
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from escrowmq.app.app import App
from escrowmq.app.handlers import Retry
from escrowmq.app.payloads import encode_payload
from escrowmq.errors import InvalidHandler, InvalidPayload

if TYPE_CHECKING:
    from escrowmq.app.django_database import DjangoDatabase

__all__ = [
    "App",
    "DjangoDatabase",
    "InvalidHandler",
    "InvalidPayload",
    "Retry",
    "encode_payload",
]


def __getattr__(name: str) -> Any:
    if name == "DjangoDatabase":  # Django is an extra
        return importlib.import_module("escrowmq.app.django_database").DjangoDatabase
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
