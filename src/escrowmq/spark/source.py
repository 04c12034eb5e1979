"""The data source as Spark sees it: `format("escrowmq")`."""

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

from escrowmq.spark import read_options as options
from escrowmq.spark.options import choose
from escrowmq.spark.schema import MESSAGE, TRANSACTION, Columns


class EscrowSource(DataSource):
    cores: ClassVar[int] = 0  # of the cluster, if `register` could ask; 0: of this machine

    @classmethod
    def name(cls) -> str:
        return "escrowmq"

    def schema(self) -> StructType:
        return self._columns().spark()

    def reader(self, schema: StructType) -> DataSourceReader:
        chosen = options.read_options(self.options, is_stream=False)
        columns = self._columns().chosen_by(schema)
        if chosen.has(options.PATH):
            from escrowmq.spark.log import LogReader

            return LogReader(chosen, columns, self.cores)
        from escrowmq.spark.batch import BatchReader

        return BatchReader(chosen, columns, self.cores)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        from escrowmq.spark.stream import StreamReader

        chosen = options.read_options(self.options, is_stream=True)
        return StreamReader(chosen, self._columns().chosen_by(schema), self.cores)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from escrowmq.spark.writer import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(  # noqa: N802
        self, schema: StructType, overwrite: bool
    ) -> DataSourceStreamWriter:
        from escrowmq.spark.writer import stream_writer

        return stream_writer(self.options, schema, overwrite)

    def _columns(self) -> Columns:
        chosen = choose(self.options, options.READ)
        known = TRANSACTION if chosen[options.MODE] == options.TRANSACTIONS else MESSAGE
        names = chosen[options.COLUMNS]
        return known.only(names) if names else known


class RocketSource(EscrowSource):
    """The same under the name that users of rocketmq-spark know."""

    @classmethod
    def name(cls) -> str:
        return "rocketmq"
