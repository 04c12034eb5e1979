"""Use the sink without Spark: call its tasks and its driver as Spark calls them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.types import StructType

from escrowmq.spark.writers import TaskResult, stream_writer

BODY = StructType().add("body", "string")


class Query:
    """A streaming query as the sink sees it: runs, epochs, tasks and commits."""

    def __init__(self, servers: str, topic: str, name: str = "q", **options: str) -> None:
        defaults = {"servers": servers, "topic": topic, "timeout": "30", "batchbytes": "400"}
        self._options = {**defaults, **options}
        self.name = f"{topic}-{name}"

    def writer(self) -> Any:
        return stream_writer(self._options, BODY, False)

    def task(
        self, run: str, epoch: int, rows: Iterable[str], *, partition: int = 0, attempt: int = 0
    ) -> TaskResult:
        """Write the rows as one attempt of a task."""
        # Private: PySpark has no public way to create the context of a task.
        context = TaskContext._getOrCreate()
        # Private, for the same reason.
        context._partitionId, context._taskAttemptId = partition, attempt
        # Private, for the same reason.
        context._localProperties = {
            "sql.streaming.queryId": self.name,
            "spark.jobGroup.id": run,
            "streaming.sql.batchId": str(epoch),
        }
        batch = pa.RecordBatch.from_pydict({"body": pa.array(list(rows), type=pa.string())})
        try:
            result = self.writer().write(iter([batch]))
        finally:
            # Private: PySpark has no public way to remove the context of a task.
            TaskContext._setTaskContext(None)
        assert isinstance(result, TaskResult)
        return result

    def commit(self, epoch: int, *results: TaskResult | None) -> None:
        self.writer().commit(list(results), epoch)

    def abort(self, epoch: int, *results: TaskResult | None) -> None:
        self.writer().abort(list(results), epoch)


def numbers(begin: int, end: int) -> list[str]:
    return [str(number) for number in range(begin, end)]
