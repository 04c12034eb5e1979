"""The sink: what Spark calls, for batches and for streams, and what runs in a task.

    task     write(): Arrow batches ── BatchEncoder ── BatchSender | TransactionalSender ──> brokers
    driver   commit(): decide the epoch    abort(): give the run up

A writer is pickled and sent to the tasks, so it holds options and names, but no connection. A task
returns a `TaskResult`, which Spark passes to `commit()` or `abort()` in the driver.
"""

from __future__ import annotations

import gc
import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from escrowmq.spark.foreach_batch import QUERY_ID_PROPERTY, RUN_ID_PROPERTY
from escrowmq.spark.options import AT_LEAST_ONCE, EXACTLY_ONCE, WriteOptions, parse_write_options
from escrowmq.spark.queues import CREATED_QUEUES
from escrowmq.spark.row_encoding import (
    BatchEncoder,
    SendBatch,
    check_columns,
    key_prefix,
    read_rows,
)

log = logging.getLogger(__name__)

_BATCH_ID_PROPERTY: Final = "streaming.sql.batchId"
_PREPARED_SYS_FLAG: Final = 4
_clock = SystemClock()

# --- writers -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TaskResult(WriterCommitMessage):
    """What a task reports to the driver: its epoch, and the halves that it parked, by broker."""

    epoch: SinkEpoch
    row_count: int
    home_broker: str = ""  # empty with at-least-once: there is nothing to decide
    parked_halves: dict[str, ParkedHalves] = field(default_factory=dict)
    is_decided: bool = False  # an earlier run decided the epoch; nothing was sent


def batch_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceArrowWriter:
    """Return the writer of `df.write.save()`. Raises ConfigError."""
    if overwrite:
        raise ConfigError(
            "a topic cannot be overwritten: use .mode('append'); old messages expire by themselves"
        )
    parsed = parse_write_options(options, is_stream=False)
    check_columns(schema, parsed.topic)
    return BatchWriter(parsed, effective_guarantee(parsed))


def stream_writer(
    options: Mapping[str, str], schema: StructType, overwrite: bool
) -> DataSourceStreamArrowWriter:
    """Return the writer of `df.writeStream.start()`. Raises ConfigError."""
    if overwrite:
        raise ConfigError(
            "Spark lets a sink in Python only append: for outputMode 'update' or 'complete' use "
            ".foreachBatch(escrowmq.spark.foreach_batch_writer(servers=…, topic=…))"
        )
    parsed = parse_write_options(options, is_stream=True)
    check_columns(schema, parsed.topic)
    return StreamWriter(parsed, effective_guarantee(parsed))


def effective_guarantee(options: WriteOptions) -> str:
    """Return the guarantee that was asked for, or the best that the brokers support.

    Raises ConfigError if the brokers do not support what was asked for.
    """
    if options.guarantee == AT_LEAST_ONCE:
        return AT_LEAST_ONCE
    # The cache must not depend on options that do not matter here, such as the epoch.
    connection_options = WriteOptions(
        servers=options.servers,
        access=options.access,
        response_timeout_s=options.response_timeout_s,
        group=options.group,
        timeout_s=options.timeout_s,
    )
    if _supports_batch_decisions(connection_options):
        return EXACTLY_ONCE
    if options.guarantee == EXACTLY_ONCE:
        raise ConfigError(
            "guarantee=exactly-once needs EscrowMQ brokers, but one of these is Apache RocketMQ, "
            "which cannot decide many messages at once. Use guarantee=at-least-once; consumers "
            "recognise a repeated message by its id"
        )
    log.warning(
        "not all brokers are EscrowMQ, writing at least once: after a failure, rows may be sent "
        "twice, with the same message id; set guarantee=at-least-once to accept that servers=%s",
        options.servers,
    )
    return AT_LEAST_ONCE


@lru_cache(maxsize=16)
def _supports_batch_decisions(options: WriteOptions) -> bool:
    connections = BrokerConnections(options)
    try:
        return supports_batch_decisions(connections, options.group)
    finally:
        connections.close()


class _Committer:
    """The driver's part of both writers."""

    def __init__(self, options: WriteOptions, guarantee: str) -> None:
        self._options = options
        self._guarantee = guarantee

    def _commit(self, messages: Sequence[WriterCommitMessage | None], *, is_last: bool) -> None:
        results = _task_results(messages)
        if not results or not results[0].home_broker:
            return
        epoch, home_broker = results[0].epoch, results[0].home_broker
        connections = BrokerConnections(self._options)
        try:
            if any(result.is_decided for result in results):
                propagate_decision_again(connections, epoch, home_broker)
            elif any(result.parked_halves for result in results):
                parked_halves = [result.parked_halves for result in results]
                decide(connections, epoch, home_broker, parked_halves, is_last=is_last)
        finally:
            connections.close()

    def _abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Release the halves of a failed job early.

        Without this they are rolled back as well, but only when another run registers.
        """
        results = _task_results(messages)
        if not results or not results[0].home_broker:
            return
        connections = BrokerConnections(self._options)
        try:
            parked_halves = [result.parked_halves for result in results]
            abandon(connections, results[0].epoch, results[0].home_broker, parked_halves)
        finally:
            connections.close()


def _task_results(messages: Sequence[WriterCommitMessage | None]) -> list[TaskResult]:
    """Return the results of the tasks that succeeded; Spark passes None for the others."""
    return [message for message in messages if isinstance(message, TaskResult)]


class BatchWriter(_Committer, DataSourceArrowWriter):
    """Writes one epoch. The driver commits with the same object, so a random name is safe."""

    def __init__(self, options: WriteOptions, guarantee: str) -> None:
        super().__init__(options, guarantee)
        run = uuid.uuid4().hex
        self._is_named = bool(options.transactional_id)
        sink = options.transactional_id or f"spark-batch-{run}"
        self._epoch = SinkEpoch(sink, options.epoch or 0, run)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        epoch = self._epoch
        if self._is_named:
            # In `foreachBatch` the query belongs to the epoch, as it does in a stream: another
            # query with the same `transactional.id` must not take this epoch for its own.
            epoch = replace(epoch, query=_local_property(QUERY_ID_PROPERTY))
        return write(iterator, self._options, self._guarantee, epoch, current_task())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        # A sink with a random name has no further epochs, so the brokers need not remember it.
        self._commit(messages, is_last=not self._is_named)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._abort(messages)


class StreamWriter(_Committer, DataSourceStreamArrowWriter):
    """Writes the epochs of a query.

    Spark creates it for every epoch, and again for the commit. Only `TaskResult`s pass from one
    object to the other.
    """

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskResult:
        epoch = stream_epoch(self._options)
        return write(iterator, self._options, self._guarantee, epoch, current_task())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._commit(messages, is_last=False)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        self._abort(messages)


# --- task ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskId:
    partition: int
    attempt: int


def current_task() -> TaskId:
    context = TaskContext.get()
    if context is None:
        raise ConfigError("the sink can only write in a task of Spark")
    return TaskId(context.partitionId(), context.taskAttemptId())


def stream_epoch(options: WriteOptions) -> SinkEpoch:
    """Return the epoch of the current task. Raises ConfigError.

    The sink has the name `transactional.id`, or the id of the query.
    """
    properties = [
        _local_property(name) for name in (QUERY_ID_PROPERTY, RUN_ID_PROPERTY, _BATCH_ID_PROPERTY)
    ]
    query, run, number = properties
    if not query or not run or not number or not number.isdecimal():
        raise ConfigError(
            f"this Spark does not tell its tasks {QUERY_ID_PROPERTY}, {RUN_ID_PROPERTY} "
            f"and {_BATCH_ID_PROPERTY} ({properties}): "
            "the sink needs Spark 4.2 or 4.3, and a query that runs as micro-batches"
        )
    return SinkEpoch(options.transactional_id or query, int(number), run, query)


def _local_property(name: str) -> str:
    """Return a property of the current task; empty if it has none."""
    context = TaskContext.get()
    return (context.getLocalProperty(name) if context else None) or ""


@cache
def _freeze_imports() -> None:
    """Exclude imported modules from garbage collection, which Spark runs after every task."""
    gc.freeze()


def write(
    batches: Iterator[pa.RecordBatch],
    options: WriteOptions,
    guarantee: str,
    epoch: SinkEpoch,
    task: TaskId,
) -> TaskResult:
    """Send the rows of one task. With exactly-once they are parked until the driver commits.

    Raises RowRefused, WriterFenced, RequestRefused, TransportError.
    """
    _freeze_imports()
    connections = BrokerConnections(options)
    try:
        if guarantee != EXACTLY_ONCE:
            return _send_all(batches, options, epoch, task, BatchSender(connections, options))
        registration = SinkRegistration(connections, epoch)
        if registration.is_decided:
            for _ in batches:
                pass  # evaluate all rows: a state store in the plan commits only then
            return TaskResult(epoch, 0, registration.home_broker, is_decided=True)
        if options.topic:
            # Register at all brokers of the topic now, rather than between two sends.
            for queue in connections.cluster.writable_queues(options.topic):
                registration.fence(queue.broker)
        sender = TransactionalSender(connections, options, registration, epoch, task)
        return _send_all(batches, options, epoch, task, sender)
    finally:
        connections.close()


def _send_all(
    batches: Iterator[pa.RecordBatch],
    options: WriteOptions,
    epoch: SinkEpoch,
    task: TaskId,
    sender: BatchSender,
) -> TaskResult:
    encoder = BatchEncoder(
        sender.connections.cluster.writable_queues,
        options.topic,
        key_prefix(epoch.sink, epoch.number, task.partition),
        batch_bytes=options.batch_bytes,
        first_queue=task.partition,
        send_delayed_singly=not isinstance(sender, TransactionalSender),
    )
    for batch in batches:
        if len(batch):
            for send_batch in encoder.add(read_rows(batch, encoder.row_count)):
                sender.send(send_batch)
    for send_batch in encoder.flush():
        sender.send(send_batch)
    sender.flush()
    return sender.result(epoch, encoder.row_count)


class BatchSender:
    """Sends at least once: a message with a response is stored."""

    def __init__(self, connections: BrokerConnections, options: WriteOptions) -> None:
        self.connections = connections
        self._group = options.group

    def send(self, batch: SendBatch) -> None:
        properties = "" if batch.single_properties is None else batch.single_properties.decode()
        is_batch = batch.single_properties is None
        code = RequestCode.SEND_BATCH_MESSAGE if is_batch else RequestCode.SEND_MESSAGE_V2
        self._send(batch, code, properties, is_batch=is_batch)

    def flush(self) -> None:
        """Wait until everything is stored."""
        self.connections.flush()

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
        queue = batch.queue
        header = SendMessageV2(
            producer_group=self._group,
            topic=queue.topic,
            default_topic=TEMPLATE_TOPIC,
            default_topic_queue_nums=CREATED_QUEUES,
            queue_id=queue.queue_id,
            sys_flag=sys_flag,
            born_timestamp=_clock.now_ms(),
            properties=properties,
            batch=is_batch,
            broker_name=queue.broker,
            bulk=is_batch or None,
        )
        self.connections.pipeline(queue.broker).send(
            code, header, batch.body_parts, batch.body_bytes
        )


class TransactionalSender(BatchSender):
    """Parks every batch as one half message of this attempt."""

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
        broker = batch.queue.broker
        key = f"{self._key_prefix}{self._batch_count:08X}"
        fence = self._registration.fence(broker)
        properties = f"{self._properties}ESCROW_FENCE\x01{fence}\x02UNIQ_KEY\x01{key}\x02"
        code = RequestCode.SEND_BATCH_MESSAGE
        self._send(batch, code, properties, is_batch=True, sys_flag=_PREPARED_SYS_FLAG)
        self._batch_count += 1
        self._counts_by_broker[broker] = self._counts_by_broker.get(broker, 0) + 1

    def result(self, epoch: SinkEpoch, row_count: int) -> TaskResult:
        fence = self._registration.fence
        parked_halves = {
            broker: ParkedHalves(fence(broker), self._attempt, count)
            for broker, count in self._counts_by_broker.items()
        }
        return TaskResult(epoch, row_count, self._registration.home_broker, parked_halves)
