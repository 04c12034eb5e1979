"""App: the handlers of a service, and a worker that runs them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypeVar

from escrowmq.app.databases import HandlerDatabase, ProducerSettings
from escrowmq.app.dispatch import Dispatcher, SendMessage
from escrowmq.app.handlers import BATCH_SIZE, AppHandler, Argument, Retry
from escrowmq.client.access import Access
from escrowmq.client.consumer.consumer import Consumer
from escrowmq.client.consumer.fetcher import ConsumerLimits
from escrowmq.client.consumer.offset_store import ConsumeFrom
from escrowmq.client.messages import Message
from escrowmq.client.producer.producer import Producer
from escrowmq.client.telemetry import Telemetry
from escrowmq.errors import ConfigError, InvalidHandler, TransportError
from escrowmq.message.filter import FilterLike
from escrowmq.metrics import Samples

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine

log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
DEFAULT_CONCURRENCY: Final = 8
SHUTDOWN_TIMEOUT_S: Final = 30.0
START_PAUSE_S: Final = 1.0  # before the next attempt, if no server responds
NOT_STARTED_REASON: Final = "the worker is not started"


class App:
    """The handlers of a service: functions that get the messages of a consumer group.

        app = App("127.0.0.1:9876", group="smith-bank", database=engine)

        @app.on("transfers", retry=Retry(times=5, first_s=1, factor=2), concurrency=8)
        def credit(session: Session, transfer: Transfer) -> None:
            session.execute(...)

    `escrowmq worker bank.messages:app` runs it. See docs/app.md.

    `servers`: addresses of name servers, "127.0.0.1:9876" or several.
    `group`: the consumer group, and the producer group of what the handlers send. All workers of
    the group must have the same handlers.
    `database`: an Engine or AsyncEngine of SQLAlchemy, or a DjangoDatabase. With it a handler that
    takes a session, takes `tx` or returns messages runs in one transaction with the inbox row.
    `session_factory`: a sessionmaker, for sessions with other options.
    `start`: where a group without committed offsets starts: "earliest", "latest" or a datetime.
    `limits`: how many messages are kept in memory.
    `telemetry`: True or a TracerProvider, to run handlers in spans of the producer's trace.

    Raises ConfigError for a database of another kind.
    """

    def __init__(
        self,
        servers: str,
        *,
        group: str,
        database: Engine | AsyncEngine | HandlerDatabase | None = None,
        session_factory: Callable[..., Any] | None = None,
        start: ConsumeFrom = "earliest",
        limits: ConsumerLimits | None = None,
        namespace: str = "",
        access: Access | None = None,
        telemetry: Any = None,
    ) -> None:
        self.group = group
        self.handlers: list[AppHandler] = []
        self._servers = servers
        self._database = _database_binding(database, group, session_factory)
        self._start = start
        self._limits = limits
        self._namespace = namespace
        self._access = access
        self._telemetry = Telemetry.from_option(telemetry)
        self._stop_requested = asyncio.Event()
        self._dispatcher: Dispatcher | None = None
        self.not_ready_reason: str | None = NOT_STARTED_REASON  # None while messages are handled

    # --- handlers --------------------------------------------------------------------------------

    def on(
        self,
        topic: str,
        expression: FilterLike = "*",
        *,
        retry: Retry = Retry(),  # noqa: B008  an immutable value
        concurrency: int = DEFAULT_CONCURRENCY,
        ordered: bool = False,
        batch_size: int = BATCH_SIZE,
        send_to: str = "",
    ) -> Callable[[F], F]:
        """Register a handler for a topic, or for some tags of it; a decorator.

        The annotations of its parameters say what it gets; see `escrowmq.app.handlers`. A coroutine
        function runs on the event loop, a plain function in a thread. Of several handlers of a
        topic, the first whose tags match gets a message.

        `retry`: when a message comes again whose handler raised, and how often.
        `concurrency`: how many messages, or batches, are handled at the same time in each process.
        `ordered`: handle messages with the same sharding key one after the other, in the order in
        which they were stored. One that fails is tried again here, and the others of its key wait.
        `batch_size`: the largest batch of a handler that takes a list. It is not waited for.
        `send_to`: the topic that results are sent to.

        Raises InvalidHandler for a signature that cannot be used, and InvalidSubscription for an
        invalid filter.
        """

        def register(function: F) -> F:
            handler = AppHandler(
                function,
                topic=topic,
                expression=expression,
                retry=retry,
                concurrency=concurrency,
                ordered=ordered,
                batch_size=batch_size,
                send_to=send_to,
            )
            self._check(handler)
            self.handlers.append(handler)
            return function

        return register

    def _check(self, handler: AppHandler) -> None:
        if not handler.topic:
            raise handler.invalid("it needs a topic")
        if self._database is not None:
            self._database.check(handler)
            return
        for argument in (Argument.SESSION, Argument.TRANSACTION_MESSAGES):
            if (annotation := handler.signature.type_of(argument)) is not None:
                raise handler.invalid(
                    f"it takes {annotation.__name__}, but the App has no database="
                )

    # --- running ---------------------------------------------------------------------------------

    async def run(self, *, shutdown_timeout_s: float = SHUTDOWN_TIMEOUT_S) -> int:
        """Handle messages until `stop` is called; then finish the handlers that run.

        A name server or broker that does not respond at the start is waited for. Return how many
        handlers did not end within `shutdown_timeout_s`. Raises InvalidHandler without handlers,
        RequestRefused, InvalidSubscription, and what the database raises.
        """
        if not self.handlers:
            raise InvalidHandler("the App has no handlers: register one with on() first")
        self.not_ready_reason = "the worker is starting"
        try:
            async with contextlib.AsyncExitStack() as parts:
                send = await self._open_senders(parts)
                consumer, dispatcher = await self._wait_for_servers(
                    lambda: self._start_consumer(send)
                )
                self._dispatcher = dispatcher
                parts.push_async_callback(consumer.close)
                dispatcher.start()
                self.not_ready_reason = None
                log.info("worker started group=%s handlers=%d", self.group, len(self.handlers))
                await self._stop_requested.wait()
                self.not_ready_reason = "the worker is stopping"
                return await dispatcher.stop(shutdown_timeout_s)
        except _StoppedAtStart:
            return 0
        finally:
            self.not_ready_reason = NOT_STARTED_REASON
            self._stop_requested = asyncio.Event()

    def stop(self) -> None:
        """Make `run` finish the running handlers and return. Call it on the event loop; handlers
        that are coroutines may call it too."""
        self._stop_requested.set()

    def collect(self) -> Iterator[Samples]:
        """Yield the metrics of the handlers, for an `escrowmq.metrics.Registry`."""
        if self._dispatcher is not None:
            yield from self._dispatcher.collect()

    async def _open_senders(self, parts: contextlib.AsyncExitStack) -> SendMessage:
        """Open what the handlers send with: the database's Escrow, or a producer."""
        options: dict[str, Any] = {"namespace": self._namespace, "access": self._access}
        sends = any(handler.sends for handler in self.handlers)
        if (database := self._database) is not None:
            parts.push_async_callback(database.close)
            settings = ProducerSettings(self._servers, self.group, options)
            await self._wait_for_servers(lambda: database.open(settings, sends=sends))
        elif sends:
            producer = Producer(self._servers, group=self.group, **options)
            await parts.enter_async_context(producer)
            return producer.send
        return _refuse_send

    async def _start_consumer(self, send: SendMessage) -> tuple[Consumer, Dispatcher]:
        """Join the group. The consumer cannot be used again if this raises."""
        consumer = Consumer(
            self._servers,
            group=self.group,
            start=self._start,
            limits=self._limits,
            namespace=self._namespace,
            access=self._access,
            # The handlers say when a message is a dead letter, so the broker must not be first.
            max_reconsume_times=max(handler.retry.times for handler in self.handlers) + 1,
        )
        dispatcher = Dispatcher(
            consumer,
            self.handlers,
            database=self._database,
            send=send,
            telemetry=self._telemetry,
        )
        await consumer.__aenter__()
        return consumer, dispatcher

    async def _wait_for_servers(self, start: Callable[[], Awaitable[T]]) -> T:
        """Call `start` until a server responds. Raises _StoppedAtStart."""
        while True:
            try:
                return await start()
            except TransportError as error:
                self.not_ready_reason = f"no server responds: {error}"
                log.warning("no server responds, retrying in %g s: %s", START_PAUSE_S, error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(START_PAUSE_S):
                    await self._stop_requested.wait()
                    raise _StoppedAtStart


class _StoppedAtStart(Exception):
    """The app was stopped before a server responded."""


async def _refuse_send(message: Message) -> None:
    raise AssertionError("no handler sends without a transaction")


def _database_binding(
    database: Engine | AsyncEngine | HandlerDatabase | None,
    group: str,
    session_factory: Callable[..., Any] | None,
) -> HandlerDatabase | None:
    """Return the binding of a database. SQLAlchemy is imported only for an engine of it."""
    if database is None or isinstance(database, HandlerDatabase):
        return database
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
    from sqlalchemy.orm import Session

    from escrowmq.app.sql_database import AsyncEngineDatabase, EngineDatabase

    if isinstance(database, AsyncEngine):
        return AsyncEngineDatabase(database, group, session_factory or AsyncSession)
    if isinstance(database, Engine):
        return EngineDatabase(database, group, session_factory or Session)
    raise ConfigError(
        f"database= is an Engine, an AsyncEngine or a DjangoDatabase, not {database!r}"
    )
