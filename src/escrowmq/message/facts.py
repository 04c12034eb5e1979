"""What queues and indexes keep of a record: its tags code, its keys, whether it is shown at all.

The store derives the same from a message that is being appended and from a record found again
after a crash, so it is written once, here, over the encoded properties.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

from escrowmq.message import names
from escrowmq.message.javahash import java_hash
from escrowmq.message.sysflag import (
    TRANSACTION_MASK,
    TRANSACTION_PREPARED,
    TRANSACTION_ROLLBACK,
)

# 1s 5s 10s 30s, 1 to 10 minutes, 20m 30m 1h 2h
DELAY_LEVELS_MS: Final[tuple[int, ...]] = (
    *(1_000, 5_000, 10_000, 30_000),
    *(minutes * 60_000 for minutes in (*range(1, 11), 20, 30, 60, 120)),
)

# One pass over the properties for all that is wanted of them: this is on the path of every send.
_wanted = re.compile(
    b"\x02(%s)\x01([^\x02]+)"  # a literal first: that is what makes it fast
    % b"|".join(
        name.encode() for name in (names.TAGS, names.UNIQUE_KEY, names.KEYS, names.DELAY_LEVEL)
    )
).findall


def has_queue_entry(sys_flag: int) -> bool:
    """RocketMQ's prepared and rolled-back records take no place in their queue."""
    return not sys_flag & TRANSACTION_PREPARED  # this bit is set in both


def has_keys(sys_flag: int) -> bool:
    """Rolled-back records are not found by key either."""
    return sys_flag & TRANSACTION_MASK != TRANSACTION_ROLLBACK


def derive(topic: str, properties: bytes, stored_ms: int) -> tuple[int, list[bytes]]:
    """The tags code of a record's queue entry, and its keys: the unique one, then the user's."""
    code = 0
    keys: list[bytes] = []
    given = b""
    for name, value in _wanted(b"\x02" + properties):
        if name == b"UNIQ_KEY":
            keys = [value]
        elif name == b"TAGS":
            code = _tag_hash(value)
        elif name == b"KEYS":
            given = value
    if given:
        keys += filter(None, given.split(b" "))
    if topic == names.SCHEDULE_TOPIC:
        code = _due_ms(properties, stored_ms) or code
    return code, keys


def _due_ms(properties: bytes, stored_ms: int) -> int:
    """Queues of the schedule topic carry the time at which a message is due."""
    level = 0
    for name, value in _wanted(b"\x02" + properties):
        if name == b"DELAY":
            level = delay_level(value, len(DELAY_LEVELS_MS))
    return stored_ms + DELAY_LEVELS_MS[level - 1] if level else 0


def delay_level(text: bytes, highest: int) -> int:
    """1 to the highest; 0 for none. A number past the highest means the highest."""
    if not text.isdigit():
        return 0
    digits = text.lstrip(b"0")
    return min(int(digits[:9] or b"0"), highest)


@lru_cache(maxsize=4096)
def _tag_hash(tag: bytes) -> int:
    return java_hash(tag.decode("utf-8", "replace"))
