"""Run Python blocks in one namespace, as `python -m asyncio` does: `await` is allowed everywhere.

    python snippet_runner.py FD

Each line of standard input is a block, {"source": …, "name": …}; each line that is written to the
file descriptor FD is its result, {"error": traceback or null}. A block that is interrupted (SIGINT)
is done.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import os
import sys
import traceback
from typing import Any


def run(source: str, name: str, namespace: dict[str, Any], runner: asyncio.Runner) -> None:
    code = compile(source, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    result = eval(code, namespace)
    if code.co_flags & inspect.CO_COROUTINE:
        runner.run(result)


def main() -> None:
    results = int(sys.argv[1])
    sys.path[0] = ""  # imports are those of the page's directory, not of this file's
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with asyncio.Runner() as runner:
        for line in sys.stdin:
            block, error = json.loads(line), None
            try:
                run(block["source"], block["name"], namespace, runner)
            except KeyboardInterrupt:
                pass  # the block is endless
            except BaseException:  # also SystemExit: the next block needs this process
                error = traceback.format_exc()
            sys.stdout.flush()
            os.write(results, json.dumps({"error": error}).encode() + b"\n")


if __name__ == "__main__":
    main()
