"""Streams of a cluster into tables, a batch at a time, each exactly once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException

from escrowmq.errors import PipelineFailed
from escrowmq.pipeline.progress import Report, silent, watch
from escrowmq.pipeline.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.readwriter import DataStreamWriter

_NOT_UP: Final = "failed to connect back"
_STARTS: Final = 5
BATCH_MESSAGES: Final = 1_000_000  # of a micro-batch


@dataclass(frozen=True, slots=True)
class Source:
    """A cluster, and how to speak with it: options of the Spark source (accessKey, tls, …)."""

    servers: str
    options: Mapping[str, str] = field(default_factory=dict)
    batch_messages: int = BATCH_MESSAGES


def read_now(
    spark: SparkSession,
    source: Source,
    what: Mapping[str, str],
    checkpoint: Path,
    table: Table,
    make: Callable[[DataFrame], DataFrame],
    *,
    step: str,
    partition_by: tuple[str, ...] = (),
    report: Report = silent,
) -> int:
    """Append to the table what is there now and was not read before. How many messages it was."""
    if table.manifest.next_batch and not (checkpoint / "offsets").is_dir():
        raise PipelineFailed(
            f"{checkpoint} is gone, which says what {table.directory} has read: "
            f"bring it back, or begin in a new directory"
        )
    stream = (
        spark.readStream.format("escrowmq")
        .option("servers", source.servers)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", source.batch_messages)
        .options(**source.options)
        .options(**what)
        .load()
    )

    def each(frame: DataFrame, batch: int) -> None:
        table.append(batch, make(frame), partition_by)

    writer = (
        stream.writeStream.foreachBatch(each)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
    )
    return _to_its_end(writer, step, report)


def _to_its_end(writer: DataStreamWriter, step: str, report: Report) -> int:
    """Spark gives a Python process ten seconds to come up, which a busy machine may not have. A
    query goes on where it was, so it is started again."""
    left = _STARTS
    while True:
        left -= 1
        query = writer.start()
        try:
            return watch(query, step, report)
        except PySparkException as error:
            if _NOT_UP not in str(error) or not left:
                raise
        finally:
            query.stop()
