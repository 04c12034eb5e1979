"""The options of reading, and which of them go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from escrowmq.errors import BadOption
from escrowmq.spark.offsets import Position, at_time, by_times, places, queues_named
from escrowmq.spark.options import (
    CONNECTION,
    SERVERS,
    Chosen,
    Option,
    choose,
    full,
    one_of,
    whole,
    words,
    yes_no,
)

MESSAGES, TRANSACTIONS = "messages", "transactions"

SUBSCRIBE: Final[Option[list[str]]] = Option(
    "subscribe", words, [], "Topics, with commas.", ("topic", "topics")
)
SUBSCRIBE_PATTERN: Final = Option("subscribePattern", full, "", "Topics, as a regular expression.")
ASSIGN: Final = Option("assign", queues_named, None, "Queues: JSON, topic -> broker -> [queue].")
MODE: Final = Option(
    "mode", one_of(MESSAGES, TRANSACTIONS), MESSAGES, "What to read: messages or transactions."
)
PATH: Final = Option("path", full, "", "A broker's directory: read its log files.")
COLUMNS: Final[Option[list[str]]] = Option("columns", words, [], "Only these columns.")
INCLUDE_SYSTEM: Final = Option(
    "includeSystem", yes_no, False, "Whether a pattern also finds the brokers' own topics."
)
TAGS: Final = Option(
    "tags", full, "*", "Only messages with this tag: `a || b`.", ("subExpression", "expression")
)
SQL: Final = Option("sql", full, "", "Only messages for which this SQL92 expression is true.")
GROUP: Final = Option(
    "group", full, "", "The consumer group.", ("groupId", "consumerGroup", "consumer.group")
)
REPORT_OFFSETS: Final = Option(
    "reportOffsets", yes_no, False, "Stream: whether the group's offsets follow."
)
STARTING: Final = Option("startingOffsets", places, None, "earliest, latest, or JSON.")
ENDING: Final = Option("endingOffsets", places, None, "latest, or JSON. Batch only.")
STARTING_TIME: Final = Option(
    "startingTimestamp", at_time, None, "From this time on, ms since 1970."
)
ENDING_TIME: Final = Option("endingTimestamp", at_time, None, "Up to this time. Batch only.")
STARTING_TIMES: Final = Option(
    "startingOffsetsByTimestamp", by_times, None, "The same by queue, JSON."
)
ENDING_TIMES: Final = Option("endingOffsetsByTimestamp", by_times, None, "The same by queue, JSON.")
FAIL_ON_DATA_LOSS: Final = Option(
    "failOnDataLoss", yes_no, True, "Whether to fail if messages are gone, or go on behind them."
)
MIN_PARTITIONS: Final = Option("minPartitions", whole(), 1, "So many tasks at the least.")
MAX_BYTES_PER_PARTITION: Final = Option(
    "maxBytesPerPartition", whole(), 0, "So many tasks that none reads more."
)
MAX_OFFSETS_PER_TRIGGER: Final = Option(
    "maxOffsetsPerTrigger", whole(), 0, "At most so many messages in a micro-batch."
)
MAX_BYTES_PER_TRIGGER: Final = Option(
    "maxBytesPerTrigger", whole(), 0, "At most about so many bytes in a micro-batch."
)
PULL_BATCH: Final = Option(
    "pullBatchSize", whole(), 8_192, "At most so many messages in a pull; brokers allow less."
)

READ: Final[tuple[Option[Any], ...]] = (
    *CONNECTION,
    *(SUBSCRIBE, SUBSCRIBE_PATTERN, ASSIGN, MODE, PATH, COLUMNS, INCLUDE_SYSTEM, TAGS, SQL),
    *(GROUP, REPORT_OFFSETS, STARTING, ENDING, STARTING_TIME, ENDING_TIME),
    *(STARTING_TIMES, ENDING_TIMES, FAIL_ON_DATA_LOSS, MIN_PARTITIONS, MAX_BYTES_PER_PARTITION),
    *(MAX_OFFSETS_PER_TRIGGER, MAX_BYTES_PER_TRIGGER, PULL_BATCH),
)

_OF_A_STREAM: Final = (MAX_OFFSETS_PER_TRIGGER, MAX_BYTES_PER_TRIGGER, REPORT_OFFSETS)
_OF_A_BATCH: Final = (ENDING, ENDING_TIME, ENDING_TIMES)
_OF_FILES: Final = (
    PATH,
    SUBSCRIBE,
    MODE,
    COLUMNS,
    FAIL_ON_DATA_LOSS,
    MIN_PARTITIONS,
    MAX_BYTES_PER_PARTITION,
)
_WHICH: Final = (SUBSCRIBE, SUBSCRIBE_PATTERN, ASSIGN)


def read_options(given: Mapping[str, str], *, is_stream: bool) -> Chosen:
    """Raises BadOption."""
    chosen = choose(given, READ)
    _refuse(chosen, _OF_A_BATCH if is_stream else _OF_A_STREAM, is_stream)
    if chosen.has(PATH):
        _check_files(chosen, is_stream)
        return chosen
    if not chosen[SERVERS]:
        raise BadOption(
            'option servers is missing: the name server, .option("servers", "host:9876"); '
            "or path, to read a broker's files"
        )
    which = [option.name for option in _WHICH if chosen.has(option)]
    if chosen[MODE] == TRANSACTIONS:
        if which:
            raise BadOption(f"mode=transactions knows its topics: leave {which[0]} out")
    elif len(which) != 1:
        named = " and ".join(which) or "none of them"
        raise BadOption(f"one of subscribe, subscribePattern, assign is wanted; there is {named}")
    if chosen.has(TAGS) and chosen.has(SQL):
        raise BadOption("tags or sql, not both")
    if chosen[REPORT_OFFSETS] and not chosen[GROUP]:
        raise BadOption("reportOffsets needs a group whose offsets follow: option group")
    if not is_stream and start_of(chosen, is_stream=False) is Position.LATEST:
        raise BadOption("a batch that starts at latest would be empty")
    if end_of(chosen) is Position.EARLIEST:
        raise BadOption("a batch that ends at earliest would be empty")
    return chosen


def start_of(chosen: Chosen, *, is_stream: bool) -> Any:
    """A time counts more than times by queue, and these more than offsets."""
    said = chosen[STARTING_TIME] or chosen[STARTING_TIMES] or chosen[STARTING]
    if said is not None:
        return said
    return Position.LATEST if is_stream else Position.EARLIEST


def end_of(chosen: Chosen) -> Any:
    said = chosen[ENDING_TIME] or chosen[ENDING_TIMES] or chosen[ENDING]
    return Position.LATEST if said is None else said


def _refuse(chosen: Chosen, unfit: tuple[Option[Any], ...], is_stream: bool) -> None:
    for option in unfit:
        if chosen.has(option):
            where = "a batch" if is_stream else "a stream"
            raise BadOption(f"option {option.name} is for {where} only")


def _check_files(chosen: Chosen, is_stream: bool) -> None:
    if is_stream:
        raise BadOption("log files are read in a batch; a stream reads from brokers: servers")
    fit = {option.name for option in _OF_FILES}
    for name in sorted(chosen.given - fit):
        raise BadOption(f"option {name} does not go with path; these do: {', '.join(sorted(fit))}")
