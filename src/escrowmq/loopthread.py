"""The loop that blocking clients share, in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from escrowmq.errors import NotSent

T = TypeVar("T")


class _LoopThread:
    """The loop and its thread, made when first wanted, and once more in a child."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._process_id = 0

    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None or self._process_id != os.getpid():
                loop = self._loop = asyncio.new_event_loop()
                self._process_id = os.getpid()
                name = "escrowmq-client"
                threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
            return self._loop


_thread = _LoopThread()


class Blocking:
    def __init__(self) -> None:
        self._loop = _thread.loop()
        self._process_id = os.getpid()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if os.getpid() != self._process_id:
            work.close()
            raise NotSent("this client was made in another process (fork); make one in each child")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


async def made(make: Callable[[], T]) -> T:
    """On the loop's thread: what it makes belongs to the loop."""
    return make()
