"""What queues and indexes keep of a record: its tags code, its keys, whether it is shown at all.

The store derives the same from a message that is being appended and from a record found again
after a crash, so it is written once, here, over the encoded properties.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from escrowmq.message import names
from escrowmq.message.javahash import java_hash
from escrowmq.message.properties import find_property

TRANSACTION_BITS: Final = 12
PREPARED: Final = 4
ROLLED_BACK: Final = 12

# 1s 5s 10s 30s, 1 to 10 minutes, 20m 30m 1h 2h
DELAY_LEVELS_MS: Final[tuple[int, ...]] = (
    *(1_000, 5_000, 10_000, 30_000),
    *(minutes * 60_000 for minutes in (*range(1, 11), 20, 30, 60, 120)),
)

_TAGS = names.TAGS.encode()
_KEYS = names.KEYS.encode()
_UNIQUE_KEY = names.UNIQUE_KEY.encode()
_DELAY = names.DELAY_LEVEL.encode()


def has_queue_entry(sys_flag: int) -> bool:
    """RocketMQ's prepared and rolled-back records take no place in their queue."""
    return sys_flag & TRANSACTION_BITS not in (PREPARED, ROLLED_BACK)


def tags_code(topic: str, properties: bytes, stored_ms: int) -> int:
    """What a queue entry carries besides place and size: a hash to filter by, or a due time."""
    if topic == names.SCHEDULE_TOPIC:
        level = _delay_level(properties)
        if level > 0:
            return stored_ms + DELAY_LEVELS_MS[min(level, len(DELAY_LEVELS_MS)) - 1]
    tag = find_property(properties, _TAGS)
    return 0 if tag is None else _tag_hash(tag)


def record_keys(properties: bytes) -> list[bytes]:
    """The unique key, then the keys the user gave."""
    unique = find_property(properties, _UNIQUE_KEY)
    given = find_property(properties, _KEYS)
    keys = [] if unique is None else [unique]
    if given is not None:
        keys += filter(None, given.split(b" "))
    return keys


def _delay_level(properties: bytes) -> int:
    text = find_property(properties, _DELAY)
    try:
        return int(text or 0)
    except ValueError:
        return 0


@lru_cache(maxsize=4096)
def _tag_hash(tag: bytes) -> int:
    return java_hash(tag.decode("utf-8", "replace"))
