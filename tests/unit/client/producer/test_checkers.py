"""Registration of checkers: for a topic, a tag or a transaction's name; and its options."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq import ReceivedMessage, Verdict
from escrowmq.client.producer.checker import CheckerRegistry


def always_commit(message: ReceivedMessage) -> Verdict:
    return Verdict.COMMIT


@pytest.mark.parametrize(
    "selection",
    [
        {"topic": "orders"},
        {"topic": "orders", "tag": "paid"},
        {"topic": "*"},
        {"name": "transfer"},
    ],
    ids=str,
)
def test_a_checker_is_registered_for_a_topic_a_tag_all_topics_or_a_name(
    selection: dict[str, str],
) -> None:
    checkers = CheckerRegistry("g")
    assert not checkers.has_checkers()
    checkers.register(always_commit, **selection)
    assert checkers.has_checkers()


@pytest.mark.parametrize("selection", [{"topic": "*"}, {"name": "transfer"}], ids=str)
def test_a_tag_without_its_topic_is_refused(selection: dict[str, str]) -> None:
    """Only a checker for one topic compares tags, so this tag would be ignored."""
    checkers = CheckerRegistry("g")
    with pytest.raises(ValueError, match="needs the topic"):
        checkers.register(always_commit, tag="paid", **selection)
    assert not checkers.has_checkers()


@pytest.mark.parametrize("selection", [{}, {"tag": "paid"}, {"topic": "t", "name": "n"}], ids=str)
def test_a_checker_for_nothing_or_for_two_things_is_refused(selection: dict[str, str]) -> None:
    checkers = CheckerRegistry("g")
    with pytest.raises(ValueError, match="for a topic"):
        checkers.register(always_commit, **selection)
    assert not checkers.has_checkers()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"concurrency": 0}, ValueError("check_concurrency must be at least 1, not 0")),
        ({"request_hold_max": -1}, ValueError("check_request_hold_max must be at least 0, not -1")),
        (
            {"executor": 5},
            TypeError("check_executor must be a concurrent.futures.Executor, not int"),
        ),
    ],
    ids=str,
)
def test_an_impossible_option_is_refused(options: dict[str, Any], error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        CheckerRegistry("g", **options)
