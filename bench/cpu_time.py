"""The CPU time of processes and their descendants."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


class Meter:
    """The CPU time of some processes and all their descendants from now on.

    It is kept by process, not as a sum: Spark ends Python workers that were idle for a minute, and
    the time of an ended process is lost otherwise.
    """

    def __init__(self, *pids: int) -> None:
        self._pids = pids
        self._before = _ticks(*pids)

    def spent_s(self) -> float:
        now = _ticks(*self._pids)
        spent = sum(ticks - self._before.get(pid, 0) for pid, ticks in now.items())
        return spent / os.sysconf("SC_CLK_TCK")


def cpu_s(*pids: int) -> float:
    """Return the CPU time of these processes and their descendants since they began."""
    return sum(_ticks(*pids).values()) / os.sysconf("SC_CLK_TCK")


def family_of(*pids: int) -> set[int]:
    """Return these processes and all their descendants."""
    return _families(_stats(), pids)


def _ticks(*pids: int) -> dict[int, int]:
    """Return user and system time, with ended children, of each process and its descendants."""
    stats = _stats()
    families = _families(stats, pids)
    return {pid: sum(map(int, stats[pid][11:15])) for pid in families if pid in stats}


def _stats() -> dict[int, list[str]]:
    """Return the fields of every process's `stat` after its name."""
    results = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            results[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
    return results


def _families(stats: dict[int, list[str]], pids: Sequence[int]) -> set[int]:
    mine = set(pids)
    grown = True
    while grown:
        more = {pid for pid, fields in stats.items() if int(fields[1]) in mine} - mine
        mine |= more
        grown = bool(more)
    return mine
