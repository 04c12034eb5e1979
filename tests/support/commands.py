"""Run `escrowmq …` in this process, which is faster than starting one, or on a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, NamedTuple

from escrowmq.cli.main import main
from tests.support.brokers import COMMAND, WAIT_S


class CommandResult(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


def run(*arguments: str, stdin: bytes = b"") -> CommandResult:
    """Run a command in this process. Standard input is not a terminal: no prompt appears."""
    out, err = io.StringIO(), io.StringIO()
    saved = sys.argv, sys.stdin
    sys.argv = ["escrowmq", *arguments]
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
    code: Any = 0
    try:
        with redirect_stdout(out), redirect_stderr(err):
            main()
    except SystemExit as error:
        code = error.code
    finally:
        sys.argv, sys.stdin = saved
    return CommandResult(int(code or 0), out.getvalue(), err.getvalue())


def run_on_terminal(*arguments: str, answer: str = "") -> str:
    """Run a command on a pseudo-terminal, type the answer, and return what the screen showed."""
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [COMMAND, *arguments], stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    os.write(controller, f"{answer}\n".encode())
    screen = b""
    try:
        while chunk := os.read(controller, 4096):
            screen += chunk
    except OSError:
        pass  # Linux reports the end of a pseudo-terminal as an error
    finally:
        os.close(controller)
    process.wait(WAIT_S)
    return screen.decode()
