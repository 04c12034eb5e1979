"""Message ids: where a record lies (offset id), and what its sender calls it (unique key).

    offset id    store ip 4 or 16 | port 4 | log offset 8                    upper-case hex
    unique key   client ip 4 or 16 | pid 2 | process 4 | ms in month 4 | counter 2    upper-case hex

Both have 32 characters on IPv4 and 56 on IPv6, so length does not tell them apart.
"""

from __future__ import annotations

import ipaddress
import itertools
import struct
from collections.abc import Iterable

from escrowmq.errors import LocalProtocolError, RemoteProtocolError

_PORT = struct.Struct(">i")
_OFFSET = struct.Struct(">q")
_UNIQUE_TAIL = struct.Struct(">HIIH")


def encode_host(address: str, port: int) -> bytes:
    """An address as records hold it: 8 bytes for IPv4, 20 for IPv6."""
    try:
        return ipaddress.ip_address(address).packed + _PORT.pack(port)
    except (ValueError, struct.error) as error:
        raise LocalProtocolError(f"not an address: {address!r} port {port}") from error


def decode_host(host: bytes) -> tuple[str, int]:
    if len(host) not in (8, 20):
        raise RemoteProtocolError(f"a host of {len(host)} bytes, not 8 or 20")
    return str(ipaddress.ip_address(host[:-4])), _PORT.unpack(host[-4:])[0]


def encode_offset_id(store_host: bytes, log_offset: int) -> str:
    return (store_host + _OFFSET.pack(log_offset)).hex().upper()


def encode_offset_ids(store_host: bytes, log_offsets: Iterable[int]) -> list[str]:
    """The same for many of one store."""
    host = store_host.hex().upper()
    return ["%s%016X" % (host, log_offset) for log_offset in log_offsets]  # noqa: UP031  # faster


def decode_offset_id(text: str) -> tuple[bytes, int]:
    """The store's host and the log offset that an offset id names."""
    try:
        raw = bytes.fromhex(text)
    except ValueError:
        raise RemoteProtocolError(f"message id {text!r} is not hexadecimal") from None
    if len(raw) not in (16, 28):
        raise RemoteProtocolError(f"message id {text!r} has {len(raw)} bytes, not 16 or 28")
    return raw[:-8], _OFFSET.unpack(raw[-8:])[0]


class UniqueKeys:
    """Makes unique keys for one process. `month_began_ms` moves on with the calendar."""

    def __init__(self, *, address: str, process_id: int, salt: int) -> None:
        self._ip = ipaddress.ip_address(address).packed
        self._process_id = process_id & 0xFFFF
        self._salt = salt & 0xFFFFFFFF
        self._counter = itertools.count()

    def next(self, *, now_ms: int, month_began_ms: int) -> str:
        elapsed_ms = (now_ms - month_began_ms) & 0xFFFFFFFF
        count = next(self._counter) & 0xFFFF
        tail = _UNIQUE_TAIL.pack(self._process_id, self._salt, elapsed_ms, count)
        return (self._ip + tail).hex().upper()
