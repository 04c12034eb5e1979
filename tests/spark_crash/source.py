"""The data source of a run: a stream of numbers that can be read again, and the sink with hooks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pyspark.sql.datasource import (
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StringType, StructField, StructType

from escrowmq.spark.data_source import EscrowSource
from tests.spark_crash import points

points.install()


class Span(InputPartition):
    def __init__(self, begin: int, end: int, epoch: int) -> None:
        super().__init__(None)
        self.begin, self.end, self.epoch = begin, end, epoch


class Numbers(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """From 0 up to `count`, `step` in an epoch, in two partitions."""

    def __init__(self, count: int, step: int) -> None:
        self._count, self._step = count, step

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"at": 0}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        pass

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._step)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        points.reach("read-offsets", start["at"] // self._step)
        return {"at": min(start["at"] + self._step, self._count)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        begin, middle, last = start["at"], (start["at"] + end["at"]) // 2, end["at"]
        epoch = begin // self._step
        points.reach("read-plan", epoch)
        return [Span(begin, middle, epoch), Span(middle, last, epoch)]

    def read(self, partition: InputPartition) -> Iterator[tuple[str]]:
        assert isinstance(partition, Span)
        for number in range(partition.begin, partition.end):
            if number == partition.begin + 10:
                points.reach("read-task", partition.epoch)
            yield (str(number),)


class CrashDataSource(EscrowSource):
    @classmethod
    def name(cls) -> str:
        return "crash"

    def schema(self) -> StructType:
        return StructType([StructField("body", StringType())])

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802
        return Numbers(int(self.options["count"]), int(self.options["step"]))
