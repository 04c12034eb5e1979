"""Streams of a cluster into tables, a batch at a time, each exactly once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from escrowmq.errors import PipelineFailed
from escrowmq.pipeline.progress import Report, silent, watch
from escrowmq.pipeline.tables import Table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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

    query = (
        stream.writeStream.foreachBatch(each)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    try:
        return watch(query, step, report)
    finally:
        query.stop()
