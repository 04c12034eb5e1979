"""Charts as SVG text: bars, alone or stacked, with their scale and a tooltip on each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

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
