"""A thread with an event loop, for those who block; and what a fork does to it.

A child of fork has neither the thread nor the connections of its parent: it has copies of the
sockets, which it must not touch. So both are made anew there, when they are first wanted. Locks are
made anew too: who held one in the parent is not there to let it go.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, Generic, TypeVar

from escrowmq.errors import LocalProtocolError, WrongProcess

T = TypeVar("T")


class PerProcess(Generic[T]):
    """Something of which each process has its own, made when it is first wanted."""

    _all: ClassVar[weakref.WeakSet[PerProcess[Any]]] = weakref.WeakSet()

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: T | None = None
        self._left: list[T] = []  # the parent's, kept: letting go of it would close its sockets
        PerProcess._all.add(self)

    def get(self) -> T:
        made = self._made
        if made is None:
            with self._lock:
                made = self._made
                if made is None:
                    made = self._made = self._make()
        return made

    def existing(self) -> T | None:
        return self._made

    @classmethod
    def forked(cls) -> None:
        """In the child."""
        for one in list(cls._all):
            one._lock = threading.Lock()
            if one._made is not None:
                one._left.append(one._made)
                one._made = None


os.register_at_fork(after_in_child=PerProcess.forked)


class _LoopThread:
    def __init__(self) -> None:
        self.loop = _new_loop()
        self._thread = threading.Thread(
            target=self.loop.run_forever, name="escrowmq-client", daemon=True
        )
        self._thread.start()

    @property
    def is_current(self) -> bool:
        return threading.current_thread() is self._thread


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed: a blocking call crosses to the loop and back, and its way
    there and back is half as long."""
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


_thread = PerProcess(_LoopThread)


def client_loop() -> asyncio.AbstractEventLoop:
    return _thread.get().loop


def run_on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run it there and wait for it here. What this thread has in its context, it sees."""
    if _thread.get().is_current:
        work.close()
        raise LocalProtocolError(
            "a blocking client was called on its own event loop, which would wait for itself: "
            "in a coroutine use the client of `escrowmq`"
        )
    call = _Call(loop, work)
    loop.call_soon_threadsafe(call.begin)
    return call.wait()


class _Call(Generic[T]):
    """Much less than a concurrent Future: one who waits, one lock."""

    __slots__ = ("_context", "_done", "_loop", "_task", "_work")

    def __init__(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._work = work
        self._context = contextvars.copy_context()
        self._task: asyncio.Task[T] | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def begin(self) -> None:
        self._task = self._loop.create_task(self._work, context=self._context)
        self._task.add_done_callback(lambda _: self._done.release())

    def wait(self) -> T:
        try:
            self._done.acquire()
        except BaseException:  # interrupted: nobody waits any more
            self._loop.call_soon_threadsafe(self._cancel)
            raise
        assert self._task is not None
        return self._task.result()

    def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()


class Blocking:
    """A client that belongs to the process that made it, run on the shared loop."""

    def __init__(self) -> None:
        self._loop = client_loop()
        self._process_id = os.getpid()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if os.getpid() != self._process_id:
            work.close()
            raise WrongProcess("this client was made before a fork: make one in each child")
        return run_on(self._loop, work)


async def made(make: Callable[[], T]) -> T:
    """On the loop's thread: what it makes belongs to the loop."""
    return make()
