"""Run pytest inside the copied tree: `python pytest_runner.py request.json`.

This is a separate program. It imports nothing of this package, because in its process the package
`tests` is the copied one. It records which lines each test runs, or runs chosen tests in order.
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

DATA_BYTES_MAX: Final = 4 << 30  # a mutant that allocates without end gets a MemoryError


class RunRequest(TypedDict):
    """What to run. If `chosen` is None, record all tests that `arguments` select."""

    arguments: list[str]
    chosen: list[str] | None
    recorded: list[str]
    source: str
    data_file: str
    result_file: str


class RunResult(TypedDict):
    """The result of a run. Seconds and lines are those of tests that passed while recording."""

    failed: list[str]
    seconds: dict[str, float]
    lines: dict[str, int]


class OutcomePlugin:
    """Records which tests failed, which passed, and their durations."""

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


class CoveragePlugin:
    """Records the lines that each test runs, with the test's id as the context of coverage."""

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
        """Return the number of lines that each test ran."""
        data = self.coverage.get_data()
        counts: Counter[str] = Counter()
        for path in data.measured_files():
            for contexts in data.contexts_by_lineno(path).values():
                counts.update(contexts)
        return counts


class ChosenTestsPlugin:
    """Selects the chosen tests, in their order."""

    def __init__(self, chosen: list[str], recorded: list[str]) -> None:
        self._ranks = {test: rank for rank, test in enumerate(chosen)}
        self._recorded = set(recorded)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # A mutated constant can change the ids of parametrized tests. Tests with new ids run if
        # any test of the same function was chosen.
        functions = {test.partition("[")[0] for test in self._ranks}
        last_rank = len(self._ranks)
        items[:] = sorted(
            (
                item
                for item in items
                if item.nodeid in self._ranks
                or (
                    item.nodeid not in self._recorded and item.nodeid.partition("[")[0] in functions
                )
            ),
            key=lambda item: self._ranks.get(item.nodeid, last_rank),
        )


def record(request: RunRequest) -> tuple[int, RunResult]:
    recorder, outcomes = CoveragePlugin(request["source"], request["data_file"]), OutcomePlugin()
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
    outcomes = OutcomePlugin()
    plugins = [ChosenTestsPlugin(chosen, request["recorded"]), outcomes]
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
