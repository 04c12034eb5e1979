"""Reserve free ports that no other test process uses."""

from __future__ import annotations

import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

PORTS: Final = range(20_000, 32_000)  # the kernel uses higher ports for outgoing connections
_reserved: Final[set[int]] = set()


def free_ports(count: int) -> list[int]:
    """Return ports that are free now and stay reserved while this process lives."""
    ports: list[int] = []
    while len(ports) < count:
        ports += free_port_block((0,))
    return ports


def free_port_block(offsets: Sequence[int]) -> list[int]:
    """Return a random base port plus each of the offsets, all of them free and reserved."""
    while True:
        base = random.randrange(PORTS.start, PORTS.stop - max(offsets))
        block = [base + offset for offset in offsets]
        if all(_is_free(port) for port in block) and all(_reserve(port) for port in block):
            return block


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _reserve(port: int) -> bool:
    """Lock the byte of a common file that stands for this port, until this process ends."""
    if port in _reserved:
        return False
    try:
        fcntl.lockf(_ports_file(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except OSError:
        return False
    _reserved.add(port)
    return True


@cache
def _ports_file() -> int:
    """Open the file once and never close it: closing any descriptor releases all locks."""
    path = Path(tempfile.gettempdir()) / f"escrowmq-test-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
