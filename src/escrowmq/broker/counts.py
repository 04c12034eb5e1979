"""What the broker has done, as plain numbers: moved once per turn, per pull or per request.

`broker/metrics.py` reads them when somebody asks.

What is kept for each topic and group is bounded by those that exist: `forget` drops the rest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Sequence
from typing import Any, Final, Protocol

from escrowmq.broker.topics import TIMER_TOPIC
from escrowmq.message import names
from escrowmq.message.newrun import ToAppend
from escrowmq.metrics import SECONDS, Distribution
from escrowmq.store.placed import Placed
from escrowmq.wire.codes import ResponseCode
from escrowmq.wire.fastpath import Request

NORMAL: Final = "normal"
DELAY: Final = "delay"
TRANSACTION: Final = "transaction"
_LATER: Final = frozenset((names.SCHEDULE_TOPIC, TIMER_TOPIC))  # where delayed messages wait

KIB: Final = 1024
MESSAGE_BYTES: Final = (KIB, 4 * KIB, 512 * KIB, KIB * KIB, 2 * KIB * KIB, 4 * KIB * KIB)
APPEND_RECORDS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Sent(Protocol):
    """A send whose records were appended: `count` of them from `first` on, or one run."""

    request: Request[Any]
    first: int
    count: int
    is_alone: bool


class Counts:
    def __init__(self, elapsed_s: Callable[[], float] = lambda: 0.0) -> None:
        self._elapsed_s = elapsed_s
        self.turn_began_s: Callable[[], float] = elapsed_s  # whoever makes the turns knows better
        self.requests: defaultdict[int, int] = defaultdict(int)  # by request code
        self.refused: defaultdict[tuple[int, int], int] = defaultdict(int)  # and response code
        self.messages_in: dict[tuple[str, str], Distribution] = {}  # topic, kind: their sizes
        self.messages_out: dict[tuple[str, str], list[int]] = {}  # topic, group: messages, bytes
        self.stored = 0  # messages, of any topic
        self.fetched = 0
        self.appends = Distribution(APPEND_RECORDS)
        self.send_seconds = Distribution(SECONDS)

    def appended(
        self, sends: Sequence[Sent], records: Sequence[ToAppend], placed: Sequence[Placed]
    ) -> None:
        """Once per append: how much came for each topic."""
        if records:
            count = len(records) + sum([len(place.run.sizes) - 1 for place in placed if place.run])
            self.appends.observe(count)
            self.stored += count
        usual = 0
        fresh: dict[tuple[str, int], int] = {}
        for send in sends:
            if send.is_alone:
                alike = records[send.first].topic, placed[send.first].size
                fresh[alike] = fresh.get(alike, 0) + 1
        for (topic, size), times in fresh.items():
            if topic not in _LATER:
                self._sizes_of(topic, NORMAL).observe(size, times)
                usual += times
        if usual < len(sends):
            self._appended_unusual(sends, records, placed)

    def _appended_unusual(
        self, sends: Sequence[Sent], records: Sequence[ToAppend], placed: Sequence[Placed]
    ) -> None:
        """Batches, and what is delayed: it counts for the topic it was sent to."""
        for send in sends:
            topic = records[send.first].topic
            if topic in _LATER:
                topic = send.request.head.fields.topic
                self.came(topic, DELAY, placed[send.first].size)
            elif not send.is_alone:
                places = placed[send.first : send.first + send.count]
                run = places[0].run
                sizes = run.sizes if run else [place.size for place in places]
                for size, times in Counter(sizes).items():
                    self._sizes_of(topic, NORMAL).observe(size, times)

    def came(self, topic: str, kind: str, size: int) -> None:
        """One message that was stored."""
        self._sizes_of(topic, kind).observe(size)

    def _sizes_of(self, topic: str, kind: str) -> Distribution:
        found = self.messages_in.get((topic, kind))
        if found is None:
            found = self.messages_in[topic, kind] = Distribution(MESSAGE_BYTES)
        return found

    def answered(self, sends: Sequence[Sent], code: int, began_s: float) -> None:
        """Once per turn, or per flush that it waited for."""
        if sends:
            self.send_seconds.observe(self._elapsed_s() - began_s, len(sends))
        if code != ResponseCode.SUCCESS:
            for send in sends:
                self.refused[send.request.head.code, code] += 1

    def pulled(self, topic: str, group: str, messages: int, size: int) -> None:
        counted = self.messages_out.get((topic, group))
        if counted is None:
            counted = self.messages_out[topic, group] = [0, 0]
        self.fetched += messages
        counted[0] += messages
        counted[1] += size

    def forget(self, topics: Container[str], groups: Container[str]) -> None:
        """Everything but these, which are there."""
        for came in [key for key in self.messages_in if key[0] not in topics]:
            del self.messages_in[came]
        for went in [
            key for key in self.messages_out if key[0] not in topics or key[1] not in groups
        ]:
            del self.messages_out[went]
