"""The connections of one client, by address: made when they are wanted, one each."""

from __future__ import annotations

import asyncio
import os

from escrowmq.client.access import NO_ACCESS, Access
from escrowmq.client.line import Asked, Line
from escrowmq.clock import Clock
from escrowmq.errors import ClientClosed, WrongProcess


class Lines:
    def __init__(self, asked: Asked, clock: Clock, access: Access | None = None) -> None:
        shown = access or NO_ACCESS
        self._sign = shown.signer()
        self._tls = shown.context()
        self._asked = asked
        self._clock = clock
        self._lines: dict[str, asyncio.Task[Line]] = {}
        self._process_id = os.getpid()
        self._is_closed = False

    async def to(self, address: str) -> Line:
        """Raises NotSent. Whoever asks while it is being made waits for the same one."""
        self._refuse_if_forked()
        making = self._lines.get(address)
        if making is None or _is_over(making):
            making = asyncio.ensure_future(
                Line.connect(address, self._asked, self._clock, sign=self._sign, tls=self._tls)
            )
            self._lines[address] = making
        # Not cancelled with one of those who wait for it.
        return await asyncio.shield(making)

    def open_ones(self) -> list[Line]:
        return [
            task.result() for task in self._lines.values() if task.done() and not _is_over(task)
        ]

    async def close(self) -> None:
        self._is_closed = True
        for task in self._lines.values():
            if _is_over(task):
                continue
            if task.done():
                task.result().close()
            else:
                task.cancel()
        await asyncio.sleep(0)  # what was written leaves

    @property
    def is_usable(self) -> bool:
        """Not closed, and not in a child of the process that made it."""
        return not self._is_closed and os.getpid() == self._process_id

    def _refuse_if_forked(self) -> None:
        if self._is_closed:
            raise ClientClosed("this client is closed: make another one")
        if os.getpid() != self._process_id:
            raise WrongProcess(
                "this client was made in another process (fork): its connections are the parent's; "
                "make a client in each child; those of escrowmq.blocking do it by themselves"
            )


def _is_over(making: asyncio.Task[Line]) -> bool:
    """Whether it failed, or what it made is closed by now."""
    if not making.done():
        return False
    if making.cancelled() or making.exception() is not None:
        return True
    return not making.result().is_open
