"""Rounds, medians, a table, and a file that stores it.

Variants of one figure take turns, so that other work on the machine affects all of them. A figure
is the median of its rounds; what counts is its ratio to the reference beside it.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("what", "figure", "yardstick", "ratio", "goal")


@dataclass(frozen=True)
class Plan:
    """How long a run measures, and in how many rounds."""

    rounds: int = 5
    seconds: float = 4.0  # duration of each measurement, after
    warm_up_s: float = 1.0  # this warm-up with the same load
    java_warm_up_s: float = 20.0  # load before the first measurement of a JVM
    topics: int = 10_000
    log_gib: float = 20.0
    halves: int = 1_000_000
    transactions: tuple[int, ...] = (1_000_000, 10_000_000)
    work: str = ""  # directory for input and finished steps
    alone: bool = False  # without Apache RocketMQ
    quick: bool = False


QUICK = Plan(
    rounds=1,
    seconds=1,
    warm_up_s=0.3,
    java_warm_up_s=2,
    topics=1_000,
    log_gib=0.5,
    halves=20_000,
    transactions=(10_000, 20_000),
    quick=True,
)


@dataclass(frozen=True)
class Row:
    what: str
    figure: str
    yardstick: str
    ratio: str
    goal: str = ""


def alternate(variants: dict[str, Callable[[], float]], *, rounds: int) -> dict[str, float]:
    """Return the median of each variant over some rounds, in which they take turns."""
    results: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            results[name].append(run())
    return {name: statistics.median(values) for name, values in results.items()}


def machine() -> str:
    load = os.getloadavg()[0]
    optimised = "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or "")
    return (
        f"{os.cpu_count()} cores, load {load:.1f} before, {platform.system()} "
        f"{platform.machine()}, {platform.python_implementation()} {platform.python_version()}"
        f"{'' if optimised else ' (configured without --enable-optimizations)'}"
    )


def keep(name: str, title: str, rows: Iterable[Row], notes: list[str], conditions: str) -> None:
    """Print the table of the store's figures and store it."""
    cells = [(row.what, row.figure, row.yardstick, row.ratio, row.goal) for row in rows]
    keep_table(name, title, COLUMNS, cells, notes, conditions)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    first, rule, *rest = (" | ".join(cells) for cells in lines)
    return [f"| {first} |", f"|{rule.replace(' ', '')}|", *(f"| {line} |" for line in rest)]


def keep_table(
    name: str,
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    notes: Sequence[str],
    conditions: str,
) -> None:
    """Print a table and store it under bench/results."""
    rows = list(rows)
    table = Table(title=title)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    lines = [
        f"# {title}",
        "",
        f"`{' '.join(['python -m bench', *sys.argv[1:]])}`, {today}, {conditions}.",
        "",
        *markdown(columns, rows),
        "",
        *(f"- {note}" for note in notes),
    ]
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.md").write_text("\n".join(lines) + "\n")
