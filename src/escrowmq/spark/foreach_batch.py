"""A writer for `foreachBatch`: the exactly-once sink for the output modes `update` and `complete`.

Spark lets a sink that is written in Python only append. `foreachBatch` accepts every mode and calls
a function with the rows of each micro-batch and its number. The writer saves them as a batch whose
epoch is that number, under a name that stays the same when the query is restarted. So a micro-batch
that is repeated finds its epoch decided, and writes nothing.

    foreachBatch(writer)  ──rows, number──>  write.format("escrowmq") with transactional.id, epoch
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from escrowmq.errors import ConfigError, InvalidOption
from escrowmq.spark.options import EPOCH, TRANSACTIONAL_ID, parse_write_options

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

OptionValue = str | int | float | bool

# Local properties of the thread that runs a micro-batch; tasks have them too. Spark calls them
# internal.
QUERY_ID_PROPERTY: Final = "sql.streaming.queryId"
RUN_ID_PROPERTY: Final = "spark.jobGroup.id"

# The writer that wrote the last micro-batch of a sink in this process, with run and epoch.
_last_writers: dict[str, tuple[str, int, ForeachBatchWriter]] = {}


def foreach_batch_writer(
    *, servers: str, topic: str = "", transactional_id: str = "", **options: OptionValue
) -> Callable[[DataFrame, int], None]:
    """Return a function for `foreachBatch` that writes every micro-batch to a topic exactly once.

        totals.writeStream.outputMode("update").foreachBatch(
            foreach_batch_writer(servers="127.0.0.1:9876", topic="totals")
        )

    `topic`: for rows without a column `topic`.
    `transactional_id`: the name of the sink. Default: the query's id and the topic.
    `options`: the other options of a write, such as `accessKey` or `batchBytes`.

    It can also be called in a function of your own, which writes to several places. Raises
    InvalidOption.
    """
    texts = {name: _option_text(value) for name, value in options.items()}
    for name in texts:
        if name.lower() in (EPOCH.name, TRANSACTIONAL_ID.name):
            raise InvalidOption(
                f"option {name} is not for foreach_batch_writer: it takes the epoch from Spark, "
                "and the name of the sink as transactional_id"
            )
    texts["servers"] = servers
    if topic:
        texts["topic"] = topic
    # The names of sink and epoch are known when the first micro-batch is written.
    parse_write_options(
        {**texts, TRANSACTIONAL_ID.name: transactional_id or "-", EPOCH.name: "0"}, is_stream=False
    )
    return ForeachBatchWriter(texts, topic, transactional_id)


def _option_text(value: OptionValue) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class ForeachBatchWriter:
    """What `foreach_batch_writer` returns."""

    def __init__(self, options: dict[str, str], topic: str, transactional_id: str) -> None:
        self._options = options
        self._topic = topic
        self._transactional_id = transactional_id

    def __call__(self, rows: DataFrame, epoch: int) -> None:
        """Write the rows of a micro-batch, or nothing if this epoch is decided.

        Raises ConfigError if another writer has written this epoch under the same name.
        """
        query, run = _query_and_run(rows)
        if not query and not self._transactional_id:
            raise ConfigError(
                "this session does not say which query calls foreachBatch (Spark Connect does "
                "not): give the sink a name, foreach_batch_writer(…, transactional_id=…)"
            )
        sink = self._transactional_id or f"{query}/{self._topic}"
        last_run, last_epoch, last_writer = _last_writers.get(sink, ("", -1, self))
        if run and (last_run, last_epoch) == (run, epoch) and last_writer is not self:
            # The second writer would find the epoch decided, and its rows would be lost.
            raise ConfigError(
                f"two writers of one query have the name {sink}, so epoch {epoch} would be written "
                "by one of them only: give each its own transactional_id"
            )
        (
            rows.write.format("escrowmq")
            .mode("append")
            .options(**self._options)
            .option(TRANSACTIONAL_ID.name, sink)
            .option(EPOCH.name, epoch)
            .save()
        )
        _last_writers[sink] = run, epoch, self


def _query_and_run(rows: DataFrame) -> tuple[str, str]:
    """Return the ids of the query that calls `foreachBatch`, and of its run; empty if unknown."""
    try:
        context = rows.sparkSession.sparkContext
    except Exception:  # Spark Connect has no context, and raises different errors
        return "", ""
    properties = [context.getLocalProperty(name) for name in (QUERY_ID_PROPERTY, RUN_ID_PROPERTY)]
    return properties[0] or "", properties[1] or ""
