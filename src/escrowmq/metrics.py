"""Metrics in the text format of Prometheus, version 0.0.4. No I/O, no clock.

The parts of a server count in plain numbers and `Distribution`s, which cost almost nothing to
update. A family of metrics is declared once, as a constant of a module. A collector reads the
numbers and gives them to their families when the metrics are read:

    WAITING_PULLS = Gauge("escrowmq_waiting_pulls", "Pulls that wait for a message.")
    REQUESTS = Counter("escrowmq_requests_total", "Requests.", ("request_code",))

    def collect() -> Iterator[Samples]:
        yield WAITING_PULLS.value(len(waiting))
        yield REQUESTS.samples(((name,), count) for name, count in counts.items())

    registry = Registry({"cluster": "DefaultCluster"})
    registry.add(collect)
    text = "".join(registry.lines())

The page docs/metrics.md is generated from the declarations.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, Generic, TypeVar

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
LATENCY_BOUNDS_S: Final = (
    *(0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1),
    *(0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)

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


Value = TypeVar("Value")  # float or Distribution
LabelValues = tuple[str, ...]  # in the order of a family's labels


@dataclass(frozen=True, slots=True)
class Family(Generic[Value]):
    """A declared metric: its name, what it means, and the names of its labels.

    Raises ValueError if Prometheus does not accept the name or a label.
    """

    name: str
    help: str
    labels: tuple[str, ...] = ()
    kind: ClassVar[str]

    def __post_init__(self) -> None:
        _check_name(_NAME, self.name)
        for label in self.labels:
            _check_name(_LABEL, label)

    def value(self, value: Value, *label_values: str) -> FamilySamples[Value]:
        """Return a single sample."""
        return self.samples([(label_values, value)])

    def samples(self, samples: Iterable[tuple[LabelValues, Value]]) -> FamilySamples[Value]:
        """Return one sample for each pair of label values and value.

        They are read when the page is written, so a generator is read line by line.
        """
        return FamilySamples(self, samples)

    def sample_lines(self, labels: str, value: Value) -> Iterator[str]:
        """Yield the lines of one sample; `labels` are formatted, without braces."""
        raise NotImplementedError


class _SingleNumber(Family[float]):
    """A family whose samples are single numbers."""

    __slots__ = ()

    def sample_lines(self, labels: str, value: float) -> Iterator[str]:
        yield f"{self.name}{_braced(labels)} {_format_number(value)}\n"


class Gauge(_SingleNumber):
    """A value that may rise and fall, for each set of labels."""

    __slots__ = ()
    kind = "gauge"


class Counter(_SingleNumber):
    """A value that only rises, and starts at zero again after a restart."""

    __slots__ = ()
    kind = "counter"


class Histogram(Family[Distribution]):
    """A Distribution for each set of labels."""

    __slots__ = ()
    kind = "histogram"

    def sample_lines(self, labels: str, value: Distribution) -> Iterator[str]:
        name, total, comma = self.name, 0, "," if labels else ""
        bounds = (*value.bounds, math.inf)
        for bound, count in zip(bounds, tuple(value.counts), strict=True):
            total += count
            yield f'{name}_bucket{{{labels}{comma}le="{_format_number(bound)}"}} {total}\n'
        yield f"{name}_sum{_braced(labels)} {_format_number(value.sum)}\n"
        yield f"{name}_count{_braced(labels)} {total}\n"


@dataclass(frozen=True, slots=True)
class FamilySamples(Generic[Value]):
    """The current values of a family, each with the values of its labels."""

    family: Family[Value]
    samples: Iterable[tuple[LabelValues, Value]]

    def lines(self, common_labels: Sequence[str]) -> Iterator[str]:
        """Yield the lines of all samples.

        Raises ValueError if a sample has fewer or more label values than the family has labels.
        """
        family = self.family
        for label_values, value in self.samples:
            own_labels = [
                _format_label(name, text)
                for name, text in zip(family.labels, label_values, strict=True)
            ]
            yield from family.sample_lines(",".join([*common_labels, *own_labels]), value)


Samples = FamilySamples[float] | FamilySamples[Distribution]
Collector = Callable[[], Iterable[Samples]]


class Registry:
    """All collectors of a process. `labels` are added to every sample."""

    def __init__(self, labels: Mapping[str, str] | None = None) -> None:
        self._common_labels: list[str] = []
        for name, text in (labels or {}).items():
            _check_name(_LABEL, name)
            self._common_labels.append(_format_label(name, text))
        self._collectors: list[Collector] = []

    def add(self, collector: Collector) -> None:
        self._collectors.append(collector)

    def lines(self) -> Iterator[str]:
        """Yield the text line by line, so that the caller can do other work in between.

        Samples of one family are joined under one heading, also those of several collectors.
        Raises ValueError if a name is declared twice.
        """
        by_name: dict[str, list[Samples]] = {}
        for collector in self._collectors:
            for samples in collector():
                by_name.setdefault(samples.family.name, []).append(samples)
        for name, same_name in by_name.items():
            family = same_name[0].family
            if any(samples.family is not family for samples in same_name):
                raise ValueError(f"metric {name} is declared twice")
            yield f"# HELP {name} {_escape_help(family.help)}\n"
            yield f"# TYPE {name} {family.kind}\n"
            for samples in same_name:
                yield from samples.lines(self._common_labels)


def _format_label(name: str, text: str) -> str:
    return f'{name}="{_escape(text)}"'


def _braced(labels: str) -> str:
    return f"{{{labels}}}" if labels else ""


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


def _check_name(pattern: re.Pattern[str], name: str) -> None:
    if pattern.fullmatch(name) is None:
        raise ValueError(f"{name!r} is not a valid name of a metric or label")
