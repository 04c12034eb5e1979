"""Topics as tables and tables as topics, in PySpark.

    from escrowmq.spark import register

    register(spark)
    orders = spark.read.format("escrowmq").option("servers", …).option("subscribe", "orders").load()

Read in this order:
  1. source.py        what Spark calls
  2. options.py       options, by table; read_options.py: those of reading
  3. ranges.py        which queues, from where to where; cluster.py asks, offsets.py writes it down
  4. plan.py          ranges cut into tasks
  5. pull.py          what a task does on its line (line.py, access.py)
  6. records.py       many records at once; columns.py, properties.py, transactions.py
  7. batch.py, stream.py, log.py    the three readers
"""

from __future__ import annotations

from escrowmq.spark.session import local_session, register

__all__ = ["local_session", "register"]
