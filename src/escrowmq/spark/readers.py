"""The batch reader: plans on the driver, pulls and decodes in the tasks.

The streaming reader.

An offset, as Spark keeps it in the checkpoint:

    {"first": {…}, "next": {…}}        each topic -> broker -> queue -> offset

`next` is where each queue goes on. `first` is where those begin that the offset before did not
have: all of them in the first micro-batch, new ones later. Spark keeps only the end of a
micro-batch, and asks for the start of the first one again after a crash, when "latest" is no
longer what it was; so the end says where it began, and the checkpoint alone is enough.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import DataLost, TransportError
from escrowmq.message.filter import TAG, parse_tags
from escrowmq.spark import options
from escrowmq.spark.cluster import ReadCluster
from escrowmq.spark.columns import MessageColumns, is_one_of
from escrowmq.spark.line import BlockingConnection
from escrowmq.spark.offsets import Offsets, QueueKey, from_nested, to_nested
from escrowmq.spark.options import SERVERS, Options, SparkAccess, parse_access
from escrowmq.spark.planning import (
    TaskSizing,
    clip_range,
    make_pull_request,
    mean_message_sizes,
    resolve_offsets,
    select_queues,
    split_ranges,
)
from escrowmq.spark.range_pull import BLOCK_ROWS, PullRequest, QueueRange, RangePull
from escrowmq.spark.records import Records
from escrowmq.spark.schema import Columns
from escrowmq.spark.transaction_columns import TransactionColumns


@dataclass(frozen=True)
class PullPartition(InputPartition):
    """What one task reads."""

    ranges: tuple[QueueRange, ...]


@dataclass(frozen=True)
class ReadTask:
    """What a task must know; it travels to the workers."""

    access: SparkAccess
    request: PullRequest
    columns: Columns
    mode: str

    def batches(self, ranges: Sequence[QueueRange]) -> Iterator[pa.RecordBatch]:
        lines: dict[str, BlockingConnection] = {}
        try:
            for piece in ranges:
                if piece.address not in lines:
                    lines[piece.address] = BlockingConnection(piece.address, self.access)
                for block in RangePull(lines[piece.address], piece, self.request).blocks():
                    records = self._filter_records(Records.from_buffer(block), piece)
                    yield from decode_records(records, piece.queue, self.columns, self.mode)
        finally:
            for line in lines.values():
                line.close()

    def _filter_records(self, records: Records, queue_range: QueueRange) -> Records:
        """Brokers filter by the hash of a tag, and do not stop at our end when they do."""
        if self.request.is_match_all:
            return records
        records = records.select(
            (records.queue_offset >= queue_range.begin) & (records.queue_offset < queue_range.end)
        )
        if self.request.expression_type != TAG:
            return records
        tags = list(parse_tags(self.request.expression))
        found = MessageColumns(records, queue_range.queue.topic, None).property_values("TAGS")
        return records.select(is_one_of(found, tags))


def decode_records(
    records: Records, queue: QueueKey, columns: Columns, mode: str
) -> Iterator[pa.RecordBatch]:
    for at in range(0, len(records), BLOCK_ROWS):
        some = Records(records.data, records.positions[at : at + BLOCK_ROWS])
        if mode == options.TRANSACTIONS:
            yield TransactionColumns(some, queue.topic, queue.broker).to_record_batch(columns)
        else:
            yield MessageColumns(some, queue.topic, queue.broker).to_record_batch(columns)


def make_read_task(parsed_options: Options, columns: Columns) -> ReadTask:
    return ReadTask(
        parse_access(parsed_options),
        make_pull_request(parsed_options),
        columns,
        parsed_options[options.MODE],
    )


def make_task_sizing(parsed_options: Options, cores: int) -> TaskSizing:
    return TaskSizing(
        cores,
        parsed_options[options.MIN_PARTITIONS],
        parsed_options[options.MAX_BYTES_PER_PARTITION],
    )


class BatchReader(DataSourceReader):
    def __init__(self, parsed_options: Options, columns: Columns, cores: int = 0) -> None:
        self._options = parsed_options
        self._read_task = make_read_task(parsed_options, columns)
        self._task_sizing = make_task_sizing(parsed_options, cores)

    def partitions(self) -> Sequence[InputPartition]:
        cluster = ReadCluster(self._options[SERVERS], self._read_task.access)
        try:
            pieces = self._queue_ranges(cluster)
            sizes = mean_message_sizes(cluster, pieces, self._read_task.request.group)
        finally:
            cluster.close()
        return [
            PullPartition(tuple(task)) for task in split_ranges(pieces, self._task_sizing, sizes)
        ] or [PullPartition(())]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, PullPartition)
        return self._read_task.batches(partition.ranges)

    def _queue_ranges(self, cluster: ReadCluster) -> list[QueueRange]:
        chosen = self._options
        queues = select_queues(cluster, chosen)
        bounds = cluster.offset_bounds(queues)
        start = options.start_position(chosen, is_stream=False)
        begins = resolve_offsets(cluster, queues, bounds, start, is_end=False)
        ends = resolve_offsets(cluster, queues, bounds, options.end_position(chosen), is_end=True)
        fail = chosen[options.FAIL_ON_DATA_LOSS]
        pieces = []
        for queue, address in queues.items():
            there = clip_range(queue, begins[queue], ends[queue], bounds[queue], fail)
            pieces.append(QueueRange(queue, address, there.start, there.stop))
        return pieces


log = logging.getLogger(__name__)

OFFSETS_TTL_S: Final = 0.1  # Spark asks up to thirty times a second when nothing happens
SIZES_TTL_S: Final = 60.0
StreamOffset = dict[str, Any]
OffsetBounds = dict[QueueKey, tuple[int, int]]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(
        self, parsed_options: Options, columns: Columns, cores: int = 0, clock: Clock | None = None
    ) -> None:
        self._options = parsed_options
        self._read_task = make_read_task(parsed_options, columns)
        self._task_sizing = make_task_sizing(parsed_options, cores)
        self._clock = SystemClock() if clock is None else clock
        self._cluster: ReadCluster | None = None
        self._cached_bounds: tuple[float, dict[QueueKey, str], OffsetBounds] | None = None
        self._cached_sizes: tuple[float, dict[QueueKey, float]] | None = None
        self._available_now_end: Offsets | None = (
            None  # of a query that ends with what is available now
        )

    # --- what Spark asks on the driver -----------------------------------------------------------

    def initialOffset(self) -> StreamOffset:  # noqa: N802
        queues, bounds = self._queues_and_bounds()
        start = options.start_position(self._options, is_stream=True)
        begins = resolve_offsets(self._open_cluster(), queues, bounds, start, is_end=False)
        group = self._options[options.CONSUMER_GROUP]
        if group and self._options[options.MODE] != options.TRANSACTIONS:
            begins |= self._ensure_group_offsets(group, queues, begins)
        return _stream_offset({}, begins)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if rows := self._options[options.MAX_OFFSETS_PER_TRIGGER]:
            return ReadMaxRows(rows)
        if size := self._options[options.MAX_BYTES_PER_TRIGGER]:
            return ReadMaxBytes(size)
        return ReadAllAvailable()

    def latestOffset(self, start: StreamOffset, limit: ReadLimit) -> StreamOffset:  # noqa: N802
        queues, bounds = self._queues_and_bounds()
        before, first = from_nested(start["next"]), from_nested(start["first"])
        begins = {**{queue: bounds[queue][0] for queue in queues}, **first, **before}
        ends = {queue: max(bounds[queue][1], begins[queue]) for queue in queues}
        if self._available_now_end is not None:
            ends = {
                queue: max(min(end, self._available_now_end.get(queue, 0)), begins[queue])
                for queue, end in ends.items()
            }
        # A queue that cannot be seen just now (its broker is away) stays where it was.
        ends = {**{queue: begins[queue] for queue in begins}, **ends}
        ends = self._apply_read_limit(begins, ends, limit)
        if all(ends[queue] == begins[queue] for queue in ends) and ends.keys() <= (
            before.keys() | first.keys()
        ):
            return start
        return _stream_offset(ends, {queue: begins[queue] for queue in ends if queue not in before})

    def reportLatestOffset(self) -> StreamOffset:  # noqa: N802
        _, bounds = self._queues_and_bounds()
        return _stream_offset({queue: high for queue, (_, high) in bounds.items()}, {})

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        _, bounds = self._queues_and_bounds()
        self._available_now_end = {queue: high for queue, (_, high) in bounds.items()}

    def partitions(self, start: StreamOffset, end: StreamOffset) -> Sequence[InputPartition]:
        begins = {
            **from_nested(start["first"]),
            **from_nested(end["first"]),
            **from_nested(start["next"]),
        }
        ends = from_nested(end["next"])
        wanted = {queue: number for queue, number in ends.items() if number > begins.get(queue, 0)}
        if not wanted:
            return [PullPartition(())]
        queues, bounds = self._queues_and_bounds()
        fail = self._options[options.FAIL_ON_DATA_LOSS]
        pieces = []
        for queue, number in sorted(wanted.items()):
            if queue not in queues:
                if fail:
                    raise DataLost(
                        f"{queue} is gone, with messages up to {number} that were to be read; "
                        f"bring its broker back, or go on without it: failOnDataLoss=false"
                    )
                log.warning("a queue is gone, it is left out queue=%s", queue)
                continue
            there = clip_range(queue, begins.get(queue, 0), number, bounds[queue], fail)
            pieces.append(QueueRange(queue, queues[queue], there.start, there.stop))
        return [
            PullPartition(tuple(task))
            for task in split_ranges(pieces, self._task_sizing, self._mean_message_sizes(pieces))
        ] or [PullPartition(())]

    def commit(self, end: StreamOffset) -> None:
        """Only so that others see how far we are: nothing here is read again by us."""
        if not self._options[options.REPORT_OFFSETS]:
            return
        queues, _ = self._queues_and_bounds()
        reached = {queue: at for queue, at in from_nested(end["next"]).items() if queue in queues}
        try:
            self._open_cluster().set_group_offsets(
                self._options[options.CONSUMER_GROUP], queues, reached
            )
        except TransportError as error:
            log.warning("the group's offsets could not be reported: %s", error)

    def stop(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    # --- what a task does ------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, PullPartition)
        return self._read_task.batches(partition.ranges)

    # --- looking ---------------------------------------------------------------------------------

    def _open_cluster(self) -> ReadCluster:
        if self._cluster is None:
            self._cluster = ReadCluster(self._options[SERVERS], self._read_task.access, self._clock)
        return self._cluster

    def _queues_and_bounds(self) -> tuple[dict[QueueKey, str], OffsetBounds]:
        now_s = self._clock.elapsed_s()
        if self._cached_bounds is None or now_s - self._cached_bounds[0] > OFFSETS_TTL_S:
            queues = select_queues(self._open_cluster(), self._options)
            self._cached_bounds = now_s, queues, self._open_cluster().offset_bounds(queues)
        return self._cached_bounds[1], self._cached_bounds[2]

    def _mean_message_sizes(self, ranges: list[QueueRange]) -> dict[QueueKey, float]:
        now_s = self._clock.elapsed_s()
        if self._cached_sizes is None or now_s - self._cached_sizes[0] > SIZES_TTL_S:
            self._cached_sizes = (
                now_s,
                mean_message_sizes(self._open_cluster(), ranges, self._read_task.request.group),
            )
        return self._cached_sizes[1]

    def _ensure_group_offsets(
        self, group: str, queues: Mapping[QueueKey, str], begins: Offsets
    ) -> Offsets:
        """Where the group stands; it is put where we begin if it stands nowhere yet."""
        there = self._open_cluster().group_offsets(group, queues)
        missing = {queue: begins[queue] for queue in queues if queue not in there}
        if missing:
            self._open_cluster().create_group(group, queues)
            self._open_cluster().set_group_offsets(group, queues, missing)
        return there

    def _apply_read_limit(self, begins: Offsets, ends: Offsets, limit: ReadLimit) -> Offsets:
        waiting = {queue: end - begins[queue] for queue, end in ends.items()}
        if isinstance(limit, ReadMaxRows):
            left = limit.max_rows
        elif isinstance(limit, ReadMaxBytes):
            left = self._estimate_rows(limit.max_bytes, begins, ends)
        else:
            return ends
        total = sum(waiting.values())
        if total <= left:
            return ends
        # Each queue its share of what waits, rounded up, the smallest first; none past the limit.
        found = dict(begins)
        for queue, count in sorted(waiting.items(), key=lambda item: item[1]):
            share = min(count, -(-count * left // total)) if total else 0
            found[queue] = begins[queue] + share
            left, total = left - share, total - count
        return found

    def _estimate_rows(self, max_bytes: int, begins: Offsets, ends: Offsets) -> int:
        queues, _ = self._queues_and_bounds()
        pieces = [
            QueueRange(queue, queues[queue], begins[queue], end)
            for queue, end in ends.items()
            if queue in queues and end > begins[queue]
        ]
        sizes = self._mean_message_sizes(pieces)
        mean = sum(sizes.values()) / len(sizes) if sizes else 1024
        return max(1, int(max_bytes / mean))


def _stream_offset(ends: Offsets, begins: Offsets) -> StreamOffset:
    return {"first": to_nested(begins), "next": to_nested(ends)}
