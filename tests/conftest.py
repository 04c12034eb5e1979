"""Hypothesis profiles: "ci" by default, "long" for a night of fuzzing (HYPOTHESIS_PROFILE=long),
"find" where it only matters whether a test fails.

A test that is a coroutine runs in a loop of its own. Tests of the Spark session come first. A test
marked `both_paths` runs with the native module and without it.
"""

from __future__ import annotations

import asyncio
import inspect
import os

import pytest
from hypothesis import Phase, settings

from escrowmq.native import SWITCH, load_native

settings.register_profile("ci", deadline=None, max_examples=60, print_blob=True)
settings.register_profile("long", deadline=None, max_examples=1_000, print_blob=True)
settings.register_profile(
    "find", deadline=None, max_examples=60, phases=[Phase.explicit, Phase.generate], database=None
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one worker run all tests of the shared Spark session, so that only one has to start it.

    pytest-xdist gives each worker a contiguous part of the list, and a worker without work takes
    tests from the end of another part. So the tests at the very beginning stay together.
    """
    items.sort(key=lambda item: "spark" not in getattr(item, "fixturenames", ()))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that is marked `both_paths` once with the native module, and once without it."""
    if metafunc.definition.get_closest_marker("both_paths"):
        paths = ["python"] if load_native({}).module is None else ["native", "python"]
        metafunc.fixturenames.insert(0, "request_path")
        metafunc.parametrize("request_path", paths, indirect=True)


@pytest.fixture
def request_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let every broker and store of a test take this path, also in processes that it starts."""
    path: str = request.param
    monkeypatch.setenv(SWITCH, "1" if path == "native" else "0")
    return path


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    # pytest has no public name for the arguments of a test.
    wanted = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True
