"""Subscriptions and the message filters that they are compiled to."""

from __future__ import annotations

import pytest

from escrowmq.consume.subscription import (
    EXPRESSION_CHARS_MAX,
    MATCH_ALL,
    SQL_COMPARISONS_MAX,
    Subscription,
    compile_subscription,
    parse_heartbeat_subscription,
    parse_subscription,
)
from escrowmq.errors import InvalidSubscription
from escrowmq.message.filter import SQL92, TAG
from escrowmq.message.keys import java_hash, tags_and_keys
from escrowmq.message.record import PROPERTIES_BYTES_MAX


@pytest.mark.parametrize(
    ("expression", "tags"),
    [
        ("*", ()),
        ("", ()),
        (None, ()),
        ("   ", ()),
        (" * ", ()),
        ("a", ("a",)),
        ("a || b", ("a", "b")),
        ("a||b", ("a", "b")),
        ("  a  ||  b  ", ("a", "b")),
        ("a || a || b", ("a", "b")),
        ("a ||", ("a",)),
        ("|| a", ("a",)),
        ("a || || b", ("a", "b")),
        ("a|b", ("a|b",)),
        ("a|||b", ("a", "|b")),
        ("a || *", ("a", "*")),
        ("two words || 标签", ("two words", "标签")),
    ],
)
def test_an_expression_is_split_into_tags(expression: str | None, tags: tuple[str, ...]) -> None:
    subscription = parse_subscription("orders", expression, version=7)
    assert subscription.tags == tags
    assert (subscription.tag_filter.tags_codes or set()) == {java_hash(tag) for tag in tags}
    assert (subscription.topic, subscription.expression_type, subscription.version) == (
        "orders",
        "TAG",
        7,
    )


@pytest.mark.parametrize("expression_type", [None, "", "TAG"])
def test_the_default_expression_type_is_tags(expression_type: str | None) -> None:
    assert parse_subscription("orders", "a", expression_type=expression_type).tags == ("a",)


@pytest.mark.parametrize(
    ("expression", "expression_type"),
    [
        ("||", "TAG"),
        (" || ", "TAG"),
        ("|| || ||", "TAG"),
        ("a", "XPATH"),
        ("x" * (EXPRESSION_CHARS_MAX + 1), "TAG"),
        ("x" * (EXPRESSION_CHARS_MAX + 1), "SQL92"),
    ],
)
def test_an_invalid_expression_is_an_error(expression: str, expression_type: str) -> None:
    with pytest.raises(InvalidSubscription):
        parse_subscription("orders", expression, expression_type=expression_type)


@pytest.mark.parametrize("expression_type", [TAG, SQL92])
def test_an_expression_as_long_as_the_longest_properties_is_accepted(expression_type: str) -> None:
    tag = "x" * PROPERTIES_BYTES_MAX
    expression = tag if expression_type == TAG else f"a = '{tag}'"
    for parse in (parse_subscription, parse_heartbeat_subscription):
        subscription = parse("orders", expression, expression_type=expression_type, version=1)
        assert subscription.expression == expression


def test_sql_filters_by_properties_and_not_by_tags() -> None:
    subscription = parse_subscription("orders", "price > 3", expression_type=SQL92, version=1)
    assert subscription == Subscription(
        topic="orders", expression="price > 3", expression_type="SQL92", version=1
    )
    message_filter = compile_subscription(subscription)
    assert message_filter.tags_codes is None
    assert not message_filter.matches_all
    assert message_filter.matches(7, b"price\x014\x02")
    assert not message_filter.matches(7, b"price\x013\x02")


def test_an_expression_of_a_heartbeat_is_compiled_when_it_is_needed() -> None:
    subscription = parse_heartbeat_subscription(
        "orders", " price > 3 ", expression_type=SQL92, version=7
    )
    assert compile_subscription(subscription).matches(0, b"price\x014\x02")
    invalid = parse_heartbeat_subscription("orders", "price >", expression_type=SQL92, version=7)
    with pytest.raises(InvalidSubscription, match="at character 8"):
        compile_subscription(invalid)
    for expression, expression_type in (("||", TAG), ("x" * (EXPRESSION_CHARS_MAX + 1), SQL92)):
        with pytest.raises(InvalidSubscription):
            parse_heartbeat_subscription(
                "orders", expression, expression_type=expression_type, version=7
            )


@pytest.mark.parametrize("expression", ["a = 1234", " OR ".join(["a = 1234"] * 60)])
def test_an_expression_is_compiled_once(expression: str) -> None:
    filters = [
        compile_subscription(parse_subscription(topic, expression, expression_type=SQL92))
        for topic in ("orders", "stock")
    ]
    assert filters[0] is filters[1]


def test_a_long_expression_tests_fewer_messages_per_read() -> None:
    short = parse_subscription("orders", "a = 1", expression_type=SQL92)
    long = parse_subscription("orders", " OR ".join(["a = 1"] * 9), expression_type=SQL92)
    assert compile_subscription(short).scan_max == SQL_COMPARISONS_MAX
    assert compile_subscription(long).scan_max == SQL_COMPARISONS_MAX // 10


def test_the_filter_of_all_messages_tests_nothing() -> None:
    message_filter = compile_subscription(parse_subscription("orders", "*"))
    assert message_filter == MATCH_ALL
    assert message_filter.matches_all
    assert message_filter.matches(7, b"")


@pytest.mark.parametrize(
    ("properties", "matches"),
    [
        (b"TAGS\x01paid\x02", True),
        (b"TAGS\x01shipped\x02", True),
        (b"TAGS\x01lost\x02", False),
        (b"KEYS\x01paid\x02", False),
        (b"", False),
    ],
)
def test_tags_are_compared_by_the_code_of_the_queue_entry(properties: bytes, matches: bool) -> None:
    message_filter = compile_subscription(parse_subscription("orders", "paid || shipped"))
    tags_code, _ = tags_and_keys("orders", properties, 0)
    assert message_filter.matches(tags_code, properties) is matches


def test_a_tag_with_the_same_hash_matches() -> None:
    """The client compares the tags themselves and drops such a message."""
    message_filter = compile_subscription(parse_subscription("orders", "Aa"))
    assert message_filter.matches(java_hash("BB"), b"TAGS\x01BB\x02")
