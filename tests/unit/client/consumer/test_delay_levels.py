"""The delay level that is nearest to an exact delay, for brokers that know only levels."""

from __future__ import annotations

import pytest

from escrowmq.client.consumer.queue_client import DELAY_LEVELS_S, delay_level_for
from escrowmq.config import DelayConfig


def test_the_levels_are_those_of_a_broker_with_default_settings() -> None:
    assert tuple(level_s * 1000 for level_s in DELAY_LEVELS_S) == DelayConfig().delay_levels_ms


@pytest.mark.parametrize(
    ("delay_s", "level"),
    [(0, 1), (0.2, 1), (1, 1), (1.01, 2), (10, 3), (45, 5), (7_200, 18), (86_400, 18)],
)
def test_no_level_is_shorter_than_the_delay_unless_there_is_none(
    delay_s: float, level: int
) -> None:
    assert delay_level_for(delay_s) == level
