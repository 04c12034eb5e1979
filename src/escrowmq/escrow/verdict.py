"""Verdicts and states, as the escrow's own modules know them; clients know them too."""

from __future__ import annotations

from escrowmq.message.verdict import STATE_OF, State, Verdict

__all__ = ["STATE_OF", "State", "Verdict"]
