"""Rounds, medians, a table, and a file that keeps it.

Variants of one figure take turns, so that whatever else the machine does hits all of them; a
figure is the median of its rounds, and what counts is its ratio to the yardstick beside it.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    what: str
    figure: str
    yardstick: str
    ratio: str
    goal: str = ""


def alternate(variants: dict[str, Callable[[], float]], *, rounds: int) -> dict[str, float]:
    """The median of each variant over some rounds, in which they take turns."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            found[name].append(run())
    return {name: statistics.median(values) for name, values in found.items()}


def machine() -> str:
    load = os.getloadavg()[0]
    return (
        f"{os.cpu_count()} cores, load {load:.1f} before, {platform.system()} "
        f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}"
    )


def keep(name: str, title: str, rows: Iterable[Row], notes: list[str], conditions: str) -> None:
    """Print the table, and keep it under bench/results."""
    rows = list(rows)
    table = Table(title=title)
    for column in ("what", "figure", "yardstick", "ratio", "goal"):
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(row.what, row.figure, row.yardstick, row.ratio, row.goal)
    Console().print(table)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    lines = [
        f"# {title}",
        "",
        f"`{' '.join(['python -m bench', *sys.argv[1:]])}`, {today}, {conditions}.",
        "",
        "| what | figure | yardstick | ratio | goal |",
        "|---|---|---|---|---|",
        *(f"| {r.what} | {r.figure} | {r.yardstick} | {r.ratio} | {r.goal} |" for r in rows),
        "",
        *(f"- {note}" for note in notes),
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")
