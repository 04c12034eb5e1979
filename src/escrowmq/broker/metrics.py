"""Metrics of a broker and of its transactions, under RocketMQ's names where it has one.

    registry.add(BrokerMetrics(broker, clock.now_ms).collect)

Families are generated while a page is written, and the broker may work in between. Therefore every
table is copied before it is iterated.
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
            "Permission of the broker: 4 read, 2 write, 6 both.",
            [({}, self._permission)],
        )
        yield Gauge("rocketmq_topic_number", "Number of topics.", [({}, len(topics))])
        yield Gauge(
            "rocketmq_consumer_group_number", "Number of consumer groups.", [({}, len(groups))]
        )
        dlq_topics = [topic for topic in topics if topic.startswith(DLQ_PREFIX)]
        yield Counter(
            "rocketmq_send_to_dlq_messages_total",
            "Messages that a group could not process and that went to its dead-letter topic.",
            (self._dead_letters(topic) for topic in dlq_topics),
        )

    def _dead_letters(self, topic: str) -> tuple[Labels, float]:
        group = topic.removeprefix(DLQ_PREFIX)
        config = self._broker.topics.find(topic)
        queues = 0 if config is None else config.write_queue_nums
        total = sum(self._broker.store.max_offset(topic, number) for number in range(queues))
        return {"consumer_group": group, "is_system": _bool_label(_is_system("", group))}, total

    def _message_metrics(self) -> Iterator[Family]:
        messages_in = list(self._broker.counters.messages_in.items())
        messages_out = list(self._broker.counters.messages_out.items())
        yield Counter(
            "rocketmq_messages_in_total",
            "Messages that producers sent and that were stored.",
            ((_topic_labels(*key), sizes.count) for key, sizes in messages_in),
        )
        yield Counter(
            "rocketmq_throughput_in_total",
            "Bytes of the messages that producers sent, as stored.",
            ((_topic_labels(*key), sizes.sum) for key, sizes in messages_in),
        )
        yield Histogram(
            "rocketmq_message_size",
            "Bytes of a message, as stored.",
            ((_topic_labels(*key), sizes) for key, sizes in messages_in),
        )
        yield Counter(
            "rocketmq_messages_out_total",
            "Messages that consumers pulled.",
            ((_group_labels(*key), messages) for key, (messages, _) in messages_out),
        )
        yield Counter(
            "rocketmq_throughput_out_total",
            "Bytes of the messages that consumers pulled.",
            ((_group_labels(*key), size) for key, (_, size) in messages_out),
        )

    def _connection_metrics(self) -> Iterator[Family]:
        producers, consumers = self._broker.producers, self._broker.consumers
        count = sum(len(producers.members(name)) for name in producers.names())
        yield Gauge(
            "rocketmq_producer_connections",
            "Connected producers.",
            [({"protocol_type": "remoting"}, count)],
        )
        groups = [group for name in consumers.names() if (group := consumers.find(name))]
        yield Gauge(
            "rocketmq_consumer_connections",
            "Connected consumers of a group.",
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
        """Yield the lag of every group with committed offsets, connected or not."""
        latencies: list[tuple[Labels, float]] = []
        yield Gauge(
            "rocketmq_consumer_lag_messages",
            "Messages of a topic that a group has not consumed.",
            self._lag_samples(latencies),
        )
        yield Gauge(
            "rocketmq_consumer_lag_latency",
            "Milliseconds since the oldest message that a group has not consumed was stored.",
            latencies,  # filled while the samples above were read
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
        for queue_id, committed in queues.items():
            next_offset = max(committed, store.min_offset(topic, queue_id))
            queue_lag = store.max_offset(topic, queue_id) - next_offset
            if queue_lag > 0:
                lag += queue_lag
                stored_ms = self._stored_ms(topic, queue_id, committed)
                if stored_ms is not None and (oldest_ms is None or stored_ms < oldest_ms):
                    oldest_ms = stored_ms
        return lag, oldest_ms

    def _stored_ms(self, topic: str, queue_id: int, queue_offset: int) -> int | None:
        try:
            return self._broker.store.stored_ms(topic, queue_id, queue_offset)
        except (RecordNotFound, CorruptRecord):
            return None  # a bad record must not break all other metrics

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
        for name, help_text, value in (
            ("begin", "Log offset of the oldest record.", store.begin),
            ("end", "Log offset of the next record.", store.end),
            ("flushed", "Log offset up to which the log is durable.", store.flushed_offset),
            (
                "checkpointed",
                "Log offset up to which queues and index are in their files.",
                store.checkpointed_offset,
            ),
        ):
            yield Gauge(f"escrowmq_log_{name}_bytes", help_text, [({}, value)])
        yield Gauge(
            "escrowmq_store_writable",
            "1 if the store accepts messages, 0 if the disk is nearly full or has failed.",
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
        counters = self._broker.counters
        yield Gauge(
            "escrowmq_waiting_pulls",
            "Pulls that are held until a message arrives.",
            [({}, self._broker.pull_processor.held_count)],
        )
        yield Counter(
            "escrowmq_busy_refusals_total",
            "Sends that were refused with SYSTEM_BUSY, by the limit that was reached.",
            [
                ({"limit": limit}, self._broker.flow_control.refused_by_limit[limit])
                for limit in (CONNECTION, TOPIC, UNFLUSHED)
            ],
        )
        yield Histogram(
            "escrowmq_append_records",
            "Records in one write of the log.",
            [({}, counters.records_per_append)],
        )
        yield Histogram(
            "escrowmq_send_seconds",
            "Seconds from the start of the turn that received a send to its response.",
            [({}, counters.send_seconds)],
        )
        yield Counter(
            "escrowmq_requests_total",
            "Requests that could be decoded.",
            [
                ({"request_code": _request_code_name(code)}, count)
                for code, count in sorted(counters.requests.items())
            ],
        )
        yield Counter(
            "escrowmq_refusals_total",
            "Responses other than SUCCESS, also to pulls without a message.",
            [
                (
                    {
                        "request_code": _request_code_name(code),
                        "response_code": response_code_name(response_code),
                    },
                    count,
                )
                for (code, response_code), count in sorted(counters.refused.items())
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


# --- transactions --------------------------------------------------------------------------------


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
        counters = self._coordinator.counters
        yield Gauge(
            "rocketmq_half_messages",
            "Open transactions, including stranded ones.",
            _by_topic(self._coordinator.halves.count_by_topic),
        )
        yield Counter(
            "rocketmq_commit_messages_total",
            "Committed transactions.",
            _by_topic(counters.committed),
        )
        yield Counter(
            "rocketmq_rollback_messages_total",
            "Rolled back transactions.",
            _by_topic(counters.rolled_back),
        )
        yield Histogram(
            "rocketmq_finish_message_latency",
            "Seconds from a half message to its decision.",
            [({}, counters.finish_seconds)],
        )

    def _open_metrics(self) -> Iterator[Family]:
        halves = self._coordinator.halves
        oldest = halves.oldest()
        age_s = 0.0 if oldest is None else max(0, self._now_ms() - oldest.parked_ms) / 1000
        yield Gauge(
            "escrowmq_open_transactions",
            "Open transactions, including stranded ones.",
            [({}, len(halves))],
        )
        yield Gauge(
            "escrowmq_open_transaction_bytes",
            "Bytes of the log that open transactions take.",
            [({}, halves.total.size)],
        )
        yield Gauge(
            "escrowmq_oldest_transaction_seconds",
            "Age of the oldest open transaction.",
            [({}, age_s)],
        )
        yield Gauge(
            "escrowmq_stranded_transactions",
            "Transactions that are not checked any more and wait for an operator.",
            [({}, halves.stranded_count)],
        )

    def _decision_metrics(self) -> Iterator[Family]:
        counters = self._coordinator.counters
        yield Counter(
            "escrowmq_parked_total", "Half messages that were parked.", [({}, counters.parked)]
        )
        yield Counter(
            "escrowmq_stranded_total",
            "Transactions that became stranded.",
            [({}, counters.stranded)],
        )
        yield Counter(
            "escrowmq_repeated_sends_total",
            "Half messages that were sent again and got the response of the first send.",
            [({}, counters.duplicate_sends)],
        )
        yield Counter(
            "escrowmq_repeated_ends_total",
            "Ends of transactions that were decided before in the same way.",
            [({}, counters.repeated_ends)],
        )
        yield Counter(
            "escrowmq_contradictions_total",
            "Ends that were refused because the transaction was decided differently.",
            [({}, counters.conflicts)],
        )
        yield Counter(
            "escrowmq_unreadable_halves_total",
            "Half messages that could not be read back from the log.",
            [({}, counters.unreadable_halves)],
        )

    def _check_metrics(self) -> Iterator[Family]:
        counters = self._checker.counters
        yield Counter("escrowmq_checks_sent_total", "Checks that were sent.", [({}, counters.sent)])
        yield Counter(
            "escrowmq_checks_unsent_total",
            "Half messages whose check was due while no producer of the group was connected.",
            [({}, counters.unsent)],
        )
        yield Counter(
            "escrowmq_checks_answered_total",
            "Answers to checks, by their content.",
            [
                ({"answer": "decided"}, counters.answered - counters.unknown),
                ({"answer": "unknown"}, counters.unknown),
            ],
        )
        yield Gauge(
            "escrowmq_checks_waiting",
            "Half messages whose check is due and waits for a producer.",
            [({}, self._checker.backlog_size())],
        )
        yield Histogram(
            "escrowmq_check_lateness_seconds",
            "Seconds from the time a check was due to the time it was sent.",
            [({}, counters.lateness_seconds)],
        )


def _by_topic(table: dict[str, int]) -> list[tuple[Labels, float]]:
    return [
        ({"topic": topic, "is_system": _bool_label(is_system_topic(topic))}, count)
        for topic, count in table.items()
    ]
