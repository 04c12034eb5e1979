"""Explain mistakes of the application: a wrong kind of client, of function, of argument.

Each of these would otherwise end in a wait without end, or in an error that explains nothing:

    AsyncioClient, BlockingClient   the wrong `with` or `for`, a blocking call in a coroutine
    check_callable                  a function with the wrong parameters
    UnawaitedCalls                  a forgotten `await`
    short_traceback                 an error that ends a dozen frames below the application
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast

from escrowmq.errors import EscrowError, LocalProtocolError
from escrowmq.message.names import NAME_PATTERN

log = logging.getLogger(__name__)

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Awaitable[Any]])
E = TypeVar("E", bound=BaseException)

# --- the wrong kind of client --------------------------------------------------------------------


class AsyncioClient:
    """Explains that an asyncio class needs `async with` and `async for`."""

    if not TYPE_CHECKING:  # a type checker still says that these methods do not exist

        def __enter__(self) -> NoReturn:
            raise TypeError(_needs_async(self, "with"))

        def __exit__(self, *_: object) -> NoReturn:
            raise AssertionError("__enter__() has raised")

        def __iter__(self) -> NoReturn:
            raise TypeError(_needs_async(self, "for"))


class BlockingClient:
    """Explains that a blocking class needs a plain `with` and `for`, and no event loop."""

    _has_warned = False

    def _warn_on_event_loop(self) -> None:
        """Warn, once for each client, that its calls stop a running event loop."""
        if self._has_warned or not is_on_event_loop():
            return
        self._has_warned = True
        name = _class_name(self)
        warnings.warn(
            f"{_blocking_name(name)} was called in a running event loop, which stands still during "
            f"the call: use {_asyncio_name(name)}, or call it in a thread with asyncio.to_thread()",
            RuntimeWarning,
            stacklevel=_caller_level(),
        )

    if not TYPE_CHECKING:

        async def __aenter__(self) -> NoReturn:
            raise TypeError(_needs_plain(self, "with"))

        async def __aexit__(self, *_: object) -> NoReturn:
            raise AssertionError("__aenter__() has raised")

        def __aiter__(self) -> NoReturn:
            raise TypeError(_needs_plain(self, "for"))


def _needs_async(client: object, keyword: str) -> str:
    name = _class_name(client)
    return (
        f"{name} is for asyncio: use `async {keyword}`, or {_blocking_name(name)} without asyncio"
    )


def _needs_plain(client: object, keyword: str) -> str:
    name = _class_name(client)
    return (
        f"{_blocking_name(name)} is for threads: use a plain `{keyword}`, or "
        f"{_asyncio_name(name)} with asyncio"
    )


def _class_name(client: object) -> str:
    """Return the name of our class of a client, of which the application may have a subclass."""
    ours = (cls for cls in type(client).__mro__ if cls.__module__.startswith("escrowmq."))
    return next(ours).__name__


def _blocking_name(name: str) -> str:
    """Return the full name of the blocking class for a class of either kind."""
    if name.endswith(_DATABASE_CLASSES):
        return f"escrowmq.sql.{name.removeprefix('Async')}"
    return f"escrowmq.blocking.{name}"


def _asyncio_name(name: str) -> str:
    if name.endswith(_DATABASE_CLASSES):
        return f"escrowmq.sql.Async{name}"
    return f"escrowmq.{name}"


_DATABASE_CLASSES: Final = ("Escrow", "Inbox")
_PACKAGE: Final = str(Path(__file__).parent.parent)


def is_on_event_loop() -> bool:
    """Return whether the calling thread runs an event loop, which a blocking call would stop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _caller_level() -> int:
    """Return the `stacklevel` of the first caller that does not belong to this package."""
    level, frame = 1, sys._getframe(1)  # inspect.stack() would read the source of every frame
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back  # type: ignore[assignment]  # None is the end
    return level


# --- wrong arguments -----------------------------------------------------------------------------


def check_callable(function: object, role: str, parameters: Sequence[str]) -> None:
    """Raise TypeError unless a function can be called with these parameters.

    `role` describes the function: "a handler of messages". The parameters are positional.
    """
    rule = f"{role} takes {' and '.join(parameters)}"
    if not callable(function):
        raise TypeError(f"{rule}: it has to be a function, not {function!r}")
    try:
        # That of a decorated function is the decorator's: it may add or take parameters.
        signature = inspect.signature(function, follow_wrapped=False)
    except ValueError:  # written in C
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        name = getattr(function, "__qualname__", repr(function)).rpartition("<locals>.")[2]
        text = ", ".join(signature.parameters)
        raise TypeError(f"{rule}, but {name}({text}) does not: {error}") from None


def check_topic_argument(topic: object, usage: str) -> None:
    """Raise TypeError for a decorator that was used without a topic, `@consumer.on`."""
    if callable(topic):
        raise TypeError(f"the decorator needs a topic: {usage}")
    if not isinstance(topic, str):
        raise TypeError(f"a topic is a text, not {topic!r}")


def check_group(group: object) -> None:
    """Raise ValueError or TypeError for a group that RocketMQ's clients refuse too."""
    if not isinstance(group, str):
        raise TypeError(f"a group is a text, not {group!r}")
    if not group:
        raise ValueError("the group is empty: give group=, a name that all its members share")
    if not NAME_PATTERN.fullmatch(group):
        raise ValueError(f"the group {group[:100]!r} may contain only letters, digits and %|_-")


def check_seconds(name: str, value: object) -> None:
    """Raise TypeError unless a time limit is a number of seconds, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
        raise TypeError(f"{name} is a number of seconds, not {value!r}")


class UnawaitedCalls:
    """Finds calls of a block that the application has forgotten to await.

    Python warns about them only when they are deleted, and the block would end as if nothing had
    been called.
    """

    def __init__(self) -> None:
        self._coroutines: list[Coroutine[Any, Any, Any]] = []

    def watch(self, coroutine: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        self._coroutines.append(coroutine)
        return coroutine

    def raise_if_any(self, call: str) -> None:
        """Raise LocalProtocolError if a coroutine was not started. None of them can be any more."""
        states = [inspect.getcoroutinestate(coroutine) for coroutine in self._coroutines]
        count = states.count(inspect.CORO_CREATED)
        for coroutine, state in zip(self._coroutines, states, strict=True):
            if state == inspect.CORO_CREATED:
                coroutine.close()
        self._coroutines.clear()
        if count:
            raise LocalProtocolError(
                f"{call} was called without await (calls: {count}), so its message is not sent: "
                f"write `await {call}`"
            )


# --- long tracebacks -----------------------------------------------------------------------------


def short_traceback(function: F) -> F:
    """Let errors of a public coroutine function end there, and not a dozen frames below it.

    For EscrowError only: its text says what happened. Other exceptions are bugs, or come from
    functions of the application, and keep their frames.
    """

    @functools.wraps(function)
    async def call(*args: Any, **options: Any) -> Any:
        try:
            return await function(*args, **options)
        except EscrowError as error:
            raise without_frames(error) from error.__cause__

    return cast(F, call)  # the same type, so that editors show the function itself


def without_frames(error: E) -> E:
    """Return an error without the frames that it has passed; they are logged at level DEBUG."""
    if log.isEnabledFor(logging.DEBUG):
        log.debug("call failed", exc_info=(type(error), error, error.__traceback__))
    return error.with_traceback(None)
