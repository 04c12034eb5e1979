"""Telemetry is optional and needs OpenTelemetry."""

from __future__ import annotations

import sys

import pytest

from escrowmq import Producer
from escrowmq.client.telemetry import Telemetry


async def test_without_opentelemetry_the_error_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(ValueError, match=r"pip install 'escrowmq\[otel\]'"):
        Producer("127.0.0.1:1", group="g", telemetry=True)


def test_telemetry_is_off_by_default() -> None:
    assert Telemetry.from_option(None) is None
    assert Telemetry.from_option(False) is None
