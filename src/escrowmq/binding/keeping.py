"""What every Escrow knows about its markers: whose they are, and for how long they stay."""

from __future__ import annotations

from escrowmq.binding.caretaker import Chores
from escrowmq.binding.held import AsyncHeldMessages, HeldMessages
from escrowmq.binding.marker import checked_kept_ms
from escrowmq.client.messages import ReceivedMessage
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import ConfigError


class Keeping:
    def __init__(
        self, *, group: str, kept_ms: int, forget_acknowledged: bool, clock: Clock | None
    ) -> None:
        self._group = group
        self._kept_ms = checked_kept_ms(kept_ms)
        self._forget_acknowledged = forget_acknowledged
        self._clock = clock or SystemClock()
        self._chores = Chores(self._clock)

    def _has_ended(self, tx: HeldMessages | AsyncHeldMessages) -> None:
        """If the broker has acknowledged that, nobody asks about its marker any more."""
        if self._forget_acknowledged and tx.outcome is not None and tx.outcome.acknowledged:
            self._chores.acknowledged(tx.id)

    def _may_be_forgotten(self, message: ReceivedMessage) -> bool:
        """Its marker, by age."""
        return self._clock.now_ms() - message.born_ms >= self._kept_ms

    def _forgets_before_ms(self, older_than_ms: int | None) -> int:
        age_ms = self._kept_ms if older_than_ms is None else older_than_ms
        if age_ms < self._kept_ms:
            raise ConfigError(f"markers are kept for {self._kept_ms} ms; kept_ms=… changes that")
        return self._clock.now_ms() - age_ms
