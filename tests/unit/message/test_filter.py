"""Filter expressions as users write them, and as heartbeats contain them."""

from __future__ import annotations

import pytest

from escrowmq import SqlFilter
from escrowmq.client.heartbeat import subscription_entry
from escrowmq.errors import InvalidSubscription
from escrowmq.message.filter import FilterExpression, parse_filter, parse_tags


@pytest.mark.parametrize("text", ["*", "", " * ", "a || *"])
def test_a_star_or_an_empty_text_matches_every_message(text: str) -> None:
    assert parse_filter(text) == FilterExpression()
    assert parse_filter(text).matches_tag("any")


def test_tags_are_compared_by_name_and_sent_with_their_hashes() -> None:
    tag_filter = parse_filter(" b|| a ||")
    matching = [tag for tag in ("a", "b", "c", "") if tag_filter.matches_tag(tag)]
    assert matching == ["a", "b"]
    entry = subscription_entry("t", tag_filter, 7)
    assert (entry.sub_string, entry.expression_type, entry.sub_version) == ("a || b", "TAG", 7)
    assert (entry.tags_set, entry.code_set) == (["a", "b"], [97, 98])


def test_an_sql_expression_is_sent_unchanged() -> None:
    sql_filter = parse_filter(SqlFilter("a > 3"))
    entry = subscription_entry("t", sql_filter, 7)
    assert (entry.sub_string, entry.expression_type, entry.tags_set) == ("a > 3", "SQL92", [])
    assert sql_filter.matches_tag("any")


def test_combined_filters_match_what_either_of_them_matches() -> None:
    a, b, match_all = parse_filter("a"), parse_filter("b"), FilterExpression()
    assert a | b == parse_filter("a || b")
    assert a | match_all == match_all | a == match_all
    sql_filter = parse_filter(SqlFilter("a > 3"))
    assert sql_filter | sql_filter == sql_filter
    with pytest.raises(InvalidSubscription, match="one expression"):
        assert sql_filter | a


@pytest.mark.parametrize("expression", ["||", SqlFilter(" "), 3, None])
def test_an_invalid_expression_is_refused(expression: object) -> None:
    with pytest.raises(InvalidSubscription):
        parse_filter(expression)  # type: ignore[arg-type]  # as an untyped caller may do


def test_tags_keep_their_order_and_a_star_among_tags_is_a_tag() -> None:
    # The broker parses lists of tags as RocketMQ does, where only a single star means everything.
    assert parse_tags("b || a||b|| ") == ("b", "a")
    assert parse_tags("a || *") == ("a", "*")
    assert parse_tags(" * ") == parse_tags("") == ()
