"""Keys and queue entries as columns: what can be done for many records at once is.

    pending keys --hash_keys, hash_run--> KeyColumns --pack_rows--> entries of an index file
    offsets and sizes of a run --pack_rows--> entries of a consume queue

Every message has at least one key, so hashing them is a large part of the cost of a checkpoint. The
hashed text is `topic#key`. `key_hash` is the plain version; the others are fast versions of it, and
tests compare them.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Final, NamedTuple, Protocol, cast

from escrowmq.message.keys import POWERS, hash_suffixes, hash_with_shared_prefix, unsigned_hash

_SUFFIX_BYTES: Final = 8
_SIGN_BIT: Final = 0x80000000

# A key that is not in the index files yet: topic, key, log offset, stored ms.
PendingKey = tuple[str, bytes, int, int]


class PendingKeyRun(NamedTuple):
    """The keys of a run of messages. All keys have one length."""

    topic: str
    keys: list[bytes]
    log_offsets: list[int]
    stored_ms: int

    def iter_keys(self) -> Iterator[PendingKey]:
        for key, log_offset in zip(self.keys, self.log_offsets, strict=True):
            yield self.topic, key, log_offset, self.stored_ms


class KeyBlock(Protocol):
    """The keys of the records of one batch, hashed already."""

    @property
    def stored_ms(self) -> int: ...
    @property
    def hashes(self) -> bytes:
        """The hashes as 32-bit numbers of this machine."""

    @property
    def log_offsets(self) -> bytes:
        """The log offsets of the records as 64-bit numbers of this machine."""

    def __len__(self) -> int: ...
    def find(self, hash_value: int) -> list[int]:
        """Return the log offsets of the keys with this hash, the newest first."""


PendingKeys = PendingKey | PendingKeyRun | KeyBlock


def key_hash(topic: str, key: bytes) -> int:
    """Return the hash of a key in the index, as RocketMQ computes it. This is the specification."""
    return _java_abs(unsigned_hash(f"{topic}#{key.decode('utf-8', 'replace')}"))


def hash_keys(topics: Sequence[str], keys: Sequence[bytes]) -> list[int]:
    """Hash many keys. Those of one length are hashed together, whatever their topics."""
    if len(set(map(len, keys))) == 1 and _is_vectorizable(keys[0]) and b"".join(keys).isascii():
        return _hash_equal_length_keys(topics, keys)
    hashes = [0] * len(keys)
    by_length: defaultdict[int, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        if _is_vectorizable(key) and key.isascii():
            by_length[len(key)].append(index)
        else:
            hashes[index] = key_hash(topics[index], key)
    for indexes in by_length.values():
        group = _hash_equal_length_keys([topics[i] for i in indexes], [keys[i] for i in indexes])
        for index, value in zip(indexes, group, strict=True):
            hashes[index] = value
    return hashes


def _is_vectorizable(key: bytes) -> bool:
    return _SUFFIX_BYTES < len(key) < len(POWERS)


def _hash_equal_length_keys(topics: Sequence[str], keys: Sequence[bytes]) -> list[int]:
    """Hash ASCII keys of one length.

    Most keys differ only in their last characters, a time and a counter. What precedes these is
    hashed once per distinct value.
    """
    heads = [key[:-_SUFFIX_BYTES] for key in keys]
    by_head = {head: unsigned_hash(head.decode("ascii")) for head in set(heads)}
    power = POWERS[len(heads[0])]
    by_topic = {topic: _topic_hash(topic) * power & 0xFFFFFFFF for topic in set(topics)}
    prefixes = [by_topic[topic] + by_head[head] for topic, head in zip(topics, heads, strict=True)]
    return _java_abs_all(hash_suffixes(prefixes, [key[-_SUFFIX_BYTES:] for key in keys]))


def hash_run(run: PendingKeyRun) -> list[int]:
    """Hash the keys of a bulk sender, which have a common prefix and end in a number."""
    length, joined = len(run.keys[0]), b"".join(run.keys)
    head_bytes, count = length - _SUFFIX_BYTES, len(run.keys)
    head = joined[: max(0, head_bytes)]
    # Compare column by column: the i-th characters of all keys against that of the first key.
    have_same_head = all(joined[i::length] == head[i : i + 1] * count for i in range(len(head)))
    if not (_is_vectorizable(run.keys[0]) and joined.isascii() and have_same_head):
        return hash_keys([run.topic] * count, run.keys)
    prefix = _topic_hash(run.topic) * POWERS[head_bytes] + unsigned_hash(head.decode("ascii"))
    return _java_abs_all(hash_with_shared_prefix(prefix & 0xFFFFFFFF, joined, length, head_bytes))


@lru_cache(maxsize=16_384)
def _topic_hash(topic: str) -> int:
    return unsigned_hash(f"{topic}#")


def _java_abs(value: int) -> int:
    """Return Java's absolute value of a hash code; 0 for -2**31, which has none in 32 bits."""
    return value if value < _SIGN_BIT else ((1 << 32) - value) % _SIGN_BIT


def _java_abs_all(values: Sequence[int]) -> list[int]:
    return [value if value < _SIGN_BIT else ((1 << 32) - value) % _SIGN_BIT for value in values]


class KeyColumns(NamedTuple):
    """Keys for the index files, as columns of equal length."""

    hashes: array[int]  # 32 bits
    log_offsets: array[int]  # 64 bits
    stored_ms: array[int]  # 64 bits

    @classmethod
    def from_pending(cls, pending: Sequence[PendingKeys]) -> KeyColumns:
        """Hash pending keys. Their order is kept."""
        columns = cls(array("I"), array("q"), array("q"))
        for kind, group in itertools.groupby(pending, type):
            if kind is PendingKeyRun:
                for run in cast(Iterator[PendingKeyRun], group):
                    columns.hashes.extend(hash_run(run))
                    columns.log_offsets.extend(run.log_offsets)
                    columns.stored_ms.extend([run.stored_ms] * len(run.keys))
            elif kind is tuple:
                topics, keys, log_offsets, stored = zip(
                    *cast(Iterator[PendingKey], group), strict=True
                )
                columns.hashes.extend(hash_keys(topics, keys))
                columns.log_offsets.extend(log_offsets)
                columns.stored_ms.extend(stored)
            else:
                for block in cast(Iterator[KeyBlock], group):
                    columns.hashes.frombytes(block.hashes)
                    columns.log_offsets.frombytes(block.log_offsets)
                    columns.stored_ms.extend(array("q", [block.stored_ms]) * len(block))
        return columns

    def part(self, begin: int, end: int) -> KeyColumns:
        return KeyColumns(*(column[begin:end] for column in self))


class LinkedEntries(NamedTuple):
    """What new entries change in an index file. The native module returns the same."""

    entries: bytes  # as the file holds them
    words: bytes  # the changed slots: position 4, value 4, both big-endian
    sum_changes: list[tuple[int, int]]  # of pages of slots: number of the page, difference
    new_slots: int  # that were empty before


def find_pending(
    pending: Sequence[PendingKeys], topic: str, key: bytes
) -> Iterator[tuple[int, int] | None]:
    """Yield log offset and stored time of the pending entries that may have this key.

    The newest come first; None stands for an entry that does not have it. A block of keys knows
    only hashes, as an index file does.
    """
    hash_value = key_hash(topic, key)
    for entry in reversed(pending):
        if isinstance(entry, PendingKeyRun):
            for run_topic, run_key, log_offset, stored_ms in reversed(list(entry.iter_keys())):
                yield (log_offset, stored_ms) if (run_topic, run_key) == (topic, key) else None
        elif isinstance(entry, tuple):
            yield (entry[2], entry[3]) if (entry[0], entry[1]) == (topic, key) else None
        else:
            yield None
            for log_offset in entry.find(hash_value):
                yield log_offset, entry.stored_ms


def newest_stored_ms(pending: Sequence[PendingKeys]) -> int:
    """Return the stored time of the last pending key; 0 if there is none."""
    if not pending:
        return 0
    last = pending[-1]
    return last[3] if isinstance(last, tuple) else last.stored_ms


def pack_rows(*columns: array[int]) -> bytes:
    """Return the rows of some columns, packed as `struct` does with `>`.

    To pack one row at a time with `struct` was measured to be three times slower. The columns are
    changed and must not be used afterwards.
    """
    width, begin = sum(column.itemsize for column in columns), 0
    rows = bytearray(width * len(columns[0]))
    for column in columns:
        if sys.byteorder == "little":
            column.byteswap()
        data, item_bytes = column.tobytes(), column.itemsize
        for i in range(item_bytes):  # the i-th bytes of all items in one strided copy
            rows[begin + i :: width] = data[i::item_bytes]
        begin += item_bytes
    return bytes(rows)
