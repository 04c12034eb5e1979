"""What the broker has done, as plain numbers: moved once per turn, per pull or per request.

`broker/metrics.py` reads them when somebody asks.

What is kept for each topic and group is bounded by those that exist: `forget` drops the rest.

Rates and totals of the last minute, hour and day, as RocketMQ's tools show them.

Nothing is counted here: the counters that there are anyway are looked at every ten seconds, and
a rate is what they have moved since. Samples of topics and groups cost memory only for those that
had traffic.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from escrowmq.broker.metadata import TIMER_TOPIC
from escrowmq.message import names
from escrowmq.message.batch import ToAppend
from escrowmq.metrics import SECONDS, Distribution
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.requests import Request
from escrowmq.store.commit_log import Placed

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


MINUTE_STEP_MS: Final = 10_000
HOUR_STEP_MS: Final = 600_000
DAY_STEP_MS: Final = 3_600_000
_DAY_MS: Final = 86_400_000
_PULLS: Final = (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)

Amount = tuple[int, int]  # messages, bytes
NOTHING: Final[Amount] = (0, 0)


class Totals(NamedTuple):
    """Since the start."""

    put: int = 0  # messages stored
    fetched: int = 0  # messages pulled
    found: int = 0  # pulls that brought something
    missed: int = 0  # pulls that did not


@dataclass(frozen=True, slots=True)
class Sample:
    taken_ms: int
    totals: Totals
    came: dict[str, Amount]  # by topic
    went: dict[tuple[str, str], Amount]  # by topic and group


@dataclass(frozen=True, slots=True)
class Moved:
    count: int
    per_s: float


def utc_day(now_ms: int) -> int:
    return now_ms // _DAY_MS


class Statistics:
    def __init__(
        self, counts: Counts, *, now_ms: int = 0, day_of: Callable[[int], int] = utc_day
    ) -> None:
        self._counts = counts
        self._day_of = day_of
        first = self.now(now_ms)
        self._minute: deque[Sample] = deque([first], maxlen=60)  # ten minutes, in fact
        self._hour: deque[Sample] = deque([first], maxlen=6)
        self._day: deque[Sample] = deque([first], maxlen=24)
        self._today = day_of(now_ms)
        self.morning = self.yesterday_morning = first.totals

    def tick(self, now_ms: int) -> None:
        """Now and then; most times there is nothing to do."""
        if 0 <= now_ms - self._minute[-1].taken_ms < MINUTE_STEP_MS:
            return
        sample = self.now(now_ms)
        if now_ms < self._minute[-1].taken_ms or self._minute[0].taken_ms == 0:
            # The clock was set back, or this is the first time that we hear of it.
            for samples in (self._minute, self._hour, self._day):
                samples.clear()
        for samples, step_ms in (
            (self._minute, MINUTE_STEP_MS),
            (self._hour, HOUR_STEP_MS),
            (self._day, DAY_STEP_MS),
        ):
            if not samples or now_ms - samples[-1].taken_ms >= step_ms:
                samples.append(sample)
        if self._day_of(now_ms) != self._today:
            self._today = self._day_of(now_ms)
            self.yesterday_morning, self.morning = self.morning, sample.totals

    def now(self, now_ms: int) -> Sample:
        counts = self._counts
        came: dict[str, Amount] = {}
        for (topic, _), sizes in counts.messages_in.items():
            count, size = came.get(topic, NOTHING)
            came[topic] = count + sizes.count, size + int(sizes.sum)
        went = {key: (count, size) for key, (count, size) in counts.messages_out.items()}
        pulls = sum(counts.requests.get(code, 0) for code in _PULLS)
        missed = sum(
            count
            for (code, why), count in counts.refused.items()
            if code in _PULLS and why != ResponseCode.SUCCESS
        )
        totals = Totals(counts.stored, counts.fetched, max(0, pulls - missed), missed)
        return Sample(now_ms, totals, came, went)

    # --- what is asked ---------------------------------------------------------------------------

    def rates(self, field: str, now_ms: int) -> tuple[float, float, float]:
        """Of a field of Totals, over ten seconds, one minute and ten minutes."""
        present = self.now(now_ms)
        return (
            self._rate(self._since(now_ms, MINUTE_STEP_MS), present, field),
            self._rate(self._since(now_ms, 60_000), present, field),
            self._rate(self._since(now_ms, 600_000), present, field),
        )

    def of_topic(self, topic: str, index: int, now_ms: int) -> tuple[Moved, Moved, Moved]:
        """What came in a minute, an hour, a day: 0 counts messages, 1 bytes."""
        present = self.now(now_ms)
        return self._spans(lambda s: s.came.get(topic, NOTHING)[index], present)

    def of_group(
        self, topic: str, group: str, index: int, now_ms: int
    ) -> tuple[Moved, Moved, Moved]:
        present = self.now(now_ms)
        return self._spans(lambda s: s.went.get((topic, group), NOTHING)[index], present)

    def of_broker(self, field: str, now_ms: int) -> tuple[Moved, Moved, Moved]:
        present = self.now(now_ms)
        return self._spans(lambda s: int(getattr(s.totals, field)), present)

    def _spans(self, value: Callable[[Sample], int], present: Sample) -> tuple[Moved, Moved, Moved]:
        since = (self._since(present.taken_ms, 60_000), self._hour[0], self._day[0])
        minute, hour, day = (_moved(value, sample, present) for sample in since)
        return minute, hour, day

    def _since(self, now_ms: int, span_ms: int) -> Sample:
        """The newest sample that is at least so old; the oldest if none is."""
        for sample in reversed(self._minute):
            if now_ms - sample.taken_ms >= span_ms:
                return sample
        return self._minute[0]

    @staticmethod
    def _rate(before: Sample, present: Sample, field: str) -> float:
        return _moved(lambda s: int(getattr(s.totals, field)), before, present).per_s


def _moved(value: Callable[[Sample], int], before: Sample, present: Sample) -> Moved:
    # A topic that was deleted and made again begins at 0.
    count = max(0, value(present) - value(before))
    elapsed_ms = max(1_000, present.taken_ms - before.taken_ms)
    return Moved(count, count * 1000 / elapsed_ms)
