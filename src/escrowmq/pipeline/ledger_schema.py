"""The ledger's columns: one row for each transaction. Whoever reads a ledger counts on these."""

from __future__ import annotations

from typing import Final

from pyspark.sql.types import (
    ArrayType,
    DateType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

OPEN, COMMITTED, ROLLED_BACK, STRANDED = "open", "committed", "rolled_back", "stranded"

FINAL: Final = StructType(
    [
        StructField("topic", StringType()),
        StructField("broker", StringType()),
        StructField("queue_id", IntegerType()),
        StructField("queue_offset", LongType()),
    ]
)

LEDGER: Final = StructType(
    [
        StructField("transaction_id", StringType()),  # TX_ID, else the half's UNIQ_KEY
        StructField("marker_id", StringType()),  # TX_ID: the row in the database
        StructField("group", StringType()),
        StructField("topics", ArrayType(StringType())),  # sorted
        StructField("messages", IntegerType()),
        StructField("message_ids", ArrayType(StringType())),  # UNIQ_KEYs, sorted
        StructField("brokers", ArrayType(StringType())),
        StructField("parked_at", TimestampType()),
        StructField("first_check", TimestampType()),
        StructField("last_check", TimestampType()),
        StructField("checks", IntegerType()),
        StructField("answered_by", StringType()),  # whose answer to a check decided it
        StructField("outcome", StringType()),
        StructField("decided_at", TimestampType()),
        StructField("decided_by", StringType()),
        StructField("decision_ms", LongType()),  # parked to decided
        StructField("finals", ArrayType(FINAL)),
        StructField("visible_ms", LongType()),  # decided to visible
        StructField("day", DateType()),  # of parked_at
    ]
)
