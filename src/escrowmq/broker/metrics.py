"""Metrics of a broker and of its transactions, under RocketMQ's names where it has one.

    registry.add(BrokerMetrics(broker, clock.now_ms).collect)

Families are declared first, in the order of docs/metrics.md; the collectors below give them their
samples. Samples are read while a page is written, and the broker may work in between. Therefore
every table is copied before it is iterated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from escrowmq.broker.broker import Broker
from escrowmq.broker.flow_control import CONNECTION, TOPIC, UNFLUSHED
from escrowmq.broker.transactions.check import TransactionChecker
from escrowmq.errors import CorruptRecord, RecordNotFound
from escrowmq.escrow.coordinator import TransactionCoordinator
from escrowmq.message.names import (
    DLQ_PREFIX,
    TOOLS_CONSUMER_GROUP,
    is_group_topic,
    is_system_topic,
)
from escrowmq.message.record import QueueOffset
from escrowmq.metrics import Counter, Gauge, Histogram, LabelValues, Samples
from escrowmq.remoting.codes import RequestCode, ResponseCode

_Sample = tuple[LabelValues, float]
_SYSTEM_GROUP_PREFIX: Final = "cid_rmq_sys_"
_CONSUME_MODES: Final = {
    "CONSUME_PASSIVELY": "push",
    "CONSUME_ACTIVELY": "pull",
    "CONSUME_POP": "pop",
}

# --- families of the broker ----------------------------------------------------------------------

_TOPIC_LABELS: Final = ("topic", "message_type", "is_system")
_GROUP_LABELS: Final = ("topic", "consumer_group", "is_retry", "is_system")
STORAGE_LABELS: Final = ("storage_type", "storage_medium")
STORAGE: Final = ("local", "disk")  # the values of STORAGE_LABELS; there is no other storage

PERMISSION: Final = Gauge(
    "rocketmq_broker_permission",
    "Permission of the broker (brokerPermission): 4 read, 2 write, 6 both.",
)
TOPICS: Final = Gauge("rocketmq_topic_number", "Number of topics, including those of the broker.")
CONSUMER_GROUPS: Final = Gauge(
    "rocketmq_consumer_group_number", "Number of consumer groups, including those of RocketMQ."
)
DEAD_LETTERS: Final = Counter(
    "rocketmq_send_to_dlq_messages_total",
    "Messages that went to the dead-letter topic of a group, also before this process started.",
    ("consumer_group", "is_system"),
)
OPEN_DEAD_LETTERS: Final = Gauge(
    "escrowmq_open_dead_letters",
    "Dead letters of a group from the first one on that was neither resent nor purged.",
    ("consumer_group", "is_system"),
)
OLDEST_DEAD_LETTER: Final = Gauge(
    "escrowmq_oldest_dead_letter_seconds",
    "Seconds since the first of them was stored, or 0.",
    ("consumer_group", "is_system"),
)
MESSAGES_IN: Final = Counter(
    "rocketmq_messages_in_total",
    "Messages that were sent and stored. The message_type is normal, delay or transaction.",
    _TOPIC_LABELS,
)
BYTES_IN: Final = Counter(
    "rocketmq_throughput_in_total",
    "Bytes of the messages that producers sent, as stored.",
    _TOPIC_LABELS,
)
MESSAGE_SIZE: Final = Histogram(
    "rocketmq_message_size", "Bytes of a message, as stored.", _TOPIC_LABELS
)
MESSAGES_OUT: Final = Counter(
    "rocketmq_messages_out_total", "Messages that consumers pulled.", _GROUP_LABELS
)
BYTES_OUT: Final = Counter(
    "rocketmq_throughput_out_total", "Bytes of the messages that consumers pulled.", _GROUP_LABELS
)
PRODUCER_CONNECTIONS: Final = Gauge(
    "rocketmq_producer_connections", "Connected producers.", ("protocol_type",)
)
CONSUMER_CONNECTIONS: Final = Gauge(
    "rocketmq_consumer_connections",
    "Connected consumers of a group. The consume_mode is push, pull, pop or other.",
    ("consumer_group", "consume_mode", "protocol_type", "is_system"),
)
LAG_MESSAGES: Final = Gauge(
    "rocketmq_consumer_lag_messages",
    "Messages of a topic after the committed offsets of a group, whether it is connected or not.",
    _GROUP_LABELS,
)
LAG_LATENCY: Final = Gauge(
    "rocketmq_consumer_lag_latency",
    "Milliseconds since the first message that a group has not consumed was stored, or 0.",
    _GROUP_LABELS,
)
UNFLUSHED_BYTES: Final = Gauge(
    "rocketmq_storage_flush_behind_bytes",
    "Bytes of the log that are not durable yet; a power cut would lose them.",
    STORAGE_LABELS,
)
OLDEST_MESSAGE_AGE: Final = Gauge(
    "rocketmq_storage_message_reserve_time",
    "Milliseconds since the oldest message was stored.",
    STORAGE_LABELS,
)
LOG_BEGIN: Final = Gauge(
    "escrowmq_log_begin_bytes",
    "Log offset of the oldest record. It moves when a segment expires.",
)
LOG_END: Final = Gauge("escrowmq_log_end_bytes", "Log offset of the next record.")
LOG_FLUSHED: Final = Gauge(
    "escrowmq_log_flushed_bytes", "Log offset up to which the log is durable."
)
DAMAGE_FOUND: Final = Counter(
    "escrowmq_damage_found_total",
    "Damage that was found in files of the store since the start. What is repaired has cost "
    "nothing; look at the broker's log for what is not, and at the disk in both cases.",
    ("kind", "repaired"),
)
LOG_CHECKPOINTED: Final = Gauge(
    "escrowmq_log_checkpointed_bytes",
    "Log offset up to which queues and index are in their files, where a start after a crash "
    "begins to read.",
)
LOG_DAMAGED_RANGES: Final = Gauge(
    "escrowmq_log_damaged_ranges",
    "Ranges of the log whose messages were durable and that the last start found damaged.",
)
LOG_DAMAGED_BYTES: Final = Gauge(
    "escrowmq_log_damaged_bytes", "Bytes of the log that the last start found damaged."
)
STORE_WRITABLE: Final = Gauge(
    "escrowmq_store_writable",
    "1 if the store accepts messages, 0 if the disk is nearly full or has failed.",
)
REFUSED_CREATIONS: Final = Counter(
    "escrowmq_automatic_creations_refused_total",
    "Topics, groups and offsets that were not created because there are too many. The kind is "
    "topic, group or offset.",
    ("kind",),
)
WAITING_PULLS: Final = Gauge(
    "escrowmq_waiting_pulls", "Pulls that are held until a message arrives."
)
BUSY_REFUSALS: Final = Counter(
    "escrowmq_busy_refusals_total",
    "Sends that were refused with SYSTEM_BUSY. The limit is connection, topic or unflushed.",
    ("limit",),
)
DELAYED_WAITING: Final = Gauge(
    "escrowmq_delayed_messages_waiting", "Delayed messages, timers and retries that wait."
)
DELAYED_DELIVERED: Final = Counter(
    "escrowmq_delayed_messages_delivered_total",
    "Delayed messages, timers and retries that were delivered.",
)
DELAYED_SET_ASIDE: Final = Gauge(
    "escrowmq_delayed_messages_set_aside",
    "Delayed messages that are due and could not be delivered. Each is tried again every minute.",
)
DELAYED_FAILURES: Final = Counter(
    "escrowmq_delayed_messages_failures_total", "Attempts to deliver a delayed message that failed."
)
DELAYED_MOVED: Final = Counter(
    "escrowmq_delayed_messages_moved_total",
    "Delayed messages that were stored again because their segment expired.",
)
DELAYED_LOST: Final = Counter(
    "escrowmq_delayed_messages_lost_total",
    "Delayed messages that were damaged or deleted before they could be delivered.",
)
APPEND_RECORDS: Final = Histogram("escrowmq_append_records", "Records in one write of the log.")
SEND_SECONDS: Final = Histogram(
    "escrowmq_send_seconds",
    "Seconds from the start of the turn that received a send to its response. With SYNC_FLUSH "
    "this includes the flush.",
)
NATIVE_PATH: Final = Gauge(
    "escrowmq_native_path",
    "1 if plain requests take the native path, 0 if all requests take the Python path.",
)
NATIVE_REQUESTS: Final = Counter(
    "escrowmq_native_requests_total", "Requests that took the native path."
)
REQUESTS: Final = Counter(
    "escrowmq_requests_total", "Requests that could be decoded.", ("request_code",)
)
REFUSALS: Final = Counter(
    "escrowmq_refusals_total",
    "Responses other than SUCCESS, also to pulls without a message (pull_not_found).",
    ("request_code", "response_code"),
)

# --- families of transactions --------------------------------------------------------------------

_TRANSACTION_LABELS: Final = ("topic", "is_system")

HALF_MESSAGES: Final = Gauge(
    "rocketmq_half_messages", "Open transactions, including stranded ones.", _TRANSACTION_LABELS
)
COMMITTED: Final = Counter(
    "rocketmq_commit_messages_total", "Committed transactions.", _TRANSACTION_LABELS
)
ROLLED_BACK: Final = Counter(
    "rocketmq_rollback_messages_total", "Rolled back transactions.", _TRANSACTION_LABELS
)
FINISH_LATENCY: Final = Histogram(
    "rocketmq_finish_message_latency", "Seconds from a half message to its decision."
)
OPEN_TRANSACTIONS: Final = Gauge(
    "escrowmq_open_transactions", "Open transactions, including stranded ones."
)
OPEN_BYTES: Final = Gauge(
    "escrowmq_open_transaction_bytes", "Bytes of the log that open transactions take."
)
OLDEST_TRANSACTION: Final = Gauge(
    "escrowmq_oldest_transaction_seconds", "Age of the oldest open transaction, or 0."
)
STRANDED_TRANSACTIONS: Final = Gauge(
    "escrowmq_stranded_transactions",
    "Transactions that are not checked any more and wait for an operator.",
)
PARKED: Final = Counter("escrowmq_parked_total", "Half messages that were parked.")
STRANDED: Final = Counter("escrowmq_stranded_total", "Transactions that became stranded.")
REPEATED_SENDS: Final = Counter(
    "escrowmq_repeated_sends_total",
    "Half messages that were sent again and got the response of the first send.",
)
REPEATED_ENDS: Final = Counter(
    "escrowmq_repeated_ends_total",
    "Ends of transactions that were decided before in the same way.",
)
CONFLICTS: Final = Counter(
    "escrowmq_contradictions_total",
    "Ends that were refused because the transaction was decided differently.",
)
UNREADABLE_HALVES: Final = Counter(
    "escrowmq_unreadable_halves_total", "Half messages that could not be read back from the log."
)
SET_ASIDE_HALVES: Final = Counter(
    "escrowmq_set_aside_halves_total",
    "Half messages that are not checked any more because their check failed with an error.",
)
CHECKS_SENT: Final = Counter("escrowmq_checks_sent_total", "Checks that were sent.")
CHECKS_UNSENT: Final = Counter(
    "escrowmq_checks_unsent_total",
    "Half messages whose check was due while no producer of the group was connected.",
)
CHECKS_ANSWERED: Final = Counter(
    "escrowmq_checks_answered_total",
    "Answers to checks. The answer is decided or unknown.",
    ("answer",),
)
CHECKS_WAITING: Final = Gauge(
    "escrowmq_checks_waiting", "Half messages whose check is due and waits for a producer."
)
CHECK_LATENESS: Final = Histogram(
    "escrowmq_check_lateness_seconds",
    "Seconds from the time a check was due to the time it was sent.",
)


# --- the broker ----------------------------------------------------------------------------------


class BrokerMetrics:
    def __init__(self, broker: Broker, now_ms: Callable[[], int], *, permission: int = 6) -> None:
        self._broker = broker
        self._now_ms = now_ms
        self._permission = permission

    def collect(self) -> Iterator[Samples]:
        self._broker.counters.purge(self._broker.topics.configs(), self._broker.groups.configs())
        yield from self._table_metrics()
        yield from self._message_metrics()
        yield from self._connection_metrics()
        yield from self._lag_metrics()
        yield from self._log_metrics()
        yield from self._delay_metrics()
        yield from self._request_metrics()

    def _table_metrics(self) -> Iterator[Samples]:
        topics, groups = self._broker.topics.configs(), self._broker.groups.configs()
        yield PERMISSION.value(self._permission)
        yield TOPICS.value(len(topics))
        yield CONSUMER_GROUPS.value(len(groups))
        yield REFUSED_CREATIONS.samples(
            [
                (("topic",), self._broker.topics.refused_creations),
                (("group",), self._broker.groups.refused_creations),
                (("offset",), self._broker.offsets.refused),
            ]
        )
        dlq_topics = [topic for topic in topics if topic.startswith(DLQ_PREFIX)]
        yield from self._dead_letter_metrics(dlq_topics)

    def _dead_letter_metrics(self, dlq_topics: Sequence[str]) -> Iterator[Samples]:
        store = self._broker.store
        stored: list[_Sample] = []
        opened: list[_Sample] = []
        oldest: list[_Sample] = []
        for topic in dlq_topics:
            config = self._broker.topics.find(topic)
            queue_ids = range(0 if config is None else config.write_queue_nums)
            group = topic.removeprefix(DLQ_PREFIX)
            labels = group, _bool_label(_is_system("", group))
            cursors = {
                queue_id: self._dead_letter_cursor(topic, queue_id) for queue_id in queue_ids
            }
            count, oldest_ms = self._lag_of(topic, cursors)
            age_ms = 0 if oldest_ms is None else max(0, self._now_ms() - oldest_ms)
            stored.append((labels, sum(store.max_offset(topic, number) for number in queue_ids)))
            opened.append((labels, count))
            oldest.append((labels, age_ms / 1000))
        yield DEAD_LETTERS.samples(stored)
        yield OPEN_DEAD_LETTERS.samples(opened)
        yield OLDEST_DEAD_LETTER.samples(oldest)

    def _dead_letter_cursor(self, topic: str, queue_id: int) -> QueueOffset:
        """Return where the first open dead letter of a queue may be (admin/dead_letters.py)."""
        store = self._broker.store
        cursor = self._broker.offsets.query(topic, TOOLS_CONSUMER_GROUP, queue_id) or 0
        # A cursor behind the end is that of a topic of this name which was deleted.
        is_valid = cursor <= store.max_offset(topic, queue_id)
        return QueueOffset(max(cursor if is_valid else 0, store.min_offset(topic, queue_id)))

    def _message_metrics(self) -> Iterator[Samples]:
        messages_in = list(self._broker.counters.messages_in.items())
        messages_out = list(self._broker.counters.messages_out.items())
        yield MESSAGES_IN.samples((_topic_labels(*key), sizes.count) for key, sizes in messages_in)
        yield BYTES_IN.samples((_topic_labels(*key), sizes.sum) for key, sizes in messages_in)
        yield MESSAGE_SIZE.samples((_topic_labels(*key), sizes) for key, sizes in messages_in)
        yield MESSAGES_OUT.samples(
            (_group_labels(*key), messages) for key, (messages, _) in messages_out
        )
        yield BYTES_OUT.samples((_group_labels(*key), size) for key, (_, size) in messages_out)

    def _connection_metrics(self) -> Iterator[Samples]:
        producers, consumers = self._broker.producers, self._broker.consumers
        count = sum(len(producers.members(name)) for name in producers.names())
        yield PRODUCER_CONNECTIONS.value(count, "remoting")
        groups = [group for name in consumers.names() if (group := consumers.find(name))]
        yield CONSUMER_CONNECTIONS.samples(
            (
                (
                    group.name,
                    _CONSUME_MODES.get(group.settings.consume_type, "other"),
                    "remoting",
                    _bool_label(_is_system("", group.name)),
                ),
                len(consumers.members(group.name)),
            )
            for group in groups
        )

    def _lag_metrics(self) -> Iterator[Samples]:
        """Yield the lag of every group with committed offsets, connected or not."""
        latencies: list[_Sample] = []
        yield LAG_MESSAGES.samples(self._lag_samples(latencies))
        yield LAG_LATENCY.samples(latencies)  # filled while the samples above were read

    def _lag_samples(self, latencies: list[_Sample]) -> Iterator[_Sample]:
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

    def _log_metrics(self) -> Iterator[Samples]:
        store = self._broker.store
        yield UNFLUSHED_BYTES.value(store.end - store.flushed_offset, *STORAGE)
        yield OLDEST_MESSAGE_AGE.samples(self._oldest_message_age())
        yield LOG_BEGIN.value(store.begin)
        yield LOG_END.value(store.end)
        yield LOG_FLUSHED.value(store.flushed_offset)
        yield LOG_CHECKPOINTED.value(store.checkpointed_offset)
        yield LOG_DAMAGED_RANGES.value(len(store.recovery.damage))
        yield LOG_DAMAGED_BYTES.value(sum(damage.size for damage in store.recovery.damage))
        yield STORE_WRITABLE.value(int(store.is_writable))
        yield DAMAGE_FOUND.samples(
            [
                ((kind.value, "yes" if is_repaired else "no"), count)
                for (kind, is_repaired), count in store.damage.counts.items()
            ]
        )

    def _oldest_message_age(self) -> list[_Sample]:
        store = self._broker.store
        try:
            record = next(store.records(store.begin, store.end), None)
        except (RecordNotFound, CorruptRecord):
            return []
        return [] if record is None else [(STORAGE, max(0, self._now_ms() - record.stored_ms))]

    def _delay_metrics(self) -> Iterator[Samples]:
        delayed_messages = self._broker.delayed_messages
        counters = delayed_messages.counters
        yield DELAYED_WAITING.value(delayed_messages.waiting_count)
        yield DELAYED_DELIVERED.value(counters.delivered)
        yield DELAYED_SET_ASIDE.value(delayed_messages.set_aside_count)
        yield DELAYED_FAILURES.value(counters.failed_attempts)
        yield DELAYED_MOVED.value(counters.moved)
        yield DELAYED_LOST.value(counters.lost)

    def _request_metrics(self) -> Iterator[Samples]:
        counters = self._broker.counters
        yield WAITING_PULLS.value(self._broker.pull_processor.held_count)
        yield BUSY_REFUSALS.samples(
            ((limit,), self._broker.flow_control.refused_by_limit[limit])
            for limit in (CONNECTION, TOPIC, UNFLUSHED)
        )
        yield APPEND_RECORDS.value(counters.records_per_append)
        yield SEND_SECONDS.value(counters.send_seconds)
        native_requests = self._broker.native_requests
        yield NATIVE_PATH.value(native_requests is not None)
        yield NATIVE_REQUESTS.value(0 if native_requests is None else native_requests.count)
        yield REQUESTS.samples(
            ((_request_code_name(code),), count)
            for code, count in sorted(counters.requests.items())
        )
        yield REFUSALS.samples(
            ((_request_code_name(code), response_code_name(response_code)), count)
            for (code, response_code), count in sorted(counters.refused.items())
        )


def _topic_labels(topic: str, message_type: str) -> LabelValues:
    return topic, message_type, _bool_label(is_system_topic(topic))


def _group_labels(topic: str, group: str) -> LabelValues:
    is_retry, is_system = is_group_topic(topic), _is_system(topic, group)
    return topic, group, _bool_label(is_retry), _bool_label(is_system)


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

    def collect(self) -> Iterator[Samples]:
        yield from self._open_metrics()
        yield from self._decision_metrics()
        yield from self._check_metrics()

    def _open_metrics(self) -> Iterator[Samples]:
        halves = self._coordinator.halves
        oldest = halves.oldest()
        age_s = 0.0 if oldest is None else max(0, self._now_ms() - oldest.parked_ms) / 1000
        yield HALF_MESSAGES.samples(_by_topic(halves.count_by_topic))
        yield OPEN_TRANSACTIONS.value(len(halves))
        yield OPEN_BYTES.value(halves.total.size)
        yield OLDEST_TRANSACTION.value(age_s)
        yield STRANDED_TRANSACTIONS.value(halves.stranded_count)

    def _decision_metrics(self) -> Iterator[Samples]:
        counters = self._coordinator.counters
        yield COMMITTED.samples(_by_topic(counters.committed))
        yield ROLLED_BACK.samples(_by_topic(counters.rolled_back))
        yield FINISH_LATENCY.value(counters.finish_seconds)
        yield PARKED.value(counters.parked)
        yield STRANDED.value(counters.stranded)
        yield REPEATED_SENDS.value(counters.duplicate_sends)
        yield REPEATED_ENDS.value(counters.repeated_ends)
        yield CONFLICTS.value(counters.conflicts)
        yield UNREADABLE_HALVES.value(counters.unreadable_halves)
        yield SET_ASIDE_HALVES.value(counters.set_aside_halves)

    def _check_metrics(self) -> Iterator[Samples]:
        counters = self._checker.counters
        yield CHECKS_SENT.value(counters.sent)
        yield CHECKS_UNSENT.value(counters.unsent)
        yield CHECKS_ANSWERED.samples(
            [
                (("decided",), counters.answered - counters.unknown),
                (("unknown",), counters.unknown),
            ]
        )
        yield CHECKS_WAITING.value(self._checker.backlog_size())
        yield CHECK_LATENESS.value(counters.lateness_seconds)


def _by_topic(table: Mapping[str, int]) -> list[_Sample]:
    return [((topic, _bool_label(is_system_topic(topic))), count) for topic, count in table.items()]
