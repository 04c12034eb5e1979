"""The verdict of a producer on a transaction, and the state that the broker records."""

from __future__ import annotations

import enum
from typing import Final


class Verdict(enum.IntEnum):
    """What a producer says about its transaction. The numbers are RocketMQ's, as in the sysFlag."""

    UNKNOWN = 0
    COMMIT = 8
    ROLLBACK = 12

    # The same three under RocketMQ's names.
    UNKNOW = UNKNOWN
    COMMIT_MESSAGE = COMMIT
    ROLLBACK_MESSAGE = ROLLBACK


LocalTransactionState = Verdict  # RocketMQ's name


class TransactionState(enum.IntEnum):
    """The state of a half, in two bits. COMMITTED and ROLLED_BACK are final."""

    OPEN = 0
    COMMITTED = 1
    ROLLED_BACK = 2
    STRANDED = 3  # checked as often as allowed, or too old: it waits for an operator

    @property
    def text(self) -> str:
        """The name of the state as responses and tools show it."""
        return self.name.lower()

    @property
    def is_decided(self) -> bool:
        return self in (TransactionState.COMMITTED, TransactionState.ROLLED_BACK)


# Every commit needs these: a name of a module is found ten times faster than a member of an enum.
COMMITTED: Final = TransactionState.COMMITTED
ROLLED_BACK: Final = TransactionState.ROLLED_BACK
STRANDED: Final = TransactionState.STRANDED
COMMIT: Final = Verdict.COMMIT

STATE_BY_VERDICT = {
    Verdict.COMMIT: TransactionState.COMMITTED,
    Verdict.ROLLBACK: TransactionState.ROLLED_BACK,
}
