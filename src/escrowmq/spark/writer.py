"""The sink of the data source: what Spark calls, for batches and for streams.

A writer is pickled and sent to the tasks, so it holds options and names, and no connection.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from escrowmq.errors import ConfigError
from escrowmq.spark.access import Access
from escrowmq.spark.write_cluster import Cluster
from escrowmq.spark.write_columns import check_columns
from escrowmq.spark.write_options import (
    AT_LEAST_ONCE,
    EXACTLY_ONCE,
    WriteOptions,
    write_options,
)
from escrowmq.spark.write_sink import Brokers, Epoch, can_decide, decide, finish_again, give_up
from escrowmq.spark.write_task import Written, epoch_of_stream, place_of_task, write

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
