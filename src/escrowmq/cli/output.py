"""Print what commands find: tables, fields, JSON; once or again and again (`--watch`).

Output that is piped into a program is never cut and never styled. On a terminal, tables fit its
width. Widths are counted in terminal cells, so that Chinese text lines up too.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, TextIO

import click
from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.live import Live
from rich.text import Text

from escrowmq.admin.cluster import Cluster
from escrowmq.cli.options import cluster_options, watch_option

P = ParamSpec("P")

# --- text ----------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """Escape control characters: a message must not move the cursor or change the title."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def truncate(text: str, width: int) -> str:
    """Cut a text to `width` terminal cells; what was cut is shown as an ellipsis."""
    return text if cell_len(text) <= width else set_cell_size(text, width - 1) + "…"


def print_json(content: Any) -> None:
    """Print one line of JSON at once, for programs that read a pipe line by line."""
    click.echo(json.dumps(content))
    sys.stdout.flush()


def print_json_array(items: Iterable[Any]) -> None:
    """Print each item when it arrives: there may be a million."""
    separator = "["
    for item in items:
        click.echo(f"{separator}{json.dumps(item)}", nl=False)
        separator = ",\n "
    click.echo("[]" if separator == "[" else "]")


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line)


@contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """Ignore a closed standard output, as when piped into `head`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes standard output again at exit, which must not fail either.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class PlainConsole(Console):
    """A console that neither wraps nor highlights, and raises BrokenPipeError."""

    def __init__(self) -> None:
        super().__init__(highlight=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        raise  # rich would exit with 1, which is our exit code for damage


# --- tables and fields ---------------------------------------------------------------------------

MIN_COLUMN_WIDTH: Final = 8  # columns do not shrink below this
_ROWS_PER_CHUNK: Final = 1_000  # rows that are measured before the first one is printed
_GAP: Final = "  "


class TableColumn(NamedTuple):
    title: str
    can_shrink: bool = False  # never set for what users copy, such as an id
    is_number: bool = False


def table_lines(
    columns: Sequence[TableColumn], rows: Iterable[Sequence[str]], width: int | None
) -> Iterator[str]:
    """Yield a heading and a line per row; nothing without rows.

    `width` is that of the terminal, or None if nothing may be cut. Column widths come from the
    first rows, so that a table of a million rows starts to print at once.
    """
    remaining = iter(rows)
    widths: list[int] = []
    titles = [column.title for column in columns]
    while chunk := list(itertools.islice(remaining, _ROWS_PER_CHUNK)):
        if not widths:
            widths = _column_widths(columns, [titles, *chunk], width)
            yield _format_row(columns, titles, widths)
        for cells in chunk:
            yield _format_row(columns, cells, widths)


def field_lines(fields: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield `name  value` lines with the values in one column; `-` stands for an empty value."""
    pairs = list(fields)
    width = max((cell_len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        yield f"{_pad(name, width)}  {value or '-'}".rstrip()


def terminal_width(stream: TextIO | None = None) -> int | None:
    """Return the width if the stream (standard output) is a terminal, else None."""
    stream = sys.stdout if stream is None else stream
    return shutil.get_terminal_size().columns if stream.isatty() else None


def _column_widths(
    columns: Sequence[TableColumn], rows: Sequence[Sequence[str]], width: int | None
) -> list[int]:
    widths = [max(cell_len(row[index]) for row in rows) for index in range(len(columns))]
    if width is None:
        return widths
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - width
    shrinkable = [index for index, column in enumerate(columns) if column.can_shrink]
    while excess > 0 and shrinkable:
        widest = max(shrinkable, key=lambda index: widths[index])
        if widths[widest] <= MIN_COLUMN_WIDTH:
            break
        widths[widest] -= 1
        excess -= 1
    return widths


def _format_row(columns: Sequence[TableColumn], cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = []
    for column, cell, width in zip(columns, cells, widths, strict=True):
        text = truncate(cell, width) if column.can_shrink else cell
        padded.append(_pad(text, width, right=column.is_number))
    return _GAP.join(padded).rstrip()


def _pad(text: str, width: int, *, right: bool = False) -> str:
    # str.ljust counts characters, and a Chinese character is two cells wide.
    padding = " " * (width - cell_len(text))
    return padding + text if right else text + padding


# --- failures ------------------------------------------------------------------------------------


def print_failures(cluster: Cluster) -> None:
    for failure in cluster.failures:
        click.echo(f"escrowmq: {printable(str(failure))}", err=True)


def exit_with_failures(context: click.Context, cluster: Cluster, exit_code: int = 0) -> None:
    """Exit with 2 if a broker failed, whatever the others answered, else with `exit_code`."""
    print_failures(cluster)
    context.exit(2 if cluster.failures else exit_code)


# --- queries -------------------------------------------------------------------------------------

# A query returns its result twice: as values for --json, and as lines for people.
QueryResult = tuple[Any, Iterable[str]]


@dataclass(frozen=True)
class QueryContext:
    """The cluster to ask, and how to print the result."""

    context: click.Context
    cluster: Cluster
    as_json: bool
    interval_s: float | None

    def show(
        self,
        query: Callable[Concatenate[Cluster, P], QueryResult],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> None:
        """Run `query(cluster, ...)` and print its result, again and again with --watch."""
        show_repeatedly(
            self.context,
            self.cluster,
            partial(query, self.cluster, *args, **kwargs),
            as_json=self.as_json,
            interval_s=self.interval_s,
        )


def query_command(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a command that only reads: it receives a QueryContext instead of them."""

    @watch_option
    @cluster_options
    @click.pass_context
    @wraps(command)
    def run(
        context: click.Context,
        /,
        *,
        interval_s: float | None,
        cluster: Cluster,
        as_json: bool,
        **options: Any,
    ) -> None:
        command(QueryContext(context, cluster, as_json, interval_s), **options)

    return run


def pause(seconds: float) -> None:
    """Wait. Ctrl-C raises KeyboardInterrupt."""
    threading.Event().wait(seconds)


def show_repeatedly(
    context: click.Context,
    cluster: Cluster,
    query: Callable[[], QueryResult],
    *,
    as_json: bool,
    interval_s: float | None,
    repeat_count: int | None = None,
) -> None:
    """Print the result of a query once, or every `interval_s` seconds, and exit.

    It ends after `repeat_count` results or with Ctrl-C. A terminal shows each result in place of
    the one before; elsewhere they follow each other, with --json as one line each.
    """
    live = (
        Live(console=Console(highlight=False), auto_refresh=False, vertical_overflow="ellipsis")
        if interval_s is not None and not as_json and sys.stdout.isatty()
        else None
    )
    try:
        with ignore_broken_pipe(), live or nullcontext():
            for count in itertools.count(1):
                cluster.failures.clear()
                content, lines = query()
                if as_json:
                    print_json(content)
                elif live is not None:
                    live.update(Text("\n".join(lines), no_wrap=True), refresh=True)
                else:
                    click.echo("\n".join(lines))
                    sys.stdout.flush()
                if interval_s is None or count == repeat_count:
                    break
                print_failures(cluster)
                pause(interval_s)
    except KeyboardInterrupt:
        context.exit(0)
    exit_with_failures(context, cluster)
