"""The sink of the data source: what Spark calls, for batches and for streams.

A writer is pickled and sent to the tasks, so it holds options and names, and no connection.

What runs in a task: an iterator of Arrow batches to messages at the brokers.
"""

from __future__ import annotations

import gc
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from escrowmq.clock import SystemClock
from escrowmq.errors import ConfigError
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import SendMessageV2
from escrowmq.spark.exactly_once import (
    Brokers,
    Epoch,
    Parked,
    Registration,
    can_decide,
    decide,
    finish_again,
    give_up,
)
from escrowmq.spark.options import AT_LEAST_ONCE, EXACTLY_ONCE, Access, WriteOptions, write_options
from escrowmq.spark.row_encoding import Packer, Packet, check_columns, key_prefix, rows_of
from escrowmq.spark.write_cluster import QUEUES_MADE, TEMPLATE, Cluster

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


log = logging.getLogger(__name__)


def batch_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceArrowWriter:
    if overwrite:
        raise ConfigError(
            "a topic cannot be overwritten: use .mode('append'); old messages expire by themselves"
        )
    found = write_options(options, streaming=False)
    check_columns(schema, found.topic)
    return BatchWriter(found, guarantee_of(found))


def stream_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceStreamArrowWriter:
    if overwrite:
        raise ConfigError(
            "a topic only grows: use .outputMode('append'), or 'update' for aggregates whose "
            "every change is a message; 'complete' would have to take messages back"
        )
    found = write_options(options, streaming=True)
    check_columns(schema, found.topic)
    return StreamWriter(found, guarantee_of(found))


def guarantee_of(options: WriteOptions) -> str:
    """What is asked for, or the best that the brokers can do."""
    if options.guarantee == AT_LEAST_ONCE:
        return AT_LEAST_ONCE
    if _can_decide(options.servers, options.access, options.group, options.timeout_s):
        return EXACTLY_ONCE
    if options.guarantee == EXACTLY_ONCE:
        raise ConfigError(
            "guarantee=exactly-once needs EscrowMQ brokers, and one of these is none: Apache "
            "RocketMQ cannot decide many messages at once, nor twice the same. Set "
            "guarantee=at-least-once; each message's id then tells a double from a new one"
        )
    log.warning(
        "not all brokers behind %s are EscrowMQ: writing at least once. After a failure rows may "
        "be there twice, with the same message id. Say so with guarantee=at-least-once",
        options.servers,
    )
    return AT_LEAST_ONCE


@lru_cache(maxsize=16)
def _can_decide(servers: str, access: Access, group: str, timeout_s: float) -> bool:
    brokers = Brokers(Cluster(servers, access, timeout_s=timeout_s), timeout_s)
    try:
        return can_decide(brokers, group)
    finally:
        brokers.close()


class _Committer:
    """What batch and stream have in common: the driver's side."""

    def __init__(self, options: WriteOptions, guarantee: str) -> None:
        self._options = options
        self._guarantee = guarantee

    def _commit(self, messages: Sequence[WriterCommitMessage | None], *, is_last: bool) -> None:
        written = _written(messages)
        if not written or not written[0].home:
            return
        epoch, home = written[0].epoch, written[0].home
        brokers = self._brokers()
        try:
            if any(one.is_decided for one in written):
                finish_again(brokers, epoch, home)
            elif any(one.parked for one in written):
                decide(brokers, epoch, home, [one.parked for one in written], is_last=is_last)
        finally:
            brokers.close()

    def _abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """A courtesy: what is not decided is rolled back anyway once another run registers."""
        written = _written(messages)
        if not written or not written[0].home:
            return
        brokers = self._brokers()
        try:
            parked = [one.parked for one in written]
            give_up(brokers, written[0].epoch, written[0].home, parked)
        finally:
            brokers.close()

    def _brokers(self) -> Brokers:
        options = self._options
        cluster = Cluster(options.servers, options.access, timeout_s=options.timeout_s)
        return Brokers(cluster, options.timeout_s)


def _written(messages: Sequence[WriterCommitMessage | None]) -> list[Written]:
    return [message for message in messages if isinstance(message, Written)]


class BatchWriter(_Committer, DataSourceArrowWriter):
    """One epoch. Its name is made here, once: the driver commits with this very object."""

    def __init__(self, options: WriteOptions, guarantee: str) -> None:
        super().__init__(options, guarantee)
        run = uuid.uuid4().hex
        self._is_named = bool(options.transactional_id)
        sink = options.transactional_id or f"spark-batch-{run}"
        self._epoch = Epoch(sink, options.epoch or 0, run)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return write(iterator, self._options, self._guarantee, self._epoch, place_of_task())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._commit(messages, is_last=not self._is_named)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._abort(messages)


class StreamWriter(_Committer, DataSourceStreamArrowWriter):
    """Made anew for every epoch, and once more for its commit: only messages go between them."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        epoch = epoch_of_stream(self._options)
        return write(iterator, self._options, self._guarantee, epoch, place_of_task())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._commit(messages, is_last=False)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._abort(messages)
