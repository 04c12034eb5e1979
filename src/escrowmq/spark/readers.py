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
from escrowmq.spark import options
from escrowmq.spark.cluster import Cluster
from escrowmq.spark.columns import MessageColumns, is_one_of
from escrowmq.spark.line import BlockingLine
from escrowmq.spark.offsets import Offsets, QueueKey, flat, nested
from escrowmq.spark.options import SERVERS, Access, Chosen, access_of
from escrowmq.spark.planning import Rules, mean_sizes, places, queues_of, split, wish_of, within
from escrowmq.spark.range_pull import BLOCK_ROWS, Piece, RangePull, Wish
from escrowmq.spark.records import Records
from escrowmq.spark.schema import Columns
from escrowmq.spark.transaction_columns import TransactionColumns


@dataclass(frozen=True)
class Pull(InputPartition):
    """What one task reads."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Reading:
    """What a task must know; it travels to the workers."""

    access: Access
    wish: Wish
    columns: Columns
    mode: str

    def batches(self, pieces: Sequence[Piece]) -> Iterator[pa.RecordBatch]:
        lines: dict[str, BlockingLine] = {}
        try:
            for piece in pieces:
                if piece.address not in lines:
                    lines[piece.address] = BlockingLine(piece.address, self.access)
                for block in RangePull(lines[piece.address], piece, self.wish).blocks():
                    records = self._wanted(Records.all_of(block), piece)
                    yield from decoded(records, piece.queue, self.columns, self.mode)
        finally:
            for line in lines.values():
                line.close()

    def _wanted(self, records: Records, piece: Piece) -> Records:
        """Brokers filter by the hash of a tag, and do not stop at our end when they do."""
        if self.wish.is_everything:
            return records
        records = records.where(
            (records.queue_offset >= piece.begin) & (records.queue_offset < piece.end)
        )
        if self.wish.kind != "TAG":
            return records
        tags = [tag.strip() for tag in self.wish.expression.split("||")]
        found = MessageColumns(records, piece.queue.topic, None).property("TAGS")
        return records.where(is_one_of(found, tags))


def decoded(
    records: Records, queue: QueueKey, columns: Columns, mode: str
) -> Iterator[pa.RecordBatch]:
    for at in range(0, len(records), BLOCK_ROWS):
        some = Records(records.data, records.at[at : at + BLOCK_ROWS])
        if mode == options.TRANSACTIONS:
            yield TransactionColumns(some, queue.topic, queue.broker).batch(columns)
        else:
            yield MessageColumns(some, queue.topic, queue.broker).batch(columns)


def reading_of(chosen: Chosen, columns: Columns) -> Reading:
    return Reading(access_of(chosen), wish_of(chosen), columns, chosen[options.MODE])


def rules_of(chosen: Chosen, cores: int) -> Rules:
    return Rules(cores, chosen[options.MIN_PARTITIONS], chosen[options.MAX_BYTES_PER_PARTITION])


class BatchReader(DataSourceReader):
    def __init__(self, chosen: Chosen, columns: Columns, cores: int = 0) -> None:
        self._chosen = chosen
        self._reading = reading_of(chosen, columns)
        self._rules = rules_of(chosen, cores)

    def partitions(self) -> Sequence[InputPartition]:
        cluster = Cluster(self._chosen[SERVERS], self._reading.access)
        try:
            pieces = self._pieces(cluster)
            sizes = mean_sizes(cluster, pieces, self._reading.wish.group)
        finally:
            cluster.close()
        return [Pull(tuple(task)) for task in split(pieces, self._rules, sizes)] or [Pull(())]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Pull)
        return self._reading.batches(partition.pieces)

    def _pieces(self, cluster: Cluster) -> list[Piece]:
        chosen = self._chosen
        queues = queues_of(cluster, chosen)
        bounds = cluster.bounds(queues)
        start = options.start_of(chosen, is_stream=False)
        begins = places(cluster, queues, bounds, start, is_end=False)
        ends = places(cluster, queues, bounds, options.end_of(chosen), is_end=True)
        fail = chosen[options.FAIL_ON_DATA_LOSS]
        pieces = []
        for queue, address in queues.items():
            there = within(queue, begins[queue], ends[queue], bounds[queue], fail)
            pieces.append(Piece(queue, address, there.start, there.stop))
        return pieces


log = logging.getLogger(__name__)

FRESH_S: Final = 0.1  # Spark asks up to thirty times a second when nothing happens
SIZES_FRESH_S: Final = 60.0
Told = dict[str, Any]
Bounds = dict[QueueKey, tuple[int, int]]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(
        self, chosen: Chosen, columns: Columns, cores: int = 0, clock: Clock | None = None
    ) -> None:
        self._chosen = chosen
        self._reading = reading_of(chosen, columns)
        self._rules = rules_of(chosen, cores)
        self._clock = SystemClock() if clock is None else clock
        self._cluster: Cluster | None = None
        self._seen: tuple[float, dict[QueueKey, str], Bounds] | None = None
        self._sizes: tuple[float, dict[QueueKey, float]] | None = None
        self._target: Offsets | None = None  # of a query that ends with what is available now

    # --- what Spark asks on the driver -----------------------------------------------------------

    def initialOffset(self) -> Told:  # noqa: N802
        queues, bounds = self._look()
        start = options.start_of(self._chosen, is_stream=True)
        begins = places(self._lines(), queues, bounds, start, is_end=False)
        group = self._chosen[options.CONSUMER_GROUP]
        if group and self._chosen[options.MODE] != options.TRANSACTIONS:
            begins |= self._pinned(group, queues, begins)
        return _told({}, begins)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if rows := self._chosen[options.MAX_OFFSETS_PER_TRIGGER]:
            return ReadMaxRows(rows)
        if size := self._chosen[options.MAX_BYTES_PER_TRIGGER]:
            return ReadMaxBytes(size)
        return ReadAllAvailable()

    def latestOffset(self, start: Told, limit: ReadLimit) -> Told:  # noqa: N802
        queues, bounds = self._look()
        before, first = flat(start["next"]), flat(start["first"])
        begins = {**{queue: bounds[queue][0] for queue in queues}, **first, **before}
        ends = {queue: max(bounds[queue][1], begins[queue]) for queue in queues}
        if self._target is not None:
            ends = {
                queue: max(min(end, self._target.get(queue, 0)), begins[queue])
                for queue, end in ends.items()
            }
        # A queue that cannot be seen just now (its broker is away) stays where it was.
        ends = {**{queue: begins[queue] for queue in begins}, **ends}
        ends = self._limited(begins, ends, limit)
        if all(ends[queue] == begins[queue] for queue in ends) and ends.keys() <= (
            before.keys() | first.keys()
        ):
            return start
        return _told(ends, {queue: begins[queue] for queue in ends if queue not in before})

    def reportLatestOffset(self) -> Told:  # noqa: N802
        _, bounds = self._look()
        return _told({queue: high for queue, (_, high) in bounds.items()}, {})

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        _, bounds = self._look()
        self._target = {queue: high for queue, (_, high) in bounds.items()}

    def partitions(self, start: Told, end: Told) -> Sequence[InputPartition]:
        begins = {**flat(start["first"]), **flat(end["first"]), **flat(start["next"])}
        ends = flat(end["next"])
        wanted = {queue: number for queue, number in ends.items() if number > begins.get(queue, 0)}
        if not wanted:
            return [Pull(())]
        queues, bounds = self._look()
        fail = self._chosen[options.FAIL_ON_DATA_LOSS]
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
            there = within(queue, begins.get(queue, 0), number, bounds[queue], fail)
            pieces.append(Piece(queue, queues[queue], there.start, there.stop))
        return [
            Pull(tuple(task)) for task in split(pieces, self._rules, self._mean_sizes(pieces))
        ] or [Pull(())]

    def commit(self, end: Told) -> None:
        """Only so that others see how far we are: nothing here is read again by us."""
        if not self._chosen[options.REPORT_OFFSETS]:
            return
        queues, _ = self._look()
        reached = {queue: at for queue, at in flat(end["next"]).items() if queue in queues}
        try:
            self._lines().set_group_offsets(self._chosen[options.CONSUMER_GROUP], queues, reached)
        except TransportError as error:
            log.warning("the group's offsets could not be reported: %s", error)

    def stop(self) -> None:
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    # --- what a task does ------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, Pull)
        return self._reading.batches(partition.pieces)

    # --- looking ---------------------------------------------------------------------------------

    def _lines(self) -> Cluster:
        if self._cluster is None:
            self._cluster = Cluster(self._chosen[SERVERS], self._reading.access, self._clock)
        return self._cluster

    def _look(self) -> tuple[dict[QueueKey, str], Bounds]:
        now_s = self._clock.elapsed_s()
        if self._seen is None or now_s - self._seen[0] > FRESH_S:
            queues = queues_of(self._lines(), self._chosen)
            self._seen = now_s, queues, self._lines().bounds(queues)
        return self._seen[1], self._seen[2]

    def _mean_sizes(self, pieces: list[Piece]) -> dict[QueueKey, float]:
        now_s = self._clock.elapsed_s()
        if self._sizes is None or now_s - self._sizes[0] > SIZES_FRESH_S:
            self._sizes = now_s, mean_sizes(self._lines(), pieces, self._reading.wish.group)
        return self._sizes[1]

    def _pinned(self, group: str, queues: Mapping[QueueKey, str], begins: Offsets) -> Offsets:
        """Where the group stands; it is put where we begin if it stands nowhere yet."""
        there = self._lines().group_offsets(group, queues)
        missing = {queue: begins[queue] for queue in queues if queue not in there}
        if missing:
            self._lines().make_group(group, queues)
            self._lines().set_group_offsets(group, queues, missing)
        return there

    def _limited(self, begins: Offsets, ends: Offsets, limit: ReadLimit) -> Offsets:
        waiting = {queue: end - begins[queue] for queue, end in ends.items()}
        if isinstance(limit, ReadMaxRows):
            left = limit.max_rows
        elif isinstance(limit, ReadMaxBytes):
            left = self._rows_in(limit.max_bytes, begins, ends)
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

    def _rows_in(self, size: int, begins: Offsets, ends: Offsets) -> int:
        queues, _ = self._look()
        pieces = [
            Piece(queue, queues[queue], begins[queue], end)
            for queue, end in ends.items()
            if queue in queues and end > begins[queue]
        ]
        sizes = self._mean_sizes(pieces)
        mean = sum(sizes.values()) / len(sizes) if sizes else 1024
        return max(1, int(size / mean))


def _told(ends: Offsets, first: Offsets) -> Told:
    return {"first": nested(first), "next": nested(ends)}
