"""Tasks that run as long as a server does; one that fails stops it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def running(*loops: Any) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(loop) for loop in loops]
    for task in tasks:
        task.add_done_callback(_stop_if_failed)
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _stop_if_failed(task: asyncio.Task[None]) -> None:
    """A broker without one of its loops would only look alive: better none at all."""
    if not task.cancelled() and task.exception() is not None:
        log.error("a loop failed, stopping", exc_info=task.exception())
        os.kill(os.getpid(), signal.SIGTERM)
