"""Lets Spark find the data source without `register()`.

Spark imports every installed package whose name begins with `pyspark_` and registers its
`DefaultSource`.
"""

from escrowmq.spark.data_source import EscrowSource as DefaultSource

__all__ = ["DefaultSource"]
