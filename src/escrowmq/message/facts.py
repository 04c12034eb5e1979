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


_ALIKE_BYTES: Final = 24


def has_queue_entry(sys_flag: int) -> bool:
    """RocketMQ's prepared and rolled-back records take no place in their queue."""
    return not sys_flag & TRANSACTION_PREPARED  # this bit is set in both


def has_keys(sys_flag: int) -> bool:
    """Rolled-back records are not found by key either."""
    return sys_flag & TRANSACTION_MASK != TRANSACTION_ROLLBACK


# Both, by the bits of a transaction in the sysFlag: every append looks.
SHOWN_AND_KEYED: Final = [
    (has_queue_entry(bits), has_keys(bits)) for bits in range(TRANSACTION_MASK + 1)
]


def derive(topic: str, properties: bytes, stored_ms: int) -> tuple[int, list[bytes]]:
    """The tags code of a record's queue entry, and its keys: the unique one, then the user's."""
    if len(properties) <= _ALIKE_BYTES and topic != names.SCHEDULE_TOPIC:
        return _derive_alike(properties)
    return _derive(topic, properties, stored_ms)


@lru_cache(maxsize=256)
def _derive_alike(properties: bytes) -> tuple[int, list[bytes]]:
    """So short that many records have the very same: ops, and messages with a tag alone. Nobody
    changes the list."""
    return _derive("", properties, 0)


def _derive(topic: str, properties: bytes, stored_ms: int) -> tuple[int, list[bytes]]:
    items = b"\x02" + properties
    code = 0
    keys: list[bytes] = []
    # Cutting at a literal is the fastest way to one value: this is on the path of every send.
    _, found, rest = items.rpartition(b"\x02TAGS\x01")
    if found:
        code = _tag_hash(rest.partition(b"\x02")[0] or _last_value(items, b"TAGS"))
    _, found, rest = items.rpartition(b"\x02UNIQ_KEY\x01")
    if found:
        unique = rest.partition(b"\x02")[0] or _last_value(items, b"UNIQ_KEY")
        if unique:
            keys.append(unique)
    _, found, rest = items.rpartition(b"\x02KEYS\x01")
    if found:
        given = rest.partition(b"\x02")[0] or _last_value(items, b"KEYS")
        keys += filter(None, given.split(b" "))
    if topic == names.SCHEDULE_TOPIC:
        code = _due_ms(items, stored_ms) or code
    return code, keys


def _last_value(items: bytes, name: bytes) -> bytes:
    """An empty value is as good as none: the last one before it counts."""
    return find_property(items, name) or b""


def _due_ms(items: bytes, stored_ms: int) -> int:
    """Queues of the schedule topic carry the time at which a message is due."""
    level = delay_level(_last_value(items, b"DELAY"), len(DELAY_LEVELS_MS))
    return stored_ms + DELAY_LEVELS_MS[level - 1] if level else 0


def delay_level(text: bytes, highest: int) -> int:
    """1 to the highest; 0 for none. A number past the highest means the highest."""
    if not text.isdigit():
        return 0
    digits = text.lstrip(b"0")
    return min(int(digits[:9] or b"0"), highest)


def _tag_hash(tag: bytes) -> int:
    return tag_code(tag.decode("utf-8", "replace"))


tag_code = lru_cache(maxsize=4096)(java_hash)
