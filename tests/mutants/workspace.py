"""A copy of the tree in which mistakes are planted and tests run. The checkout is not changed."""

from __future__ import annotations

import compileall
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.mutants import pytest_runner
from tests.mutants.pytest_runner import RunRequest, RunResult
from tests.mutants.selection import Mutant

NOT_COPIED: Final = (
    ".git",
    ".venv",
    "venv",
    ".mutants",
    ".hypothesis",
    ".*_cache",
    "__pycache__",
    "*-data",
    "*-demo",
    "build",
    "dist",
)
PYTEST_ARGUMENTS: Final = ("-q", "--no-header", "--tb=line", "-p", "no:cacheprovider")


@dataclass(frozen=True, slots=True)
class PytestRun:
    """The result of a pytest process. The exit code is None if the process timed out."""

    exit_code: int | None
    failed: tuple[str, ...]
    output: str
    result: RunResult


class Workspace:
    """The copy, and a directory for temporary files beside it."""

    def __init__(self, checkout: Path, directory: Path) -> None:
        self.tree = directory / "tree"
        self._temporary = directory / "tmp"
        self._request_file = directory / "request.json"
        self._result_file = directory / "result.json"
        self._output_file = directory / "output.txt"
        shutil.copytree(
            checkout, self.tree, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED)
        )
        # Compile the copy once, because runs with mutants write no bytecode.
        compileall.compile_dir(self.tree / "src", quiet=2)
        compileall.compile_dir(self.tree / "tests", quiet=2)

    @contextlib.contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Plant a mistake in the copy, and remove it when the block ends."""
        path = self.tree / mutant.path
        original = path.read_text(encoding="utf-8")
        # Python considers bytecode current if size and modification time (in seconds) of the source
        # are the same, which is often so for a mutant. Without a bytecode file it compiles the
        # source in every run.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
        path.write_text(mutant.mutation.apply(original), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(original, encoding="utf-8")

    def record(self, tests: Sequence[str], data_file: Path) -> PytestRun:
        """Run all tests and record the lines that each of them runs."""
        arguments = ["-m", "not nightly", *tests]
        return self._run(arguments, data_file=data_file)

    def run(
        self, chosen: Sequence[str], recorded: Sequence[str], *, seed: int, timeout_s: float
    ) -> PytestRun:
        """Run the chosen tests in their order until one fails."""
        arguments = ["-x", f"--hypothesis-seed={seed}", *_files(chosen)]
        return self._run(arguments, chosen=chosen, recorded=recorded, timeout_s=timeout_s)

    def run_without_mutant(self, chosen: Sequence[str], recorded: Sequence[str]) -> PytestRun:
        """Run all chosen tests on the unchanged source."""
        return self._run(_files(chosen), chosen=chosen, recorded=recorded)

    def _run(
        self,
        arguments: Sequence[str],
        *,
        chosen: Sequence[str] | None = None,
        recorded: Sequence[str] = (),
        data_file: Path | None = None,
        timeout_s: float | None = None,
    ) -> PytestRun:
        self._clean()
        request = RunRequest(
            arguments=[*PYTEST_ARGUMENTS, f"--basetemp={self._temporary / 'pytest'}", *arguments],
            chosen=None if chosen is None else list(chosen),
            recorded=list(recorded),
            source=str(self.tree / "src"),
            data_file=str(data_file),
            result_file=str(self._result_file),
        )
        self._request_file.write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, pytest_runner.__file__, str(self._request_file)]
        exit_code = self._wait(command, timeout_s)
        result = RunResult(failed=[], seconds={}, lines={})
        if self._result_file.exists():
            result = json.loads(self._result_file.read_text(encoding="utf-8"))
        output = self._output_file.read_text(encoding="utf-8", errors="replace")
        return PytestRun(exit_code, tuple(result["failed"]), output, result)

    def _wait(self, command: Sequence[str], timeout_s: float | None) -> int | None:
        """Return the exit code, or None after a timeout. Kill all processes of the run."""
        with (
            self._output_file.open("wb") as output,
            subprocess.Popen(
                command,
                cwd=self.tree,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process,
        ):
            try:
                return process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _environment(self) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTEST_", "COVERAGE_", "COV_CORE_"))
        }
        return {
            **inherited,
            "PYTHONPATH": str(self.tree / "src"),  # takes precedence over an editable install
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(self._temporary),
        }

    def _clean(self) -> None:
        """Remove the files of the previous run, such as the failing examples of hypothesis."""
        shutil.rmtree(self._temporary, ignore_errors=True)
        shutil.rmtree(self.tree / ".hypothesis", ignore_errors=True)
        self._temporary.mkdir(exist_ok=True)
        self._result_file.unlink(missing_ok=True)


def _files(tests: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(test.partition("::")[0] for test in tests))


@contextlib.contextmanager
def workspace(checkout: Path) -> Iterator[Workspace]:
    """Copy the checkout to a temporary directory that is removed when the block ends."""
    # The name is short because tests create Unix sockets in it, whose paths have at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as name:
        yield Workspace(checkout, Path(name).resolve())
