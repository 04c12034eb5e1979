"""The report that a manager can read: one HTML file that needs nothing else.

Charts as SVG text: bars, alone or stacked, with their scale and a tooltip on each.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, Final

from escrowmq.clock import utc_text
from escrowmq.pipeline.reconcile.compare import KINDS
from escrowmq.pipeline.reconcile.job import CHECKS, LATENCY_MS, OUTCOMES, Summary

WIDTH: Final = 860
HEIGHT: Final = 220
LEFT: Final = 64
BOTTOM: Final = 34
TOP: Final = 12
LABELS_MAX: Final = 12


def bars(labels: Sequence[str], series: Mapping[str, Sequence[int]], title: str) -> str:
    """One bar for each label, the series above each other. Their names are CSS classes."""
    totals = [sum(column) for column in zip(*series.values(), strict=True)]
    if not any(totals):
        return '<p class="none">nothing to show</p>'
    top = nice(max(totals))
    width = (WIDTH - LEFT) / len(totals)
    parts = [_axis(top), *(_label(i, labels, width) for i in range(len(labels)))]
    for i in range(len(totals)):
        floor = 0
        for name, values in series.items():
            if values[i]:
                parts.append(_bar(i, width, floor, values[i], top, name, labels[i]))
            floor += values[i]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + BOTTOM}" role="img" aria-label="{escape(title)}">'
        f"{''.join(parts)}</svg>"
    )


def nice(value: int) -> int:
    """The next number that people like on a scale."""
    power = 1
    while True:
        for factor in (1, 2, 5):
            if value <= factor * power:
                return factor * power
        power *= 10


def _y(value: float, top: int) -> float:
    return TOP + (HEIGHT - TOP) * (1 - value / top)


def _bar(at: int, width: float, floor: int, value: int, top: int, name: str, label: str) -> str:
    high, low = _y(floor + value, top), _y(floor, top)
    told = escape(f"{label}: {value:,} {name.replace('_', ' ')}")
    return (
        f'<rect class="{escape(name)}" x="{LEFT + at * width + width * 0.08:.1f}" y="{high:.1f}" '
        f'width="{width * 0.84:.1f}" height="{max(low - high, 1):.1f}"><title>{told}</title></rect>'
    )


def _axis(top: int) -> str:
    lines = []
    for share in (0, 0.5, 1):
        y = _y(top * share, top)
        lines.append(
            f'<line x1="{LEFT}" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="scale" x="{LEFT - 8}" y="{y + 4:.1f}">{top * share:,.4g}</text>'
        )
    return "".join(lines)


def _label(at: int, labels: Sequence[str], width: float) -> str:
    every = -(-len(labels) // LABELS_MAX)
    if at % every:
        return ""
    x = LEFT + (at + 0.5) * width
    return f'<text class="label" x="{x:.1f}" y="{HEIGHT + 20}">{escape(labels[at])}</text>'


DAY_MS: Final = 86_400_000
SHOWN: Final = ("kind", "transaction_id", "group", "topics", "at", "outcome", "detail")

STYLE: Final = """
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


def html(told: Summary, rows: Sequence[Mapping[str, Any]], *, title: str = "Reconciliation") -> str:
    """`rows`: the first differences, as many as are to be shown."""
    parts = [
        _verdict(told, title),
        _section("In numbers", _table(numbers(told))),
        _section("Differences", _differences(told, rows)),
        _section("Outcomes over time", _over_time(told)),
        _section("How long a decision took", _latency(told)),
        _section("How often the broker had to ask", _checks(told)),
        _section("What was compared", _table(_scope(told))),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def numbers(told: Summary) -> list[tuple[str, str]]:
    """What the terminal shows as well."""
    return [
        ("transactions", f"{told.transactions:,}"),
        ("messages", f"{told.messages:,}"),
        *((_words(name), f"{told.outcomes.get(name, 0):,}") for name in OUTCOMES),
        ("resolved by check-back", f"{told.resolved_by_check:,}"),
        ("delivered again, taken once", f"{told.repeats_taken_once:,}"),
        *((f"decision time, {name}", _duration(ms)) for name, ms in told.decision_ms.items()),
        *((f"sum {name}", _amount(total)) for name, total in told.sums.items()),
    ]


def verdict(told: Summary) -> str:
    if told.agree:
        return "Ledger and databases agree."
    count = sum(told.differences.values())
    return f"{count:,} difference{'' if count == 1 else 's'} between ledger and databases."


def _verdict(told: Summary, title: str) -> str:
    tone = "good" if told.agree else "bad"
    span = (
        f"{told.transactions:,} transactions from {_time(told.first_ms)} to {_time(told.last_ms)}"
        if told.transactions
        else "no transaction in this time"
    )
    return (
        f'<p class="dim">{escape(title)} · {_time(told.now_ms)}</p>'
        f'<h1 class="{tone}">{verdict(told)}</h1><p>{span}</p>'
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{title}</h2>{body}</section>"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    lines = (f'<tr><td>{escape(a)}</td><td class="number">{escape(b)}</td></tr>' for a, b in rows)
    return f"<table>{''.join(lines)}</table>"


def _differences(told: Summary, rows: Sequence[Mapping[str, Any]]) -> str:
    counted = "".join(
        f"<tr><td>{_words(kind)}</td><td>{KINDS[kind]}</td>"
        f'<td class="number {"bad" if count else "good"}">{count:,}</td></tr>'
        for kind, count in told.differences.items()
    )
    if not rows:
        return f"<table>{counted}</table>"
    head = "".join(f"<th>{_words(name)}</th>" for name in SHOWN)
    lines = "".join(f"<tr>{''.join(_cell(name, row[name]) for name in SHOWN)}</tr>" for row in rows)
    total = sum(told.differences.values())
    more = f'<p class="dim">the first {len(rows):,} of {total:,}</p>' if total > len(rows) else ""
    return f"<table>{counted}</table><h2>One by one</h2>{more}<table><tr>{head}</tr>{lines}</table>"


def _cell(name: str, value: Any) -> str:
    text = "" if value is None else str(value)
    kind = ' class="id"' if name == "transaction_id" else ""
    return f"<td{kind}>{escape(_words(text) if name in ('kind', 'outcome') else text)}</td>"


def _over_time(told: Summary) -> str:
    steps = len(next(iter(told.over_time.values()), []))
    starts = [utc_text(told.first_ms + at * told.width_ms) for at in range(steps)]
    labels = [start[5:10] if told.width_ms >= DAY_MS else start[11:19] for start in starts]
    names = "".join(f'<span class="key {name}"></span>{_words(name)}' for name in OUTCOMES)
    said = f'<p class="dim">by {_duration(told.width_ms)}, UTC{names}</p>'
    return said + bars(labels, told.over_time, "outcomes over time")


def _latency(told: Summary) -> str:
    labels = [f"< {_duration(limit)}" for limit in LATENCY_MS] + ["longer"]
    return bars(labels, {"transactions": told.latency}, "decision latency")


def _checks(told: Summary) -> str:
    ends = [*(limit - 1 for limit in CHECKS), None]
    starts = [0, *CHECKS]
    labels = [_span(start, end) for start, end in zip(starts, ends, strict=True)]
    return bars(labels, {"transactions": told.checks}, "questions of the broker")


def _span(start: int, end: int | None) -> str:
    if end is None:
        return f"{start} or more"
    return f"{start}" if start == end else f"{start} to {end}"


def _scope(told: Summary) -> list[tuple[str, str]]:
    consumers = [f"{group} ({', '.join(topics)})" for group, topics in told.consumers.items()]
    return [
        ("producer groups", ", ".join(told.groups) or "all"),
        ("consumer groups with an inbox", ", ".join(consumers) or "none"),
        ("transactions of other groups, not compared", f"{told.not_compared:,}"),
        ("from", _time(told.since_ms) if told.since_ms else "the beginning"),
    ]


def _words(name: str) -> str:
    return name.replace("_", " ")


def _time(at_ms: int) -> str:
    return utc_text(at_ms)[:19].replace("T", " ") + " UTC"


def _duration(ms: int | None) -> str:
    if ms is None:
        return "-"
    for unit, size in (("d", DAY_MS), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if ms >= size:
            return f"{ms / size:.3g} {unit}"
    return f"{ms} ms"


def _amount(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text
