"""The data source as Spark calls it: `format("escrowmq")`.

Spark creates an `EscrowSource` with the options of a query and asks it for the schema and for a
reader or writer. Readers and writers are imported on demand: Spark imports this module in many
short-lived Python processes, of which most need only one of them.
"""

from __future__ import annotations

from typing import ClassVar

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from escrowmq.spark import options
from escrowmq.spark.options import parse_options
from escrowmq.spark.schema import MESSAGE_COLUMNS, TRANSACTION_COLUMNS, Columns


class EscrowSource(DataSource):
    """Reads and writes topics, and reads the records of transactions."""

    cores: ClassVar[int] = 0  # of the Spark cluster, set by `register()`; 0: use this machine's

    @classmethod
    def name(cls) -> str:
        return "escrowmq"

    def schema(self) -> StructType:
        return self._columns().spark_schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        read_options = options.parse_read_options(self.options, is_stream=False)
        columns = self._columns().select_schema(schema)
        if read_options.is_set(options.PATH):
            from escrowmq.spark.log_reader import LogReader

            return LogReader(read_options, columns, self.cores)
        from escrowmq.spark.readers import BatchReader

        return BatchReader(read_options, columns, self.cores)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        from escrowmq.spark.readers import StreamReader

        read_options = options.parse_read_options(self.options, is_stream=True)
        return StreamReader(read_options, self._columns().select_schema(schema), self.cores)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from escrowmq.spark.writers import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        from escrowmq.spark.writers import stream_writer

        return stream_writer(self.options, schema, overwrite)

    def _columns(self) -> Columns:
        parsed = parse_options(self.options, options.READ_OPTIONS)
        is_transaction_mode = parsed[options.MODE] == options.TRANSACTIONS
        columns = TRANSACTION_COLUMNS if is_transaction_mode else MESSAGE_COLUMNS
        names = parsed[options.COLUMNS]
        return columns.select(names) if names else columns


class RocketMQSource(EscrowSource):
    """The same source under the name that users of rocketmq-spark know."""

    @classmethod
    def name(cls) -> str:
        return "rocketmq"
