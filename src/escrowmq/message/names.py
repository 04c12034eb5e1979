"""Names that RocketMQ gives to properties, topics and groups. They stay at the edge: here."""

from __future__ import annotations

from typing import Final

# Properties that the store reads.
KEYS: Final = "KEYS"
TAGS: Final = "TAGS"
UNIQUE_KEY: Final = "UNIQ_KEY"
DELAY_LEVEL: Final = "DELAY"
WAIT_STORE_OK: Final = "WAIT"
RECORD_CRC: Final = "__CRC32#"

# Properties of a transactional message.
TRANSACTIONAL: Final = "TRAN_MSG"
PRODUCER_GROUP: Final = "PGROUP"
REAL_TOPIC: Final = "REAL_TOPIC"
REAL_QUEUE_ID: Final = "REAL_QID"

HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"
OP_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"
STRANDED_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"
JOURNAL_TOPIC: Final = "ESCROW_JOURNAL"  # ours
DECISION_TOPIC: Final = "ESCROW_DECISION"  # ours
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"
