"""What is compared with the ledger, within which limits, and how the differences are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

DAY_MS: Final = 86_400_000
KINDS: Final = {
    "row_without_message": "committed in the database, but a message is missing",
    "message_without_row": "a message went out, but the database knows nothing of it",
    "delivered_twice": "a message is there twice, and nothing keeps its effect from being doubled",
    "consumed_without_effect": "delivered, but without effect at the consumer",
    "stranded": "asked about too often; an operator has to decide",
    "still_open": "undecided for longer than it may be",
    "amount_differs": "sender and receiver booked different amounts",
}
TAKEN_ONCE: Final = "taken_once"  # delivered again, but every consumer has an inbox: no difference


@dataclass(frozen=True, slots=True)
class Limits:
    """`since_ms`: what is older is not compared, since databases forget (0: everything)."""

    now_ms: int
    grace_ms: int = 10 * 60_000
    open_ms: int = 60 * 60_000
    since_ms: int = 0


@dataclass(frozen=True, slots=True)
class Sides:
    """What the ledger is compared with. Frames that are None are not compared.

    markers   id, outcome, at_ms, producer_group, messages: the table of the database binding
    inbox     consumer_group, message_id, at_ms: likewise
    sent      transaction_id, perhaps amount and at_ms: the sender's own books
    received  the same of the receiver

    Given markers and books of the sender, both must know what was committed.
    """

    markers: DataFrame | None = None
    inbox: DataFrame | None = None
    sent: DataFrame | None = None
    received: DataFrame | None = None
    groups: Sequence[str] = ()  # of producers whose databases these are; empty: all
    consumers: Mapping[str, Sequence[str]] = field(default_factory=dict)  # group: its topics
