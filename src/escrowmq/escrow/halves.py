"""The open halves: what is needed to decide, to ask and to list each, and no more.

There may be a million of them, so an entry is small: the message itself stays in the log.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import msgspec


class Attempt(NamedTuple):
    """Whose batch a half belongs to: his decision settles it, and nobody is asked."""

    writer: str
    batch: int
    name: str
    fence: int


class Half(msgspec.Struct, gc=False):
    """One that is not settled: open, or stranded."""

    queue_offset: int
    log_offset: int
    size: int
    topic: str
    queue_id: int
    group: str
    key: bytes
    parked_ms: int
    due_ms: int
    sender: Hashable | None = None  # the line that it came by
    checks: int = 0  # that were handed to a socket
    is_stranded: bool = False
    is_deciding: bool = False  # its records are in this turn's batch
    why: str = ""  # why it is stranded, or cannot be asked about
    older: tuple[int, ...] = ()  # places it had before it was appended again
    attempt: Attempt | None = None

    @property
    def is_unreadable(self) -> bool:
        """The log could not give it when it was last asked."""
        return self.why.startswith("unreadable")


@dataclass(slots=True)
class Load:
    count: int = 0
    size: int = 0


_NO_LOAD = Load()


class OpenHalves:
    """By place, by unique key, and how many each group has."""

    def __init__(self) -> None:
        self._by_offset: dict[int, Half] = {}
        # By key alone, as keys are unique; of several groups with one key, the others by both.
        self._by_key: dict[bytes | tuple[str, bytes], int] = {}
        self._names: dict[str, str] = {}  # topics and groups, once each
        self._loads: dict[str, Load] = {}
        self.by_topic: dict[str, int] = {}
        self.total = Load()
        self.stranded = 0  # of them

    def __len__(self) -> int:
        return len(self._by_offset)

    def __iter__(self) -> Iterator[Half]:
        return iter(self._by_offset.values())

    def name(self, text: str) -> str:
        """The one object for this name: a million halves share it."""
        return self._names.setdefault(text, text)

    def add(self, half: Half) -> None:
        self._by_offset[half.queue_offset] = half
        self.add_key(half)
        self.stranded += half.is_stranded
        self._account(half, 1)

    def add_key(self, half: Half) -> None:
        """It is the one that its key leads to."""
        key = half.key
        if key:
            taken = self._by_key.get(key)
            first = None if taken is None else self._by_offset.get(taken)
            is_taken = first is not None and first.group != half.group
            self._by_key[(half.group, key) if is_taken else key] = half.queue_offset

    def remove(self, half: Half) -> None:
        del self._by_offset[half.queue_offset]
        self.stranded -= half.is_stranded
        if self._by_key.get(half.key) == half.queue_offset:
            del self._by_key[half.key]
        elif self._by_key.get((half.group, half.key)) == half.queue_offset:
            del self._by_key[half.group, half.key]
        self._account(half, -1)

    def strand(self, half: Half) -> None:
        half.is_stranded = True
        self.stranded += 1

    def unstrand(self, half: Half) -> None:
        half.is_stranded = False
        self.stranded -= 1

    def find(self, queue_offset: int) -> Half | None:
        return self._by_offset.get(queue_offset)

    def find_by_key(self, key: bytes, group: str | None = None) -> Half | None:
        """Of this group, or of any."""
        half = self._by_offset.get(self._by_key.get(key, -1))
        if group is None or (half is not None and half.group == group):
            return half
        return self._by_offset.get(self._by_key.get((group, key), -1))

    def first(self) -> Half | None:
        """The one that has been in the log for longest."""
        return next(iter(self._by_offset.values()), None)

    def load_of(self, group: str) -> Load:
        return self._loads.get(group) or _NO_LOAD

    def _account(self, half: Half, sign: int) -> None:
        load = self._loads.get(half.group)
        if load is None:
            load = self._loads[self.name(half.group)] = Load()
        size, total, topic, by_topic = sign * half.size, self.total, half.topic, self.by_topic
        load.count += sign
        load.size += size
        total.count += sign
        total.size += size
        if not load.count:
            del self._loads[half.group]
        count = by_topic.get(topic, 0) + sign
        if count:
            by_topic[topic] = count
        else:
            del by_topic[topic]
