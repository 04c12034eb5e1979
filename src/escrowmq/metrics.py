"""Metrics in the text format of Prometheus, version 0.0.4. No I/O, no clock.

The parts of a server count in plain numbers and `Distribution`s, which cost almost nothing to
update. A collector turns them into metric families when the metrics are read:

    def collect() -> Iterator[Family]:
        yield Gauge("escrowmq_waiting_pulls", "Pulls that wait for a message.", [({}, waiting)])

    registry = Registry({"cluster": "DefaultCluster"})
    registry.add(collect)
    text = "".join(registry.lines())
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Final

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_BOUNDS_S: Final = (
    *(0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)

Labels = Mapping[str, str]
_NAME: Final = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*", re.ASCII)
_LABEL: Final = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", re.ASCII)


class Distribution:
    """Counts observed values by bounds, as a histogram needs them."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds  # ascending
        self.counts = [0] * (len(bounds) + 1)  # the last one counts values above all bounds
        self.sum: float = 0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value that was observed, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """The number of observed values."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Gauge:
    """A value that may rise and fall, for each set of labels."""

    name: str
    help: str
    samples: Iterable[tuple[Labels, float]]
    kind: ClassVar[str] = "gauge"

    def lines(self, common_labels: str) -> Iterator[str]:
        for labels, value in self.samples:
            yield f"{self.name}{_format_label_set(common_labels, labels)} {_format_number(value)}\n"


@dataclass(frozen=True, slots=True)
class Counter:
    """A value that only rises, and starts at zero again after a restart."""

    name: str
    help: str
    samples: Iterable[tuple[Labels, float]]
    kind: ClassVar[str] = "counter"

    def lines(self, common_labels: str) -> Iterator[str]:
        for labels, value in self.samples:
            yield f"{self.name}{_format_label_set(common_labels, labels)} {_format_number(value)}\n"


@dataclass(frozen=True, slots=True)
class Histogram:
    """A Distribution for each set of labels."""

    name: str
    help: str
    samples: Iterable[tuple[Labels, Distribution]]
    kind: ClassVar[str] = "histogram"

    def lines(self, common_labels: str) -> Iterator[str]:
        name = self.name
        for labels, distribution in self.samples:
            label_text = _format_labels(common_labels, labels)
            comma = "," if label_text else ""
            total = 0
            bounds = (*distribution.bounds, math.inf)
            for bound, count in zip(bounds, tuple(distribution.counts), strict=True):
                total += count
                yield f'{name}_bucket{{{label_text}{comma}le="{_format_number(bound)}"}} {total}\n'
            braced = f"{{{label_text}}}" if label_text else ""
            yield f"{name}_sum{braced} {_format_number(distribution.sum)}\n"
            yield f"{name}_count{braced} {total}\n"


Family = Gauge | Counter | Histogram
Collector = Callable[[], Iterable[Family]]


class Registry:
    """All collectors of a process. `labels` are added to every sample."""

    def __init__(self, labels: Labels | None = None) -> None:
        self._common_labels = _format_labels("", labels or {})
        self._collectors: list[Collector] = []

    def add(self, collector: Collector) -> None:
        self._collectors.append(collector)

    def lines(self) -> Iterator[str]:
        """Yield the text line by line, so that the caller can do other work in between.

        Families with the same name are joined under one heading, also those of several collectors.
        Raises ValueError if a name is invalid or has two kinds.
        """
        families: dict[str, list[Family]] = {}
        for collector in self._collectors:
            for family in collector():
                families.setdefault(family.name, []).append(family)
        for name, same_name in families.items():
            _check_name(_NAME, name)
            first = same_name[0]
            if any(family.kind != first.kind for family in same_name):
                raise ValueError(f"metric {name} has two kinds")
            yield f"# HELP {name} {_escape_help(first.help)}\n"
            yield f"# TYPE {name} {first.kind}\n"
            for family in same_name:
                yield from family.lines(self._common_labels)


def _format_labels(common_labels: str, labels: Labels) -> str:
    """Return the labels without braces; `common_labels` are formatted already."""
    own = ",".join(f'{_check_label(name)}="{_escape(text)}"' for name, text in labels.items())
    return f"{common_labels},{own}" if common_labels and own else common_labels or own


def _format_label_set(common_labels: str, labels: Labels) -> str:
    inner = _format_labels(common_labels, labels)
    return f"{{{inner}}}" if inner else ""


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _format_number(value: float) -> str:
    if isinstance(value, int):
        return str(int(value))
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


@cache
def _check_label(name: str) -> str:
    _check_name(_LABEL, name)
    return name


def _check_name(pattern: re.Pattern[str], name: str) -> None:
    if pattern.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not a valid name of a metric or label")
