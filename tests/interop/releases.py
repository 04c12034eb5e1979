"""Run a test with every release of Apache RocketMQ, and only with some of them in CI.

To start a release takes many seconds, 5.5.0 twice as many as 4.9.7. `make interop` runs everything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import pytest

from tests.interop import jars


def with_releases(fixture: str, *, in_ci: Collection[str]) -> pytest.MarkDecorator:
    """Run a test with each release as the parameter of a fixture; CI runs those in `in_ci`."""
    return pytest.mark.parametrize(
        fixture,
        [
            pytest.param(version, marks=[] if version in in_ci else pytest.mark.nightly)
            for version in jars.VERSIONS
        ],
        indirect=True,
    )


def with_cases_and_releases(
    names: tuple[str, ...],
    cases: Mapping[str, tuple[object, ...]],
    *,
    in_ci: Collection[tuple[str, str]],
) -> pytest.MarkDecorator:
    """Run a test for each case and release; CI runs the pairs of release and case in `in_ci`.

    `cases` has the arguments `names` of each case by its id. The release is the fixture `version`.
    """
    return pytest.mark.parametrize(
        ("version", *names),
        [
            pytest.param(
                *(version, *values),
                id=f"{version}-{case}",
                marks=[] if (version, case) in in_ci else pytest.mark.nightly,
            )
            for case, values in cases.items()
            for version in jars.VERSIONS
        ],
        indirect=["version"],
    )
