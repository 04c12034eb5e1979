"""The batch and the stream reader: the driver plans, the tasks pull and decode.

    driver   options ── planning ──> partitions: a list of queue ranges per task
    task     ReadTask: RangePull ── Records ── columns ──> Arrow batches

A stream offset, as Spark stores it in the checkpoint:

    {"first": {…}, "next": {…}}        each topic -> broker -> queue -> offset

`next` is where each queue continues. `first` is where those queues start that the offset before did
not have: all of them in the first micro-batch, new ones later. Spark stores only the end of a
micro-batch. After a crash it calls `initialOffset()` again, and then "latest" would be somewhere
else. Since the end says where it started, the checkpoint alone is enough.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
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

from escrowmq.client.access import Access
from escrowmq.client.messages import MessageQueue
from escrowmq.client.sync_connection import SyncConnection
from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import DataLost, TransportError
from escrowmq.message.filter import TAG, parse_tags
from escrowmq.spark import options
from escrowmq.spark.columns import MessageColumns, is_one_of, message_batches
from escrowmq.spark.offsets import Offsets, from_nested, to_nested
from escrowmq.spark.options import SERVERS, TIMEOUT_MS, Options, parse_access
from escrowmq.spark.planning import (
    clip_range,
    make_pull_request,
    make_task_sizing,
    mean_message_sizes,
    resolve_offsets,
    select_queues,
    split_ranges,
)
from escrowmq.spark.queues import OffsetBounds, ReadCluster
from escrowmq.spark.range_pull import BLOCK_ROWS, PullRequest, QueueRange, RangePull
from escrowmq.spark.records import Records
from escrowmq.spark.schema import Columns
from escrowmq.spark.transaction_columns import TransactionColumns

log = logging.getLogger(__name__)

OFFSETS_TTL_S: Final = 0.1  # Spark asks up to thirty times a second while a stream is idle
SIZES_TTL_S: Final = 60.0
_DEFAULT_MESSAGE_BYTES: Final = 1024
StreamOffset = dict[str, Any]

# --- task ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PullPartition(InputPartition):
    """The ranges that one task reads."""

    ranges: tuple[QueueRange, ...]


@dataclass(frozen=True)
class ReadTask:
    """What a task needs besides its ranges. It is pickled and sent to the workers."""

    access: Access
    timeout_s: float
    request: PullRequest
    columns: Columns
    mode: str

    def batches(self, ranges: Sequence[QueueRange]) -> Iterator[pa.RecordBatch]:
        """Yield the rows of these ranges. Raises as `RangePull.blocks()`."""
        connections: dict[str, SyncConnection] = {}
        try:
            for queue_range in ranges:
                address = queue_range.address
                if address not in connections:
                    connections[address] = SyncConnection(address, self.access, self.timeout_s)
                pull = RangePull(connections[address], queue_range, self.request)
                for block in pull.blocks():
                    records = self._filter_records(Records.from_buffer(block), queue_range)
                    yield from decode_records(records, queue_range.queue, self.columns, self.mode)
        finally:
            for connection in connections.values():
                connection.close()

    def _filter_records(self, records: Records, queue_range: QueueRange) -> Records:
        """Drop records outside of the range, and those whose tag only has the same hash.

        With a filter, a broker may send messages behind the end of the range, and it compares
        hashes of tags only.
        """
        if self.request.is_match_all:
            return records
        records = records.select(
            (records.queue_offset >= queue_range.begin) & (records.queue_offset < queue_range.end)
        )
        if self.request.expression_type != TAG:
            return records
        tags = MessageColumns(records, queue_range.queue.topic, None).property_values("TAGS")
        return records.select(is_one_of(tags, list(parse_tags(self.request.expression))))


def decode_records(
    records: Records, queue: MessageQueue, columns: Columns, mode: str
) -> Iterator[pa.RecordBatch]:
    """Yield the records as Arrow batches of at most BLOCK_ROWS rows."""
    for begin in range(0, len(records), BLOCK_ROWS):
        part = Records(records.data, records.positions[begin : begin + BLOCK_ROWS])
        if mode == options.TRANSACTIONS:
            yield TransactionColumns(part, queue.topic, queue.broker).to_record_batch(columns)
        else:
            yield from message_batches(part, queue.topic, queue.broker, columns)


def make_read_task(parsed_options: Options, columns: Columns) -> ReadTask:
    return ReadTask(
        parse_access(parsed_options),
        parsed_options[TIMEOUT_MS] / 1000,
        make_pull_request(parsed_options),
        columns,
        parsed_options[options.MODE],
    )


def open_cluster(parsed_options: Options, clock: Clock | None = None) -> ReadCluster:
    return ReadCluster(
        parsed_options[SERVERS],
        parse_access(parsed_options),
        timeout_s=parsed_options[TIMEOUT_MS] / 1000,
        clock=clock,
    )


def _as_partitions(tasks: Sequence[Sequence[QueueRange]]) -> Sequence[InputPartition]:
    """Return at least one partition: Spark needs one even if there is nothing to read."""
    return [PullPartition(tuple(ranges)) for ranges in tasks] or [PullPartition(())]


# --- batch ---------------------------------------------------------------------------------------


class BatchReader(DataSourceReader):
    """Reads the ranges that exist when the query starts."""

    def __init__(self, parsed_options: Options, columns: Columns, cores: int = 0) -> None:
        self._options = parsed_options
        self._read_task = make_read_task(parsed_options, columns)
        self._task_sizing = make_task_sizing(parsed_options, cores)

    def partitions(self) -> Sequence[InputPartition]:
        with closing(open_cluster(self._options)) as cluster:
            ranges = self._queue_ranges(cluster)
            sizes = mean_message_sizes(cluster, ranges, self._read_task.request.group)
        return _as_partitions(split_ranges(ranges, self._task_sizing, sizes))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, PullPartition)
        return self._read_task.batches(partition.ranges)

    def _queue_ranges(self, cluster: ReadCluster) -> list[QueueRange]:
        queues = select_queues(cluster, self._options)
        bounds = cluster.offset_bounds(queues)
        start = options.start_position(self._options, is_stream=False)
        end = options.end_position(self._options)
        begins = resolve_offsets(cluster, queues, bounds, start, is_end=False)
        ends = resolve_offsets(cluster, queues, bounds, end, is_end=True)
        fail_on_data_loss = self._options[options.FAIL_ON_DATA_LOSS]
        ranges = []
        for queue, address in queues.items():
            existing = clip_range(
                queue, begins[queue], ends[queue], bounds[queue], fail_on_data_loss
            )
            ranges.append(QueueRange(queue, address, existing.start, existing.stop))
        return ranges


# --- stream --------------------------------------------------------------------------------------


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads what is new, a micro-batch at a time. Spark's checkpoint holds the offsets."""

    def __init__(
        self, parsed_options: Options, columns: Columns, cores: int = 0, clock: Clock | None = None
    ) -> None:
        self._options = parsed_options
        self._read_task = make_read_task(parsed_options, columns)
        self._task_sizing = make_task_sizing(parsed_options, cores)
        self._clock = SystemClock() if clock is None else clock
        self._cluster: ReadCluster | None = None
        # Each with the time when it was fetched.
        self._cached_bounds: tuple[float, dict[MessageQueue, str], OffsetBounds] | None = None
        self._cached_sizes: tuple[float, dict[MessageQueue, float]] | None = None
        # With Trigger.AvailableNow, the offsets where the query ends.
        self._available_now_end: Offsets | None = None

    # --- in the driver ---------------------------------------------------------------------------

    def initialOffset(self) -> StreamOffset:  # noqa: N802
        queues, bounds = self._queues_and_bounds()
        start = options.start_position(self._options, is_stream=True)
        begins = resolve_offsets(self._open_cluster(), queues, bounds, start, is_end=False)
        group = self._options[options.CONSUMER_GROUP]
        if group and self._options[options.MODE] != options.TRANSACTIONS:
            begins |= self._ensure_group_offsets(group, queues, begins)
        return _stream_offset({}, begins)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if max_rows := self._options[options.MAX_OFFSETS_PER_TRIGGER]:
            return ReadMaxRows(max_rows)
        if max_bytes := self._options[options.MAX_BYTES_PER_TRIGGER]:
            return ReadMaxBytes(max_bytes)
        return ReadAllAvailable()

    def latestOffset(self, start: StreamOffset, limit: ReadLimit) -> StreamOffset:  # noqa: N802
        queues, bounds = self._queues_and_bounds()
        previous, first = from_nested(start["next"]), from_nested(start["first"])
        begins = {**{queue: bounds[queue][0] for queue in queues}, **first, **previous}
        ends = {queue: max(bounds[queue][1], begins[queue]) for queue in queues}
        if self._available_now_end is not None:
            ends = {
                queue: max(min(end, self._available_now_end.get(queue, 0)), begins[queue])
                for queue, end in ends.items()
            }
        # A queue that is not in the route now, because its broker is down, stays where it was.
        ends = {**begins, **ends}
        ends = self._apply_read_limit(begins, ends, limit)
        has_new_queues = not ends.keys() <= previous.keys() | first.keys()
        if not has_new_queues and ends == begins:
            return start
        new_begins = {queue: begins[queue] for queue in ends if queue not in previous}
        return _stream_offset(ends, new_begins)

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
        ends = {
            queue: offset
            for queue, offset in from_nested(end["next"]).items()
            if offset > begins.get(queue, 0)
        }
        if not ends:
            return _as_partitions(())
        queues, bounds = self._queues_and_bounds()
        fail_on_data_loss = self._options[options.FAIL_ON_DATA_LOSS]
        ranges = []
        for queue, offset in sorted(ends.items()):
            if queue not in queues:
                if fail_on_data_loss:
                    raise DataLost(
                        f"{queue} is gone, with messages up to {offset} that are not read yet; "
                        f"restore its broker, or continue without it: failOnDataLoss=false"
                    )
                log.warning("a queue is gone, its messages are skipped queue=%s", queue)
                continue
            existing = clip_range(
                queue, begins.get(queue, 0), offset, bounds[queue], fail_on_data_loss
            )
            ranges.append(QueueRange(queue, queues[queue], existing.start, existing.stop))
        return _as_partitions(
            split_ranges(ranges, self._task_sizing, self._mean_message_sizes(ranges))
        )

    def commit(self, end: StreamOffset) -> None:
        """Set the offsets of the consumer group, if asked for.

        They show the progress to other tools. The stream itself reads its checkpoint only.
        """
        if not self._options[options.REPORT_OFFSETS]:
            return
        queues, _ = self._queues_and_bounds()
        offsets = {
            queue: offset for queue, offset in from_nested(end["next"]).items() if queue in queues
        }
        group = self._options[options.CONSUMER_GROUP]
        try:
            self._open_cluster().set_group_offsets(group, queues, offsets)
        except TransportError as error:
            log.warning("cannot report the offsets of a group group=%s: %s", group, error)

    def stop(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    # --- in a task -------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, PullPartition)
        return self._read_task.batches(partition.ranges)

    # --- helpers of the driver -------------------------------------------------------------------

    def _open_cluster(self) -> ReadCluster:
        if self._cluster is None:
            self._cluster = open_cluster(self._options, self._clock)
        return self._cluster

    def _queues_and_bounds(self) -> tuple[dict[MessageQueue, str], OffsetBounds]:
        now_s = self._clock.elapsed_s()
        if self._cached_bounds is None or now_s - self._cached_bounds[0] > OFFSETS_TTL_S:
            queues = select_queues(self._open_cluster(), self._options)
            self._cached_bounds = now_s, queues, self._open_cluster().offset_bounds(queues)
        return self._cached_bounds[1], self._cached_bounds[2]

    def _mean_message_sizes(self, ranges: list[QueueRange]) -> dict[MessageQueue, float]:
        now_s = self._clock.elapsed_s()
        if self._cached_sizes is None or now_s - self._cached_sizes[0] > SIZES_TTL_S:
            group = self._read_task.request.group
            self._cached_sizes = now_s, mean_message_sizes(self._open_cluster(), ranges, group)
        return self._cached_sizes[1]

    def _ensure_group_offsets(
        self, group: str, queues: Mapping[MessageQueue, str], begins: Offsets
    ) -> Offsets:
        """Return the offsets of the group. Where it has none, set the position of the options."""
        existing = self._open_cluster().group_offsets(group, queues)
        missing = {queue: begins[queue] for queue in queues if queue not in existing}
        if missing:
            self._open_cluster().create_group(group, queues)
            self._open_cluster().set_group_offsets(group, queues, missing)
        return existing

    def _apply_read_limit(self, begins: Offsets, ends: Offsets, limit: ReadLimit) -> Offsets:
        """Return the ends of a micro-batch that does not exceed the limit."""
        available = {queue: end - begins[queue] for queue, end in ends.items()}
        if isinstance(limit, ReadMaxRows):
            remaining_rows = limit.max_rows
        elif isinstance(limit, ReadMaxBytes):
            remaining_rows = self._estimate_rows(limit.max_bytes, begins, ends)
        else:
            return ends
        remaining_available = sum(available.values())
        if remaining_available <= remaining_rows:
            return ends
        # Each queue gets its share of the limit, rounded up, the smallest queue first. Rounding up
        # makes a small queue progress in every micro-batch; what is still to be distributed
        # shrinks with it, so the sum never exceeds the limit.
        limited_ends = dict(begins)
        for queue, count in sorted(available.items(), key=lambda item: item[1]):
            share = 0
            if remaining_available:
                share = min(count, -(-count * remaining_rows // remaining_available))
            limited_ends[queue] = begins[queue] + share
            remaining_rows -= share
            remaining_available -= count
        return limited_ends

    def _estimate_rows(self, max_bytes: int, begins: Offsets, ends: Offsets) -> int:
        queues, _ = self._queues_and_bounds()
        ranges = [
            QueueRange(queue, queues[queue], begins[queue], end)
            for queue, end in ends.items()
            if queue in queues and end > begins[queue]
        ]
        sizes = self._mean_message_sizes(ranges)
        mean_bytes = sum(sizes.values()) / len(sizes) if sizes else _DEFAULT_MESSAGE_BYTES
        return max(1, int(max_bytes / mean_bytes))


def _stream_offset(ends: Offsets, begins: Offsets) -> StreamOffset:
    return {"first": to_nested(begins), "next": to_nested(ends)}
