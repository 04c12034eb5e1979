"""Verdicts and states, as the escrow's own modules know them; clients know them too."""

from __future__ import annotations

from escrowmq.message.verdict import (
    COMMIT,
    COMMITTED,
    ROLLED_BACK,
    STATE_OF,
    STRANDED,
    State,
    Verdict,
)

__all__ = ["COMMIT", "COMMITTED", "ROLLED_BACK", "STATE_OF", "STRANDED", "State", "Verdict"]
