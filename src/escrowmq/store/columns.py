"""Keys on their way to the index: kept as they came, and turned into columns when they go.

The text that is hashed is `topic#key`. There is a key for every message that is sent, so what can
be done for many at once is.

Columns of numbers to rows of bytes.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, cast

from escrowmq.message.keys import POWERS, hash_suffixes, hash_with_shared_prefix, unsigned_hash

_SUFFIX_BYTES: Final = 8
_SIGN_BIT: Final = 0x80000000

# A key waiting for the files: topic, key, log offset, stored ms.
PendingKey = tuple[str, bytes, int, int]


class PendingKeyRun(NamedTuple):
    """Keys of one length, of messages that came together."""

    topic: str
    keys: list[bytes]
    log_offsets: list[int]
    stored_ms: int

    def iter_keys(self) -> Iterator[PendingKey]:
        for key, log_offset in zip(self.keys, self.log_offsets, strict=True):
            yield self.topic, key, log_offset, self.stored_ms


PendingKeys = PendingKey | PendingKeyRun


def key_hash(topic: str, key: bytes) -> int:
    return _java_abs(unsigned_hash(f"{topic}#{key.decode('utf-8', 'replace')}"))


def hash_keys(topics: Sequence[str], keys: Sequence[bytes]) -> list[int]:
    """The same for many: those of one length are hashed together, whatever their topics."""
    if len(set(map(len, keys))) == 1 and _is_vectorizable(keys[0]) and b"".join(keys).isascii():
        return _hash_equal_length_keys(topics, keys)
    found = [0] * len(keys)
    alike: defaultdict[int, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        if _is_vectorizable(key) and key.isascii():
            alike[len(key)].append(place)
        else:
            found[place] = key_hash(topics[place], key)
    for places in alike.values():
        hashes = _hash_equal_length_keys([topics[at] for at in places], [keys[at] for at in places])
        for place, value in zip(places, hashes, strict=True):
            found[place] = value
    return found


def _is_vectorizable(key: bytes) -> bool:
    return _SUFFIX_BYTES < len(key) < len(POWERS)


def _hash_equal_length_keys(topics: Sequence[str], keys: Sequence[bytes]) -> list[int]:
    """Of ASCII keys of one length. Most differ from others in their last characters alone, a time
    and a counter: what is before them is hashed once."""
    heads = [key[:-_SUFFIX_BYTES] for key in keys]
    by_head = {head: unsigned_hash(head.decode("ascii")) for head in set(heads)}
    power = POWERS[len(heads[0])]
    by_topic = {topic: _topic_hash(topic) * power & 0xFFFFFFFF for topic in set(topics)}
    before = [by_topic[topic] + by_head[head] for topic, head in zip(topics, heads, strict=True)]
    return _java_abs_all(hash_suffixes(before, [key[-_SUFFIX_BYTES:] for key in keys]))


def hash_run(run: PendingKeyRun) -> list[int]:
    """Of a bulk sender's keys: they begin alike and end in a number."""
    length, joined = len(run.keys[0]), b"".join(run.keys)
    head_bytes, count = length - _SUFFIX_BYTES, len(run.keys)
    head = joined[: max(0, head_bytes)]
    begin_alike = all(joined[at::length] == head[at : at + 1] * count for at in range(len(head)))
    if not (_is_vectorizable(run.keys[0]) and joined.isascii() and begin_alike):
        return hash_keys([run.topic] * count, run.keys)
    before = _topic_hash(run.topic) * POWERS[head_bytes] + unsigned_hash(head.decode("ascii"))
    return _java_abs_all(hash_with_shared_prefix(before & 0xFFFFFFFF, joined, length, head_bytes))


@lru_cache(maxsize=16_384)
def _topic_hash(topic: str) -> int:
    return unsigned_hash(f"{topic}#")


def _java_abs(value: int) -> int:
    """Java's absolute value of a hash code; of the one number that has none, 0."""
    return value if value < _SIGN_BIT else ((1 << 32) - value) % _SIGN_BIT


def _java_abs_all(values: Sequence[int]) -> list[int]:
    return [value if value < _SIGN_BIT else ((1 << 32) - value) % _SIGN_BIT for value in values]


class KeyColumns(NamedTuple):
    """Keys on their way to the files, by columns: there is one for every message that is sent."""

    hashes: list[int]
    log_offsets: list[int]
    stored_ms: list[int]

    @classmethod
    def from_pending(cls, pending: Sequence[PendingKeys]) -> KeyColumns:
        found = cls([], [], [])
        for kind, ones in itertools.groupby(pending, type):
            if kind is PendingKeyRun:
                for run in cast(Iterator[PendingKeyRun], ones):
                    found.hashes.extend(hash_run(run))
                    found.log_offsets.extend(run.log_offsets)
                    found.stored_ms.extend([run.stored_ms] * len(run.keys))
            else:
                topics, keys, log_offsets, stored = zip(*ones, strict=True)
                found.hashes.extend(hash_keys(topics, keys))
                found.log_offsets.extend(log_offsets)
                found.stored_ms.extend(stored)
        return found

    def part(self, begin: int, end: int) -> KeyColumns:
        return KeyColumns(*(column[begin:end] for column in self))


def newest_first(pending: Sequence[PendingKeys]) -> Iterator[PendingKey]:
    for one in reversed(pending):
        if isinstance(one, PendingKeyRun):
            yield from reversed(list(one.iter_keys()))
        else:
            yield one


def pack_rows(*columns: array[int]) -> bytes:
    """Row by row, as `struct` packs them with `>`; a row at a time is three times slower. The
    columns are used up."""
    width, begin = sum(column.itemsize for column in columns), 0
    rows = bytearray(width * len(columns[0]))
    for column in columns:
        if sys.byteorder == "little":
            column.byteswap()
        data, item_bytes = column.tobytes(), column.itemsize
        for at in range(item_bytes):
            rows[begin + at :: width] = data[at::item_bytes]
        begin += item_bytes
    return bytes(rows)
