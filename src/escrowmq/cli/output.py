"""Standard output whose reader may leave, as `head` does."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console


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
