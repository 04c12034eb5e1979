"""Memory as on a machine that has been up for a while: full of file pages.

On a virtual machine that is fresh, or has memory free, every page of a log that grows is one that
the host must find first, here at about one and a half microseconds of system time for each KiB.
That is the host's price, and who writes at which moment pays it or does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

SHARE: Final = 0.85  # of what is free; the rest is for the brokers and Spark
CHUNK_BYTES: Final = 1 << 20


@contextmanager
def full_of_pages(directory: Path) -> Iterator[None]:
    """Reads a file of nothing that is as large. Its pages make room for others when they come."""
    size = int(_free_bytes() * SHARE)
    hole = directory / "hole"
    with hole.open("wb") as file:
        file.truncate(size)
    try:
        with hole.open("rb", buffering=0) as file:
            while file.read(CHUNK_BYTES):
                pass
        yield
    finally:
        hole.unlink()


def _free_bytes() -> int:
    found = re.search(r"^MemFree:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
