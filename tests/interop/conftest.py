"""`version`: a release of Apache RocketMQ that this machine can run, each in turn."""

from __future__ import annotations

import pytest

from tests.interop import jars


@pytest.fixture(params=jars.VERSIONS)
def version(request: pytest.FixtureRequest) -> str:
    wanted: str = request.param
    if reason := jars.unavailable_reason():
        pytest.skip(reason)
    try:
        jars.fetch(wanted)
    except jars.Unavailable as error:
        pytest.skip(str(error))
    return wanted
