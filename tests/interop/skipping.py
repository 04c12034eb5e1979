"""Skip a test if this machine lacks a program that the test runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from tests.interop.jars import Unavailable

T = TypeVar("T")


def call_or_skip(program: str, call: Callable[[], T]) -> T:
    """Return the result of the call. Skips the test if the call raises Unavailable."""
    try:
        return call()
    except Unavailable as error:
        pytest.skip(f"{program}: {error}")
