"""Call functions of the application: checkers, handlers and listeners.

They may raise anything. SystemExit, KeyboardInterrupt and others that are no Exception would end
the event loop of all clients, and with it every call that waits, so they become CallbackFailed. The
same holds for tasks of the client itself: `keep_running` starts one again that failed.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextvars import Context
from functools import cache
from typing import Any, Final

from escrowmq.errors import CallbackFailed
from escrowmq.message.delivery_failure import FailureReport

log = logging.getLogger(__name__)

RESTART_PAUSE_S: Final = 1.0
_TEXT_LENGTH_MAX: Final = 500


async def run_callback(
    function: Callable[..., Any],
    *arguments: Any,
    executor: Executor | None = None,
    context: Context | None = None,
) -> Any:
    """Call a function of the application and return its result.

    A coroutine function runs on the event loop, a plain function in a thread of the executor, with
    the context variables of `context`. Raises what the function raises if that is an Exception,
    CallbackFailed if it is not, and CancelledError only if this task itself was cancelled.
    """
    try:
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        loop = asyncio.get_running_loop()
        if context is None:
            future = loop.run_in_executor(executor, _capture, function, arguments)
        else:
            future = loop.run_in_executor(executor, context.run, _capture, function, arguments)
        result, failure = await future
        if failure is not None:
            raise failure
        return await result if inspect.isawaitable(result) else result
    except Exception:
        raise
    except BaseException as error:
        if is_own_cancellation(error):
            raise
        raise CallbackFailed(f"a function of the application raised {describe(error)}") from error


def _capture(
    function: Callable[..., Any], arguments: tuple[Any, ...]
) -> tuple[Any, BaseException | None]:
    """Call a function and return its result, or what it raised.

    A future cannot carry every exception: with a StopIteration it would never be done.
    """
    try:
        return function(*arguments), None
    except BaseException as error:
        return None, error


def is_own_cancellation(error: BaseException) -> bool:
    """Return whether the current task has to end: it was cancelled, or its loop has stopped."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return True  # there is no running loop: the coroutine is being closed
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def describe(error: BaseException) -> str:
    """Return an exception as a short text that can be sent, whatever its own methods do."""
    try:
        text = repr(error)
    except BaseException:  # this is code of the application too
        text = f"{type(error).__name__} (its text cannot be shown)"
    return shorten(text)


def failure_report(cause: BaseException | str | None, *, attempts: int = 0) -> FailureReport:
    """Return what a consumer tells its broker about a delivery that failed.

    The cause is the exception of a handler, or a text of the application.
    """
    error_type, text = "", ""
    if isinstance(cause, str):
        text = cause
    elif cause is not None:
        # What an application raised that would have ended the event loop is the cause of this one.
        if isinstance(cause, CallbackFailed) and cause.__cause__ is not None:
            cause = cause.__cause__
        error_type = type(cause).__qualname__
        if (module := type(cause).__module__) != "builtins":
            error_type = f"{module}.{error_type}"
        try:
            text = str(cause)
        except BaseException:  # this is code of the application too
            text = "its text cannot be shown"
    return FailureReport.cleaned(error_type, text, _host_name(), attempts)


@cache
def _host_name() -> str:
    return socket.gethostname()


def shorten(text: str) -> str:
    """Return a text that is short and valid UTF-8, so that a request can carry it."""
    return text[:_TEXT_LENGTH_MAX].encode("utf-8", "replace").decode()


async def wait_for_close(task: asyncio.Task[None], close: Callable[[], Awaitable[None]]) -> None:
    """Wait for a task that closes a client by `close`. Cancelling the caller does not end it.

    When a program ends, asyncio.run() cancels every task, the closing one too, and then waits for
    all of them. So it is closed once more here: what is done has to be committed.
    """
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        if task.cancelling():
            await asyncio.wait((task,))
            await close()
        raise


async def keep_running(name: str, run: Callable[[], Awaitable[None]]) -> None:
    """Run a task of the client, and start it again after a pause if it fails.

    A task that ended silently would leave the client waiting for what it should have done.
    """
    while True:
        try:
            await run()
            return
        except Exception:
            log.exception("task failed, starting it again in %g s task=%s", RESTART_PAUSE_S, name)
        await asyncio.sleep(RESTART_PAUSE_S)
