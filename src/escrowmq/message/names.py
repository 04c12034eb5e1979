"""The names of topics, groups and message properties that brokers and clients agree on.

They are stored in logs and sent over the network, so none of them may change. Most are RocketMQ's;
those that begin with `ESCROW_` are EscrowMQ's own and mean nothing to a RocketMQ broker.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

# --- topics --------------------------------------------------------------------------------------

TEMPLATE_TOPIC: Final = "TBW102"  # the first send to an unknown topic creates it like this one
SCHEDULE_TOPIC: Final = "SCHEDULE_TOPIC_XXXX"  # delayed messages, a queue for each delay level
TIMER_TOPIC: Final = "rmq_sys_wheel_timer"  # messages that are delivered at a given time
TRACE_TOPIC: Final = "RMQ_SYS_TRACE_TOPIC"  # traces of clients; every client may write it
SELF_TEST_TOPIC: Final = "SELF_TEST_TOPIC"
BENCHMARK_TOPIC: Final = "BenchmarkTest"
OFFSET_MOVED_TOPIC: Final = "OFFSET_MOVED_EVENT"

HALF_TOPIC: Final = "RMQ_SYS_TRANS_HALF_TOPIC"  # parked messages
OP_TOPIC: Final = "RMQ_SYS_TRANS_OP_HALF_TOPIC"  # which halves are decided
STRANDED_TOPIC: Final = "TRANS_CHECK_MAX_TIME_TOPIC"  # halves that were checked too often
JOURNAL_TOPIC: Final = "ESCROW_JOURNAL"  # checks and their results
DECISION_TOPIC: Final = "ESCROW_DECISION"  # decisions over many halves
DELIVERY_TOPIC: Final = "ESCROW_DELIVERY"  # which delayed messages are delivered

# RocketMQ's light queues. The entries of such a queue refer to records of other topics.
LIGHT_QUEUE_PREFIX: Final = "%LMQ%"
RETRY_PREFIX: Final = "%RETRY%"
DLQ_PREFIX: Final = "%DLQ%"
GROUP_TOPIC_PREFIXES: Final = (RETRY_PREFIX, DLQ_PREFIX)

# Clients may not send to these topics; only the broker itself writes them.
BROKER_ONLY_TOPICS: Final = frozenset(
    (
        SCHEDULE_TOPIC,
        HALF_TOPIC,
        OP_TOPIC,
        STRANDED_TOPIC,
        JOURNAL_TOPIC,
        DECISION_TOPIC,
        DELIVERY_TOPIC,
        SELF_TEST_TOPIC,
        OFFSET_MOVED_TOPIC,
        TIMER_TOPIC,
    )
)
# What these hold is believed at the next start, so clients may not commit offsets for them either,
# nor have their records delivered. They may consume the other three: operators watch them.
CLOSED_TOPICS: Final = BROKER_ONLY_TOPICS - {STRANDED_TOPIC, SELF_TEST_TOPIC, OFFSET_MOVED_TOPIC}
_SYSTEM_TOPICS: Final = BROKER_ONLY_TOPICS | {TEMPLATE_TOPIC, BENCHMARK_TOPIC}
_SYSTEM_TOPIC_PREFIX: Final = "rmq_sys_"

_PROXY_TOPIC: Final = "DefaultHeartBeatSyncerTopic"  # heartbeats among the proxies of RocketMQ 5


NAME_PATTERN: Final = re.compile(r"[%|a-zA-Z0-9_-]+")  # of topics and groups
TOPIC_LENGTH_MAX: Final = 127
GROUP_TOPIC_LENGTH_MAX: Final = 255  # retry and dead-letter topics
_SHOWN_LENGTH_MAX: Final = 100  # of a name that an error repeats


def topic_name_error(topic: str) -> str:
    """Return why a topic cannot have this name; an empty text if it can."""
    length_max = GROUP_TOPIC_LENGTH_MAX if is_group_topic(topic) else TOPIC_LENGTH_MAX
    if not NAME_PATTERN.fullmatch(topic):
        name = topic[:_SHOWN_LENGTH_MAX]
        return f"topic name {name!r} may contain only letters, digits and %|_-"
    if len(topic) > length_max:
        return f"topic name has {len(topic)} characters, the limit is {length_max}"
    return ""


# Control characters, and the two separators of lines and paragraphs of Unicode.
_CONTROL_CHARACTER: Final = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029]")


def has_control_characters(name: str) -> bool:
    """Return whether a name could break a line of a log or of a list."""
    return not name.isprintable() and _CONTROL_CHARACTER.search(name) is not None


def retry_topic(group: str) -> str:
    """Return the topic of messages that a consumer group reads once more."""
    return RETRY_PREFIX + group


def dlq_topic(group: str) -> str:
    """Return the topic of the dead letters of a consumer group."""
    return DLQ_PREFIX + group


def reply_topic(cluster: str) -> str:
    """Return the topic through which replies go back to the client that asked."""
    return f"{cluster}_REPLY_TOPIC"


def group_of_retry_topic(topic: str) -> str | None:
    """Return the consumer group of a retry topic, or None for any other topic."""
    return topic.removeprefix(RETRY_PREFIX) if topic.startswith(RETRY_PREFIX) else None


def is_group_topic(topic: str) -> bool:
    """Return whether the topic holds retries or dead letters of a consumer group."""
    return topic.startswith(GROUP_TOPIC_PREFIXES)


def is_system_topic(topic: str) -> bool:
    """Return whether the topic exists on every broker and cannot be created or deleted."""
    return topic in _SYSTEM_TOPICS or topic.startswith(_SYSTEM_TOPIC_PREFIX)


def is_internal_topic(topic: str, server_names: Collection[str]) -> bool:
    """Return whether the topic is not one that a user has created.

    `server_names` are the names of all clusters and brokers: each has a topic of its own name, and
    a cluster has one for replies. Use this to choose among all topics of a cluster.
    """
    return (
        is_system_topic(topic)
        or is_group_topic(topic)
        or topic.startswith("RMQ_SYS_")
        or topic == _PROXY_TOPIC
        or topic in server_names
        or topic in map(reply_topic, server_names)
    )


# --- groups --------------------------------------------------------------------------------------

TOOLS_CONSUMER_GROUP: Final = "TOOLS_CONSUMER"
TOOLS_PRODUCER_GROUP: Final = "TOOLS_PRODUCER"
CURSOR_GROUP: Final = "CID_RMQ_SYS_TRANS"  # its offsets are the cursors of the half and op topics
SYSTEM_GROUP_PREFIX: Final = "CID_RMQ_SYS_"
_CLOSED_GROUP_PREFIXES: Final = (SYSTEM_GROUP_PREFIX, "CID_SYS_RMQ_")
_CLOSED_GROUP_TOPIC_PREFIXES: Final = tuple(
    topic_prefix + prefix
    for topic_prefix in GROUP_TOPIC_PREFIXES
    for prefix in _CLOSED_GROUP_PREFIXES
)

# The groups that RocketMQ's own tools and brokers use.
SYSTEM_GROUPS: Final = (
    TOOLS_CONSUMER_GROUP,
    "SELF_TEST_C_GROUP",
    CURSOR_GROUP,
    "CID_ONSAPI_OWNER",
    "CID_ONSAPI_PERMISSION",
    "CID_ONSAPI_PULL",
    "CID_SYS_RMQ_TRANS",
)


def is_system_group(group: str) -> bool:
    """Return whether the group exists on every broker and cannot be deleted."""
    return group in SYSTEM_GROUPS


def is_closed_group(group: str) -> bool:
    """Return whether only brokers use the group: its offsets are cursors of theirs."""
    return group.startswith(_CLOSED_GROUP_PREFIXES)


def is_closed_topic(topic: str) -> bool:
    """Return whether only brokers may commit offsets for the topic."""
    return topic in CLOSED_TOPICS or _is_of_closed_group(topic)


def is_writable_topic(topic: str) -> bool:
    """Return whether clients may send to a topic of this name."""
    return topic not in BROKER_ONLY_TOPICS and not _is_of_closed_group(topic)


def _is_of_closed_group(topic: str) -> bool:
    """Return whether the topic holds retries or dead letters of a closed group."""
    return topic.startswith(_CLOSED_GROUP_TOPIC_PREFIXES)


def is_shared_name(name: str) -> bool:
    """Return whether a topic or group has the same name in every namespace."""
    return is_system_topic(name) or name == TRACE_TOPIC or name.startswith(SYSTEM_GROUP_PREFIX)


# --- properties of every message -----------------------------------------------------------------

KEYS: Final = "KEYS"
TAGS: Final = "TAGS"
UNIQUE_KEY: Final = "UNIQ_KEY"
WAIT_STORE_OK: Final = "WAIT"
RECORD_CRC: Final = "__CRC32#"
SHARDING_KEY: Final = "__SHARDINGKEY"
INSTANCE_ID: Final = "INSTANCE_ID"  # the namespace of the message
CLUSTER: Final = "CLUSTER"  # the broker adds it to every message

# --- properties of delayed messages --------------------------------------------------------------

DELAY_LEVEL: Final = "DELAY"
TIMER_DELAY_SEC: Final = "TIMER_DELAY_SEC"
TIMER_DELAY_MS: Final = "TIMER_DELAY_MS"
TIMER_DELIVER_MS: Final = "TIMER_DELIVER_MS"
TIMER_OUT_MS: Final = "TIMER_OUT_MS"
# With one of these, a message that a client sends is delayed.
DELAY_PROPERTIES: Final = (DELAY_LEVEL, TIMER_DELAY_SEC, TIMER_DELAY_MS, TIMER_DELIVER_MS)

# --- properties of retries and dead letters ------------------------------------------------------

RETRY_TOPIC: Final = "RETRY_TOPIC"  # the topic that the message was sent to, as consumers know it
ORIGIN_MESSAGE_ID: Final = "ORIGIN_MESSAGE_ID"  # the offset id of its first delivery
RETRY_OF: Final = "ESCROW_RETRY_OF"  # the log offset of the message that was sent back
DLQ_ORIGIN_TOPIC: Final = "DLQ_ORIGIN_TOPIC"
DLQ_ORIGIN_MESSAGE_ID: Final = "DLQ_ORIGIN_MESSAGE_ID"
CAUSE_PREFIX: Final = "ESCROW_CAUSE_"  # why the last delivery failed: written by a broker only
RESENT_FROM: Final = "DLQ_RESENT_FROM"  # of a message: the offset id of the dead letter it copies
CLIENT_CAUSE_PREFIX: Final = "DLQ_CAUSE_"  # the same, written by a client for Apache RocketMQ

# --- properties of requests and replies ----------------------------------------------------------

CORRELATION_ID: Final = "CORRELATION_ID"
REPLY_TO: Final = "REPLY_TO_CLIENT"
TTL_MS: Final = "TTL"
MESSAGE_TYPE: Final = "MSG_TYPE"
PUSH_REPLY_TIME: Final = "PUSH_REPLY_TIME"  # when the broker pushed the reply

# --- properties of transactional messages --------------------------------------------------------

TRANSACTIONAL: Final = "TRAN_MSG"
PRODUCER_GROUP: Final = "PGROUP"
REAL_TOPIC: Final = "REAL_TOPIC"
REAL_QUEUE_ID: Final = "REAL_QID"
TRANSACTION_ID: Final = "__transactionId__"
CHECK_IMMUNITY_TIME: Final = "CHECK_IMMUNITY_TIME_IN_SECONDS"
CHECK_TIMES: Final = "TRANSACTION_CHECK_TIMES"
PREPARED_QUEUE_OFFSET: Final = "TRAN_PREPARED_QUEUE_OFFSET"
OUTCOME: Final = "ENDED"  # of an op; the name is short because every transaction stores it

TX_ID: Final = "TX_ID"  # on every message of a transaction: the id of the first one
TX_NAME: Final = "TX_NAME"  # selects the checker of a transaction
TX_TIME: Final = "TX_TIME"  # of a database binding: when it began, by the clock of the database

COPY_OF: Final = "ESCROW_COPY_OF"  # a half that was appended again: its previous positions
COPY_CHECK_STATE: Final = "ESCROW_COPY_PAST"  # and the checks before it was appended again
PACKED: Final = "ESCROW_PACKED"  # a half that holds several messages: their number
DECIDED_BY: Final = "ESCROW_BY"
REASON: Final = "ESCROW_REASON"
PREVIOUS_OFFSETS: Final = "ESCROW_ALSO"

WRITER: Final = "ESCROW_WRITER"
BATCH: Final = "ESCROW_BATCH"
ATTEMPT: Final = "ESCROW_ATTEMPT"
FENCE: Final = "ESCROW_FENCE"
