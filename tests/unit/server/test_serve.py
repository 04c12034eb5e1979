"""What the parts of the server are told of the configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from escrowmq.config import Config
from escrowmq.server.rules import store_settings, tick_interval_s


@pytest.mark.parametrize(("precision_ms", "interval_s"), [(1, 0.001), (50, 0.05), (1000, 0.1)])
def test_messages_that_are_due_are_looked_for_as_often_as_is_set(
    precision_ms: int, interval_s: float
) -> None:
    config = Config()
    delay = replace(config.delay, timer_precision_ms=precision_ms)
    assert tick_interval_s(replace(config, delay=delay)) == interval_s


@pytest.mark.parametrize("is_on", [True, False])
def test_the_store_is_told_whether_to_index(is_on: bool) -> None:
    config = Config()
    store = replace(config.store, index_enabled=is_on)
    assert store_settings(replace(config, store=store)).is_index_enabled is is_on
