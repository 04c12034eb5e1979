"""Rows of a table, as wide as the terminal: some columns give way to the others."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

NARROW: Final = 8  # no column gives way further
_PART: Final = 1_000  # rows whose widths are looked at together
_GAP: Final = "  "


class Column(NamedTuple):
    head: str
    gives_way: bool = False  # what others copy, like an id, never does
    is_number: bool = False


def table_lines(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], width: int | None
) -> Iterator[str]:
    """Nothing if there are no rows. `width`: None if nobody looks at it."""
    waiting = iter(rows)
    widths: list[int] = []
    heads = [column.head for column in columns]
    while part := list(islice(waiting, _PART)):
        if not widths:
            widths = _widths(columns, [heads, *part], width)
            yield _line(columns, heads, widths)
        for cells in part:
            yield _line(columns, cells, widths)


def field_lines(fields: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Names, and their values in a column."""
    shown = list(fields)
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        yield f"{name:<{width}}  {value or '-'}".rstrip()


def width_of(stream: Any) -> int | None:
    """None if it is no terminal: what a program reads is not cut."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def _widths(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None
) -> list[int]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    if width is None:
        return widths
    over = sum(widths) + len(_GAP) * (len(widths) - 1) - width
    soft = [number for number, column in enumerate(columns) if column.gives_way]
    while over > 0 and soft:
        widest = max(soft, key=lambda number: widths[number])
        if widths[widest] <= NARROW:
            break
        widths[widest] -= 1
        over -= 1
    return widths


def _line(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = []
    for column, cell, width in zip(columns, cells, widths, strict=True):
        fitted = cell[: width - 1] + "…" if column.gives_way and len(cell) > width else cell
        padded.append(f"{fitted:>{width}}" if column.is_number else f"{fitted:<{width}}")
    return _GAP.join(padded).rstrip()
