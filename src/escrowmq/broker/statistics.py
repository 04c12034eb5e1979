"""What the broker has done, as counters and as rates.

    BrokerCounters   totals since the start, updated once per turn, per pull or per request;
                     `broker/metrics.py` reads them
    Statistics       rates of the last minute, hour and day, as RocketMQ's tools show them

Statistics counts nothing itself: it samples the counters every ten seconds and compares samples.
Topics and groups take memory only while they exist (`BrokerCounters.purge()`) and had traffic. A
sample shares with the one before it what has not changed: there are ninety of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeVar

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
MESSAGE_TYPES: Final = (NORMAL, DELAY, TRANSACTION)
# Where delayed messages are stored until they are due.
_DELAYED_TOPICS: Final = frozenset((names.SCHEDULE_TOPIC, TIMER_TOPIC))

# Any client can pull every topic in the name of every group, so only so many pairs are counted by
# name. The others are counted together.
TRAFFIC_PAIRS_MAX: Final = 10_000
OTHER_TRAFFIC: Final = "(other)"  # no topic and no group can have this name

KIB: Final = 1024
MESSAGE_BYTES_BUCKETS: Final = (KIB, 4 * KIB, 512 * KIB, KIB * KIB, 2 * KIB * KIB, 4 * KIB * KIB)
APPEND_RECORDS_BUCKETS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class AppendedSend(Protocol):
    """A send whose records were appended: `count` of them from `first_index` on, or one run."""

    request: Request[Any]
    first_index: int
    count: int
    is_single: bool


class BrokerCounters:
    """Totals since the start."""

    def __init__(self, elapsed_s: Callable[[], float] = lambda: 0.0) -> None:
        self._elapsed_s = elapsed_s
        self.turn_start_s: Callable[[], float] = elapsed_s  # the server replaces it
        self.requests: defaultdict[int, int] = defaultdict(int)  # by request code
        # By request code and response code.
        self.refused: defaultdict[tuple[int, int], int] = defaultdict(int)
        # By topic and message type: the sizes of the messages.
        self.messages_in: dict[tuple[str, str], Distribution] = {}
        # By topic and group: messages and bytes.
        self.messages_out: dict[tuple[str, str], list[int]] = {}
        self.stored_messages = 0
        self.fetched_messages = 0
        self.records_per_append = Distribution(APPEND_RECORDS_BUCKETS)
        self.send_seconds = Distribution(LATENCY_BOUNDS_S)

    def record_append(
        self,
        sends: Sequence[AppendedSend],
        records: Sequence[Appendable],
        results: Sequence[AppendResult],
    ) -> None:
        """Count the records of one append, and the messages of its sends by topic."""
        if records:
            in_runs = sum([len(result.run.sizes) - 1 for result in results if result.run])
            count = len(records) + in_runs
            self.records_per_append.observe(count)
            self.stored_messages += count
        # The sends of a turn are often alike, so count them by topic and size first: one
        # observation for hundreds of messages.
        plain_count = 0
        counts: dict[tuple[str, int], int] = {}
        for send in sends:
            if send.is_single:
                key = records[send.first_index].topic, results[send.first_index].size
                counts[key] = counts.get(key, 0) + 1
        for (topic, size), count in counts.items():
            if topic not in _DELAYED_TOPICS:
                self._message_sizes(topic, NORMAL).observe(size, count)
                plain_count += count
        if plain_count < len(sends):
            self._record_other_sends(sends, records, results)

    def _record_other_sends(
        self,
        sends: Sequence[AppendedSend],
        records: Sequence[Appendable],
        results: Sequence[AppendResult],
    ) -> None:
        """Count batches, and delayed messages under the topic they were sent to."""
        for send in sends:
            topic = records[send.first_index].topic
            if topic in _DELAYED_TOPICS:
                topic = send.request.head.fields.topic
                self.record_message(topic, DELAY, results[send.first_index].size)
            elif not send.is_single:
                own_results = results[send.first_index : send.first_index + send.count]
                run = own_results[0].run
                sizes = run.sizes if run else [result.size for result in own_results]
                for size, count in Counter(sizes).items():
                    self._message_sizes(topic, NORMAL).observe(size, count)

    def record_message(self, topic: str, message_type: str, size: int, count: int = 1) -> None:
        """Count stored messages of one size."""
        self._message_sizes(topic, message_type).observe(size, count)

    def _message_sizes(self, topic: str, message_type: str) -> Distribution:
        sizes = self.messages_in.get((topic, message_type))
        if sizes is None:
            sizes = self.messages_in[topic, message_type] = Distribution(MESSAGE_BYTES_BUCKETS)
        return sizes

    def record_responses(self, sends: Sequence[AppendedSend], code: int, start_s: float) -> None:
        """Count the responses to the sends of a turn, which had to wait until now."""
        self.record_send_responses(len(sends), start_s)
        if code != ResponseCode.SUCCESS:
            for send in sends:
                self.refused[send.request.head.code, code] += 1

    def record_send_responses(self, count: int, start_s: float) -> None:
        """Observe how long sends have waited for their responses."""
        if count:
            self.send_seconds.observe(self._elapsed_s() - start_s, count)

    def record_pull(self, topic: str, group: str, messages: int, size: int) -> None:
        traffic = self.messages_out.get((topic, group))
        if traffic is None:
            if len(self.messages_out) >= TRAFFIC_PAIRS_MAX:
                topic = group = OTHER_TRAFFIC
            traffic = self.messages_out.setdefault((topic, group), [0, 0])
        self.fetched_messages += messages
        traffic[0] += messages
        traffic[1] += size

    def purge(self, topics: Container[str], groups: Container[str]) -> None:
        """Drop the counters of topics and groups that do not exist any more."""
        for in_key in [key for key in self.messages_in if key[0] not in topics]:
            del self.messages_in[in_key]
        for out_key in [
            key
            for key in self.messages_out
            if key[0] != OTHER_TRAFFIC and (key[0] not in topics or key[1] not in groups)
        ]:
            del self.messages_out[out_key]


# --- rates ---------------------------------------------------------------------------------------


MINUTE_STEP_MS: Final = 10_000
HOUR_STEP_MS: Final = 600_000
DAY_STEP_MS: Final = 3_600_000
_DAY_MS: Final = 86_400_000
_PULL_CODES: Final = (RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE)

Traffic = tuple[int, int]  # messages, bytes
NO_TRAFFIC: Final[Traffic] = (0, 0)


class Totals(NamedTuple):
    """Totals of the whole broker since its start, by RocketMQ's names."""

    put: int = 0  # messages stored
    fetched: int = 0  # messages pulled
    found: int = 0  # pulls with messages
    missed: int = 0  # pulls without


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


K = TypeVar("K")


def _share_unchanged(current: dict[K, Traffic], last: dict[K, Traffic]) -> dict[K, Traffic]:
    """Return the current traffic, with the objects of the last sample where they are equal."""
    if current == last:
        return last
    for key, traffic in current.items():
        if last.get(key) == traffic:
            current[key] = last[key]
    return current


def utc_day(now_ms: int) -> int:
    return now_ms // _DAY_MS


class Statistics:
    """Samples of the counters, and the rates between them."""

    def __init__(
        self, counters: BrokerCounters, *, now_ms: int = 0, day_of: Callable[[int], int] = utc_day
    ) -> None:
        self._counters = counters
        self._day_of = day_of
        self._last_sample = TrafficSample(now_ms, Totals(), {}, {})
        first = self.take_sample(now_ms)
        # The samples of every ten seconds reach back ten minutes.
        self._minute_samples: deque[TrafficSample] = deque([first], maxlen=60)
        self._hour_samples: deque[TrafficSample] = deque([first], maxlen=6)
        self._day_samples: deque[TrafficSample] = deque([first], maxlen=24)
        self._today = day_of(now_ms)
        self.morning = self.yesterday_morning = first.totals

    def tick(self, now_ms: int) -> None:
        """Take a sample if one is due."""
        if 0 <= now_ms - self._minute_samples[-1].taken_ms < MINUTE_STEP_MS:
            return
        sample = self.take_sample(now_ms)
        if now_ms < self._minute_samples[-1].taken_ms or self._minute_samples[0].taken_ms == 0:
            # The clock was set back, or this is the first tick with a real time.
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
        counters = self._counters
        traffic_in: dict[str, Traffic] = {}
        for (topic, _), sizes in counters.messages_in.items():
            count, size = traffic_in.get(topic, NO_TRAFFIC)
            traffic_in[topic] = count + sizes.count, size + int(sizes.sum)
        traffic_out = {key: (count, size) for key, (count, size) in counters.messages_out.items()}
        last = self._last_sample
        self._last_sample = TrafficSample(
            now_ms,
            self.totals(),
            _share_unchanged(traffic_in, last.traffic_in),
            _share_unchanged(traffic_out, last.traffic_out),
        )
        return self._last_sample

    def totals(self) -> Totals:
        counters = self._counters
        pulls = sum(counters.requests.get(code, 0) for code in _PULL_CODES)
        missed = sum(
            count
            for (code, response_code), count in counters.refused.items()
            if code in _PULL_CODES and response_code != ResponseCode.SUCCESS
        )
        return Totals(
            counters.stored_messages, counters.fetched_messages, max(0, pulls - missed), missed
        )

    # A request compares one topic or group with the samples. To take a whole sample for it would
    # cost as much as there are topics and groups, for each of them if it asks for all.

    def topic_traffic(self, topic: str) -> Traffic | None:
        """Return what was sent to a topic since the start; None if nothing was."""
        sizes_by_type = self._counters.messages_in
        sizes = [
            sizes_by_type[topic, kind] for kind in MESSAGE_TYPES if (topic, kind) in sizes_by_type
        ]
        if not sizes:
            return None
        return sum(size.count for size in sizes), sum(int(size.sum) for size in sizes)

    def group_traffic(self, topic: str, group: str) -> Traffic | None:
        """Return what a group has pulled from a topic since the start; None if nothing."""
        traffic = self._counters.messages_out.get((topic, group))
        return None if traffic is None else (traffic[0], traffic[1])

    def rates(self, field: str, now_ms: int) -> tuple[float, float, float]:
        """Return the rates per second of a field of Totals over 10 s, one and ten minutes."""

        def per_s(span_ms: int) -> float:
            earlier = self._sample_before(now_ms, span_ms)
            return _rate(
                getattr(current, field) - getattr(earlier.totals, field),
                now_ms - earlier.taken_ms,
            ).per_s

        current = self.totals()
        return per_s(MINUTE_STEP_MS), per_s(60_000), per_s(600_000)

    def topic_rates(
        self, topic: str, index: int, now_ms: int
    ) -> tuple[TrafficRate, TrafficRate, TrafficRate]:
        """Return what was sent to a topic in the last minute, hour and day.

        `index` 0 counts messages, 1 counts bytes.
        """
        return self._rates_by_span(
            lambda sample: sample.traffic_in.get(topic, NO_TRAFFIC)[index],
            (self.topic_traffic(topic) or NO_TRAFFIC)[index],
            now_ms,
        )

    def group_rates(
        self, topic: str, group: str, index: int, now_ms: int
    ) -> tuple[TrafficRate, TrafficRate, TrafficRate]:
        return self._rates_by_span(
            lambda sample: sample.traffic_out.get((topic, group), NO_TRAFFIC)[index],
            (self.group_traffic(topic, group) or NO_TRAFFIC)[index],
            now_ms,
        )

    def broker_rates(self, field: str, now_ms: int) -> tuple[TrafficRate, TrafficRate, TrafficRate]:
        current = int(getattr(self.totals(), field))
        return self._rates_by_span(
            lambda sample: int(getattr(sample.totals, field)), current, now_ms
        )

    def _rates_by_span(
        self, value: Callable[[TrafficSample], int], current: int, now_ms: int
    ) -> tuple[TrafficRate, TrafficRate, TrafficRate]:
        """Compare a current value with that of the samples before a minute, an hour and a day."""
        since = (
            self._sample_before(now_ms, 60_000),
            self._hour_samples[0],
            self._day_samples[0],
        )
        minute, hour, day = (
            _rate(current - value(sample), now_ms - sample.taken_ms) for sample in since
        )
        return minute, hour, day

    def _sample_before(self, now_ms: int, span_ms: int) -> TrafficSample:
        """Return the newest sample that is at least `span_ms` old, or else the oldest one."""
        for sample in reversed(self._minute_samples):
            if now_ms - sample.taken_ms >= span_ms:
                return sample
        return self._minute_samples[0]


def _rate(count: int, elapsed_ms: int) -> TrafficRate:
    # The counters of a topic that was deleted and created again begin at 0.
    count = max(0, count)
    return TrafficRate(count, count * 1000 / max(1_000, elapsed_ms))
