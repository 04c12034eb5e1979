"""The report that a manager can read: one HTML file that needs nothing else.

Charts as SVG text: bars, alone or stacked, with their scale and a tooltip on each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from escrowmq.clock import format_utc
from escrowmq.pipeline.reconcile.compare import DIFFERENCE_KINDS
from escrowmq.pipeline.reconcile.job import (
    CHECK_BUCKETS,
    LATENCY_BUCKETS_MS,
    OUTCOMES,
    ReconcileSummary,
)

WIDTH: Final = 860
HEIGHT: Final = 220
MARGIN_LEFT: Final = 64
MARGIN_BOTTOM: Final = 34
MARGIN_TOP: Final = 12
MAX_LABELS: Final = 12


def bar_chart(labels: Sequence[str], series: Mapping[str, Sequence[int]], title: str) -> str:
    """One bar for each label, the series above each other. Their names are CSS classes."""
    totals = [sum(column) for column in zip(*series.values(), strict=True)]
    if not any(totals):
        return '<p class="none">nothing to show</p>'
    top = round_up_to_scale(max(totals))
    width = (WIDTH - MARGIN_LEFT) / len(totals)
    parts = [_axis(top), *(_label(i, labels, width) for i in range(len(labels)))]
    for i in range(len(totals)):
        floor = 0
        for name, values in series.items():
            if values[i]:
                parts.append(_bar(i, width, floor, values[i], top, name, labels[i]))
            floor += values[i]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + MARGIN_BOTTOM}" role="img" '
        f'aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def round_up_to_scale(value: int) -> int:
    """The next number that people like on a scale."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if value <= factor * power:
                return factor * power
        power *= 10


def _y(value: float, scale_max: int) -> float:
    return MARGIN_TOP + (HEIGHT - MARGIN_TOP) * (1 - value / scale_max)


def _bar(
    index: int, width: float, floor: int, value: int, scale_max: int, name: str, label: str
) -> str:
    high, low = _y(floor + value, scale_max), _y(floor, scale_max)
    told = escape(f"{label}: {value:,} {name.replace('_', ' ')}")
    return (
        f'<rect class="{escape(name)}" '
        f'x="{MARGIN_LEFT + index * width + width * 0.08:.1f}" y="{high:.1f}" '
        f'width="{width * 0.84:.1f}" height="{max(low - high, 1):.1f}"><title>{told}</title></rect>'
    )


def _axis(scale_max: int) -> str:
    lines = []
    for share in (0, 0.5, 1):
        y = _y(scale_max * share, scale_max)
        lines.append(
            f'<line x1="{MARGIN_LEFT}" x2="{WIDTH}" y1="{y:.1f}" '
            f'y2="{y:.1f}"/>'
            f'<text class="scale" x="{MARGIN_LEFT - 8}" y="{y + 4:.1f}">'
            f"{scale_max * share:,.4g}</text>"
        )
    return "".join(lines)


def _label(index: int, labels: Sequence[str], width: float) -> str:
    every = -(-len(labels) // MAX_LABELS)
    if index % every:
        return ""
    x = MARGIN_LEFT + (index + 0.5) * width
    return f'<text class="label" x="{x:.1f}" y="{HEIGHT + 20}">{escape(labels[index])}</text>'


DAY_MS: Final = 86_400_000
SHOWN_COLUMNS: Final = ("kind", "transaction_id", "group", "topics", "at", "outcome", "detail")

STYLESHEET: Final = """
:root { color-scheme: light dark; --ink: #1c2330; --dim: #667085; --line: #d9dde5; --card: #fff;
  --page: #f4f6f9; --good: #14804a; --bad: #c0282d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8ebf0; --dim: #9aa4b5; --line: #333b4a;
  --card: #1b212c; --page: #12161e; --good: #46c582; --bad: #ff7a7a; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
  margin: 0 auto; max-width: 960px; padding: 24px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 8px 20px 16px; margin: 16px 0; overflow-x: auto; }
h1 { font-size: 28px; margin: 8px 0; } h2 { font-size: 17px; }
.good { color: var(--good); } .bad { color: var(--bad); } .dim, .none { color: var(--dim); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); }
td.number { text-align: right; } td.id { font-family: ui-monospace, monospace; font-size: 12px; }
svg { width: 100%; } svg line { stroke: var(--line); }
svg text { fill: var(--dim); font-size: 11px; }
svg .scale { text-anchor: end; } svg .label { text-anchor: middle; }
.committed { fill: #2e9e6b; background: #2e9e6b; }
.rolled_back { fill: #e0a030; background: #e0a030; }
.stranded { fill: #c0282d; background: #c0282d; } .open { fill: #6c7a93; background: #6c7a93; }
.transactions { fill: #3b7dd8; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin: 0 5px 0 14px; }
"""


def render_html(
    summary: ReconcileSummary, rows: Sequence[Mapping[str, Any]], *, title: str = "Reconciliation"
) -> str:
    """`rows`: the first differences, as many as are to be shown."""
    parts = [
        _verdict_header(summary, title),
        _section("In numbers", _table(summary_rows(summary))),
        _section("Differences", _differences(summary, rows)),
        _section("Outcomes over time", _outcomes_chart(summary)),
        _section("How long a decision took", _latency_chart(summary)),
        _section("How often the broker had to ask", _checks_chart(summary)),
        _section("What was compared", _table(_scope(summary))),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLESHEET}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def summary_rows(summary: ReconcileSummary) -> list[tuple[str, str]]:
    """What the terminal shows as well."""
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


def verdict_text(summary: ReconcileSummary) -> str:
    if summary.is_consistent:
        return "Ledger and databases agree."
    count = sum(summary.differences.values())
    return f"{count:,} difference{'' if count == 1 else 's'} between ledger and databases."


def _verdict_header(summary: ReconcileSummary, title: str) -> str:
    tone = "good" if summary.is_consistent else "bad"
    span = (
        f"{summary.transactions:,} transactions from {_format_time(summary.first_ms)} "
        f"to {_format_time(summary.last_ms)}"
        if summary.transactions
        else "no transaction in this time"
    )
    return (
        f'<p class="dim">{escape(title)} · {_format_time(summary.now_ms)}</p>'
        f'<h1 class="{tone}">{verdict_text(summary)}</h1><p>{span}</p>'
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    lines = (f'<tr><td>{escape(a)}</td><td class="number">{escape(b)}</td></tr>' for a, b in rows)
    return f"<table>{''.join(lines)}</table>"


def _differences(summary: ReconcileSummary, rows: Sequence[Mapping[str, Any]]) -> str:
    counted = "".join(
        f"<tr><td>{_spaced(kind)}</td><td>{DIFFERENCE_KINDS[kind]}</td>"
        f'<td class="number {"bad" if count else "good"}">{count:,}</td></tr>'
        for kind, count in summary.differences.items()
    )
    if not rows:
        return f"<table>{counted}</table>"
    head = "".join(f"<th>{_spaced(name)}</th>" for name in SHOWN_COLUMNS)
    lines = "".join(
        f"<tr>{''.join(_cell(name, row[name]) for name in SHOWN_COLUMNS)}</tr>" for row in rows
    )
    total = sum(summary.differences.values())
    more = f'<p class="dim">the first {len(rows):,} of {total:,}</p>' if total > len(rows) else ""
    return f"<table>{counted}</table><h2>One by one</h2>{more}<table><tr>{head}</tr>{lines}</table>"


def _cell(name: str, value: Any) -> str:
    text = "" if value is None else str(value)
    kind = ' class="id"' if name == "transaction_id" else ""
    return f"<td{kind}>{escape(_spaced(text) if name in ('kind', 'outcome') else text)}</td>"


def _outcomes_chart(summary: ReconcileSummary) -> str:
    steps = len(next(iter(summary.outcomes_over_time.values()), []))
    starts = [format_utc(summary.first_ms + at * summary.step_ms) for at in range(steps)]
    labels = [start[5:10] if summary.step_ms >= DAY_MS else start[11:19] for start in starts]
    names = "".join(f'<span class="key {name}"></span>{_spaced(name)}' for name in OUTCOMES)
    said = f'<p class="dim">by {_format_duration(summary.step_ms)}, UTC{names}</p>'
    return said + bar_chart(labels, summary.outcomes_over_time, "outcomes over time")


def _latency_chart(summary: ReconcileSummary) -> str:
    labels = [f"< {_format_duration(limit)}" for limit in LATENCY_BUCKETS_MS] + ["longer"]
    return bar_chart(labels, {"transactions": summary.latency_counts}, "decision latency")


def _checks_chart(summary: ReconcileSummary) -> str:
    ends = [*(limit - 1 for limit in CHECK_BUCKETS), None]
    starts = [0, *CHECK_BUCKETS]
    labels = [_bucket_label(start, end) for start, end in zip(starts, ends, strict=True)]
    return bar_chart(labels, {"transactions": summary.check_counts}, "questions of the broker")


def _bucket_label(start: int, end: int | None) -> str:
    if end is None:
        return f"{start} or more"
    return f"{start}" if start == end else f"{start} to {end}"


def _scope(summary: ReconcileSummary) -> list[tuple[str, str]]:
    consumers = [f"{group} ({', '.join(topics)})" for group, topics in summary.consumers.items()]
    return [
        ("producer groups", ", ".join(summary.groups) or "all"),
        ("consumer groups with an inbox", ", ".join(consumers) or "none"),
        ("transactions of other groups, not compared", f"{summary.not_compared:,}"),
        ("from", _format_time(summary.since_ms) if summary.since_ms else "the beginning"),
    ]


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _format_time(at_ms: int) -> str:
    return format_utc(at_ms)[:19].replace("T", " ") + " UTC"


def _format_duration(ms: int | None) -> str:
    if ms is None:
        return "-"
    for unit, size in (("d", DAY_MS), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if ms >= size:
            return f"{ms / size:.3g} {unit}"
    return f"{ms} ms"


def _format_amount(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text
