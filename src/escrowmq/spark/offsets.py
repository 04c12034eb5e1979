"""Offsets of queues as text: as users write them, and as a checkpoint stores them.

    {"orders": {"broker-a": {"0": 17, "1": -2}}}       topic -> broker -> queue -> offset

-1 means latest and -2 earliest. Written offsets are sorted and contain only numbers, because Spark
compares them as text. The `parse_*` functions raise ValueError with a text that says what is
expected.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from escrowmq.client.messages import MessageQueue

EARLIEST_OFFSET: Final = -2
LATEST_OFFSET: Final = -1

Offsets = dict[MessageQueue, int]


class SymbolicOffset(enum.Enum):
    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True)
class QueueTimes:
    """Positions by time: in each queue, the first message stored at its time or later."""

    default_ms: int | None
    by_queue: Mapping[MessageQueue, int]

    def time_ms_of(self, queue: MessageQueue) -> int | None:
        return self.by_queue.get(queue, self.default_ms)


def to_nested(offsets: Mapping[MessageQueue, int]) -> dict[str, dict[str, dict[str, int]]]:
    """Return offsets as topic -> broker -> queue -> offset, sorted."""
    nested: dict[str, dict[str, dict[str, int]]] = {}
    for (topic, broker, queue_id), offset in sorted(offsets.items()):
        nested.setdefault(topic, {}).setdefault(broker, {})[str(queue_id)] = int(offset)
    return nested


def from_nested(nested: Any) -> Offsets:
    """Return the offsets of decoded JSON. Raises ValueError if it has another shape."""
    shape = 'expected JSON like {"topic": {"broker": {"0": 17}}}'
    if not isinstance(nested, dict):
        raise ValueError(shape)
    offsets: Offsets = {}
    for topic, brokers in nested.items():
        for broker, queues in _items(brokers, shape):
            for queue_id, offset in _items(queues, shape):
                if not queue_id.isdecimal() or type(offset) is not int:
                    raise ValueError(shape)
                offsets[MessageQueue(topic, broker, int(queue_id))] = offset
    return offsets


def parse_offsets(text: str) -> SymbolicOffset | Offsets:
    """Parse `earliest`, `latest`, or JSON."""
    symbolic = parse_symbolic_offset(text)
    if symbolic is not None:
        return symbolic
    if not text.lstrip().startswith("{"):
        raise ValueError("expected earliest, latest, or JSON topic -> broker -> queue -> offset")
    offsets = from_nested(_parse_json(text))
    if any(offset < EARLIEST_OFFSET for offset in offsets.values()):
        raise ValueError("an offset is 0 or more, -1 for the latest, or -2 for the earliest")
    return offsets


def parse_symbolic_offset(text: str) -> SymbolicOffset | None:
    word = text.strip().lower()
    return next((symbol for symbol in SymbolicOffset if symbol.value == word), None)


def parse_queues(text: str) -> list[MessageQueue]:
    """Parse JSON topic -> broker -> [queue]."""
    shape = 'expected JSON like {"topic": {"broker": [0, 1]}}'
    queues: list[MessageQueue] = []
    for topic, brokers in _items(_parse_json(text), shape):
        for broker, queue_ids in _items(brokers, shape):
            if not isinstance(queue_ids, list) or any(type(item) is not int for item in queue_ids):
                raise ValueError(shape)
            queues += (MessageQueue(topic, broker, queue_id) for queue_id in queue_ids)
    if not queues:
        raise ValueError(shape)
    return queues


def parse_time(text: str) -> QueueTimes:
    """Parse a time in milliseconds since 1970, as Kafka's source has it."""
    try:
        return QueueTimes(int(text), {})
    except ValueError:
        raise ValueError("expected milliseconds since 1970") from None


def parse_times_by_queue(text: str) -> QueueTimes:
    return QueueTimes(None, from_nested(_parse_json(text)))


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON: {error}") from None


def _items(nested: Any, shape: str) -> Any:
    if not isinstance(nested, dict):
        raise ValueError(shape)
    return nested.items()
