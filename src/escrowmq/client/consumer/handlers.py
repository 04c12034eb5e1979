"""Handlers of a push consumer: coroutines run on the event loop, plain functions in threads."""

from __future__ import annotations

import contextvars
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from escrowmq.client.callbacks import run_callback
from escrowmq.client.messages import ReceivedMessage
from escrowmq.client.telemetry import Telemetry
from escrowmq.errors import LocalProtocolError
from escrowmq.message.filter import FilterExpression

# The return value is ignored. An exception means that the message has to be delivered again.
MessageHandler = Callable[[ReceivedMessage], Awaitable[Any] | Any]
HandlerT = TypeVar("HandlerT", bound=MessageHandler)  # a decorator returns what it was given


class HandlerRegistry:
    """Finds the handler of a message by topic and tag, and runs it.

    At most `concurrency` plain functions run at the same time, each in a thread of its own.
    """

    def __init__(self, concurrency: int, telemetry: Telemetry | None = None) -> None:
        self._concurrency = concurrency
        self._telemetry = telemetry
        self._by_topic: dict[str, list[tuple[FilterExpression, MessageHandler]]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def register(self, topic: str, expression: FilterExpression, handler: MessageHandler) -> None:
        """Add a handler. The first one registered whose tags match gets the message."""
        if not callable(handler):
            raise TypeError(f"a handler must be a function that takes a message, not {handler!r}")
        self._by_topic.setdefault(topic, []).append((expression, handler))

    @property
    def topics(self) -> set[str]:
        return set(self._by_topic)

    async def call(self, message: ReceivedMessage) -> None:
        """Run the handler of a message and wait for it; with telemetry, in a span.

        Raises what the handler raises, CallbackFailed if that is no Exception, and
        LocalProtocolError if there is no handler.
        """
        if self._telemetry is None:
            await self._call(message)
        else:
            with self._telemetry.continue_trace("process", message):
                await self._call(message)

    async def _call(self, message: ReceivedMessage) -> None:
        handler = self._find(message)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(
                self._concurrency, thread_name_prefix="escrowmq-handler"
            )
        # A thread gets the context of this task, so that spans and context variables are seen.
        context = contextvars.copy_context()
        await run_callback(handler, message, executor=self._threads, context=context)

    def close(self) -> None:
        """Start no more threads. Handlers that run are not waited for."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def _find(self, message: ReceivedMessage) -> MessageHandler:
        for expression, handler in self._by_topic.get(message.topic, ()):
            if expression.matches_tag(message.tags):
                return handler
        raise LocalProtocolError(
            f"no handler for topic {message.topic!r} and tag {message.tags!r}: "
            "register one with on(), or do not subscribe to it"
        )
