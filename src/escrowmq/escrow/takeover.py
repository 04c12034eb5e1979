"""What became of transactions while RocketMQ had the directory.

It asks about a copy of a half, a new one each time, and settles that copy; the half itself, and
copies that an end passed by, stay as they were. A stop saves how far it was, a crash does not. So
a half that looks open is over if any copy of it is, or if its message was delivered or discarded.
"""

from __future__ import annotations

from typing import Protocol

from escrowmq.escrow.halves import Half
from escrowmq.escrow.shapes import CHECK_TIMES, HalfFacts, is_laid_by_us
from escrowmq.escrow.verdict import State
from escrowmq.message import names
from escrowmq.message.properties import find_property
from escrowmq.message.record import StoredRecord
from escrowmq.message.sysflag import TRANSACTION_COMMIT, transaction_type

_COPIED = f"{CHECK_TIMES}\x01".encode()


class Delivered(Protocol):
    def find_by_key(self, topic: str, key: str, *, count_max: int = 32) -> list[StoredRecord]: ...


class Takeover:
    """Notes of a start: was RocketMQ here, and what has it settled?"""

    def __init__(self) -> None:
        self.was_here = False
        self._settled: dict[tuple[str, bytes], State] = {}

    def settled(self, facts: HalfFacts | None, state: State) -> None:
        """One of its ops says so, of this half or of a copy of it."""
        self.was_here = True
        if facts is not None and facts.key:
            self._settled[facts.group, facts.key] = state

    def saw(self, properties: bytes) -> None:
        """The properties of a half that looks open."""
        if _COPIED in properties or not is_laid_by_us(properties):
            self.was_here = True

    def outcome(self, half: Half, store: Delivered) -> State | None:
        """None: it is as open as it looks."""
        if not half.key:
            return None
        key = half.key.decode("utf-8", "replace")
        for record in store.find_by_key(half.topic, key):
            is_final = transaction_type(record.sys_flag) == TRANSACTION_COMMIT
            if is_final and find_property(record.properties, b"PGROUP") == half.group.encode():
                return State.COMMITTED
        settled = self._settled.get((half.group, half.key))
        if settled is not None:
            return settled
        for record in store.find_by_key(names.STRANDED_TOPIC, key):
            if record.log_offset > half.log_offset:  # else it was resumed since
                return State.STRANDED
        return None
