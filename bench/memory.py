"""Fill memory with file pages, as on a machine that has been running for a while.

On a fresh virtual machine with free memory, the host must provide every new page of a growing log
first, here at about 1.5 us of system time per KiB. That is a cost of the host, and whether it hits
a measurement depends on when it runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bench.measure import Plan

SHARE: Final = 0.85  # of the free memory; the remainder is for the brokers and Spark
CHUNK_BYTES: Final = 1 << 20


@contextmanager
def full_of_pages(directory: Path, plan: Plan) -> Iterator[None]:
    """Read a sparse file of that size. The kernel evicts its pages when others need memory.

    A quick run does without.
    """
    if plan.quick:
        yield
        return
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
    match = re.search(r"^MemFree:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024
