"""The identifiers of a message: offset id, unique key, tag hash, and the keys of the key index.

    offset id    store ip 4 or 16 | port 4 | log offset 8                    upper-case hex
    unique key   client ip 4 or 16 | pid 2 | process 4 | ms in month 4 | counter 2    upper-case hex

An offset id says where a record is; a unique key is given by the sender. Both have 32 characters
with IPv4 and 56 with IPv6, so their length does not tell them apart.

Tags and keys are hashed with Java's String.hashCode, which RocketMQ uses in consume queues and in
the key index. The store derives tags code and keys from a message that is appended and again from a
record that recovery reads, so the rule stands here once, over the encoded properties.
"""

from __future__ import annotations

import ipaddress
import itertools
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import mul
from typing import Final

from escrowmq.errors import LocalProtocolError, RemoteProtocolError
from escrowmq.message import names
from escrowmq.message.properties import find_property
from escrowmq.message.record import TRANSACTION_MASK, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK

_PORT = struct.Struct(">i")
_OFFSET = struct.Struct(">q")
_UNIQUE_TAIL = struct.Struct(">HIIH")


# --- hosts and ids -------------------------------------------------------------------------------


def encode_host(address: str, port: int) -> bytes:
    """Return an address as records hold it: 8 bytes for IPv4, 20 for IPv6.

    Raises LocalProtocolError if it is not an IP address.
    """
    try:
        return ipaddress.ip_address(address).packed + _PORT.pack(port)
    except (ValueError, struct.error) as error:
        raise LocalProtocolError(f"not an IP address and port: {address!r}, {port}") from error


def decode_host(host: bytes) -> tuple[str, int]:
    """Return address and port. Raises RemoteProtocolError."""
    if len(host) not in (8, 20):
        raise RemoteProtocolError(f"a host has {len(host)} bytes, expected 8 or 20")
    return str(ipaddress.ip_address(host[:-4])), _PORT.unpack(host[-4:])[0]


def encode_offset_id(store_host: bytes, log_offset: int) -> str:
    return (store_host + _OFFSET.pack(log_offset)).hex().upper()


def encode_offset_ids(store_host: bytes, log_offsets: Iterable[int]) -> list[str]:
    """Return the offset ids of many records of one store."""
    host = store_host.hex().upper()
    return ["%s%016X" % (host, log_offset) for log_offset in log_offsets]  # noqa: UP031  # faster


def decode_offset_id(text: str) -> tuple[bytes, int]:
    """Return the store host and the log offset of an offset id. Raises RemoteProtocolError."""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raise RemoteProtocolError(f"message id {text!r} is not hexadecimal") from None
    if len(raw) not in (16, 28):
        raise RemoteProtocolError(f"message id {text!r} has {len(raw)} bytes, expected 16 or 28")
    return raw[:-8], _OFFSET.unpack(raw[-8:])[0]


class UniqueKeyGenerator:
    """Generates the unique keys of one process. `salt` tells two processes with one pid apart."""

    def __init__(self, *, address: str, process_id: int, salt: int) -> None:
        self._ip = ipaddress.ip_address(address).packed
        self._process_id = process_id & 0xFFFF
        self._salt = salt & 0xFFFFFFFF
        self._counter = itertools.count()

    def next(self, *, now_ms: int, month_start_ms: int) -> str:
        """Return a new key. `month_start_ms` is when the month of `now_ms` began."""
        elapsed_ms = (now_ms - month_start_ms) & 0xFFFFFFFF
        count = next(self._counter) & 0xFFFF
        tail = _UNIQUE_TAIL.pack(self._process_id, self._salt, elapsed_ms, count)
        return (self._ip + tail).hex().upper()


# --- Java's String.hashCode ----------------------------------------------------------------------

_WORD_MASK = 0xFFFFFFFF
_LENGTH_MAX = 256
_LANE_BYTES = 8
_MASK_LANE = _WORD_MASK.to_bytes(_LANE_BYTES, "little")

# 31^0, 31^1, … and, by length, the same in descending order: a hash is then one sum of products.
POWERS: Final = [pow(31, exponent, 1 << 32) for exponent in range(_LENGTH_MAX + 1)]
DESCENDING_POWERS: Final = [POWERS[:length][::-1] for length in range(_LENGTH_MAX + 1)]


def java_hash(text: str) -> int:
    """Return h = 31 h + u over the UTF-16 code units, as a signed 32-bit number."""
    value = unsigned_hash(text)
    return value - (1 << 32) if value & 0x80000000 else value


def unsigned_hash(text: str) -> int:
    """Return the same as an unsigned number."""
    units = text.encode() if text.isascii() else _utf16_units(text)
    value = 0
    for begin in range(0, len(units), _LENGTH_MAX):
        part = units[begin : begin + _LENGTH_MAX]
        total: int = sum(map(mul, part, DESCENDING_POWERS[len(part)]))
        value = (value * POWERS[len(part)] + total) & _WORD_MASK
    return value


def hash_suffixes(prefix_hashes: Sequence[int], suffixes: Sequence[bytes]) -> Sequence[int]:
    """Return the unsigned hashes of texts with these suffixes, which are ASCII and of one length.

    `prefix_hashes` are the hashes of the texts before the suffixes, as numbers of up to 33 bits.
    """
    initial = struct.pack(f"<{len(suffixes)}Q", *prefix_hashes)
    return _continue_hashes(initial, b"".join(suffixes), len(suffixes[0]), 0)


def hash_with_shared_prefix(
    prefix_hash: int, joined: bytes, length: int, prefix_bytes: int
) -> Sequence[int]:
    """Return the unsigned hashes of ASCII texts of one length that share a prefix.

    `joined` are the texts one after the other; `prefix_hash` is the hash of their first
    `prefix_bytes` bytes.
    """
    initial = prefix_hash.to_bytes(_LANE_BYTES, "little") * (len(joined) // length)
    return _continue_hashes(initial, joined, length, prefix_bytes)


def _continue_hashes(
    initial: bytes, joined: bytes, length: int, first_column: int
) -> Sequence[int]:
    """Return the hashes of all texts, computed at once in lanes of one large number.

    Each text has a lane of eight bytes. One step, times 31 plus a character, grows the number in a
    lane by five bits, so six steps fit before all lanes have to be cut back to 32 bits.
    """
    count = len(joined) // length
    mask = int.from_bytes(_MASK_LANE * count, "little")
    total = int.from_bytes(initial, "little")
    for step, column in enumerate(range(first_column, length)):
        lanes = bytearray(_LANE_BYTES * count)
        lanes[::_LANE_BYTES] = joined[column::length]
        total = total * 31 + int.from_bytes(lanes, "little")
        if step % 6 == 5:
            total &= mask
    return memoryview((total & mask).to_bytes(_LANE_BYTES * count, "little")).cast("Q")


def _utf16_units(text: str) -> memoryview:
    return memoryview(text.encode("utf-16-le", "surrogatepass")).cast("H")


# --- tags code and keys --------------------------------------------------------------------------

_CACHED_PROPERTIES_BYTES_MAX: Final = 24


def has_queue_entry(sys_flag: int) -> bool:
    """Return whether a record gets a queue entry: prepared and rolled-back records do not."""
    return not sys_flag & TRANSACTION_PREPARED  # the bit is set in both types


def has_keys(sys_flag: int) -> bool:
    """Return whether a record is indexed by its keys: rolled-back records are not."""
    return sys_flag & TRANSACTION_MASK != TRANSACTION_ROLLBACK


# Both results by the transaction bits of the sysFlag, because every append needs them.
QUEUED_AND_KEYED: Final = [
    (has_queue_entry(bits), has_keys(bits)) for bits in range(TRANSACTION_MASK + 1)
]


def tags_and_keys(
    topic: str, properties: bytes, stored_ms: int = 0, delay_levels_ms: Sequence[int] = ()
) -> tuple[int, list[bytes]]:
    """Return the tags code of a record's queue entry, and its keys: the unique key comes first.

    In the schedule topic the tags code is the time at which the message is due. It follows from
    `stored_ms` and `delay_levels_ms`, the setting messageDelayLevel.
    """
    if topic != names.SCHEDULE_TOPIC:
        if len(properties) <= _CACHED_PROPERTIES_BYTES_MAX:
            return _cached_tags_and_keys(properties)
        return _parse_tags_and_keys(properties)
    tags_code, keys = _parse_tags_and_keys(properties)
    return _due_ms(properties, stored_ms, delay_levels_ms) or tags_code, keys


@lru_cache(maxsize=256)
def _cached_tags_and_keys(properties: bytes) -> tuple[int, list[bytes]]:
    """Cache properties so short that many records share them: ops, and messages with only a tag.

    Callers must not change the list.
    """
    return _parse_tags_and_keys(properties)


def _parse_tags_and_keys(properties: bytes) -> tuple[int, list[bytes]]:
    items = b"\x02" + properties
    code = 0
    keys: list[bytes] = []
    # rpartition at a literal is the fastest way to one value; every send runs through here.
    _, separator, after = items.rpartition(b"\x02TAGS\x01")
    if separator:
        code = _tag_hash(after.partition(b"\x02")[0] or _last_value(items, b"TAGS"))
    _, separator, after = items.rpartition(b"\x02UNIQ_KEY\x01")
    if separator:
        unique = after.partition(b"\x02")[0] or _last_value(items, b"UNIQ_KEY")
        if unique:
            keys.append(unique)
    _, separator, after = items.rpartition(b"\x02KEYS\x01")
    if separator:
        user_keys = after.partition(b"\x02")[0] or _last_value(items, b"KEYS")
        keys += filter(None, user_keys.split(b" "))
    return code, keys


def _last_value(items: bytes, name: bytes) -> bytes:
    """Return the last value that is not empty, or b""."""
    return find_property(items, name) or b""


def _due_ms(properties: bytes, stored_ms: int, delay_levels_ms: Sequence[int]) -> int:
    """Return when a delayed message is due; 0 if it has no delay level."""
    level = delay_level(_last_value(properties, b"DELAY"), len(delay_levels_ms))
    return stored_ms + delay_levels_ms[level - 1] if level else 0


def delay_level(text: bytes, max_level: int) -> int:
    """Return a delay level from 1 to `max_level`, or 0 for none. Higher levels mean the highest."""
    if not text.isdigit():
        return 0
    digits = text.lstrip(b"0")
    return min(int(digits[:9] or b"0"), max_level)


def _tag_hash(tag: bytes) -> int:
    return tag_code(tag.decode("utf-8", "replace"))


tag_code = lru_cache(maxsize=4096)(java_hash)
