"""Skip a test if this machine lacks a program that the test runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from tests.interop.jars import Unavailable


@contextlib.contextmanager
def skip_if_unavailable(program: str) -> Iterator[None]:
    """Skip the test if the block raises Unavailable."""
    try:
        yield
    except Unavailable as error:
        pytest.skip(f"{program}: {error}")
