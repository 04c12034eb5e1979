"""What was promised to whom, and what must be true of it in the end.

Bodies name their messages: `plain/RAW/17` is the seventeenth of the plain sender RAW. What a sender
may rely on, with `acknowledged` meaning that the broker said so:

  plain, one attempt      acknowledged: there once. Refused: not there. Else: once or not at all.
  plain, with retries     acknowledged: there, if twice then under one key.
  transactional           committed: there once. Rolled back: never, for nobody.
  order                   what was acknowledged before the next was sent lies before it.
  a consumer              everything that is there, at least once; in its queue's order if orderly.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from tests.interop.records import Record

Place = tuple[str, int]  # topic and queue


class Fate(Enum):
    SENT = "sent"  # and nobody knows more
    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"
    OPEN = "open"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"


@dataclass
class Ledger:
    fates: dict[bytes, Fate] = field(default_factory=dict)
    consumed: defaultdict[str, Counter[bytes]] = field(
        default_factory=lambda: defaultdict(Counter)
    )  # by group
    _read_to: dict[tuple[str, Place], int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)  # found while it ran

    def record(self, body: bytes, fate: Fate) -> None:
        self.fates[body] = fate

    def consume(self, group: str, body: bytes) -> None:
        if self.fates.get(body) is Fate.ROLLED_BACK:
            self.violations.append(f"{group} received {body!r}, which was rolled back")
        if self.fates.get(body) is Fate.OPEN:
            self.violations.append(f"{group} received {body!r}, which was not decided")
        self.consumed[group][body] += 1

    def consume_in_order(self, group: str, place: Place, queue_offset: int, body: bytes) -> None:
        """It may go back to what was not noted as read, and may skip nothing."""
        before = self._read_to.get((group, place), -1)
        if queue_offset > before + 1:
            self.violations.append(
                f"{group} skipped from offset {before} to {queue_offset} of {place}"
            )
        self._read_to[group, place] = queue_offset
        self.consume(group, body)

    def is_read_by(self, groups: Iterable[str]) -> bool:
        return all(self.consumed[group] for group in groups)

    def count(self, fate: Fate) -> int:
        return sum(1 for found in self.fates.values() if found is fate)

    def missing(self, visible: Iterable[bytes]) -> list[bytes]:
        """What has to be there and is not, yet."""
        there = set(visible)
        wanted = (Fate.ACKNOWLEDGED, Fate.COMMITTED)
        return [body for body, fate in self.fates.items() if fate in wanted and body not in there]

    def unread(self, group: str, visible: Iterable[bytes]) -> list[bytes]:
        return [body for body in visible if body not in self.consumed[group]]

    # --- the verdict -----------------------------------------------------------------------------

    def check(self, stored: Mapping[Place, list[Record]]) -> list[str]:
        """Everything that is wrong with what lies in the queues at the end."""
        copies: defaultdict[bytes, list[Record]] = defaultdict(list)
        for records in stored.values():
            for record in records:
                copies[record.body].append(record)
        found = [*self.violations]
        found += [
            f"{body!r} was acknowledged or committed, but is missing"
            for body in self.missing(copies)
        ]
        for body, records in copies.items():
            found += self._wrong_with(body, records)
        for place, records in stored.items():
            found += self._out_of_order(place, records)
        return found

    def _wrong_with(self, body: bytes, records: list[Record]) -> list[str]:
        fate = self.fates.get(body)
        found = []
        if fate is None:
            found.append(f"{body!r} was never sent")
        elif fate in (Fate.ROLLED_BACK, Fate.REFUSED, Fate.OPEN):
            found.append(f"{body!r} is stored, although it was {fate.value}")
        keys = {record.properties.get("UNIQ_KEY") for record in records}
        may_be_twice = body.startswith(b"plain/client") and len(keys) == 1
        if len(records) > 1 and not may_be_twice:
            found.append(f"{body!r} is stored {len(records)} times, under {len(keys)} keys")
        return found

    def _out_of_order(self, place: Place, records: list[Record]) -> list[str]:
        """Of each plain sender, those that were acknowledged; the first copy counts."""
        last: dict[bytes, int] = {}
        seen: set[bytes] = set()
        found = []
        for record in records:
            sender, _, number = record.body.rpartition(b"/")
            is_first = record.body not in seen
            seen.add(record.body)
            if is_first and self.fates.get(record.body) is Fate.ACKNOWLEDGED:
                if int(number) < last.get(sender, -1):
                    found.append(f"{record.body!r} is stored after {last[sender]} in {place}")
                last[sender] = int(number)
        return found
