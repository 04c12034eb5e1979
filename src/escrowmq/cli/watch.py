"""Print once, or again and again in place, like `watch`."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import click

from escrowmq.cli.brokers import Brokers, end
from escrowmq.cli.output import reader_may_leave

_CLEAR = "\x1b[H\x1b[2J\x1b[3J"  # home, the screen, what was scrolled away


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
