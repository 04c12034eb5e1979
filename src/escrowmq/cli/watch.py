"""Print once, or again and again in place, like `watch`."""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec

import click

from escrowmq.cli.brokers import Brokers, end
from escrowmq.cli.options import watch, where
from escrowmq.cli.output import reader_may_leave

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
