"""SIGTERM while a consumer is open: finish the messages in hand, commit, and end the program.

By default SIGTERM ends a Python process at once. Nothing is committed and no `finally` runs, so the
messages of the last seconds come again. While a consumer is open in the main thread, SIGTERM raises
SystemExit(0) instead, as Ctrl-C raises KeyboardInterrupt, where the program waits for the next
message. The blocks of the consumers are left, which commit.

    it waits for a message            SystemExit is raised at once
    it processes a message            SystemExit is raised when it asks for the next one, or when
                                      the last consumer is closed
    a second SIGTERM                  SystemExit is raised at once

A program, or a server such as gunicorn or uvicorn, that handles SIGTERM itself keeps its handler,
and so does `Consumer.run`, which returns. A child of fork has the default of the system again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import weakref
from typing import Any, NoReturn, Protocol

log = logging.getLogger(__name__)


class TerminableConsumer(Protocol):
    """A consumer that is open."""

    @property
    def has_messages_in_hand(self) -> bool:
        """Whether the application has messages that are not acknowledged yet."""


class Termination:
    """The open consumers of the main thread, and whether SIGTERM has arrived."""

    def __init__(self) -> None:
        # The event loop of each consumer; None for a blocking one.
        self._consumers: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._is_installed = False
        self.is_requested = False
        self._is_exiting = False
        os.register_at_fork(after_in_child=self._reset_in_child)

    def watch(self, consumer: TerminableConsumer) -> None:
        """Let SIGTERM wait for this consumer, if it is open in the main thread and nobody else
        handles the signal."""
        if threading.current_thread() is not threading.main_thread():
            return
        if not self._is_installed:
            if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
                return
            signal.signal(signal.SIGTERM, self._on_signal)
            self._is_installed = True
            self.is_requested = self._is_exiting = False
        loop: asyncio.AbstractEventLoop | None = None
        with contextlib.suppress(RuntimeError):
            loop = asyncio.get_running_loop()
        self._consumers[consumer] = loop

    def unwatch(self, consumer: TerminableConsumer) -> None:
        """Forget a consumer that is closed; after the last one SIGTERM has its default again.

        End the program if SIGTERM has arrived meanwhile.
        """
        if self._forget_closed(consumer):
            self._exit()

    async def unwatch_async(self, consumer: TerminableConsumer) -> None:
        """Do the same for a consumer of asyncio."""
        if self._forget_closed(consumer):
            await self._exit_loop()

    def check(self, consumer: TerminableConsumer) -> None:
        """End the program if SIGTERM has arrived and no message is in hand any more.

        Call it before each wait for a message, when the messages before are acknowledged.
        """
        if not self._can_end(consumer):
            return
        if threading.current_thread() is threading.main_thread():
            self._exit()
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        signal.pthread_kill(main_thread, signal.SIGTERM)

    async def check_async(self, consumer: TerminableConsumer) -> None:
        """Do the same for a consumer of asyncio."""
        if self._can_end(consumer):
            await self._exit_loop()

    def _can_end(self, consumer: TerminableConsumer) -> bool:
        return self.is_requested and consumer in self._consumers and not self._is_busy()

    def _forget_closed(self, consumer: TerminableConsumer) -> bool:
        """Return whether the program has to end now."""
        was_watched = self._consumers.pop(consumer, self) is not self
        if self._consumers or threading.current_thread() is not threading.main_thread():
            return False
        self._uninstall()
        return was_watched and self.is_requested

    def _on_signal(self, *_: object) -> None:
        if not self._consumers:
            self._uninstall()
            signal.raise_signal(signal.SIGTERM)
        elif self._is_busy() and not self.is_requested:
            self.is_requested = True
            log.info("SIGTERM: the program ends when the messages in hand are done")
        elif not self._is_exiting:
            loops = [loop for loop in self._consumers.values() if loop is not None]
            running = next((loop for loop in loops if loop.is_running()), None)
            if running is None:
                self._exit()
            running.call_soon_threadsafe(self._exit)

    async def _exit_loop(self) -> NoReturn:
        """End the program from a task. Raised in a callback, SystemExit leaves the loop in order:
        asyncio.run() then cancels all tasks, this one too, and their consumers close."""
        loop = asyncio.get_running_loop()
        loop.call_soon(self._exit)
        await loop.create_future()
        raise AssertionError("the future has no result")

    def _exit(self) -> NoReturn:
        self.is_requested, self._is_exiting = False, True
        raise SystemExit(0)

    def _is_busy(self) -> bool:
        return any(consumer.has_messages_in_hand for consumer in self._consumers)

    def _uninstall(self) -> None:
        # Somebody may have replaced the handler meanwhile: `Consumer.run` does.
        if self._is_installed and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._is_installed = False

    def _reset_in_child(self) -> None:
        self._consumers.clear()
        self._uninstall()


termination = Termination()
