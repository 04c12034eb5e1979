"""Brokers that are slow or fail are passed over for a while; the slower, the longer.

    an answer took      passed over for
    550 ms              2 s
    1.8 s               5 s
    3 s                 6 s
    5 s, or it failed   10 s
    15 s                30 s

The steps are RocketMQ's. Passing over is never a refusal: if nobody else is there, the one whose
time ends first is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from escrowmq.client.messages import Queue

_STEPS: Final = ((15.0, 30.0), (5.0, 10.0), (3.0, 6.0), (1.8, 5.0), (0.55, 2.0))
SLOW_S: Final = _STEPS[-1][0]
FAILED_S: Final = 10.0  # a failure counts as an answer that took so long


def avoided_s(latency_s: float) -> float:
    return next((avoided for slow, avoided in _STEPS if latency_s >= slow), 0.0)


class Faults:
    def __init__(self) -> None:
        self._until: dict[str, float] = {}  # by broker

    def answered(self, broker: str, latency_s: float, now_s: float) -> None:
        if latency_s >= SLOW_S:
            self._until[broker] = now_s + avoided_s(latency_s)
        elif self._until:
            self._until.pop(broker, None)

    def failed(self, broker: str, now_s: float) -> None:
        self._until[broker] = now_s + avoided_s(FAILED_S)

    def is_avoided(self, broker: str, now_s: float) -> bool:
        return self._until.get(broker, 0.0) > now_s

    def fit(self, queues: Sequence[Queue], tried: set[str], now_s: float) -> Sequence[Queue]:
        """Those to choose from: of brokers that are well, and were not tried for this message."""
        if not tried and not self._until:
            return queues
        untried = [queue for queue in queues if queue.broker not in tried] or queues
        well = [queue for queue in untried if not self.is_avoided(queue.broker, now_s)]
        if well:
            return well
        first = min((queue.broker for queue in untried), key=lambda name: self._until[name])
        return [queue for queue in untried if queue.broker == first]
