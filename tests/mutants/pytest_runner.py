"""Runs pytest inside the copied tree: `python pytest_runner.py request.json`.

A program of its own that imports nothing of this package, because in the copy the package `tests`
is the copied one. It records what each test runs, or runs chosen tests in a given order.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypedDict

import coverage
import pytest

DATA_BYTES_MAX: Final = 4 << 30  # a mutant that collects without end gets a MemoryError


class RunRequest(TypedDict):
    """What to run: `chosen` None records all tests that `arguments` select."""

    arguments: list[str]
    chosen: list[str] | None
    recorded: list[str]
    source: str
    data_file: str
    result_file: str


class RunResult(TypedDict):
    """What came of it. Seconds and lines are known of tests that passed in a recorded run."""

    failed: list[str]
    seconds: dict[str, float]
    lines: dict[str, int]


class Outcomes:
    """Notes which tests failed and which passed, with the time they took."""

    def __init__(self) -> None:
        self.failed: dict[str, None] = {}
        self.passed: dict[str, None] = {}
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed[report.nodeid] = None
        elif report.passed and report.when == "call":
            self.passed[report.nodeid] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = None


class Recorder:
    """Measures the lines that each test runs, under the test's id as coverage's context."""

    def __init__(self, source: str, data_file: str) -> None:
        concurrency = ["thread"]
        if importlib.util.find_spec("greenlet"):
            concurrency.append("greenlet")
        self.coverage = coverage.Coverage(
            data_file=data_file,
            source=[source],
            concurrency=concurrency,
            config_file=False,
            messages=False,
        )
        self.coverage.set_option("run:relative_files", True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self.coverage.switch_context("")

    def lines_of_each_test(self) -> Counter[str]:
        """Return how many lines each test ran."""
        data = self.coverage.get_data()
        counts: Counter[str] = Counter()
        for path in data.measured_files():
            for contexts in data.contexts_by_lineno(path).values():
                counts.update(contexts)
        return counts


class Chooser:
    """Keeps the chosen tests, in the order given."""

    def __init__(self, chosen: list[str], recorded: list[str]) -> None:
        self._ranks = {test: rank for rank, test in enumerate(chosen)}
        self._recorded = set(recorded)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # A mutated constant can change the ids of parametrized tests. Cases with new ids run if
        # any case of their function was chosen.
        functions = {test.partition("[")[0] for test in self._ranks}
        last = len(self._ranks)
        items[:] = sorted(
            (
                item
                for item in items
                if item.nodeid in self._ranks
                or (
                    item.nodeid not in self._recorded and item.nodeid.partition("[")[0] in functions
                )
            ),
            key=lambda item: self._ranks.get(item.nodeid, last),
        )


def record(request: RunRequest) -> tuple[int, RunResult]:
    recorder, outcomes = Recorder(request["source"], request["data_file"]), Outcomes()
    recorder.coverage.start()
    try:
        code = pytest.main(request["arguments"], plugins=[recorder, outcomes])
    finally:
        recorder.coverage.stop()
        recorder.coverage.save()
    passed = [test for test in outcomes.passed if test not in outcomes.failed]
    lines = recorder.lines_of_each_test()
    result = RunResult(
        failed=list(outcomes.failed),
        seconds={test: round(outcomes.seconds[test], 4) for test in passed},
        lines={test: lines[test] for test in passed},
    )
    return int(code), result


def run_chosen(request: RunRequest, chosen: list[str]) -> tuple[int, RunResult]:
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES_MAX, DATA_BYTES_MAX))
    outcomes = Outcomes()
    plugins = [Chooser(chosen, request["recorded"]), outcomes]
    code = pytest.main(request["arguments"], plugins=plugins)
    return int(code), RunResult(failed=list(outcomes.failed), seconds={}, lines={})


def main() -> int:
    sys.path[0] = os.getcwd()  # as with `python -m pytest`, so that `tests` is the copied one
    request: RunRequest = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    chosen = request["chosen"]
    code, result = record(request) if chosen is None else run_chosen(request, chosen)
    Path(request["result_file"]).write_text(json.dumps(result), encoding="utf-8")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
