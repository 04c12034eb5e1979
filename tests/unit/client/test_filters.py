"""What a consumer wants, as it is written and as it goes on the wire."""

from __future__ import annotations

import pytest

from escrowmq import SqlFilter
from escrowmq.client.filters import FilterExpression, parse_filter
from escrowmq.errors import InvalidSubscription


@pytest.mark.parametrize("text", ["*", "", " * ", "a || *"])
def test_a_star_or_nothing_is_everything(text: str) -> None:
    assert parse_filter(text) == FilterExpression()
    assert parse_filter(text).matches_tag("whatever")


def test_tags_are_told_by_name_and_by_hash() -> None:
    wanted = parse_filter(" b|| a ||")
    assert [wanted.matches_tag(tag) for tag in ("a", "b", "c", "")] == [True, True, False, False]
    entry = wanted.subscription_entry("t", 7)
    assert (entry.sub_string, entry.expression_type, entry.sub_version) == ("a || b", "TAG", 7)
    assert (entry.tags_set, entry.code_set) == (["a", "b"], [97, 98])


def test_an_expression_goes_as_it_is_and_is_the_broker_s_to_judge() -> None:
    wanted = parse_filter(SqlFilter("a > 3"))
    entry = wanted.subscription_entry("t", 7)
    assert (entry.sub_string, entry.expression_type, entry.tags_set) == ("a > 3", "SQL92", [])
    assert wanted.matches_tag("any")


def test_two_wishes_together_want_what_either_wants() -> None:
    a, b, everything = parse_filter("a"), parse_filter("b"), FilterExpression()
    assert a | b == parse_filter("a || b")
    assert a | everything == everything | a == everything
    sql = parse_filter(SqlFilter("a > 3"))
    assert sql | sql == sql
    with pytest.raises(InvalidSubscription, match="one expression"):
        assert sql | a


@pytest.mark.parametrize("wanted", ["||", SqlFilter(" "), 3, None])
def test_what_cannot_be_read_is_refused(wanted: object) -> None:
    with pytest.raises(InvalidSubscription):
        parse_filter(wanted)  # type: ignore[arg-type]
