"""Record what the broker promised for each message, and check the promises at the end.

A body names its message: `plain/raw2/17` is message 17 of the plain sender raw2. Acknowledged means
that the broker responded with success. The promises:

  plain, one attempt     Acknowledged: stored once. Refused: not stored. Otherwise at most once.
  delayed, timer         The same, in its topic and not where it waits.
  forged                 The same: whatever a client claims, it is a message like any other.
  plain, with retries    Acknowledged: stored. Duplicates have the same unique key.
  transactional          Committed: stored once. Rolled back: never stored.
  sent back              Acknowledged: once in the retry topic, however often it was sent back.
  order                  A message is stored after those acknowledged before it was sent.
  consumer               Receives every stored message at least once; if orderly, in queue order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from tests.interop.records import Record

Queue = tuple[str, int]  # topic and queue id


class Fate(Enum):
    """The last known state of a message."""

    SENT = "sent"  # the broker has not responded
    ACKNOWLEDGED = "acknowledged"
    REFUSED = "refused"
    OPEN = "open"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"


@dataclass
class Ledger:
    """The fate of each message by its body, and what each group consumed."""

    fates: dict[bytes, Fate] = field(default_factory=dict)
    consumed: defaultdict[str, Counter[bytes]] = field(
        default_factory=lambda: defaultdict(Counter)
    )  # by group
    _last_offsets: dict[tuple[str, Queue], int] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)  # found during the run
    retries: dict[bytes, Fate] = field(default_factory=dict)  # of messages that were sent back
    refused_forgeries: int = 0
    # Counted by `check`.
    lost_count: int = 0
    doubled_count: int = 0

    def record(self, body: bytes, fate: Fate) -> None:
        self.fates[body] = fate

    def consume(self, group: str, body: bytes) -> None:
        """Record that a group received a message."""
        if self.fates.get(body) is Fate.ROLLED_BACK:
            self.violations.append(f"{group} received {body!r}, which was rolled back")
        if self.fates.get(body) is Fate.OPEN:
            self.violations.append(f"{group} received {body!r}, which was not decided")
        self.consumed[group][body] += 1

    def consume_in_order(self, group: str, queue: Queue, queue_offset: int, body: bytes) -> None:
        """Record that an orderly group received a message.

        The group may repeat messages that it has not committed, but must not skip any.
        """
        last_offset = self._last_offsets.get((group, queue), -1)
        if queue_offset > last_offset + 1:
            self.violations.append(
                f"{group} skipped from offset {last_offset} to {queue_offset} of {queue}"
            )
        self._last_offsets[group, queue] = queue_offset
        self.consume(group, body)

    def is_read_by(self, groups: Iterable[str]) -> bool:
        """Return whether each of these groups has received a message."""
        return all(self.consumed[group] for group in groups)

    def count(self, fate: Fate) -> int:
        return list(self.fates.values()).count(fate)

    def missing(self, stored: Iterable[bytes]) -> list[bytes]:
        """Return the bodies that must be stored but are not."""
        stored_bodies = set(stored)
        promised = (Fate.ACKNOWLEDGED, Fate.COMMITTED)
        return [
            body
            for body, fate in self.fates.items()
            if fate in promised and body not in stored_bodies
        ]

    def missing_retries(self, stored: Iterable[bytes]) -> list[bytes]:
        """Return the bodies that were sent back and are not in the retry topic."""
        stored_bodies = set(stored)
        return [
            body
            for body, fate in self.retries.items()
            if fate is Fate.ACKNOWLEDGED and body not in stored_bodies
        ]

    def unread(self, group: str, stored: Iterable[bytes]) -> list[bytes]:
        """Return the stored bodies that a group has not received."""
        return [body for body in stored if body not in self.consumed[group]]

    # --- checks at the end -----------------------------------------------------------------------

    def check(
        self, stored: Mapping[Queue, list[Record]], retries: Iterable[Record] = ()
    ) -> list[str]:
        """Return every violation: those found during the run, and those in the queues.

        `retries`: the messages of the retry topic to which messages were sent back.
        """
        copies: defaultdict[bytes, list[Record]] = defaultdict(list)
        for records in stored.values():
            for record in records:
                copies[record.body].append(record)
        violations = [*self.violations]
        missing = self.missing(copies)
        self.lost_count = len(missing)
        violations += [
            f"{body!r} was acknowledged or committed, but is missing" for body in missing
        ]
        violations += self._retry_violations(Counter(record.body for record in retries))
        for body, records in copies.items():
            violations += self._violations_of(body, records)
        for queue, records in stored.items():
            violations += self._out_of_order(queue, records)
        return violations

    def _retry_violations(self, counts: Counter[bytes]) -> list[str]:
        missing = self.missing_retries(counts)
        doubled = [body for body, count in counts.items() if count > 1]
        self.lost_count += len(missing)
        self.doubled_count += len(doubled)
        return [
            *(f"{body!r} was sent back, but is not in the retry topic" for body in missing),
            *(f"{body!r} is {counts[body]} times in the retry topic" for body in doubled),
            *(f"{body!r} was never sent back" for body in counts if body not in self.retries),
        ]

    def _violations_of(self, body: bytes, records: list[Record]) -> list[str]:
        fate = self.fates.get(body)
        violations = []
        if fate is None:
            violations.append(f"{body!r} was never sent")
        elif fate in (Fate.ROLLED_BACK, Fate.REFUSED, Fate.OPEN):
            violations.append(f"{body!r} is stored, although it was {fate.value}")
        keys = {record.properties.get("UNIQ_KEY") for record in records}
        is_legal_duplicate = body.startswith(b"plain/client") and len(keys) == 1
        if len(records) > 1 and not is_legal_duplicate:
            self.doubled_count += 1
            violations.append(f"{body!r} is stored {len(records)} times, under {len(keys)} keys")
        return violations

    def _out_of_order(self, queue: Queue, records: list[Record]) -> list[str]:
        """Return the acknowledged messages that are stored after a later one of their sender.

        Only the first copy of a message counts.
        """
        last_numbers: dict[bytes, int] = {}
        checked: set[bytes] = set()
        violations = []
        for record in records:
            sender, _, number = record.body.rpartition(b"/")
            is_first = record.body not in checked
            checked.add(record.body)
            is_ordered = sender.startswith((b"plain/", b"failing/"))  # delays change the order
            if is_first and is_ordered and self.fates.get(record.body) is Fate.ACKNOWLEDGED:
                if int(number) < last_numbers.get(sender, -1):
                    violations.append(
                        f"{record.body!r} is stored after {last_numbers[sender]} in {queue}"
                    )
                last_numbers[sender] = int(number)
        return violations
