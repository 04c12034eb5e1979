"""The work that nobody waits for: being known to every broker, and removing rows that are done.

A broker asks those that it knows. A process that has sent nothing yet makes itself known here, so
that it can answer for one that died.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from escrowmq import blocking
from escrowmq.binding.marker import HOUR_MS, ROWS_AT_ONCE
from escrowmq.client import producer as client
from escrowmq.clock import Clock
from escrowmq.errors import EscrowError

log = logging.getLogger(__name__)

ROUND_S: Final = 10.0
EVERY_BROKER_HAS: Final = "SELF_TEST_TOPIC"
ACKNOWLEDGED_MAX: Final = 100_000  # ids that wait for their removal; age removes what is beyond


async def become_known(producer: client.Producer) -> None:
    """To every broker of the cluster that it does not have a line to."""
    try:
        route = await producer._routes.of(EVERY_BROKER_HAS)
    except EscrowError as error:
        log.warning("no broker can ask us yet group=%s: %s", producer.group, error)
        return
    for address in route.addresses.values():
        try:
            await producer._line(address)
        except EscrowError as error:
            log.warning("a broker cannot ask us yet group=%s: %s", producer.group, error)


def become_known_blocking(producer: blocking.Producer) -> None:
    producer._run(become_known(producer._inner))


class Chores:
    """What is to be removed, and when to look again."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._looked_ms = clock.now_ms()  # a start is busy enough
        self._acknowledged: deque[str] = deque(maxlen=ACKNOWLEDGED_MAX)

    def acknowledged(self, transaction_id: str) -> None:
        self._acknowledged.append(transaction_id)

    def some_acknowledged(self) -> list[str]:
        """Ids whose rows may go now; empty when there are no more."""
        waiting = min(len(self._acknowledged), ROWS_AT_ONCE)
        return [self._acknowledged.popleft() for _ in range(waiting)]

    def is_time(self) -> bool:
        """Once an hour."""
        if self._clock.now_ms() - self._looked_ms < HOUR_MS:
            return False
        self._looked_ms = self._clock.now_ms()
        return True


class Caretaker:
    """A thread that does one round of work now and then, until it is stopped."""

    def __init__(self, work: Callable[[], None], *, name: str, every_s: float = ROUND_S) -> None:
        self._work = work
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self._work()
            except Exception:
                log.exception("a round of the caretaker failed; the next one tries again")
