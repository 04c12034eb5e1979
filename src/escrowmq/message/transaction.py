"""What can be said of a transaction, and what can have become of it.

Verdicts and states, as the escrow's own modules know them; clients know them too.
"""

from __future__ import annotations

import enum
from typing import Final


class Verdict(enum.IntEnum):
    """By RocketMQ's numbers, which are those of the sysFlag."""

    UNKNOWN = 0
    COMMIT = 8
    ROLLBACK = 12


class TransactionState(enum.IntEnum):
    """Two bits. A half is in one of these, and leaves OPEN and STRANDED only for good."""

    OPEN = 0
    COMMITTED = 1
    ROLLED_BACK = 2
    STRANDED = 3  # asked about as often as allowed, or too old: it waits for an operator

    @property
    def text(self) -> str:
        return self.name.lower()

    @property
    def is_decided(self) -> bool:
        return self in (TransactionState.COMMITTED, TransactionState.ROLLED_BACK)


# Names of a module are found ten times faster than members of an enum: every commit needs these.
COMMITTED: Final = TransactionState.COMMITTED
ROLLED_BACK: Final = TransactionState.ROLLED_BACK
STRANDED: Final = TransactionState.STRANDED
COMMIT: Final = Verdict.COMMIT

STATE_BY_VERDICT = {
    Verdict.COMMIT: TransactionState.COMMITTED,
    Verdict.ROLLBACK: TransactionState.ROLLED_BACK,
}


__all__ = [
    "COMMIT",
    "COMMITTED",
    "ROLLED_BACK",
    "STATE_BY_VERDICT",
    "STRANDED",
    "TransactionState",
    "Verdict",
]
