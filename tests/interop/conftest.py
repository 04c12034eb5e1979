"""Fixtures of the tests that run Apache RocketMQ."""

from __future__ import annotations

import pytest

from tests.interop import jars
from tests.interop.skipping import call_or_skip


@pytest.fixture(params=jars.VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    """Return a release of Apache RocketMQ whose jars are fetched; each test runs with every one."""
    release: str = request.param
    call_or_skip(f"RocketMQ {release}", lambda: jars.fetch(release))
    return release
