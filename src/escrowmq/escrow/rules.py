"""What an escrow may hold and how long it waits, and what it has seen so far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from escrowmq.metrics import Distribution

# RocketMQ's bounds for the time from half to decision, and the times in which most of ours end.
FINISH_SECONDS: Final = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 5, 15, 60, 300, 1800, 7200, 86400)


@dataclass(frozen=True, slots=True, kw_only=True)
class EscrowRules:
    immunity_ms: int = 6_000
    interval_ms: int = 30_000
    checks_max: int = 15
    age_max_ms: int = 72 * 3_600_000
    backoff: float = 1.0  # each wait is so many times the one before
    backoff_max_ms: int = 3_600_000
    open_max: int = 2_000_000
    open_bytes_max: int = 64 << 30
    group_open_max: int = 1_000_000
    group_open_bytes_max: int = 32 << 30
    piece_bytes: int = 1 << 20  # of a decision over many halves goes to the log at a time
    intervals_ms: dict[str, int] = field(default_factory=dict)  # by topic or group
    immunities_ms: dict[str, int] = field(default_factory=dict)

    def immunity_of(self, topic: str, group: str, wished_ms: int | None) -> int:
        """How long a half is left alone: as it wishes itself, or its topic, or its group."""
        if wished_ms is not None:
            return wished_ms
        by_topic, by_group = self.immunities_ms.get(topic), self.immunities_ms.get(group)
        return by_topic or by_group or self.immunity_ms

    def interval_of(self, topic: str, group: str, checks: int) -> int:
        """How long to wait after so many checks."""
        by_topic, by_group = self.intervals_ms.get(topic), self.intervals_ms.get(group)
        interval = by_topic or by_group or self.interval_ms
        if self.backoff > 1 and checks > 1:
            grown = interval * self.backoff ** min(checks - 1, 64)
            interval = max(interval, int(min(grown, self.backoff_max_ms)))
        return interval


@dataclass(slots=True)
class Counts:
    """Since the start; shown as metrics."""

    parked: int = 0
    committed: dict[str, int] = field(default_factory=dict)  # by topic
    rolled_back: dict[str, int] = field(default_factory=dict)
    stranded: int = 0
    finish_seconds: Distribution = field(default_factory=lambda: Distribution(FINISH_SECONDS))
    repeats: int = 0
    contradictions: int = 0
    duplicate_sends: int = 0
    unreadable: int = 0
