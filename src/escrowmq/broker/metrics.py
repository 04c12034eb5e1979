"""What can be asked of a broker, by RocketMQ's names where it has one: made when it is asked.

    registry.add(BrokerMetrics(broker, clock.now_ms).collect)

Whoever reads the samples may let the broker work in between, so nothing here holds on to a table
while it walks: it walks a copy.

What can be asked of the escrow: RocketMQ's four by their names, and what it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from escrowmq.broker.broker import Broker
from escrowmq.broker.flow_control import CONNECTION, TOPIC, UNFLUSHED
from escrowmq.broker.transactions.check import TransactionChecker
from escrowmq.errors import CorruptRecord, RecordNotFound
from escrowmq.escrow.coordinator import TransactionCoordinator
from escrowmq.message.names import DLQ_PREFIX, is_group_topic, is_system_topic
from escrowmq.message.record import QueueOffset
from escrowmq.metrics import Counter, Family, Gauge, Histogram, Labels
from escrowmq.remoting.codes import RequestCode, ResponseCode

STORAGE_LABELS: Final = {"storage_type": "local", "storage_medium": "disk"}
_SYSTEM_GROUP_PREFIX: Final = "cid_rmq_sys_"
_CONSUME_MODES: Final = {
    "CONSUME_PASSIVELY": "push",
    "CONSUME_ACTIVELY": "pull",
    "CONSUME_POP": "pop",
}


class BrokerMetrics:
    def __init__(self, broker: Broker, now_ms: Callable[[], int], *, permission: int = 6) -> None:
        self._broker = broker
        self._now_ms = now_ms
        self._permission = permission

    def collect(self) -> Iterator[Family]:
        self._broker.counters.purge(self._broker.topics.configs(), self._broker.groups.configs())
        yield from self._table_metrics()
        yield from self._message_metrics()
        yield from self._connection_metrics()
        yield from self._lag_metrics()
        yield from self._log_metrics()
        yield from self._request_metrics()

    def _table_metrics(self) -> Iterator[Family]:
        topics, groups = self._broker.topics.configs(), self._broker.groups.configs()
        yield Gauge(
            "rocketmq_broker_permission",
            "4 to be read, 2 to be written, 6 for both.",
            [({}, self._permission)],
        )
        yield Gauge("rocketmq_topic_number", "Topics.", [({}, len(topics))])
        yield Gauge("rocketmq_consumer_group_number", "Consumer groups.", [({}, len(groups))])
        dead = [topic for topic in topics if topic.startswith(DLQ_PREFIX)]
        yield Counter(
            "rocketmq_send_to_dlq_messages_total",
            "Dead letters: messages that their group gave up, in all its time.",
            (self._dead_letters(topic) for topic in dead),
        )

    def _dead_letters(self, topic: str) -> tuple[Labels, float]:
        group = topic.removeprefix(DLQ_PREFIX)
        config = self._broker.topics.find(topic)
        queues = 0 if config is None else config.write_queue_nums
        total = sum(self._broker.store.max_offset(topic, number) for number in range(queues))
        return {"consumer_group": group, "is_system": _bool_label(_is_system("", group))}, total

    def _message_metrics(self) -> Iterator[Family]:
        came = list(self._broker.counters.messages_in.items())
        went = list(self._broker.counters.messages_out.items())
        yield Counter(
            "rocketmq_messages_in_total",
            "Messages that producers sent and that were stored.",
            ((_topic_labels(*key), sizes.count) for key, sizes in came),
        )
        yield Counter(
            "rocketmq_throughput_in_total",
            "Bytes of them, as stored.",
            ((_topic_labels(*key), sizes.sum) for key, sizes in came),
        )
        yield Histogram(
            "rocketmq_message_size",
            "Bytes of one, as stored.",
            ((_topic_labels(*key), sizes) for key, sizes in came),
        )
        yield Counter(
            "rocketmq_messages_out_total",
            "Messages that consumers pulled.",
            ((_group_labels(*key), messages) for key, (messages, _) in went),
        )
        yield Counter(
            "rocketmq_throughput_out_total",
            "Bytes of them.",
            ((_group_labels(*key), size) for key, (_, size) in went),
        )

    def _connection_metrics(self) -> Iterator[Family]:
        producers, consumers = self._broker.producers, self._broker.consumers
        count = sum(len(producers.members(name)) for name in producers.names())
        yield Gauge(
            "rocketmq_producer_connections",
            "Producers that are connected.",
            [({"protocol_type": "remoting"}, count)],
        )
        groups = [found for name in consumers.names() if (found := consumers.find(name))]
        yield Gauge(
            "rocketmq_consumer_connections",
            "Consumers of a group that are connected.",
            (
                (
                    {
                        "consumer_group": group.name,
                        "consume_mode": _CONSUME_MODES.get(group.settings.consume_type, "other"),
                        "protocol_type": "remoting",
                        "is_system": _bool_label(_is_system("", group.name)),
                    },
                    len(consumers.members(group.name)),
                )
                for group in groups
            ),
        )

    def _lag_metrics(self) -> Iterator[Family]:
        """Of every group that has noted how far it is, connected or not."""
        latencies: list[tuple[Labels, float]] = []
        yield Gauge(
            "rocketmq_consumer_lag_messages",
            "Messages of a topic that a group has not consumed.",
            self._lag_samples(latencies),
        )
        yield Gauge(
            "rocketmq_consumer_lag_latency",
            "Milliseconds since the oldest of them was stored.",
            latencies,  # filled while those above were read
        )

    def _lag_samples(self, latencies: list[tuple[Labels, float]]) -> Iterator[tuple[Labels, float]]:
        offsets, topics = self._broker.offsets, self._broker.topics
        for group in list(self._broker.groups.configs()):
            for topic in offsets.topics_of(group):
                if topics.find(topic) is None:
                    continue
                labels = _group_labels(topic, group)
                lag, oldest_ms = self._lag_of(topic, offsets.queue_offsets(topic, group))
                late_ms = 0 if oldest_ms is None else max(0, self._now_ms() - oldest_ms)
                latencies.append((labels, late_ms))
                yield labels, lag

    def _lag_of(self, topic: str, queues: Mapping[int, QueueOffset]) -> tuple[int, int | None]:
        store = self._broker.store
        lag, oldest_ms = 0, None
        for queue_id, wanted in queues.items():
            behind = store.max_offset(topic, queue_id) - max(
                wanted, store.min_offset(topic, queue_id)
            )
            if behind > 0:
                lag += behind
                stored_ms = self._stored_ms(topic, queue_id, wanted)
                if stored_ms is not None and (oldest_ms is None or stored_ms < oldest_ms):
                    oldest_ms = stored_ms
        return lag, oldest_ms

    def _stored_ms(self, topic: str, queue_id: int, queue_offset: int) -> int | None:
        try:
            return self._broker.store.stored_ms(topic, queue_id, queue_offset)
        except (RecordNotFound, CorruptRecord):
            return None  # one bad record costs its own figure, not all of them

    def _log_metrics(self) -> Iterator[Family]:
        store = self._broker.store
        yield Gauge(
            "rocketmq_storage_flush_behind_bytes",
            "Bytes of the log that are not durable yet.",
            [(STORAGE_LABELS, store.end - store.flushed_offset)],
        )
        yield Gauge(
            "rocketmq_storage_message_reserve_time",
            "Milliseconds since the oldest message was stored.",
            self._oldest_message_age(),
        )
        for name, meaning, value in (
            ("begin", "Where the oldest record of the log lies.", store.begin),
            ("end", "Where the next record of the log will lie.", store.end),
            ("flushed", "Up to where the log is durable.", store.flushed_offset),
            (
                "checkpointed",
                "Up to where queues and index are in their files.",
                store.checkpointed_offset,
            ),
        ):
            yield Gauge(f"escrowmq_log_{name}_bytes", meaning, [({}, value)])
        yield Gauge(
            "escrowmq_store_writable",
            "1 if messages are taken, 0 if the disk is nearly full or has failed.",
            [({}, int(store.is_writable))],
        )

    def _oldest_message_age(self) -> list[tuple[Labels, float]]:
        store = self._broker.store
        try:
            record = next(store.records(store.begin, store.end), None)
        except (RecordNotFound, CorruptRecord):
            return []
        return (
            [] if record is None else [(STORAGE_LABELS, max(0, self._now_ms() - record.stored_ms))]
        )

    def _request_metrics(self) -> Iterator[Family]:
        counts = self._broker.counters
        yield Gauge(
            "escrowmq_waiting_pulls",
            "Pulls that wait for a message.",
            [({}, self._broker.pull_processor.held_count)],
        )
        yield Counter(
            "escrowmq_busy_refusals_total",
            "Sends that were refused with SYSTEM_BUSY, by the limit that they met.",
            [
                ({"limit": limit}, self._broker.flow_control.refused_by_limit[limit])
                for limit in (CONNECTION, TOPIC, UNFLUSHED)
            ],
        )
        yield Histogram(
            "escrowmq_append_records",
            "Records in one write of the log.",
            [({}, counts.records_per_append)],
        )
        yield Histogram(
            "escrowmq_send_seconds",
            "From the begin of the turn that read a send to its answer.",
            [({}, counts.send_seconds)],
        )
        yield Counter(
            "escrowmq_requests_total",
            "Requests that could be read.",
            [
                ({"request_code": _request_code_name(code)}, count)
                for code, count in sorted(counts.requests.items())
            ],
        )
        yield Counter(
            "escrowmq_refusals_total",
            "Answers other than SUCCESS; a pull that found nothing is one.",
            [
                (
                    {
                        "request_code": _request_code_name(code),
                        "response_code": response_code_name(why),
                    },
                    count,
                )
                for (code, why), count in sorted(counts.refused.items())
            ],
        )


def _topic_labels(topic: str, message_type: str) -> Labels:
    return {
        "topic": topic,
        "message_type": message_type,
        "is_system": _bool_label(is_system_topic(topic)),
    }


def _group_labels(topic: str, group: str) -> Labels:
    return {
        "topic": topic,
        "consumer_group": group,
        "is_retry": _bool_label(is_group_topic(topic)),
        "is_system": _bool_label(_is_system(topic, group)),
    }


def _is_system(topic: str, group: str) -> bool:
    return is_system_topic(topic) or group.lower().startswith(_SYSTEM_GROUP_PREFIX)


def _bool_label(value: bool) -> str:
    return "true" if value else "false"


def _request_code_name(code: int) -> str:
    try:
        return RequestCode(code).name.lower()
    except ValueError:
        return str(code)


def response_code_name(code: int) -> str:
    try:
        return ResponseCode(code).name.lower()
    except ValueError:
        return str(code)


class TransactionMetrics:
    def __init__(
        self,
        coordinator: TransactionCoordinator,
        checker: TransactionChecker,
        now_ms: Callable[[], int],
    ) -> None:
        self._coordinator = coordinator
        self._checker = checker
        self._now_ms = now_ms

    def collect(self) -> Iterator[Family]:
        yield from self._rocketmq_metrics()
        yield from self._open_metrics()
        yield from self._decision_metrics()
        yield from self._check_metrics()

    def _rocketmq_metrics(self) -> Iterator[Family]:
        counts = self._coordinator.counters
        yield Gauge(
            "rocketmq_half_messages",
            "Transactions that are not decided, stranded ones included.",
            _by_topic(self._coordinator.halves.count_by_topic),
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

    def _open_metrics(self) -> Iterator[Family]:
        escrow = self._coordinator
        first = escrow.halves.oldest()
        age = 0.0 if first is None else max(0, self._now_ms() - first.parked_ms) / 1000
        yield Gauge(
            "escrowmq_open_transactions",
            "Transactions that are not decided, stranded ones included.",
            [({}, len(escrow.halves))],
        )
        yield Gauge(
            "escrowmq_open_transaction_bytes",
            "Bytes of the log that they take.",
            [({}, escrow.halves.total.size)],
        )
        yield Gauge(
            "escrowmq_oldest_transaction_seconds", "Age of the oldest of them.", [({}, age)]
        )
        yield Gauge(
            "escrowmq_stranded_transactions",
            "Those that nobody is asked about any more: they wait for an operator.",
            [({}, escrow.halves.stranded_count)],
        )

    def _decision_metrics(self) -> Iterator[Family]:
        counts = self._coordinator.counters
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
            [({}, counts.repeated_ends)],
        )
        yield Counter(
            "escrowmq_contradictions_total",
            "Decisions that were refused: it had been decided otherwise.",
            [({}, counts.conflicts)],
        )
        yield Counter(
            "escrowmq_unreadable_halves_total",
            "Halves that the log could not give back.",
            [({}, counts.unreadable_halves)],
        )

    def _check_metrics(self) -> Iterator[Family]:
        counts = self._checker.counters
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
            [({}, self._checker.backlog_size())],
        )
        yield Histogram(
            "escrowmq_check_lateness_seconds",
            "Seconds from when a question was due to when it left.",
            [({}, counts.lateness_seconds)],
        )


def _by_topic(table: dict[str, int]) -> list[tuple[Labels, float]]:
    return [
        ({"topic": topic, "is_system": "true" if is_system_topic(topic) else "false"}, count)
        for topic, count in table.items()
    ]
