"""Standard output whose reader may leave, as `head` does.

Rows of a table, as wide as the terminal: some columns give way to the others.

Print once, or again and again in place, like `watch`.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from itertools import islice
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec

import click
from rich.console import Console

from escrowmq.cli.brokers import Cluster, exit_with_failures
from escrowmq.cli.options import cluster_options, watch_option


@contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """Who reads has seen enough: what is still to be printed goes nowhere, without a complaint."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class PlainConsole(Console):
    """Lines as long as they are, and a broken pipe for `reader_may_leave` to see."""

    def __init__(self) -> None:
        super().__init__(highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        raise  # rich would exit with 1, which for us says that there is damage


MIN_COLUMN_WIDTH: Final = 8  # no column gives way further
_ROWS_PER_CHUNK: Final = 1_000  # rows whose widths are looked at together
_GAP: Final = "  "


class TableColumn(NamedTuple):
    title: str
    can_shrink: bool = False  # what others copy, like an id, never does
    is_number: bool = False


def table_lines(
    columns: Sequence[TableColumn], rows: Iterable[Sequence[str]], width: int | None
) -> Iterator[str]:
    """Nothing if there are no rows. `width`: None if nobody looks at it."""
    waiting = iter(rows)
    widths: list[int] = []
    heads = [column.title for column in columns]
    while part := list(islice(waiting, _ROWS_PER_CHUNK)):
        if not widths:
            widths = _column_widths(columns, [heads, *part], width)
            yield _format_row(columns, heads, widths)
        for cells in part:
            yield _format_row(columns, cells, widths)


def field_lines(fields: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Names, and their values in a column."""
    shown = list(fields)
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        yield f"{name:<{width}}  {value or '-'}".rstrip()


def terminal_width(stream: Any) -> int | None:
    """None if it is no terminal: what a program reads is not cut."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


def _column_widths(
    columns: Sequence[TableColumn], rows: Sequence[Sequence[str]], width: int | None
) -> list[int]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    if width is None:
        return widths
    over = sum(widths) + len(_GAP) * (len(widths) - 1) - width
    soft = [number for number, column in enumerate(columns) if column.can_shrink]
    while over > 0 and soft:
        widest = max(soft, key=lambda number: widths[number])
        if widths[widest] <= MIN_COLUMN_WIDTH:
            break
        widths[widest] -= 1
        over -= 1
    return widths


def _format_row(columns: Sequence[TableColumn], cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = []
    for column, cell, width in zip(columns, cells, widths, strict=True):
        fitted = cell[: width - 1] + "…" if column.can_shrink and len(cell) > width else cell
        padded.append(f"{fitted:>{width}}" if column.is_number else f"{fitted:<{width}}")
    return _GAP.join(padded).rstrip()


P = ParamSpec("P")
_CLEAR_SCREEN = "\x1b[H\x1b[2J\x1b[3J"  # home, the screen, what was scrolled away


@dataclass(frozen=True)
class QueryContext:
    """Whom to ask, and how to show what they say."""

    context: click.Context
    cluster: Cluster
    in_json: bool
    every_s: float | None

    def show(
        self,
        query: Callable[Concatenate[Cluster, P], tuple[Any, Iterable[str]]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """What `find` finds out from the brokers: for programs, and as lines for people."""
        found = partial(query, self.cluster, *args, **kwargs)
        show_repeatedly(
            self.context, self.cluster, found, in_json=self.in_json, every_s=self.every_s
        )


def query_command(command: Callable[..., None]) -> Callable[..., None]:
    """A command that only looks: it gets a View instead of the options for it."""

    @watch_option
    @cluster_options
    @click.pass_context
    @wraps(command)
    def run(
        context: click.Context,
        /,
        *,
        every_s: float | None,
        namesrv: str,
        broker: str | None,
        in_json: bool,
        **more: Any,
    ) -> None:
        command(QueryContext(context, Cluster(namesrv, broker), in_json, every_s), **more)

    return run


def pause(seconds: float) -> None:
    """Ctrl-C ends it."""
    threading.Event().wait(seconds)


def show_repeatedly(
    context: click.Context,
    cluster: Cluster,
    query: Callable[[], tuple[Any, Iterable[str]]],
    *,
    in_json: bool,
    every_s: float | None,
    repeat_count: int | None = None,
) -> None:
    """`found` gives it for programs, and as lines for people.

    A terminal is cleared between two times; for a program each is one line of JSON. `count` times,
    or until Ctrl-C.
    """
    try:
        with ignore_broken_pipe():
            for done in itertools.count(1):
                cluster.failures.clear()
                _echo(*query(), in_json=in_json, is_live=every_s is not None)
                if every_s is None or done == repeat_count:
                    break
                for text in cluster.failures:
                    click.echo(f"escrowmq: {text}", err=True)
                pause(every_s)
    except KeyboardInterrupt:
        context.exit(0)
    exit_with_failures(context, cluster)


def _echo(content: Any, lines: Iterable[str], *, in_json: bool, is_live: bool) -> None:
    if in_json:
        click.echo(json.dumps(content))
        sys.stdout.flush()
        return
    text = "\n".join(lines)
    if is_live and sys.stdout.isatty():
        click.echo(_CLEAR_SCREEN, nl=False)
    click.echo(text)
    sys.stdout.flush()
