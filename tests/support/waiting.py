"""Wait for a condition by polling it; tests never sleep for a fixed time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Final

TIMEOUT_S: Final = 60.0  # the machine may be busy
_INTERVAL_S: Final = 0.02

# A function is called only if the wait fails, for example to read a log then.
Description = str | Callable[[], str]


def wait_until(
    condition: Callable[[], object], description: Description, *, timeout_s: float = TIMEOUT_S
) -> None:
    """Return once the condition is true. Fails with the description after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        _check_time(deadline_s, timeout_s, description)
        threading.Event().wait(_INTERVAL_S)


async def wait_until_async(
    condition: Callable[[], object], description: Description = "", *, timeout_s: float = TIMEOUT_S
) -> None:
    """Do the same on the event loop, so that its tasks run while the condition is polled."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():  # the condition has no event
        _check_time(deadline_s, timeout_s, description)
        await asyncio.sleep(_INTERVAL_S)


def _check_time(deadline_s: float, timeout_s: float, description: Description) -> None:
    if time.monotonic() >= deadline_s:
        text = description if isinstance(description, str) else description()
        raise AssertionError(f"not within {timeout_s:g} s: {text}")
