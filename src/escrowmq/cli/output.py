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

from escrowmq.cli.brokers import Brokers, end
from escrowmq.cli.options import watch, where


@contextmanager
def reader_may_leave() -> Iterator[None]:
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


P = ParamSpec("P")
_CLEAR = "\x1b[H\x1b[2J\x1b[3J"  # home, the screen, what was scrolled away


@dataclass(frozen=True)
class View:
    """Whom to ask, and how to show what they say."""

    context: click.Context
    brokers: Brokers
    in_json: bool
    every_s: float | None

    def show(
        self,
        find: Callable[Concatenate[Brokers, P], tuple[Any, Iterable[str]]],
        *args: P.args,
        **more: P.kwargs,
    ) -> None:
        """What `find` finds out from the brokers: for programs, and as lines for people."""
        found = partial(find, self.brokers, *args, **more)
        show(self.context, self.brokers, found, in_json=self.in_json, every_s=self.every_s)


def looking(command: Callable[..., None]) -> Callable[..., None]:
    """A command that only looks: it gets a View instead of the options for it."""

    @watch
    @where
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
        command(View(context, Brokers(namesrv, broker), in_json, every_s), **more)

    return run


def pause(seconds: float) -> None:
    """Ctrl-C ends it."""
    threading.Event().wait(seconds)


def show(
    context: click.Context,
    brokers: Brokers,
    found: Callable[[], tuple[Any, Iterable[str]]],
    *,
    in_json: bool,
    every_s: float | None,
    count: int | None = None,
) -> None:
    """`found` gives it for programs, and as lines for people.

    A terminal is cleared between two times; for a program each is one line of JSON. `count` times,
    or until Ctrl-C.
    """
    try:
        with reader_may_leave():
            for done in itertools.count(1):
                brokers.failed.clear()
                _echo(*found(), in_json=in_json, is_live=every_s is not None)
                if every_s is None or done == count:
                    break
                for text in brokers.failed:
                    click.echo(f"escrowmq: {text}", err=True)
                pause(every_s)
    except KeyboardInterrupt:
        context.exit(0)
    end(context, brokers)


def _echo(content: Any, lines: Iterable[str], *, in_json: bool, is_live: bool) -> None:
    if in_json:
        click.echo(json.dumps(content))
        sys.stdout.flush()
        return
    text = "\n".join(lines)
    if is_live and sys.stdout.isatty():
        click.echo(_CLEAR, nl=False)
    click.echo(text)
    sys.stdout.flush()
