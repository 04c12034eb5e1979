"""Wait for a condition by polling it; tests never sleep for a fixed time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Final

TIMEOUT_S: Final = 60.0  # the machine may be busy
_INTERVAL_S: Final = 0.02


def wait_until(
    condition: Callable[[], object], description: str, *, timeout_s: float = TIMEOUT_S
) -> None:
    """Return once the condition is true. Fails with the description after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {description}"
        threading.Event().wait(_INTERVAL_S)


async def wait_until_async(
    condition: Callable[[], object], description: str = "", *, timeout_s: float = TIMEOUT_S
) -> None:
    """Do the same on the event loop, so that its tasks run while the condition is polled."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():  # the condition has no event
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {description}"
        await asyncio.sleep(_INTERVAL_S)
