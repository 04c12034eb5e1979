"""Which tests run which line. The map is stored in `.mutants/` until source or tests change."""

from __future__ import annotations

import ast
import hashlib
import json
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TypedDict

from coverage import CoverageData

from tests.mutants.operators import Place
from tests.mutants.selection import Mutant
from tests.mutants.workspace import Workspace


class Recording(TypedDict):
    """What is stored in addition to the data of coverage.

    `lines` counts the lines that each test runs: the fewer, the nearer is the test to each line.
    """

    fingerprint: str
    seconds: dict[str, float]
    lines: dict[str, int]
    failed: list[str]


class PytestDidNotRun(Exception):
    """Pytest failed, or no test that passed ran a line of the source."""


class CoverageMap:
    """Finds the tests that can notice a mistake."""

    def __init__(self, root: Path, data: CoverageData, recording: Recording) -> None:
        self.tests = list(recording["seconds"])
        self.failed = recording["failed"]
        self._root = root
        self._data = data
        self._seconds = dict(recording["seconds"])
        self._line_counts: Mapping[str, int] = recording["lines"]
        self._tests_by_line = cache(self._read_tests_by_line)

    def covering_tests(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the mistake, nearest first: those that run the fewest lines.

        A statement that runs on import belongs to no test. For such a statement return first the
        tests that run a line of any module with the defined name, then those that run a line with
        the name of its class, and then those that run any line of its module.
        """
        place = mutant.mutation.place
        by_line = self._tests_by_line(mutant.path)
        direct_tests = self._union(by_line, range(place.first_line, place.last_line + 1))
        if place.in_function and (direct_tests or not self._runs_on_import(mutant.path, place)):
            return self._nearest_first(direct_tests)
        name_tests = self._mentioning(place.names)
        owner_tests = self._mentioning([place.owner] if place.owner else [])
        module_tests = self._union(by_line, by_line)
        ranked_tests: dict[str, None] = {}
        for tests in (direct_tests | name_tests, owner_tests, module_tests):
            ranked_tests |= dict.fromkeys(self._nearest_first(tests))
        return list(ranked_tests)

    def affordable(self, tests: Iterable[str], count_max: int, seconds_max: float) -> list[str]:
        """Return tests within both limits, in their order, but at least the first one."""
        chosen: list[str] = []
        total_s = 0.0
        for test in tests:
            if len(chosen) == count_max:
                break
            if not chosen or total_s + self._seconds[test] <= seconds_max:
                chosen.append(test)
                total_s += self._seconds[test]
        return chosen

    def leave_out(self, tests: Iterable[str]) -> None:
        """Do not return these tests any more."""
        for test in tests:
            self._seconds.pop(test, None)
        self._tests_by_line = cache(self._read_tests_by_line)

    def _nearest_first(self, tests: Iterable[str]) -> list[str]:
        return sorted(tests, key=lambda test: (self._line_counts[test], test))

    def _mentioning(self, names: Iterable[str]) -> set[str]:
        return {
            test
            for name in names
            for path, line in self._mentions.get(name, ())
            for test in self._tests_by_line(path).get(line, ())
        }

    def _runs_on_import(self, path: str, place: Place) -> bool:
        lines = range(place.first_line, place.last_line + 1)
        contexts = self._data.contexts_by_lineno(path)
        return any("" in contexts.get(line, ()) for line in lines)

    def _read_tests_by_line(self, path: str) -> dict[int, set[str]]:
        return {
            line: {test for test in contexts if test in self._seconds}
            for line, contexts in self._data.contexts_by_lineno(path).items()
        }

    @staticmethod
    def _union(by_line: Mapping[int, set[str]], lines: Iterable[int]) -> set[str]:
        return {test for line in lines for test in by_line.get(line, ())}

    @cached_property
    def _mentions(self) -> Mapping[str, Sequence[tuple[str, int]]]:
        """Return for each name the lines of the source that use it."""
        mentions: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        for module in sorted((self._root / "src").rglob("*.py")):
            path = module.relative_to(self._root).as_posix()
            for node in ast.walk(ast.parse(module.read_bytes())):
                match node:
                    case ast.Name(id=name, lineno=line) | ast.Attribute(attr=name, lineno=line):
                        mentions[name].append((path, line))
                    case ast.keyword(arg=str(name), lineno=line):
                        mentions[name].append((path, line))
        return mentions


def coverage_map(root: Path, tests: Sequence[str], space: Workspace) -> CoverageMap:
    """Return the stored map if source and tests have not changed, else record a new one.

    Raises PytestDidNotRun with the output of pytest.
    """
    directory = root / ".mutants"
    recording_file, data_file = directory / "recording.json", directory / "coverage.sqlite"
    fingerprint = fingerprint_of(root, tests)
    recording: Recording | None = None
    if recording_file.exists() and data_file.exists():
        recording = json.loads(recording_file.read_text(encoding="utf-8"))
    if recording is None or recording["fingerprint"] != fingerprint:
        sys.stderr.write(f"Recording which lines {' '.join(tests)} run; this is done once.\n")
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        run = space.record(tests, data_file)
        if not any(run.result["lines"].values()):
            raise PytestDidNotRun(run.output)
        recording = Recording(
            fingerprint=fingerprint,
            seconds=run.result["seconds"],
            lines=run.result["lines"],
            failed=list(run.failed),
        )
        recording_file.write_text(json.dumps(recording), encoding="utf-8")
    data = CoverageData(str(data_file))
    data.read()
    return CoverageMap(root, data, recording)


def fingerprint_of(root: Path, tests: Sequence[str]) -> str:
    """Return a digest of everything that determines which test runs which line."""
    digest = hashlib.sha256(repr((sys.version_info, sorted(tests))).encode())
    for folder in ("src", "tests"):
        for path in sorted((root / folder).rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(path.relative_to(root).as_posix().encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
