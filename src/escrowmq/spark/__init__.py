"""Topics as tables and tables as topics, in PySpark: `format("escrowmq")`.

    from escrowmq.spark import register

    register(spark)
    orders = spark.read.format("escrowmq").option("servers", …).option("subscribe", "orders").load()

Reading: the driver selects queues and splits their ranges into tasks. Each task pulls its ranges
and decodes them with numpy and Arrow, without a Python object per message.

    options ─> planning ─> tasks: range_pull ─> records ─> columns ─> Arrow batches

Writing: each task encodes its rows as batches of messages. With exactly-once it parks them as half
messages, and the driver decides the whole epoch with one request.

    Arrow batches ─> row_encoding ─> send_pipeline ─> brokers;   commit ─> exactly_once

What always holds: a connection belongs to one process; options are checked before anything runs; an
epoch that was decided is never decided again.

  session.py              local sessions, `register()`, checks of Java and PySpark
  data_source.py          what Spark calls: schema, readers, writers
  schema.py               the columns, with their Arrow and Spark types
  options.py              all options, declared in tables
  offsets.py              offsets as text: options and checkpoints
  queues.py               queues, offsets and brokers of a cluster
  planning.py             queues, ranges, tasks
  readers.py              the batch and the stream reader; what a read task does
  range_pull.py           pull a range of a queue, with several pulls in flight and zero copy
  records.py              many records in one buffer, field by field
  columns.py              records to columns of messages
  transaction_columns.py  records to columns of mode=transactions
  log_reader.py           the same from the files of a broker
  foreach_batch.py        a writer for `foreachBatch`: output modes `update` and `complete`
  writers.py              the batch and the stream writer; what a write task does
  row_encoding.py         rows to batches of messages
  exactly_once.py         register a run, decide an epoch, propagate the decision
  send_pipeline.py        many sends in flight, repeated after a reconnection
"""

from __future__ import annotations

from escrowmq.spark.foreach_batch import foreach_batch_writer
from escrowmq.spark.session import local_session, register

__all__ = ["foreach_batch_writer", "local_session", "register"]
