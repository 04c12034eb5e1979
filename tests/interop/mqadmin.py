"""Apache's `mqadmin` of one release, in one Java process for many commands.

    with MqAdmin("5.5.0", namesrv_address, tmp_path) as admin:
        print(admin("topicList"))

Beside mqadmin's commands there are a producer and consumers for it to look at.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tests.interop.apache import LOGBACK
from tests.interop.clients import environments

WAIT_S = 60.0
_POLL_S = 0.3


class MqAdmin:
    def __init__(self, version: str, namesrv: str, directory: Path) -> None:
        """Raises `environments.Unavailable` if it cannot run here."""
        self._namesrv = namesrv
        command = environments.java(version, "Admin")
        (directory / "conf").mkdir(parents=True, exist_ok=True)
        (directory / "conf" / "logback_tools.xml").write_text(LOGBACK)  # 4.x wants one
        homes = [f"-Duser.home={directory}", f"-Drocketmq.home.dir={directory}"]
        with (directory / "admin.err").open("wb") as errors:
            self._process = subprocess.Popen(
                [command[0], *homes, *command[1:], namesrv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=directory,
                env={**os.environ, "HOME": str(directory)},
            )
        self._read = b""

    def __enter__(self) -> MqAdmin:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def __call__(self, command: str, *arguments: str) -> str:
        """One of mqadmin's commands: what it printed."""
        return self.tell(command, *arguments, "-n", self._namesrv)

    def tell(self, *words: str) -> str:
        """One line to the driver, and what it answered."""
        assert self._process.stdin is not None
        self._process.stdin.write("\t".join(words).encode() + b"\n")
        self._process.stdin.flush()
        deadline_s = time.monotonic() + WAIT_S
        while True:
            line = self._line(deadline_s, words)
            if line.startswith(b'"'):  # what a logger says is not an answer
                answer: str = json.loads(line)
                return answer

    def _line(self, deadline_s: float, words: tuple[str, ...]) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._read:
            left_s = max(0.0, deadline_s - time.monotonic())
            readable, _, _ = select.select([self._process.stdout], [], [], left_s)
            if not readable:
                raise TimeoutError(f"no answer after {WAIT_S} s: {' '.join(words)}")
            chunk = os.read(self._process.stdout.fileno(), 65_536)
            if not chunk:
                raise EOFError(f"the driver has ended: {' '.join(words)}")
            self._read += chunk
        line, _, self._read = self._read.partition(b"\n")
        return line


def until(ask: Callable[[], str], says: Callable[[str], bool]) -> str:
    """Ask again and again, until it says so: a figure may be a moment late."""
    deadline_s = time.monotonic() + WAIT_S
    while not says(told := ask()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"after {WAIT_S} s it still says:\n{told}")
        time.sleep(_POLL_S)
    return told
