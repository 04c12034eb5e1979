"""Keys of settled halves after a start: a send that comes late once more is still recognised.

Only so many of the last halves are looked at, without their bodies, so that a start takes no
longer the longer the log is.
"""

from __future__ import annotations

from typing import Final

from escrowmq.escrow.escrow import Escrow
from escrowmq.escrow.recoveredlog import RecoveredLog
from escrowmq.escrow.shapes import facts_of
from escrowmq.message import names

LOOKED_AT_MAX: Final = 16_384  # halves: a fraction of a second of a start


def remember_settled(escrow: Escrow, store: RecoveredLog) -> None:
    """Of several with one key, the last is the one that lived."""
    end = escrow.settled.next
    begin = max(store.min_offset(names.HALF_TOPIC, 0), end - LOOKED_AT_MAX)
    for half in store.glances(names.HALF_TOPIC, 0, begin, end):
        state = escrow.settled.state(half.queue_offset)
        if state is None or not state.is_settled:
            continue
        facts = facts_of(half)
        if facts is not None and facts.key:
            group = escrow.open.name(facts.group)
            escrow.remembered[facts.key] = group, half.queue_offset, half.log_offset
