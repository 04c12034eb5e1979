"""How far a pipeline is: rows, rate, lag and time left; for people, or a line of JSON each."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.status import Status

from escrowmq.clock import Clock, SystemClock

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

_LOOK_S: Final = 1


@dataclass(frozen=True, slots=True)
class Progress:
    step: str
    rows: int = 0
    rate: float = 0.0  # rows a second
    lag: int | None = None  # messages that are still to be read
    left_s: float | None = None

    def line(self) -> str:
        parts = [f"{self.step}: {self.rows:,} rows"]
        if self.rate:
            parts.append(f"{self.rate:,.0f} a second")
        if self.lag is not None:
            parts.append(f"{self.lag:,} behind")
        if self.left_s is not None and self.lag:
            parts.append(f"{self.left_s:,.0f} s left")
        return ", ".join(parts)

    def as_json(self) -> str:
        left_s = None if self.left_s is None else round(self.left_s, 1)
        told = {"step": self.step, "rows": self.rows, "rate": round(self.rate, 1)}
        return json.dumps({**told, "lag": self.lag, "left_s": left_s})


Report = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Of those who import a pipeline and do not care."""


@contextmanager
def reporting(*, as_json: bool) -> Iterator[Report]:
    """To standard error for people, where a terminal is; to standard output for machines."""
    if as_json:
        yield lambda progress: click.echo(progress.as_json())
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield silent
        return
    with Status("starting Spark", console=console) as status:
        yield lambda progress: status.update(progress.line())


def watch(query: StreamingQuery, step: str, report: Report, clock: Clock | None = None) -> int:
    """Wait for a query to end, and tell how far it is. The rows it has read."""
    clock = SystemClock() if clock is None else clock
    begun_s = clock.elapsed_s()
    rows, seen = 0, -1
    while True:
        has_ended = query.awaitTermination(_LOOK_S)
        for told in query.recentProgress:
            if told["batchId"] <= seen:
                continue
            seen = told["batchId"]
            rows += told["numInputRows"] or 0
            rate = rows / max(clock.elapsed_s() - begun_s, 0.001)
            lag = lag_of(told["sources"])
            left_s = None if lag is None or not rate else lag / rate
            report(Progress(step, rows, rate, lag, left_s))
        if has_ended:
            return rows


def lag_of(sources: Any) -> int | None:
    """Messages between where a query is and where its queues end; None if it does not say."""
    lag = 0
    for source in sources:
        end, latest = _next(source["endOffset"]), _next(source["latestOffset"])
        if end is None or latest is None:
            return None
        lag += sum(max(0, number - end.get(queue, 0)) for queue, number in latest.items())
    return lag


def _next(offset: Any) -> dict[tuple[str, str, str], int] | None:
    told = json.loads(offset) if isinstance(offset, str) else offset
    if not isinstance(told, Mapping) or "next" not in told:
        return None
    return {
        (topic, broker, queue): number
        for topic, brokers in told["next"].items()
        for broker, queues in brokers.items()
        for queue, number in queues.items()
    }
