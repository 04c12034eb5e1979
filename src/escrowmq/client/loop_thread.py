"""The event loop of the blocking clients: it runs in a thread, one for each process.

Used by `escrowmq.blocking` only.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Final, Generic, TypeVar

from escrowmq.client.mistakes import without_frames
from escrowmq.errors import EscrowError, LocalProtocolError, OutcomeUnknown

log = logging.getLogger(__name__)

T = TypeVar("T")
ALIVE_CHECK_S: Final = 1.0  # how often a waiting call looks whether the event loop still runs


def run_on(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop's thread and wait for it. It sees the caller's context variables.

    An EscrowError is raised without the frames of the coroutine. Raises LocalProtocolError on the
    loop's own thread, where waiting would never end.
    """
    if _loop_thread.get().is_current:
        coroutine.close()
        raise LocalProtocolError(
            "a blocking client was called on its own event loop, which would wait for itself; "
            "in a coroutine use the client of `escrowmq`"
        )
    call = _Call(loop, coroutine)
    loop.call_soon_threadsafe(call.start)
    call.wait(_loop_thread.get())
    try:
        return call.result()
    except EscrowError as error:
        raise without_frames(error) from error.__cause__


class _Call(Generic[T]):
    """A coroutine that one thread waits for. A lock is much cheaper than a concurrent Future."""

    __slots__ = ("_context", "_coroutine", "_done", "_loop", "_task")

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._coroutine = coroutine
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[T] | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def start(self) -> None:
        self._task = self._loop.create_task(self._coroutine, context=self._context)
        self._task.add_done_callback(lambda _: self._done.release())

    def wait(self, loop_thread: _LoopThread) -> None:
        try:
            while not self._done.acquire(timeout=ALIVE_CHECK_S):
                if not loop_thread.is_alive:
                    raise OutcomeUnknown("the event loop of the blocking clients has ended")
        except BaseException:  # KeyboardInterrupt: the result is not needed any more
            self._loop.call_soon_threadsafe(self._cancel)
            raise

    def result(self) -> T:
        """Return the result of a coroutine that has ended, or raise what it raised."""
        assert self._task is not None
        return self._task.result()

    def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()


class PerProcess(Generic[T]):
    """A value that each process creates for itself on first use.

    A child of fork has neither the threads nor the connections of its parent, only copies of the
    sockets, which it must not use. So it creates a value of its own. It also needs a new lock:
    another thread may have held the old one during the fork, and does not exist in the child.
    """

    _instances: ClassVar[weakref.WeakSet[PerProcess[Any]]] = weakref.WeakSet()

    def __init__(self, create: Callable[[], T]) -> None:
        self._create = create
        self._lock = threading.Lock()
        self._value: T | None = None
        # The parent's values. They are kept because deleting them would close their sockets.
        self._inherited: list[T] = []
        PerProcess._instances.add(self)

    def get(self) -> T:
        """Return the value of this process, creating it if needed. Thread-safe."""
        value = self._value
        if value is None:
            with self._lock:
                value = self._value
                if value is None:
                    value = self._value = self._create()
        return value

    def existing(self) -> T | None:
        """Return the value of this process; None if it was not created yet."""
        return self._value

    @classmethod
    def reset_after_fork(cls) -> None:
        """Forget the parent's values. Called in the child."""
        for instance in list(cls._instances):
            instance._lock = threading.Lock()
            if instance._value is not None:
                instance._inherited.append(instance._value)
                instance._value = None


os.register_at_fork(after_in_child=PerProcess.reset_after_fork)


class _LoopThread:
    def __init__(self) -> None:
        self.loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name="escrowmq-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        # A task that raises SystemExit or KeyboardInterrupt ends `run_forever`. The calls of all
        # other threads wait for this loop, so it continues.
        while not self.loop.is_closed():
            try:
                self.loop.run_forever()
            except BaseException:
                log.critical("the event loop was interrupted and continues", exc_info=True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread


def _new_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop of uvloop if it is installed: it halves the time that a blocking call
    needs to reach the loop and return."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


_loop_thread = PerProcess(_LoopThread)


def client_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all blocking clients of this process."""
    return _loop_thread.get().loop


def is_client_thread() -> bool:
    """Return whether this is the thread of that event loop."""
    return _loop_thread.get().is_current
