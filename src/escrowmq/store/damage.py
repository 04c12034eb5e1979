"""What was found to be damaged since the store was opened: logged, counted, and kept for operators.

Whoever finds damage reports it here once. A place is a path relative to the directory of the store,
with a position if there is one. What can be repaired from the log is repaired before the report.
"""

from __future__ import annotations

import enum
import logging
from collections import Counter, deque
from dataclasses import dataclass
from typing import Final

log = logging.getLogger(__name__)

_KEPT_MAX: Final = 100


class DamageKind(enum.Enum):
    """What kind of file is damaged. The values are labels of a metric."""

    LOG = "log"
    QUEUE = "queue"
    INDEX = "index"
    CHECKPOINT = "checkpoint"
    FLUSH_MARKS = "flush_marks"
    CONFIG = "config"
    SNAPSHOT = "snapshot"
    AGES = "ages"


@dataclass(frozen=True, slots=True)
class DamageReport:
    kind: DamageKind
    place: str
    description: str
    is_repaired: bool  # nothing is lost: the content was restored from the log or from a copy


class DamageReports:
    """Collects reports. Only the last ones are kept, and all are counted."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[DamageKind, bool]] = Counter()  # by kind and is_repaired
        self.recent: deque[DamageReport] = deque(maxlen=_KEPT_MAX)

    def add(self, kind: DamageKind, place: str, description: str, *, is_repaired: bool) -> None:
        """Report damage that was not reported before."""
        self.counts[kind, is_repaired] += 1
        self.recent.append(DamageReport(kind, place, description, is_repaired))
        log.error(
            "damage found kind=%s place=%s repaired=%s: %s",
            kind.value,
            place,
            "yes" if is_repaired else "no",
            description,
        )

    @property
    def total(self) -> int:
        return self.counts.total()
