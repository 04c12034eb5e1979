"""What can be asked of the escrow: RocketMQ's four by their names, and what it does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from escrowmq.broker.checks import Checks
from escrowmq.broker.topics import is_system_topic
from escrowmq.escrow.escrow import Escrow
from escrowmq.metrics import Counter, Family, Gauge, Histogram, Labels


class EscrowMetrics:
    def __init__(self, escrow: Escrow, checks: Checks, now_ms: Callable[[], int]) -> None:
        self._escrow = escrow
        self._checks = checks
        self._now_ms = now_ms

    def collect(self) -> Iterator[Family]:
        yield from self._rocketmq()
        yield from self._open()
        yield from self._decided()
        yield from self._asked()

    def _rocketmq(self) -> Iterator[Family]:
        counts = self._escrow.counts
        yield Gauge(
            "rocketmq_half_messages",
            "Transactions that are not decided, stranded ones included.",
            _by_topic(self._escrow.open.by_topic),
        )
        yield Counter(
            "rocketmq_commit_messages_total",
            "Transactions that were committed.",
            _by_topic(counts.committed),
        )
        yield Counter(
            "rocketmq_rollback_messages_total",
            "Transactions that were rolled back.",
            _by_topic(counts.rolled_back),
        )
        yield Histogram(
            "rocketmq_finish_message_latency",
            "Seconds from a half to its decision.",
            [({}, counts.finish_seconds)],
        )

    def _open(self) -> Iterator[Family]:
        escrow = self._escrow
        first = escrow.open.first()
        age = 0.0 if first is None else max(0, self._now_ms() - first.parked_ms) / 1000
        yield Gauge(
            "escrowmq_open_transactions",
            "Transactions that are not decided, stranded ones included.",
            [({}, len(escrow.open))],
        )
        yield Gauge(
            "escrowmq_open_transaction_bytes",
            "Bytes of the log that they take.",
            [({}, escrow.open.total.size)],
        )
        yield Gauge(
            "escrowmq_oldest_transaction_seconds", "Age of the oldest of them.", [({}, age)]
        )
        yield Gauge(
            "escrowmq_stranded_transactions",
            "Those that nobody is asked about any more: they wait for an operator.",
            [({}, escrow.open.stranded)],
        )

    def _decided(self) -> Iterator[Family]:
        counts = self._escrow.counts
        yield Counter("escrowmq_parked_total", "Halves that were parked.", [({}, counts.parked)])
        yield Counter(
            "escrowmq_stranded_total", "Transactions that were set aside.", [({}, counts.stranded)]
        )
        yield Counter(
            "escrowmq_repeated_sends_total",
            "Halves that were sent again and answered with the first.",
            [({}, counts.duplicate_sends)],
        )
        yield Counter(
            "escrowmq_repeated_ends_total",
            "Decisions that were told again and answered as recorded.",
            [({}, counts.repeats)],
        )
        yield Counter(
            "escrowmq_contradictions_total",
            "Decisions that were refused: it had been decided otherwise.",
            [({}, counts.contradictions)],
        )
        yield Counter(
            "escrowmq_unreadable_halves_total",
            "Halves that the log could not give back.",
            [({}, counts.unreadable)],
        )

    def _asked(self) -> Iterator[Family]:
        counts = self._checks.counts
        yield Counter("escrowmq_checks_sent_total", "Questions that left.", [({}, counts.sent)])
        yield Counter(
            "escrowmq_checks_unsent_total",
            "Halves that were due while nobody of their group was there.",
            [({}, counts.unsent)],
        )
        yield Counter(
            "escrowmq_checks_answered_total",
            "Answers to questions, by what they said.",
            [
                ({"answer": "decided"}, counts.answered - counts.unknown),
                ({"answer": "unknown"}, counts.unknown),
            ],
        )
        yield Gauge(
            "escrowmq_checks_waiting",
            "Halves that are due and wait for room, or for somebody to ask.",
            [({}, self._checks.waiting())],
        )
        yield Histogram(
            "escrowmq_check_lateness_seconds",
            "Seconds from when a question was due to when it left.",
            [({}, counts.late_seconds)],
        )


def _by_topic(table: dict[str, int]) -> list[tuple[Labels, float]]:
    return [
        ({"topic": topic, "is_system": "true" if is_system_topic(topic) else "false"}, count)
        for topic, count in table.items()
    ]
