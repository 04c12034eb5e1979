"""The sink without Spark: its tasks and its driver, called by hand as Spark would call them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import StructType

from escrowmq.spark.writers import TaskResult, stream_writer

BODY = StructType().add("body", "string")


class Query:
    """A streaming query as the sink sees one: runs, epochs, tasks, commits."""

    def __init__(self, servers: str, topic: str, name: str = "q", **options: str) -> None:
        given = {"servers": servers, "topic": topic, "timeout": "30", "batchbytes": "400"}
        self._given = {**given, **options}
        self.name = f"{topic}-{name}"

    def writer(self) -> Any:
        return stream_writer(self._given, BODY, False)

    def task(
        self, run: str, epoch: int, rows: Iterable[str], *, partition: int = 0, attempt: int = 0
    ) -> TaskResult:
        # PySpark has no public way to make a task's context.
        context = TaskContext._getOrCreate()
        # As above.
        context._partitionId, context._taskAttemptId = partition, attempt
        # PySpark has no public way to make a task's context.
        context._localProperties = {
            "sql.streaming.queryId": self.name,
            "spark.jobGroup.id": run,
            "streaming.sql.batchId": str(epoch),
        }
        batch = pa.RecordBatch.from_pydict({"body": pa.array(list(rows), type=pa.string())})
        try:
            written = self.writer().write(iter([batch]))
        finally:
            # PySpark has no public way to remove a task's context.
            TaskContext._setTaskContext(None)
        assert isinstance(written, TaskResult)
        return written

    def commit(self, epoch: int, *messages: TaskResult | None) -> None:
        self.writer().commit(list(messages), epoch)

    def abort(self, epoch: int, *messages: TaskResult | None) -> None:
        self.writer().abort(list(messages), epoch)


def numbers(begin: int, end: int) -> list[str]:
    return [str(number) for number in range(begin, end)]
