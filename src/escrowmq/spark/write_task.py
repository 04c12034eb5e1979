"""What runs in a task: an iterator of Arrow batches to messages at the brokers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import WriterCommitMessage

from escrowmq.clock import SystemClock
from escrowmq.errors import ConfigError
from escrowmq.spark.write_cluster import QUEUES_MADE, TEMPLATE, Cluster
from escrowmq.spark.write_columns import rows_of
from escrowmq.spark.write_frames import Packer, Packet, key_prefix
from escrowmq.spark.write_options import EXACTLY_ONCE, WriteOptions
from escrowmq.spark.write_sink import Brokers, Epoch, Parked, Registration
from escrowmq.wire.codes import RequestCode
from escrowmq.wire.headers_send import SendMessageV2

# Spark's names for them, which it calls internal.
_QUERY: Final = "sql.streaming.queryId"
_RUN: Final = "spark.jobGroup.id"
_EPOCH: Final = "streaming.sql.batchId"
_PREPARED: Final = 4
_clock = SystemClock()


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What a task tells the driver: who it was, and what it has parked at which broker."""

    epoch: Epoch
    rows: int
    home: str = ""  # nothing: at least once, there is nothing to decide
    parked: dict[str, Parked] = field(default_factory=dict)
    is_decided: bool = False  # in another life; nothing was sent


@dataclass(frozen=True, slots=True)
class Place:
    """Of a task in its job."""

    partition: int
    attempt: int


def place_of_task() -> Place:
    context = TaskContext.get()
    if context is None:
        raise ConfigError("the sink writes in Spark's tasks; there is none here")
    return Place(context.partitionId(), context.taskAttemptId())


def epoch_of_stream(options: WriteOptions) -> Epoch:
    """Of the task that this is; the query's id is the sink's name if it has no other."""
    context = TaskContext.get()
    found = [context and context.getLocalProperty(name) for name in (_QUERY, _RUN, _EPOCH)]
    query, run, number = found
    if not query or not run or not number or not number.isdecimal():
        raise ConfigError(
            f"this Spark does not tell its tasks {_QUERY}, {_RUN} and {_EPOCH} ({found}): "
            "the sink needs Spark 4.2 or 4.3, and a query that runs as micro-batches"
        )
    return Epoch(options.transactional_id or query, int(number), run, query)


@cache
def _freeze() -> None:
    """What is imported stays: the worker looks through all of it after every task."""
    gc.freeze()


def write(
    batches: Iterator[pa.RecordBatch],
    options: WriteOptions,
    guarantee: str,
    epoch: Epoch,
    place: Place,
) -> Written:
    _freeze()
    cluster = Cluster(options.servers, options.access, timeout_s=options.timeout_s)
    brokers = Brokers(cluster, options.timeout_s, options.in_flight_bytes)
    try:
        if guarantee != EXACTLY_ONCE:
            return _send_all(batches, options, epoch, place, cluster, Sender(brokers, options))
        registration = Registration(brokers, epoch)
        if registration.is_decided:
            for _ in batches:
                pass  # to the end: a state store behind it wants its batch evaluated
            return Written(epoch, 0, registration.home, is_decided=True)
        parker = Parker(brokers, options, registration, epoch, place)
        if options.topic:
            for target in cluster.queues(options.topic):
                registration.fence(target.broker)
        return _send_all(batches, options, epoch, place, cluster, parker)
    finally:
        brokers.close()


def _send_all(
    batches: Iterator[pa.RecordBatch],
    options: WriteOptions,
    epoch: Epoch,
    place: Place,
    cluster: Cluster,
    sender: Sender,
) -> Written:
    packer = Packer(
        cluster.queues,
        options.topic,
        key_prefix(epoch.sink, epoch.number, place.partition),
        batch_bytes=options.batch_bytes,
        first_queue=place.partition,
        delayed_alone=not isinstance(sender, Parker),
    )
    for batch in batches:
        if len(batch):
            for packet in packer.add(rows_of(batch, packer.rows)):
                sender.send(packet)
    for packet in packer.rest():
        sender.send(packet)
    sender.flush()
    return sender.written(epoch, packer.rows)


class Sender:
    """At least once: what is answered is stored."""

    def __init__(self, brokers: Brokers, options: WriteOptions) -> None:
        self._brokers = brokers
        self._group = options.group

    def send(self, packet: Packet) -> None:
        properties = "" if packet.single is None else packet.single.decode()
        is_batch = packet.single is None
        code = RequestCode.SEND_BATCH_MESSAGE if is_batch else RequestCode.SEND_MESSAGE_V2
        self._send(packet, code, properties, is_batch=is_batch)

    def flush(self) -> None:
        self._brokers.flush()

    def written(self, epoch: Epoch, rows: int) -> Written:
        return Written(epoch, rows)

    def _send(
        self,
        packet: Packet,
        code: RequestCode,
        properties: str,
        *,
        is_batch: bool,
        sys_flag: int = 0,
    ) -> None:
        target = packet.target
        fields = SendMessageV2(
            producer_group=self._group,
            topic=target.topic,
            default_topic=TEMPLATE,
            default_topic_queue_nums=QUEUES_MADE,
            queue_id=target.queue_id,
            sys_flag=sys_flag,
            born_timestamp=_clock.now_ms(),
            properties=properties,
            batch=is_batch,
            broker_name=target.broker,
            bulk=is_batch or None,
        )
        self._brokers.line(target.broker).send(code, fields, packet.pieces, packet.size)


class Parker(Sender):
    """Exactly once: each packet is one half of this attempt."""

    def __init__(
        self,
        brokers: Brokers,
        options: WriteOptions,
        registration: Registration,
        epoch: Epoch,
        place: Place,
    ) -> None:
        super().__init__(brokers, options)
        self._registration = registration
        self._attempt = f"{epoch.run}/{place.partition}/{place.attempt}"
        self._key = key_prefix(epoch.sink, epoch.number, self._attempt)
        self._counts: dict[str, int] = {}
        self._number = 0
        self._properties = (
            f"TRAN_MSG\x01true\x02PGROUP\x01{options.group}\x02ESCROW_WRITER\x01{epoch.sink}\x02"
            f"ESCROW_BATCH\x01{epoch.number}\x02ESCROW_ATTEMPT\x01{self._attempt}\x02"
        )

    def send(self, packet: Packet) -> None:
        name = packet.target.broker
        key = f"{self._key}{self._number:08X}"
        fence = self._registration.fence(name)
        text = f"{self._properties}ESCROW_FENCE\x01{fence}\x02UNIQ_KEY\x01{key}\x02"
        code = RequestCode.SEND_BATCH_MESSAGE
        self._send(packet, code, text, is_batch=True, sys_flag=_PREPARED)
        self._number += 1
        self._counts[name] = self._counts.get(name, 0) + 1

    def written(self, epoch: Epoch, rows: int) -> Written:
        fence = self._registration.fence
        parked = {
            name: Parked(fence(name), self._attempt, count) for name, count in self._counts.items()
        }
        return Written(epoch, rows, self._registration.home, parked)
