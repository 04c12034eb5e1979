"""What a checker can be registered for."""

from __future__ import annotations

import pytest

from escrowmq import ReceivedMessage, Verdict
from escrowmq.client.producer.checker import CheckerRegistry


def always_commit(message: ReceivedMessage) -> Verdict:
    return Verdict.COMMIT


@pytest.mark.parametrize(
    "place",
    [
        {"topic": "orders"},
        {"topic": "orders", "tag": "paid"},
        {"topic": "*"},
        {"name": "transfer"},
    ],
    ids=str,
)
def test_a_checker_is_registered_for_a_topic_a_tag_all_topics_or_a_name(
    place: dict[str, str],
) -> None:
    checkers = CheckerRegistry("g")
    assert not checkers.has_checkers()
    checkers.register(always_commit, **place)
    assert checkers.has_checkers()


@pytest.mark.parametrize("place", [{"topic": "*"}, {"name": "transfer"}], ids=str)
def test_a_tag_without_its_topic_is_refused(place: dict[str, str]) -> None:
    """The tag would never be compared: only a checker for one topic looks at tags."""
    checkers = CheckerRegistry("g")
    with pytest.raises(ValueError, match="needs the topic"):
        checkers.register(always_commit, tag="paid", **place)
    assert not checkers.has_checkers()


@pytest.mark.parametrize("place", [{}, {"tag": "paid"}, {"topic": "t", "name": "n"}], ids=str)
def test_a_checker_for_nothing_or_for_two_things_is_refused(place: dict[str, str]) -> None:
    checkers = CheckerRegistry("g")
    with pytest.raises(ValueError, match="for a topic"):
        checkers.register(always_commit, **place)
    assert not checkers.has_checkers()
