"""Wait for a condition by polling it; tests never sleep for a fixed time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

TIMEOUT_S: Final = 20.0
_INTERVAL_S: Final = 0.02


def wait_until(
    condition: Callable[[], object], description: str, *, timeout_s: float = TIMEOUT_S
) -> None:
    """Return once the condition is true. Fails with the description after the timeout."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {description}"
        threading.Event().wait(_INTERVAL_S)
