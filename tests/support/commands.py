"""`escrowmq …` in this process: what it printed, and how it ended. A process each would be slow."""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

from escrowmq.cli.main import main


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


def run(*arguments: str, stdin: bytes = b"") -> Ran:
    """Nobody is there to confirm anything."""
    out, err = io.StringIO(), io.StringIO()
    kept = sys.argv, sys.stdin
    sys.argv = ["escrowmq", *arguments]
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
    code: Any = 0
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv, sys.stdin = kept
    return Ran(int(code or 0), out.getvalue(), err.getvalue())
