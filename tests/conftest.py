"""Hypothesis profiles: "ci" by default, "long" for a night of fuzzing (HYPOTHESIS_PROFILE=long).

A test that is a coroutine runs in a loop of its own. Tests of the Spark session come first.
"""

from __future__ import annotations

import asyncio
import inspect
import os

import pytest
from hypothesis import settings

settings.register_profile("ci", deadline=None, max_examples=60, print_blob=True)
settings.register_profile("long", deadline=None, max_examples=1_000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let one worker run all tests of the shared Spark session, so that only one has to start it.

    pytest-xdist gives each worker a contiguous part of the list, and a worker without work takes
    tests from the end of another part. So the tests at the very beginning stay together.
    """
    items.sort(key=lambda item: "spark" not in getattr(item, "fixturenames", ()))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    # pytest has no public name for the arguments of a test.
    wanted = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True
