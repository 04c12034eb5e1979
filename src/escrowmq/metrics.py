"""Metrics as Prometheus reads them: text format 0.0.4. Opens nothing, reads no clock.

Parts keep plain numbers and Distributions, which cost next to nothing to move. A collector turns
them into families when somebody asks:

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
    """How often values up to each bound were seen. A part of the broker keeps one and moves it."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds  # rising; what is above the last has a place of its own
        self.counts = [0] * (len(bounds) + 1)
        self.sum: float = 0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class Gauge:
    """A name, what it means, and a value for each set of labels."""

    name: str
    help: str
    samples: Iterable[tuple[Labels, float]]
    kind: ClassVar[str] = "gauge"

    def lines(self, common_labels: str) -> Iterator[str]:
        for labels, value in self.samples:
            yield f"{self.name}{_format_label_set(common_labels, labels)} {_format_number(value)}\n"


@dataclass(frozen=True, slots=True)
class Counter:
    """As a Gauge, but it only rises, or begins anew."""

    name: str
    help: str
    samples: Iterable[tuple[Labels, float]]
    kind: ClassVar[str] = "counter"

    def lines(self, common_labels: str) -> Iterator[str]:
        for labels, value in self.samples:
            yield f"{self.name}{_format_label_set(common_labels, labels)} {_format_number(value)}\n"


@dataclass(frozen=True, slots=True)
class Histogram:
    name: str
    help: str
    samples: Iterable[tuple[Labels, Distribution]]
    kind: ClassVar[str] = "histogram"

    def lines(self, common_labels: str) -> Iterator[str]:
        name = self.name
        for labels, seen in self.samples:
            lead = _format_labels(common_labels, labels)
            comma = "," if lead else ""
            total = 0
            for bound, count in zip((*seen.bounds, math.inf), tuple(seen.counts), strict=True):
                total += count
                yield f'{name}_bucket{{{lead}{comma}le="{_format_number(bound)}"}} {total}\n'
            braced = f"{{{lead}}}" if lead else ""
            yield f"{name}_sum{braced} {_format_number(seen.sum)}\n"
            yield f"{name}_count{braced} {total}\n"


Family = Gauge | Counter | Histogram
Collector = Callable[[], Iterable[Family]]


class Registry:
    """Everything that can be asked for. `labels` are on every sample."""

    def __init__(self, labels: Labels | None = None) -> None:
        self._common_labels = _format_labels("", labels or {})
        self._collectors: list[Collector] = []

    def add(self, collector: Collector) -> None:
        self._collectors.append(collector)

    def lines(self) -> Iterator[str]:
        """The whole text, a line at a time: who writes it may do something else in between.

        Families of one name, from whichever collectors, stand together under one heading.
        """
        families: dict[str, list[Family]] = {}
        for collector in self._collectors:
            for family in collector():
                families.setdefault(family.name, []).append(family)
        for name, alike in families.items():
            _check_name(_NAME, name)
            first = alike[0]
            if any(family.kind != first.kind for family in alike):
                raise ValueError(f"{name} is of two kinds")
            yield f"# HELP {name} {_escape_help(first.help)}\n"
            yield f"# TYPE {name} {first.kind}\n"
            for family in alike:
                yield from family.lines(self._common_labels)


def _format_labels(common_labels: str, labels: Labels) -> str:
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
        raise ValueError(f"{name!r} names no metric and no label")
