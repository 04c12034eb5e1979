"""Functions that messages are handed to: coroutines on the loop, plain functions in threads."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from escrowmq.client.messages import ReceivedMessage
from escrowmq.client.telemetry import Telemetry
from escrowmq.errors import LocalProtocolError
from escrowmq.message.filter import FilterExpression

# What it returns has no meaning; what it raises means: later.
MessageHandler = Callable[[ReceivedMessage], Awaitable[Any] | Any]


class HandlerRegistry:
    def __init__(self, concurrency: int, telemetry: Telemetry | None = None) -> None:
        self._concurrency = concurrency
        self._telemetry = telemetry
        self._by_topic: dict[str, list[tuple[FilterExpression, MessageHandler]]] = {}
        self._threads: ThreadPoolExecutor | None = None

    def register(self, topic: str, expression: FilterExpression, handler: MessageHandler) -> None:
        if not callable(handler):
            raise TypeError(f"a handler is a function that takes a message, not {handler!r}")
        self._by_topic.setdefault(topic, []).append((expression, handler))

    @property
    def topics(self) -> set[str]:
        return set(self._by_topic)

    async def call(self, message: ReceivedMessage) -> None:
        """In a span that goes on from the one that sent it, if traces are wanted."""
        if self._telemetry is None:
            await self._call(message)
        else:
            with self._telemetry.continue_trace("process", message):
                await self._call(message)

    async def _call(self, message: ReceivedMessage) -> None:
        handler = self._find(message)
        if inspect.iscoroutinefunction(handler):
            await handler(message)
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(
                self._concurrency, thread_name_prefix="escrowmq-handler"
            )
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        found = await loop.run_in_executor(self._threads, context.run, handler, message)
        if inspect.isawaitable(found):  # a callable object, or a partial of a coroutine
            await found

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def _find(self, message: ReceivedMessage) -> MessageHandler:
        for wanted, handler in self._by_topic.get(message.topic, ()):
            if wanted.matches_tag(message.tags):
                return handler
        raise LocalProtocolError(
            f"no handler for topic {message.topic!r} and tag {message.tags!r}: "
            "register one with on(), or do not subscribe to it"
        )
