"""Cut ranges of queues into tasks of about the same number of bytes.

A task costs Spark about 60 ms, so a little data makes few of them; much data makes one for each
core, and very much two, so that the last one is not waited for alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from escrowmq.spark.offsets import QueueKey
from escrowmq.spark.pull import Piece

WORTH_A_TASK_BYTES: Final = 16 << 20
MANY_BYTES: Final = 256 << 20
_GUESS_BYTES: Final = 1024


@dataclass(frozen=True)
class Rules:
    cores: int = 0  # 0: those of this machine
    tasks_min: int = 1
    task_bytes_max: int = 0  # 0: no limit

    def tasks(self, total_bytes: float) -> int:
        cores = self.cores or os.cpu_count() or 1
        tasks = min(cores, math.ceil(total_bytes / WORTH_A_TASK_BYTES))
        if total_bytes > cores * MANY_BYTES:
            tasks = 2 * cores
        if self.task_bytes_max:
            tasks = max(tasks, math.ceil(total_bytes / self.task_bytes_max))
        return max(1, tasks, self.tasks_min)


def split(
    pieces: Sequence[Piece], rules: Rules, sizes: Mapping[QueueKey, float] | None = None
) -> list[list[Piece]]:
    """`sizes`: the mean size of a message of each queue. Order is kept; nothing is left out."""
    sizes = sizes or {}
    usual = sum(sizes.values()) / len(sizes) if sizes else _GUESS_BYTES
    pieces = [piece for piece in pieces if piece.begin < piece.end]
    weights = [(piece.end - piece.begin) * sizes.get(piece.queue, usual) for piece in pieces]
    total = sum(weights)
    messages = sum(piece.end - piece.begin for piece in pieces)
    tasks = min(rules.tasks(total), messages)
    share = total / tasks if tasks else 0
    found: list[list[Piece]] = [[]]
    room = share
    for piece, weight in zip(pieces, weights, strict=True):
        each = weight / (piece.end - piece.begin)
        while piece.begin < piece.end:
            count = piece.end - piece.begin
            if len(found) < tasks:
                count = min(count, max(1, round(room / each)))
            found[-1].append(piece._replace(end=piece.begin + count))
            piece = piece._replace(begin=piece.begin + count)
            room -= count * each
            if room < each / 2 and len(found) < tasks:
                found.append([])
                room += share
    return [task for task in found if task]
