"""The report of a reconciliation: one HTML file that loads nothing from anywhere else.

    ReconcileSummary, first differences -> values and chart geometry (here) -> templates/*.j2

This module computes what the page says: texts, numbers, and where each bar of a chart lies. The
templates lay it out. All values are escaped by jinja2, because names of groups and ids of
transactions come from users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined

from escrowmq.parsing import format_timestamp
from escrowmq.pipeline.reconcile.compare import DAY_MS, DIFFERENCE_KINDS
from escrowmq.pipeline.reconcile.job import (
    CHECK_BUCKETS,
    LATENCY_BUCKETS_MS,
    OUTCOMES,
    ReconcileSummary,
)

# Columns of the table of differences, in this order.
ROW_COLUMNS: Final = ("kind", "transaction_id", "group", "topics", "at", "outcome", "detail")

# In the units of the SVG's viewBox; the page scales it.
CHART_WIDTH: Final = 860
PLOT_BOTTOM: Final = 220
PLOT_TOP: Final = 12
MARGIN_LEFT: Final = 64
MARGIN_BOTTOM: Final = 34
MAX_LABELS: Final = 12


def render_html(
    summary: ReconcileSummary, rows: Sequence[Mapping[str, Any]], *, title: str = "Reconciliation"
) -> str:
    """Return the page. `rows` are the first differences, as many as shall be listed."""
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            title=title,
            summary=summary,
            verdict=verdict_text(summary),
            figures=summary_rows(summary),
            difference_kinds=DIFFERENCE_KINDS,
            difference_count=sum(summary.differences.values()),
            rows=rows,
            row_columns=ROW_COLUMNS,
            outcomes=OUTCOMES,
            outcomes_chart=_outcomes_chart(summary),
            latency_chart=_latency_chart(summary),
            checks_chart=_checks_chart(summary),
            scope=_scope_rows(summary),
        )
    )


def verdict_text(summary: ReconcileSummary) -> str:
    """Return the result in one sentence. The terminal shows it as well."""
    if summary.is_consistent:
        return "Ledger and databases agree."
    count = sum(summary.differences.values())
    return f"{count:,} difference{'' if count == 1 else 's'} between ledger and databases."


def summary_rows(summary: ReconcileSummary) -> list[tuple[str, str]]:
    """Return the figures as pairs of name and value. The terminal shows them as well."""
    return [
        ("transactions", f"{summary.transactions:,}"),
        ("messages", f"{summary.messages:,}"),
        *((_spaced(name), f"{summary.outcomes.get(name, 0):,}") for name in OUTCOMES),
        ("resolved by check-back", f"{summary.resolved_by_check:,}"),
        ("delivered again, taken once", f"{summary.repeats_taken_once:,}"),
        *(
            (f"decision time, {name}", _format_duration(ms))
            for name, ms in summary.decision_ms.items()
        ),
        *((f"sum {name}", _format_amount(total)) for name, total in summary.sums.items()),
    ]


def _scope_rows(summary: ReconcileSummary) -> list[tuple[str, str]]:
    consumers = [f"{group} ({', '.join(topics)})" for group, topics in summary.consumers.items()]
    return [
        ("producer groups", ", ".join(summary.groups) or "all"),
        ("consumer groups with an inbox", ", ".join(consumers) or "none"),
        ("transactions of other groups, not compared", f"{summary.not_compared:,}"),
        ("from", _format_time(summary.since_ms) if summary.since_ms else "the beginning"),
    ]


# --- charts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bar:
    """One rectangle: the value of one series at one label."""

    series: str  # also the CSS class
    x: float
    y: float
    width: float
    height: float
    tooltip: str


@dataclass(frozen=True, slots=True)
class GridLine:
    y: float
    text: str


@dataclass(frozen=True, slots=True)
class AxisLabel:
    x: float
    text: str


@dataclass(frozen=True, slots=True)
class BarChart:
    """The geometry of a bar chart. `bars` is empty if all values are zero."""

    title: str
    grid_lines: tuple[GridLine, ...] = ()
    labels: tuple[AxisLabel, ...] = ()
    bars: tuple[Bar, ...] = ()
    width: int = CHART_WIDTH
    height: int = PLOT_BOTTOM + MARGIN_BOTTOM
    left: int = MARGIN_LEFT
    label_y: int = PLOT_BOTTOM + 20


def bar_chart(labels: Sequence[str], series: Mapping[str, Sequence[int]], title: str) -> BarChart:
    """Lay out one bar per label, with the series stacked in their order."""
    totals = [sum(values) for values in zip(*series.values(), strict=True)]
    if not any(totals):
        return BarChart(title)
    scale_max = round_up_to_scale(max(totals))
    slot_width = (CHART_WIDTH - MARGIN_LEFT) / len(totals)
    bars = []
    for index in range(len(totals)):
        stacked = 0
        for name, values in series.items():
            value = values[index]
            if value:
                bottom, top = _y(stacked, scale_max), _y(stacked + value, scale_max)
                bars.append(
                    Bar(
                        series=name,
                        x=MARGIN_LEFT + index * slot_width + slot_width * 0.08,
                        y=top,
                        width=slot_width * 0.84,
                        height=max(bottom - top, 1),  # a small value must stay visible
                        tooltip=f"{labels[index]}: {value:,} {_spaced(name)}",
                    )
                )
            stacked += value
    grid_lines = tuple(
        GridLine(_y(scale_max * share, scale_max), f"{scale_max * share:,.4g}")
        for share in (0, 0.5, 1)
    )
    every = -(-len(labels) // MAX_LABELS)  # more labels than that would overlap
    axis_labels = tuple(
        AxisLabel(MARGIN_LEFT + (index + 0.5) * slot_width, labels[index])
        for index in range(0, len(labels), every)
    )
    return BarChart(title, grid_lines, axis_labels, tuple(bars))


def round_up_to_scale(value: int) -> int:
    """Return the next of 1, 2, 5, 10, 20, 50, … that is not below the value."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if value <= factor * power:
                return factor * power
        power *= 10


def _y(value: float, scale_max: int) -> float:
    """Return the vertical position of a value. SVG counts from the top."""
    return PLOT_TOP + (PLOT_BOTTOM - PLOT_TOP) * (1 - value / scale_max)


def _outcomes_chart(summary: ReconcileSummary) -> BarChart:
    step_count = len(next(iter(summary.outcomes_over_time.values()), []))
    starts = [format_timestamp(summary.first_ms + i * summary.step_ms) for i in range(step_count)]
    # A date if a step is a day or more, else a time of day.
    labels = [start[5:10] if summary.step_ms >= DAY_MS else start[11:19] for start in starts]
    return bar_chart(labels, summary.outcomes_over_time, "outcomes over time")


def _latency_chart(summary: ReconcileSummary) -> BarChart:
    labels = [f"< {_format_duration(limit)}" for limit in LATENCY_BUCKETS_MS] + ["longer"]
    return bar_chart(labels, {"transactions": summary.latency_counts}, "decision latency")


def _checks_chart(summary: ReconcileSummary) -> BarChart:
    starts = [0, *CHECK_BUCKETS]
    ends = [*(limit - 1 for limit in CHECK_BUCKETS), None]
    labels = [_bucket_label(start, end) for start, end in zip(starts, ends, strict=True)]
    return bar_chart(labels, {"transactions": summary.check_counts}, "checks per transaction")


def _bucket_label(start: int, end: int | None) -> str:
    if end is None:
        return f"{start} or more"
    return f"{start}" if start == end else f"{start} to {end}"


# --- texts ---------------------------------------------------------------------------------------


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("escrowmq.pipeline.reconcile"),
        autoescape=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(
        count=lambda number: f"{number:,}",
        duration=_format_duration,
        pixels=lambda length: f"{length:.1f}",
        spaced=_spaced,
        time=_format_time,
    )
    return environment


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _format_time(time_ms: int) -> str:
    return format_timestamp(time_ms)[:19].replace("T", " ") + " UTC"


def _format_duration(duration_ms: int | None) -> str:
    if duration_ms is None:
        return "-"
    for unit, unit_ms in (("d", DAY_MS), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if duration_ms >= unit_ms:
            return f"{duration_ms / unit_ms:.3g} {unit}"
    return f"{duration_ms} ms"


def _format_amount(text: str) -> str:
    """Drop the zeros that databases append to a decimal number."""
    return text.rstrip("0").rstrip(".") if "." in text else text
