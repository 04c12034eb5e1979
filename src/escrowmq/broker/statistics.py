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

from escrowmq.message import names
from escrowmq.message.batch import Appendable
from escrowmq.message.names import TIMER_TOPIC
from escrowmq.metrics import LATENCY_BOUNDS_S, Distribution
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.requests import Request
from escrowmq.store.commit_log import AppendResult

NORMAL: Final = "normal"
DELAY: Final = "delay"
TRANSACTION: Final = "transaction"
_DELAYED_TOPICS: Final = frozenset(
    (names.SCHEDULE_TOPIC, TIMER_TOPIC)
)  # where delayed messages wait

KIB: Final = 1024
MESSAGE_BYTES_BUCKETS: Final = (KIB, 4 * KIB, 512 * KIB, KIB * KIB, 2 * KIB * KIB, 4 * KIB * KIB)
APPEND_RECORDS_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class AppendedSend(Protocol):
    """A send whose records were appended: `count` of them from `first` on, or one run."""

    request: Request[Any]
    first_index: int
    count: int
    is_single: bool


class BrokerCounters:
    def __init__(self, elapsed_s: Callable[[], float] = lambda: 0.0) -> None:
        self._elapsed_s = elapsed_s
        self.turn_start_s: Callable[[], float] = elapsed_s  # whoever makes the turns knows better
        self.requests: defaultdict[int, int] = defaultdict(int)  # by request code
        self.refused: defaultdict[tuple[int, int], int] = defaultdict(int)  # and response code
        self.messages_in: dict[tuple[str, str], Distribution] = {}  # topic, kind: their sizes
        self.messages_out: dict[tuple[str, str], list[int]] = {}  # topic, group: messages, bytes
        self.stored_messages = 0  # messages, of any topic
        self.fetched_messages = 0
        self.records_per_append = Distribution(APPEND_RECORDS_BUCKETS)
        self.send_seconds = Distribution(LATENCY_BOUNDS_S)

    def record_append(
        self,
        sends: Sequence[AppendedSend],
        records: Sequence[Appendable],
        results: Sequence[AppendResult],
    ) -> None:
        """Once per append: how much came for each topic."""
        if records:
            count = len(records) + sum([len(place.run.sizes) - 1 for place in results if place.run])
            self.records_per_append.observe(count)
            self.stored_messages += count
        usual = 0
        fresh: dict[tuple[str, int], int] = {}
        for send in sends:
            if send.is_single:
                alike = records[send.first_index].topic, results[send.first_index].size
                fresh[alike] = fresh.get(alike, 0) + 1
        for (topic, size), times in fresh.items():
            if topic not in _DELAYED_TOPICS:
                self._message_sizes(topic, NORMAL).observe(size, times)
                usual += times
        if usual < len(sends):
            self._record_unusual_sends(sends, records, results)

    def _record_unusual_sends(
        self,
        sends: Sequence[AppendedSend],
        records: Sequence[Appendable],
        results: Sequence[AppendResult],
    ) -> None:
        """Batches, and what is delayed: it counts for the topic it was sent to."""
        for send in sends:
            topic = records[send.first_index].topic
            if topic in _DELAYED_TOPICS:
                topic = send.request.head.fields.topic
                self.record_message(topic, DELAY, results[send.first_index].size)
            elif not send.is_single:
                places = results[send.first_index : send.first_index + send.count]
                run = places[0].run
                sizes = run.sizes if run else [place.size for place in places]
                for size, times in Counter(sizes).items():
                    self._message_sizes(topic, NORMAL).observe(size, times)

    def record_message(self, topic: str, message_type: str, size: int) -> None:
        """One message that was stored."""
        self._message_sizes(topic, message_type).observe(size)

    def _message_sizes(self, topic: str, message_type: str) -> Distribution:
        found = self.messages_in.get((topic, message_type))
        if found is None:
            found = self.messages_in[topic, message_type] = Distribution(MESSAGE_BYTES_BUCKETS)
        return found

    def record_responses(self, sends: Sequence[AppendedSend], code: int, start_s: float) -> None:
        """Once per turn, or per flush that it waited for."""
        if sends:
            self.send_seconds.observe(self._elapsed_s() - start_s, len(sends))
        if code != ResponseCode.SUCCESS:
            for send in sends:
                self.refused[send.request.head.code, code] += 1

    def record_pull(self, topic: str, group: str, messages: int, size: int) -> None:
        counted = self.messages_out.get((topic, group))
        if counted is None:
            counted = self.messages_out[topic, group] = [0, 0]
        self.fetched_messages += messages
        counted[0] += messages
        counted[1] += size

    def purge(self, topics: Container[str], groups: Container[str]) -> None:
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

Traffic = tuple[int, int]  # messages, bytes
NO_TRAFFIC: Final[Traffic] = (0, 0)


class Totals(NamedTuple):
    """Since the start."""

    put: int = 0  # messages stored
    fetched: int = 0  # messages pulled
    found: int = 0  # pulls that brought something
    missed: int = 0  # pulls that did not


@dataclass(frozen=True, slots=True)
class TrafficSample:
    taken_ms: int
    totals: Totals
    traffic_in: dict[str, Traffic]  # by topic
    traffic_out: dict[tuple[str, str], Traffic]  # by topic and group


@dataclass(frozen=True, slots=True)
class TrafficRate:
    count: int
    per_s: float


def utc_day(now_ms: int) -> int:
    return now_ms // _DAY_MS


class Statistics:
    def __init__(
        self, counters: BrokerCounters, *, now_ms: int = 0, day_of: Callable[[int], int] = utc_day
    ) -> None:
        self._counters = counters
        self._day_of = day_of
        first = self.take_sample(now_ms)
        self._minute_samples: deque[TrafficSample] = deque(
            [first], maxlen=60
        )  # ten minutes, in fact
        self._hour_samples: deque[TrafficSample] = deque([first], maxlen=6)
        self._day_samples: deque[TrafficSample] = deque([first], maxlen=24)
        self._today = day_of(now_ms)
        self.morning = self.yesterday_morning = first.totals

    def tick(self, now_ms: int) -> None:
        """Now and then; most times there is nothing to do."""
        if 0 <= now_ms - self._minute_samples[-1].taken_ms < MINUTE_STEP_MS:
            return
        sample = self.take_sample(now_ms)
        if now_ms < self._minute_samples[-1].taken_ms or self._minute_samples[0].taken_ms == 0:
            # The clock was set back, or this is the first time that we hear of it.
            for samples in (self._minute_samples, self._hour_samples, self._day_samples):
                samples.clear()
        for samples, step_ms in (
            (self._minute_samples, MINUTE_STEP_MS),
            (self._hour_samples, HOUR_STEP_MS),
            (self._day_samples, DAY_STEP_MS),
        ):
            if not samples or now_ms - samples[-1].taken_ms >= step_ms:
                samples.append(sample)
        if self._day_of(now_ms) != self._today:
            self._today = self._day_of(now_ms)
            self.yesterday_morning, self.morning = self.morning, sample.totals

    def take_sample(self, now_ms: int) -> TrafficSample:
        counts = self._counters
        came: dict[str, Traffic] = {}
        for (topic, _), sizes in counts.messages_in.items():
            count, size = came.get(topic, NO_TRAFFIC)
            came[topic] = count + sizes.count, size + int(sizes.sum)
        went = {key: (count, size) for key, (count, size) in counts.messages_out.items()}
        pulls = sum(counts.requests.get(code, 0) for code in _PULLS)
        missed = sum(
            count
            for (code, why), count in counts.refused.items()
            if code in _PULLS and why != ResponseCode.SUCCESS
        )
        totals = Totals(
            counts.stored_messages, counts.fetched_messages, max(0, pulls - missed), missed
        )
        return TrafficSample(now_ms, totals, came, went)

    # --- what is asked ---------------------------------------------------------------------------

    def rates(self, field: str, now_ms: int) -> tuple[float, float, float]:
        """Of a field of Totals, over ten seconds, one minute and ten minutes."""
        present = self.take_sample(now_ms)
        return (
            self._rate(self._sample_before(now_ms, MINUTE_STEP_MS), present, field),
            self._rate(self._sample_before(now_ms, 60_000), present, field),
            self._rate(self._sample_before(now_ms, 600_000), present, field),
        )

    def topic_rates(
        self, topic: str, index: int, now_ms: int
    ) -> tuple[TrafficRate, TrafficRate, TrafficRate]:
        """What came in a minute, an hour, a day: 0 counts messages, 1 bytes."""
        present = self.take_sample(now_ms)
        return self._rates_by_span(lambda s: s.traffic_in.get(topic, NO_TRAFFIC)[index], present)

    def group_rates(
        self, topic: str, group: str, index: int, now_ms: int
    ) -> tuple[TrafficRate, TrafficRate, TrafficRate]:
        present = self.take_sample(now_ms)
        return self._rates_by_span(
            lambda s: s.traffic_out.get((topic, group), NO_TRAFFIC)[index], present
        )

    def broker_rates(self, field: str, now_ms: int) -> tuple[TrafficRate, TrafficRate, TrafficRate]:
        present = self.take_sample(now_ms)
        return self._rates_by_span(lambda s: int(getattr(s.totals, field)), present)

    def _rates_by_span(
        self, value: Callable[[TrafficSample], int], current: TrafficSample
    ) -> tuple[TrafficRate, TrafficRate, TrafficRate]:
        since = (
            self._sample_before(current.taken_ms, 60_000),
            self._hour_samples[0],
            self._day_samples[0],
        )
        minute, hour, day = (_rate_between(value, sample, current) for sample in since)
        return minute, hour, day

    def _sample_before(self, now_ms: int, span_ms: int) -> TrafficSample:
        """The newest sample that is at least so old; the oldest if none is."""
        for sample in reversed(self._minute_samples):
            if now_ms - sample.taken_ms >= span_ms:
                return sample
        return self._minute_samples[0]

    @staticmethod
    def _rate(earlier: TrafficSample, current: TrafficSample, field: str) -> float:
        return _rate_between(lambda s: int(getattr(s.totals, field)), earlier, current).per_s


def _rate_between(
    value: Callable[[TrafficSample], int], earlier: TrafficSample, current: TrafficSample
) -> TrafficRate:
    # A topic that was deleted and made again begins at 0.
    count = max(0, value(current) - value(earlier))
    elapsed_ms = max(1_000, current.taken_ms - earlier.taken_ms)
    return TrafficRate(count, count * 1000 / elapsed_ms)
