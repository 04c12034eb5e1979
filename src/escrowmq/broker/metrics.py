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
from escrowmq.broker.metadata import DLQ_PREFIX, RETRY_PREFIX, is_system_topic
from escrowmq.broker.transactions.check import Checks
from escrowmq.errors import CorruptRecord, NoSuchRecord
from escrowmq.escrow.coordinator import Escrow
from escrowmq.message.record import QueueOffset
from escrowmq.metrics import Counter, Family, Gauge, Histogram, Labels
from escrowmq.remoting.codes import RequestCode, ResponseCode

STORAGE: Final = {"storage_type": "local", "storage_medium": "disk"}
_SYSTEM_GROUP: Final = "cid_rmq_sys_"
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
        self._broker.counts.forget(self._broker.topics.all(), self._broker.groups.all())
        yield from self._tables()
        yield from self._messages()
        yield from self._connections()
        yield from self._lag()
        yield from self._log()
        yield from self._work()

    def _tables(self) -> Iterator[Family]:
        topics, groups = self._broker.topics.all(), self._broker.groups.all()
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
        return {"consumer_group": group, "is_system": _yes(_is_system("", group))}, total

    def _messages(self) -> Iterator[Family]:
        came = list(self._broker.counts.messages_in.items())
        went = list(self._broker.counts.messages_out.items())
        yield Counter(
            "rocketmq_messages_in_total",
            "Messages that producers sent and that were stored.",
            ((_came(*key), sizes.count) for key, sizes in came),
        )
        yield Counter(
            "rocketmq_throughput_in_total",
            "Bytes of them, as stored.",
            ((_came(*key), sizes.sum) for key, sizes in came),
        )
        yield Histogram(
            "rocketmq_message_size",
            "Bytes of one, as stored.",
            ((_came(*key), sizes) for key, sizes in came),
        )
        yield Counter(
            "rocketmq_messages_out_total",
            "Messages that consumers pulled.",
            ((_went(*key), messages) for key, (messages, _) in went),
        )
        yield Counter(
            "rocketmq_throughput_out_total",
            "Bytes of them.",
            ((_went(*key), size) for key, (_, size) in went),
        )

    def _connections(self) -> Iterator[Family]:
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
                        "consume_mode": _CONSUME_MODES.get(group.habits.consume_type, "other"),
                        "protocol_type": "remoting",
                        "is_system": _yes(_is_system("", group.name)),
                    },
                    len(consumers.members(group.name)),
                )
                for group in groups
            ),
        )

    def _lag(self) -> Iterator[Family]:
        """Of every group that has noted how far it is, connected or not."""
        latencies: list[tuple[Labels, float]] = []
        yield Gauge(
            "rocketmq_consumer_lag_messages",
            "Messages of a topic that a group has not consumed.",
            self._lags(latencies),
        )
        yield Gauge(
            "rocketmq_consumer_lag_latency",
            "Milliseconds since the oldest of them was stored.",
            latencies,  # filled while those above were read
        )

    def _lags(self, latencies: list[tuple[Labels, float]]) -> Iterator[tuple[Labels, float]]:
        offsets, topics = self._broker.offsets, self._broker.topics
        for group in list(self._broker.groups.all()):
            for topic in offsets.topics_of(group):
                if topics.find(topic) is None:
                    continue
                labels = _went(topic, group)
                lag, oldest_ms = self._lag_of(topic, offsets.queues(topic, group))
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
        except (NoSuchRecord, CorruptRecord):
            return None  # one bad record costs its own figure, not all of them

    def _log(self) -> Iterator[Family]:
        store = self._broker.store
        yield Gauge(
            "rocketmq_storage_flush_behind_bytes",
            "Bytes of the log that are not durable yet.",
            [(STORAGE, store.end - store.flushed)],
        )
        yield Gauge(
            "rocketmq_storage_message_reserve_time",
            "Milliseconds since the oldest message was stored.",
            self._oldest(),
        )
        for name, meaning, value in (
            ("begin", "Where the oldest record of the log lies.", store.begin),
            ("end", "Where the next record of the log will lie.", store.end),
            ("flushed", "Up to where the log is durable.", store.flushed),
            (
                "checkpointed",
                "Up to where queues and index are in their files.",
                store.checkpointed,
            ),
        ):
            yield Gauge(f"escrowmq_log_{name}_bytes", meaning, [({}, value)])
        yield Gauge(
            "escrowmq_store_writable",
            "1 if messages are taken, 0 if the disk is nearly full or has failed.",
            [({}, int(store.takes_writes))],
        )

    def _oldest(self) -> list[tuple[Labels, float]]:
        store = self._broker.store
        try:
            record = next(store.records(store.begin, store.end), None)
        except (NoSuchRecord, CorruptRecord):
            return []
        return [] if record is None else [(STORAGE, max(0, self._now_ms() - record.stored_ms))]

    def _work(self) -> Iterator[Family]:
        counts = self._broker.counts
        yield Gauge(
            "escrowmq_waiting_pulls",
            "Pulls that wait for a message.",
            [({}, self._broker.pulls.waiting)],
        )
        yield Counter(
            "escrowmq_busy_refusals_total",
            "Sends that were refused with SYSTEM_BUSY, by the limit that they met.",
            [
                ({"limit": limit}, self._broker.overload.refused[limit])
                for limit in (CONNECTION, TOPIC, UNFLUSHED)
            ],
        )
        yield Histogram(
            "escrowmq_append_records", "Records in one write of the log.", [({}, counts.appends)]
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
                ({"request_code": _request(code)}, count)
                for code, count in sorted(counts.requests.items())
            ],
        )
        yield Counter(
            "escrowmq_refusals_total",
            "Answers other than SUCCESS; a pull that found nothing is one.",
            [
                ({"request_code": _request(code), "response_code": response_name(why)}, count)
                for (code, why), count in sorted(counts.refused.items())
            ],
        )


def _came(topic: str, kind: str) -> Labels:
    return {"topic": topic, "message_type": kind, "is_system": _yes(is_system_topic(topic))}


def _went(topic: str, group: str) -> Labels:
    return {
        "topic": topic,
        "consumer_group": group,
        "is_retry": _yes(topic.startswith((RETRY_PREFIX, DLQ_PREFIX))),
        "is_system": _yes(_is_system(topic, group)),
    }


def _is_system(topic: str, group: str) -> bool:
    return is_system_topic(topic) or group.lower().startswith(_SYSTEM_GROUP)


def _yes(value: bool) -> str:
    return "true" if value else "false"


def _request(code: int) -> str:
    try:
        return RequestCode(code).name.lower()
    except ValueError:
        return str(code)


def response_name(code: int) -> str:
    try:
        return ResponseCode(code).name.lower()
    except ValueError:
        return str(code)


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
