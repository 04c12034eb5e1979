"""Run commands of Apache's `mqadmin`, many in one Java process.

    with MqAdmin("5.5.0", namesrv_address, tmp_path) as admin:
        print(admin("topicList"))

The process also has a producer and consumers, which mqadmin can inspect: see `Admin.java`.
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
from tests.support.waiting import wait_until

TIMEOUT_S = 60.0


class MqAdmin:
    def __init__(self, version: str, namesrv: str, directory: Path) -> None:
        """Start the process. Raises Unavailable if mqadmin cannot run here."""
        self._namesrv = namesrv
        command = environments.java(version, "Admin")
        (directory / "conf").mkdir(parents=True, exist_ok=True)
        (directory / "conf" / "logback_tools.xml").write_text(LOGBACK)  # required by 4.9.7
        home_options = [f"-Duser.home={directory}", f"-Drocketmq.home.dir={directory}"]
        with (directory / "admin.err").open("wb") as errors:
            self._process = subprocess.Popen(
                [command[0], *home_options, *command[1:], namesrv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=directory,
                env={**os.environ, "HOME": str(directory)},
            )
        self._buffer = b""

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
        """Run a command of mqadmin and return its output."""
        return self.run(command, *arguments, "-n", self._namesrv)

    def run(self, *command: str) -> str:
        """Run a command of mqadmin or of the driver itself, and return its output."""
        assert self._process.stdin is not None
        self._process.stdin.write("\t".join(command).encode() + b"\n")
        self._process.stdin.flush()
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            line = self._read_line(deadline_s, command)
            if line.startswith(b'"'):  # other lines are logs
                output: str = json.loads(line)
                return output

    def _read_line(self, deadline_s: float, command: tuple[str, ...]) -> bytes:
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            remaining_s = max(0.0, deadline_s - time.monotonic())
            readable, _, _ = select.select([self._process.stdout], [], [], remaining_s)
            if not readable:
                raise TimeoutError(f"no response within {TIMEOUT_S} s: {' '.join(command)}")
            chunk = os.read(self._process.stdout.fileno(), 65_536)
            if not chunk:
                raise EOFError(f"the driver has exited: {' '.join(command)}")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


def wait_for_output(run: Callable[[], str], is_expected: Callable[[str], bool]) -> str:
    """Run a command until its output is as expected, and return the output.

    The broker updates some figures a moment later.
    """
    outputs = [""]

    def has_expected_output() -> bool:
        outputs[0] = run()
        return is_expected(outputs[0])

    try:
        wait_until(has_expected_output, "the output is as expected", timeout_s=TIMEOUT_S)
    except AssertionError as error:
        error.add_note(f"the last output:\n{outputs[0]}")
        raise
    return outputs[0]
