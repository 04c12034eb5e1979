"""Places in queues: as people write them, as a checkpoint keeps them, and as a broker knows them.

    {"orders": {"broker-a": {"0": 17, "1": -2}}}       topic -> broker -> queue -> offset

-1 is the latest, -2 the earliest. What is written is sorted and holds whole numbers only: Spark
compares offsets as text.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

EARLIEST_OFFSET: Final = -2
LATEST_OFFSET: Final = -1


class QueueKey(NamedTuple):
    topic: str
    broker: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic} {self.broker}:{self.queue_id}"


Offsets = dict[QueueKey, int]


class SymbolicOffset(enum.Enum):
    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True)
class QueueTimes:
    """Of each queue the first message stored at this time or later."""

    default_ms: int | None
    by_queue: Mapping[QueueKey, int]

    def time_ms_of(self, queue: QueueKey) -> int | None:
        return self.by_queue.get(queue, self.default_ms)


def to_nested(offsets: Mapping[QueueKey, int]) -> dict[str, dict[str, dict[str, int]]]:
    found: dict[str, dict[str, dict[str, int]]] = {}
    for (topic, broker, queue_id), number in sorted(offsets.items()):
        found.setdefault(topic, {}).setdefault(broker, {})[str(queue_id)] = int(number)
    return found


def from_nested(content: Any) -> Offsets:
    """Raises ValueError that says what is wrong with it."""
    shape = 'JSON like {"topic": {"broker": {"0": 17}}} is wanted'
    if not isinstance(content, dict):
        raise ValueError(shape)
    found: Offsets = {}
    for topic, brokers in content.items():
        for broker, queues in _items(brokers, shape):
            for queue_id, number in _items(queues, shape):
                if not queue_id.isdecimal() or type(number) is not int:
                    raise ValueError(shape)
                found[QueueKey(topic, broker, int(queue_id))] = number
    return found


def _items(content: Any, shape: str) -> Any:
    if not isinstance(content, dict):
        raise ValueError(shape)
    return content.items()


def parse_symbolic_offset(text: str) -> SymbolicOffset | None:
    return next((one for one in SymbolicOffset if one.value == text.strip().lower()), None)


def _parse_json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from None


def parse_offsets(text: str) -> SymbolicOffset | Offsets:
    """earliest, latest, or JSON."""
    word = parse_symbolic_offset(text)
    if word is not None:
        return word
    if not text.lstrip().startswith("{"):
        raise ValueError("earliest, latest, or JSON topic -> broker -> queue -> offset")
    found = from_nested(_parse_json(text))
    if any(number < EARLIEST_OFFSET for number in found.values()):
        raise ValueError("offsets are 0 or more, -1 for the latest, -2 for the earliest")
    return found


def parse_queues(text: str) -> list[QueueKey]:
    """JSON topic -> broker -> [queue]."""
    shape = 'JSON like {"topic": {"broker": [0, 1]}} is wanted'
    found: list[QueueKey] = []
    for topic, brokers in _items(_parse_json(text), shape):
        for broker, numbers in _items(brokers, shape):
            if not isinstance(numbers, list) or any(type(one) is not int for one in numbers):
                raise ValueError(shape)
            found += (QueueKey(topic, broker, number) for number in numbers)
    if not found:
        raise ValueError(shape)
    return found


def parse_time(text: str) -> QueueTimes:
    try:
        return QueueTimes(int(text), {})
    except ValueError:
        raise ValueError("milliseconds since 1970 are wanted") from None


def parse_times_by_queue(text: str) -> QueueTimes:
    return QueueTimes(None, from_nested(_parse_json(text)))
