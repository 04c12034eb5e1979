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
from escrowmq.message.names import TEMPLATE_TOPIC
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import SendMessageV2
from escrowmq.spark.exactly_once import (
    BrokerConnections,
    ParkedHalves,
    SinkEpoch,
    SinkRegistration,
    abandon,
    decide,
    propagate_decision_again,
    supports_batch_decisions,
)
from escrowmq.spark.options import (
    AT_LEAST_ONCE,
    EXACTLY_ONCE,
    SparkAccess,
    WriteOptions,
    parse_write_options,
)
from escrowmq.spark.row_encoding import (
    BatchEncoder,
    SendBatch,
    check_columns,
    key_prefix,
    read_rows,
)
from escrowmq.spark.write_cluster import CREATED_QUEUES, WriteCluster

# Spark's names for them, which it calls internal.
_QUERY_ID_PROPERTY: Final = "sql.streaming.queryId"
_RUN_ID_PROPERTY: Final = "spark.jobGroup.id"
_BATCH_ID_PROPERTY: Final = "streaming.sql.batchId"
_PREPARED_SYS_FLAG: Final = 4
_clock = SystemClock()


@dataclass(frozen=True)
class TaskResult(WriterCommitMessage):
    """What a task tells the driver: who it was, and what it has parked at which broker."""

    epoch: SinkEpoch
    row_count: int
    home_broker: str = ""  # nothing: at least once, there is nothing to decide
    parked_halves: dict[str, ParkedHalves] = field(default_factory=dict)
    is_decided: bool = False  # in another life; nothing was sent


@dataclass(frozen=True, slots=True)
class TaskId:
    """Of a task in its job."""

    partition: int
    attempt: int


def current_task() -> TaskId:
    context = TaskContext.get()
    if context is None:
        raise ConfigError("the sink writes in Spark's tasks; there is none here")
    return TaskId(context.partitionId(), context.taskAttemptId())


def stream_epoch(options: WriteOptions) -> SinkEpoch:
    """Of the task that this is; the query's id is the sink's name if it has no other."""
    context = TaskContext.get()
    found = [
        context and context.getLocalProperty(name)
        for name in (_QUERY_ID_PROPERTY, _RUN_ID_PROPERTY, _BATCH_ID_PROPERTY)
    ]
    query, run, number = found
    if not query or not run or not number or not number.isdecimal():
        raise ConfigError(
            f"this Spark does not tell its tasks {_QUERY_ID_PROPERTY}, {_RUN_ID_PROPERTY} "
            f"and {_BATCH_ID_PROPERTY} ({found}): "
            "the sink needs Spark 4.2 or 4.3, and a query that runs as micro-batches"
        )
    return SinkEpoch(options.transactional_id or query, int(number), run, query)


@cache
def _freeze_imports() -> None:
    """What is imported stays: the worker looks through all of it after every task."""
    gc.freeze()


def write(
    batches: Iterator[pa.RecordBatch],
    options: WriteOptions,
    guarantee: str,
    epoch: SinkEpoch,
    task: TaskId,
) -> TaskResult:
    _freeze_imports()
    cluster = WriteCluster(options.servers, options.access, timeout_s=options.timeout_s)
    brokers = BrokerConnections(cluster, options.timeout_s, options.in_flight_bytes)
    try:
        if guarantee != EXACTLY_ONCE:
            return _send_all(batches, options, epoch, task, cluster, BatchSender(brokers, options))
        registration = SinkRegistration(brokers, epoch)
        if registration.is_decided:
            for _ in batches:
                pass  # to the end: a state store behind it wants its batch evaluated
            return TaskResult(epoch, 0, registration.home_broker, is_decided=True)
        parker = TransactionalSender(brokers, options, registration, epoch, task)
        if options.topic:
            for target in cluster.queues(options.topic):
                registration.fence(target.broker)
        return _send_all(batches, options, epoch, task, cluster, parker)
    finally:
        brokers.close()


def _send_all(
    batches: Iterator[pa.RecordBatch],
    options: WriteOptions,
    epoch: SinkEpoch,
    task: TaskId,
    cluster: WriteCluster,
    sender: BatchSender,
) -> TaskResult:
    packer = BatchEncoder(
        cluster.queues,
        options.topic,
        key_prefix(epoch.sink, epoch.number, task.partition),
        batch_bytes=options.batch_bytes,
        first_queue=task.partition,
        send_delayed_singly=not isinstance(sender, TransactionalSender),
    )
    for batch in batches:
        if len(batch):
            for packet in packer.add(read_rows(batch, packer.row_count)):
                sender.send(packet)
    for packet in packer.flush():
        sender.send(packet)
    sender.flush()
    return sender.result(epoch, packer.row_count)


class BatchSender:
    """At least once: what is answered is stored."""

    def __init__(self, connections: BrokerConnections, options: WriteOptions) -> None:
        self._brokers = connections
        self._group = options.group

    def send(self, batch: SendBatch) -> None:
        properties = "" if batch.single_properties is None else batch.single_properties.decode()
        is_batch = batch.single_properties is None
        code = RequestCode.SEND_BATCH_MESSAGE if is_batch else RequestCode.SEND_MESSAGE_V2
        self._send(batch, code, properties, is_batch=is_batch)

    def flush(self) -> None:
        self._brokers.flush()

    def result(self, epoch: SinkEpoch, row_count: int) -> TaskResult:
        return TaskResult(epoch, row_count)

    def _send(
        self,
        batch: SendBatch,
        code: RequestCode,
        properties: str,
        *,
        is_batch: bool,
        sys_flag: int = 0,
    ) -> None:
        target = batch.queue
        fields = SendMessageV2(
            producer_group=self._group,
            topic=target.topic,
            default_topic=TEMPLATE_TOPIC,
            default_topic_queue_nums=CREATED_QUEUES,
            queue_id=target.queue_id,
            sys_flag=sys_flag,
            born_timestamp=_clock.now_ms(),
            properties=properties,
            batch=is_batch,
            broker_name=target.broker,
            bulk=is_batch or None,
        )
        self._brokers.connection(target.broker).send(
            code, fields, batch.body_parts, batch.body_bytes
        )


class TransactionalSender(BatchSender):
    """Exactly once: each packet is one half of this attempt."""

    def __init__(
        self,
        connections: BrokerConnections,
        options: WriteOptions,
        registration: SinkRegistration,
        epoch: SinkEpoch,
        task: TaskId,
    ) -> None:
        super().__init__(connections, options)
        self._registration = registration
        self._attempt = f"{epoch.run}/{task.partition}/{task.attempt}"
        self._key_prefix = key_prefix(epoch.sink, epoch.number, self._attempt)
        self._counts_by_broker: dict[str, int] = {}
        self._batch_count = 0
        self._properties = (
            f"TRAN_MSG\x01true\x02PGROUP\x01{options.group}\x02ESCROW_WRITER\x01{epoch.sink}\x02"
            f"ESCROW_BATCH\x01{epoch.number}\x02ESCROW_ATTEMPT\x01{self._attempt}\x02"
        )

    def send(self, batch: SendBatch) -> None:
        name = batch.queue.broker
        key = f"{self._key_prefix}{self._batch_count:08X}"
        fence = self._registration.fence(name)
        text = f"{self._properties}ESCROW_FENCE\x01{fence}\x02UNIQ_KEY\x01{key}\x02"
        code = RequestCode.SEND_BATCH_MESSAGE
        self._send(batch, code, text, is_batch=True, sys_flag=_PREPARED_SYS_FLAG)
        self._batch_count += 1
        self._counts_by_broker[name] = self._counts_by_broker.get(name, 0) + 1

    def result(self, epoch: SinkEpoch, row_count: int) -> TaskResult:
        fence = self._registration.fence
        parked = {
            name: ParkedHalves(fence(name), self._attempt, count)
            for name, count in self._counts_by_broker.items()
        }
        return TaskResult(epoch, row_count, self._registration.home_broker, parked)


log = logging.getLogger(__name__)


def batch_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceArrowWriter:
    if overwrite:
        raise ConfigError(
            "a topic cannot be overwritten: use .mode('append'); old messages expire by themselves"
        )
    found = parse_write_options(options, is_stream=False)
    check_columns(schema, found.topic)
    return BatchWriter(found, effective_guarantee(found))


def stream_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceStreamArrowWriter:
    if overwrite:
        raise ConfigError(
            "a topic only grows: use .outputMode('append'), or 'update' for aggregates whose "
            "every change is a message; 'complete' would have to take messages back"
        )
    found = parse_write_options(options, is_stream=True)
    check_columns(schema, found.topic)
    return StreamWriter(found, effective_guarantee(found))


def effective_guarantee(options: WriteOptions) -> str:
    """What is asked for, or the best that the brokers can do."""
    if options.guarantee == AT_LEAST_ONCE:
        return AT_LEAST_ONCE
    if _supports_batch_decisions(options.servers, options.access, options.group, options.timeout_s):
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
def _supports_batch_decisions(
    servers: str, access: SparkAccess, group: str, timeout_s: float
) -> bool:
    brokers = BrokerConnections(WriteCluster(servers, access, timeout_s=timeout_s), timeout_s)
    try:
        return supports_batch_decisions(brokers, group)
    finally:
        brokers.close()


class _Committer:
    """What batch and stream have in common: the driver's side."""

    def __init__(self, options: WriteOptions, guarantee: str) -> None:
        self._options = options
        self._guarantee = guarantee

    def _commit(self, messages: Sequence[WriterCommitMessage | None], *, is_last: bool) -> None:
        written = _task_results(messages)
        if not written or not written[0].home_broker:
            return
        epoch, home = written[0].epoch, written[0].home_broker
        brokers = self._connect()
        try:
            if any(one.is_decided for one in written):
                propagate_decision_again(brokers, epoch, home)
            elif any(one.parked_halves for one in written):
                decide(
                    brokers, epoch, home, [one.parked_halves for one in written], is_last=is_last
                )
        finally:
            brokers.close()

    def _abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """A courtesy: what is not decided is rolled back anyway once another run registers."""
        written = _task_results(messages)
        if not written or not written[0].home_broker:
            return
        brokers = self._connect()
        try:
            parked = [one.parked_halves for one in written]
            abandon(brokers, written[0].epoch, written[0].home_broker, parked)
        finally:
            brokers.close()

    def _connect(self) -> BrokerConnections:
        options = self._options
        cluster = WriteCluster(options.servers, options.access, timeout_s=options.timeout_s)
        return BrokerConnections(cluster, options.timeout_s)


def _task_results(messages: Sequence[WriterCommitMessage | None]) -> list[TaskResult]:
    return [message for message in messages if isinstance(message, TaskResult)]


class BatchWriter(_Committer, DataSourceArrowWriter):
    """One epoch. Its name is made here, once: the driver commits with this very object."""

    def __init__(self, options: WriteOptions, guarantee: str) -> None:
        super().__init__(options, guarantee)
        run = uuid.uuid4().hex
        self._is_named = bool(options.transactional_id)
        sink = options.transactional_id or f"spark-batch-{run}"
        self._epoch = SinkEpoch(sink, options.epoch or 0, run)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        return write(iterator, self._options, self._guarantee, self._epoch, current_task())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._commit(messages, is_last=not self._is_named)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._abort(messages)


class StreamWriter(_Committer, DataSourceStreamArrowWriter):
    """Made anew for every epoch, and once more for its commit: only messages go between them."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        epoch = stream_epoch(self._options)
        return write(iterator, self._options, self._guarantee, epoch, current_task())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._commit(messages, is_last=False)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._abort(messages)
