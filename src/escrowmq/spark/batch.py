"""The batch reader: plans on the driver, pulls and decodes in the tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from escrowmq.spark import read_options as options
from escrowmq.spark.access import Access, access_of
from escrowmq.spark.cluster import Cluster
from escrowmq.spark.columns import MessageColumns
from escrowmq.spark.line import BlockingLine
from escrowmq.spark.offsets import QueueKey
from escrowmq.spark.options import SERVERS, Chosen
from escrowmq.spark.plan import Rules, split
from escrowmq.spark.properties import is_one_of
from escrowmq.spark.pull import BLOCK_ROWS, Piece, RangePull, Wish
from escrowmq.spark.ranges import mean_sizes, places, queues_of, wish_of, within
from escrowmq.spark.records import Records
from escrowmq.spark.schema import Columns
from escrowmq.spark.transactions import TransactionColumns


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
