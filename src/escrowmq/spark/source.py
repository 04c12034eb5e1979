"""The data source as Spark knows it: the sink only."""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
)
from pyspark.sql.types import StructType

from escrowmq.spark.writer import batch_writer, stream_writer


class EscrowDataSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "escrowmq"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        return stream_writer(self.options, schema, overwrite)
