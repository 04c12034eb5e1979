"""What a supervisor hands on to its brokers."""

from __future__ import annotations

import pytest

# Private: the option's parsing is not reachable without processes.
from escrowmq.server.supervisor import _without_brokers_option


@pytest.mark.parametrize(
    ("given", "handed_on"),
    [
        (["serve", "--brokers", "2"], ["serve"]),
        (["serve", "--brokers=2", "-c", "x"], ["serve", "-c", "x"]),
        (["serve", "--brokers", "2", "--data", "--brokers"], ["serve", "--data"]),
        (["serve", "-c", "2"], ["serve", "-c", "2"]),
    ],
)
def test_children_get_all_arguments_except_brokers(given: list[str], handed_on: list[str]) -> None:
    assert list(_without_brokers_option(given)) == handed_on
