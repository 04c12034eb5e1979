"""Run the code blocks of Markdown pages as a reader would: in order, with a broker of their own.

The language of a block says what it is: `python` and `sh` are run, the others are for reading. The
Python blocks of a page share their names, all blocks share a directory. A comment in the line
before a block says more:

    <!-- not run: REASON -->   it cannot run in a test, and why
    <!-- endless: TEXT -->     it does not end by itself; the reader goes on when it has printed
                               TEXT. A shell block keeps running, a Python block is interrupted
    <!-- output -->            it is what the block before prints; `…` stands for anything
    <!-- file: PATH -->        the reader saves it under this name
    <!-- append: PATH -->      the reader adds it to this file

A comment behind a `print(…)` is what it prints. What a page takes for granted stands in a block
that readers do not see:

    <!-- hidden: sh
    escrowmq message send orders --body lamp
    -->

Pages use the default addresses. They are replaced by free ones, in blocks by their text and for
commands by the environment, so that pages can run at the same time.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from escrowmq.native import SWITCH
from tests.support.ports import free_ports
from tests.support.waiting import wait_until

ROOT: Final = Path(__file__).parents[2]
RUNNER: Final = Path(__file__).with_name("snippet_runner.py")
RUN_LANGUAGES: Final = ("python", "sh")
READ_LANGUAGES: Final = ("java", "json", "properties", "text", "toml", "yaml")
BLOCK_TIMEOUT_S: Final = 240.0  # the machine may be busy, and a block may start Spark
STOP_TIMEOUT_S: Final = 60.0

NOT_RUN, ENDLESS, OUTPUT, FILE, APPEND, HIDDEN = (
    *("not run", "endless", "output", "file", "append", "hidden"),
)
_MARKS_WITH_VALUE: Final = (NOT_RUN, ENDLESS, FILE, APPEND)

_BLOCK: Final = re.compile(
    r"(?:^ *<!-- (?P<mark>[a-z ]+?)(?:: (?P<value>[^\n]*?))? -->\n)?"
    r"^(?P<indent> *)```(?P<language>[^\n]*)\n(?P<source>.*?)^ *```$"
    r"|^<!-- hidden: (?P<hidden_language>\w+)\n(?P<hidden_source>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
_MARK: Final = re.compile(r"^ *<!-- (not run|endless|output|file|append|hidden)\b", re.MULTILINE)
_EXPECTED_PRINT: Final = re.compile(r"^ *print\(.*\)  # (.*)$", re.MULTILINE)


class SnippetFailed(Exception):
    """A block does not do what its page says."""


@dataclass(frozen=True, slots=True)
class Block:
    """A code block of a page."""

    page: Path
    line: int  # of its first line of code
    language: str
    source: str
    mark: str = ""
    value: str = ""  # what follows the mark

    @property
    def is_run(self) -> bool:
        return self.language in RUN_LANGUAGES and self.mark not in (NOT_RUN, FILE, APPEND)

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    def problem(self) -> str | None:
        """Return why this block can be neither run nor left out, or None."""
        is_synopsis = not self.language and self.mark == NOT_RUN
        if self.language not in RUN_LANGUAGES + READ_LANGUAGES and not is_synopsis:
            return f"unknown language {self.language!r}"
        if self.mark in _MARKS_WITH_VALUE:
            if not self.value:
                return f"`{self.mark}` needs a text"
            if self.mark == ENDLESS and self.language not in RUN_LANGUAGES:
                return f"a block of {self.language} is never run"
            return None
        if self.mark == HIDDEN and self.language not in RUN_LANGUAGES:
            return "a block that readers do not see is for running"
        if self.mark == OUTPUT and self.language in RUN_LANGUAGES:
            return "an output is a block of text"
        return None if self.mark in ("", OUTPUT, HIDDEN) else f"unknown mark {self.mark!r}"


def read_blocks(page: Path) -> list[Block]:
    text = page.read_text()
    blocks = []
    for match in _BLOCK.finditer(text):
        is_hidden = match["hidden_language"] is not None
        source = match["hidden_source" if is_hidden else "source"]
        line = text.count("\n", 0, match.start("hidden_source" if is_hidden else "source")) + 1
        language = match["hidden_language"] if is_hidden else match["language"]
        mark = HIDDEN if is_hidden else match["mark"] or ""
        blocks.append(
            Block(page, line, language, textwrap.dedent(source), mark, match["value"] or "")
        )
    return blocks


def problems(page: Path) -> Iterator[str]:
    """Yield what is wrong with the blocks of a page, without running them."""
    text, blocks = page.read_text(), read_blocks(page)
    is_run = False  # whether the block before is
    for block in blocks:
        if problem := block.problem():
            yield f"{block.place}: {problem}"
        if block.mark == OUTPUT and not is_run:
            yield f"{block.place}: the block before this output is not run"
        is_run = block.is_run
    fences = len(re.findall(r"^ *```", text, re.MULTILINE))
    visible = sum(block.mark != HIDDEN for block in blocks)
    if fences != 2 * visible:
        yield f"{page}: {fences} fences, but {visible} blocks"
    if len(_MARK.findall(text)) != sum(bool(block.mark) for block in blocks):
        yield f"{page}: a comment for a block does not stand directly before one"


def matches(expected: str, output: str) -> bool:
    """Return whether the output is as expected, where `…` stands for anything."""
    pattern = ".*?".join(re.escape(part) for part in _strip_lines(expected).split("…"))
    return re.fullmatch(pattern, _strip_lines(output), re.DOTALL) is not None


def _strip_lines(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def check_prints(source: str, output: str) -> None:
    """Check that what the comments behind `print` say is printed, in this order."""
    lines = iter(output.splitlines())
    for expected in _EXPECTED_PRINT.findall(source):
        if not any(matches(expected, line) for line in lines):
            raise SnippetFailed(f"{expected!r} is not printed, or not in this order:\n{output}")


class Reader:
    """Reads pages and does what they say: runs blocks, saves files, compares outputs.

    Pages that are read one after the other share the directory, the broker and the Python session.
    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str] | None = None,
        *,
        needs_broker: bool = True,
    ) -> None:
        self._directory = directory
        self._needs_broker = needs_broker  # if a page starts none itself
        broker_port, namesrv_port, web_port, second_web_port = free_ports(4)
        self._addresses = {
            "127.0.0.1:9876": f"127.0.0.1:{namesrv_port}",
            "127.0.0.1:10911": f"127.0.0.1:{broker_port}",
            "127.0.0.1:8000": f"127.0.0.1:{web_port}",
            "127.0.0.1:8001": f"127.0.0.1:{second_web_port}",
        }
        servers = self._addresses["127.0.0.1:9876"]
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name == SWITCH or not name.startswith("ESCROWMQ_")
        }
        self._environment = {
            **inherited,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "HOME": str(directory),
            "PYTHONUNBUFFERED": "1",
            "NAMESRV_ADDR": servers,  # for commands
            "SERVERS": servers,  # for examples
            "UVICORN_PORT": str(web_port),
            "ESCROWMQ_LISTEN_PORT": str(broker_port),
            "ESCROWMQ_NAMESRV_PORT": str(namesrv_port),
            **(environment or {}),
        }
        self._background: dict[str, _Background] = {}  # by the words that name the program
        self._python: _PythonSession | None = None
        self._last_output = ""
        # A reader has cloned the repository.
        (directory / "examples").symlink_to(ROOT / "examples")

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._python is not None:
            self._python.close()
        for program in reversed(self._background.values()):
            program.stop()

    def read(self, page: Path) -> None:
        """Do what the page says. Raises SnippetFailed at the first block that fails."""
        blocks = read_blocks(page)
        if self._needs_broker and not any(_serves(block) for block in blocks):
            self._start_in_background(Block(page, 0, "sh", "escrowmq serve\n", ENDLESS, "Try it"))
        self._needs_broker = False
        for block in blocks:
            try:
                self._do(block)
            except SnippetFailed as error:
                raise SnippetFailed(f"{block.place}:\n{block.source}\n{error}") from None

    def _do(self, block: Block) -> None:
        if block.mark in (FILE, APPEND):
            path = self._directory / block.value
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a" if block.mark == APPEND else "w") as file:
                file.write(self._with_free_ports(block.source))
        elif block.mark == OUTPUT:
            if not matches(self._with_free_ports(block.source), self._last_output):
                raise SnippetFailed(f"it prints:\n{self._last_output}")
        elif block.is_run and block.language == "python":
            self._last_output = self._run_python(block)
        elif block.is_run and block.mark == ENDLESS:
            self._last_output = self._start_in_background(block)
        elif block.is_run:
            self._last_output = self._run_shell(block)

    def _with_free_ports(self, text: str) -> str:
        for default, free in self._addresses.items():
            text = text.replace(default, free)
        return text

    def _run_shell(self, block: Block) -> str:
        command = _shell_command(self._with_free_ports(block.source))
        try:
            run = subprocess.run(
                command,
                cwd=self._directory,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
                timeout=BLOCK_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode()
            raise SnippetFailed(f"not done after {BLOCK_TIMEOUT_S:g} s:\n{output}") from error
        if run.returncode:
            raise SnippetFailed(f"exit code {run.returncode}:\n{run.stdout}")
        return run.stdout

    def _start_in_background(self, block: Block) -> str:
        """Start a block that keeps running; a second one of the same program replaces the first."""
        name = " ".join(shlex.split(block.source.strip().splitlines()[-1], comments=True)[:2])
        if name in self._background:
            self._background.pop(name).stop()
        program = self._background[name] = _Background(
            self._with_free_ports(block.source), self._directory, self._environment
        )
        program.wait_for(block.value)
        ports = re.findall(r"127\.0\.0\.1:(\d+)", self._with_free_ports(block.source))
        wait_until(lambda: all(map(_accepts, ports)), f"ports {ports} are open")
        return program.output

    def _run_python(self, block: Block) -> str:
        if self._python is None:
            self._python = _PythonSession(self._directory, self._environment)
        stop_text = block.value if block.mark == ENDLESS else None
        # Empty lines before it, so that a traceback has the line numbers of the page.
        source = "\n" * (block.line - 1) + self._with_free_ports(block.source)
        output = self._python.run(source, str(block.page), stop_text)
        check_prints(block.source, output)
        return output


def _serves(block: Block) -> bool:
    return block.is_run and re.search(r"^escrowmq serve\b", block.source, re.MULTILINE) is not None


def _accepts(port: str) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", int(port))) == 0


def _shell_command(source: str) -> list[str]:
    return ["bash", "-eu", "-c", source]


class _Background:
    """A shell block that keeps running, with everything that it starts."""

    def __init__(self, source: str, directory: Path, environment: Mapping[str, str]) -> None:
        self._log = directory / f"background-{free_ports(1)[0]}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                _shell_command(source),
                cwd=directory,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    def wait_for(self, text: str) -> None:
        def is_printed() -> bool:
            code = self._process.poll()
            if text not in self.output and code is not None:
                raise SnippetFailed(f"it ended with exit code {code}:\n{self.output}")
            return text in self.output

        wait_until(is_printed, lambda: f"{text!r} is printed:\n{self.output}")

    def stop(self) -> None:
        """End the processes of this block, and wait for them."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with suppress(AssertionError):
                wait_until(self._is_over, "its processes have ended", timeout_s=STOP_TIMEOUT_S)
                return

    def _is_over(self) -> bool:
        self._process.poll()
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return True
        return False


class _PythonSession:
    """A Python process that runs one block after the other; see snippet_runner.py."""

    def __init__(self, directory: Path, environment: Mapping[str, str]) -> None:
        self._output_path, self._error_path = directory / "python.out", directory / "python.err"
        reply_end, runner_end = os.pipe()
        with self._output_path.open("wb") as output, self._error_path.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(RUNNER), str(runner_end)],
                cwd=directory,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=errors,
                pass_fds=[runner_end],
                text=True,
            )
        os.close(runner_end)
        os.set_blocking(reply_end, False)
        self._reply_end = reply_end
        self._reply = b""

    def run(self, source: str, name: str, stop_text: str | None) -> str:
        """Run a block and return what it prints; interrupt it when it has printed `stop_text`."""
        start = self._output_path.stat().st_size
        self._reply = b""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"source": source, "name": name}) + "\n")
        self._process.stdin.flush()

        def output() -> str:
            return self._output_path.read_bytes()[start:].decode()

        def describe() -> str:
            return f"the block is done; it printed:\n{output()}\n{self._errors()}"

        if stop_text is not None:
            wait_until(
                lambda: stop_text in output() or self._is_done(),
                describe,
                timeout_s=BLOCK_TIMEOUT_S,
            )
            if self._reply:
                raise SnippetFailed(f"it ended by itself:\n{self._reply.decode()}\n{output()}")
            self._process.send_signal(signal.SIGINT)
        wait_until(self._is_done, describe, timeout_s=BLOCK_TIMEOUT_S)
        error = json.loads(self._reply)["error"]
        if error:
            raise SnippetFailed(f"{output()}\n{error}")
        return output()

    def close(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._reply_end)

    def _is_done(self) -> bool:
        with suppress(BlockingIOError):
            self._reply += os.read(self._reply_end, 1 << 16)
        if not self._reply and self._process.poll() is not None:
            raise SnippetFailed(f"Python has ended:\n{self._errors()}")
        return self._reply.endswith(b"\n")

    def _errors(self) -> str:
        return self._error_path.read_text()[-3000:]
