"""The data source of a run: a repeatable stream of numbers, and our sink with hooks."""

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


class NumberRange(InputPartition):
    """The numbers from `begin` up to, but without, `end`."""

    def __init__(self, begin: int, end: int, epoch: int) -> None:
        super().__init__(None)
        self.begin, self.end, self.epoch = begin, end, epoch


class Numbers(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Numbers from 0 up to `count`, with `step` numbers per epoch in two partitions."""

    def __init__(self, count: int, step: int) -> None:
        self._count, self._step = count, step

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return {"next": 0}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        pass

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self._step)

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        points.reach("read-offsets", start["next"] // self._step)
        return {"next": min(start["next"] + self._step, self._count)}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        begin, middle, last = start["next"], (start["next"] + end["next"]) // 2, end["next"]
        epoch = begin // self._step
        points.reach("read-plan", epoch)
        return [NumberRange(begin, middle, epoch), NumberRange(middle, last, epoch)]

    def read(self, partition: InputPartition) -> Iterator[tuple[str]]:
        assert isinstance(partition, NumberRange)
        for number in range(partition.begin, partition.end):
            if number == partition.begin + 10:
                points.reach("read-task", partition.epoch)
            yield (str(number),)


class CrashDataSource(EscrowSource):
    """The source of numbers, and the sink of EscrowMQ."""

    @classmethod
    def name(cls) -> str:
        return "crash"

    def schema(self) -> StructType:
        return StructType([StructField("body", StringType())])

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802
        return Numbers(int(self.options["count"]), int(self.options["step"]))


class HookedSink(EscrowSource):
    """The sink under its own name, for `foreachBatch`. Being of this module, it has the hooks."""
