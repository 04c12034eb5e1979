"""The arguments that a supervisor passes to its brokers."""

from __future__ import annotations

import pytest

# Private: without processes there is no public way to see the arguments.
from escrowmq.server.supervisor import _without_brokers_option


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["serve", "--brokers", "2"], ["serve"]),
        (["serve", "--brokers=2", "-c", "x"], ["serve", "-c", "x"]),
        (["serve", "--brokers", "2", "--data", "--brokers"], ["serve", "--data"]),
        (["serve", "-c", "2"], ["serve", "-c", "2"]),
    ],
)
def test_brokers_get_all_arguments_except_brokers(
    arguments: list[str], expected: list[str]
) -> None:
    assert list(_without_brokers_option(arguments)) == expected
