"""TAG expressions, row by row, and the filter made of them."""

from __future__ import annotations

import pytest

from escrowmq.consume.subscription import (
    EXPRESSION_CHARS_MAX,
    SQL92,
    TAG,
    Subscription,
    compile_subscription,
    parse_heartbeat_subscription,
    parse_subscription,
    tag_filter,
)
from escrowmq.errors import InvalidSubscription
from escrowmq.message.keys import java_hash, tags_and_keys


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
def test_tags_are_read_off_the_expression(expression: str | None, tags: tuple[str, ...]) -> None:
    subscription = parse_subscription("orders", expression, version=7)
    assert subscription.tags == tags
    assert subscription.tags_codes == {java_hash(tag) for tag in tags}
    assert (subscription.topic, subscription.expression_type, subscription.version) == (
        "orders",
        "TAG",
        7,
    )


@pytest.mark.parametrize("kind", [None, "", "TAG"])
def test_no_kind_means_tags(kind: str | None) -> None:
    assert parse_subscription("orders", "a", expression_type=kind).tags == ("a",)


@pytest.mark.parametrize(
    ("expression", "kind"),
    [
        ("||", "TAG"),
        (" || ", "TAG"),
        ("|| || ||", "TAG"),
        ("a", "XPATH"),
        ("x" * (EXPRESSION_CHARS_MAX + 1), "TAG"),
        ("x" * (EXPRESSION_CHARS_MAX + 1), "SQL92"),
    ],
)
def test_an_expression_that_cannot_be_read_is_an_error(expression: str, kind: str) -> None:
    with pytest.raises(InvalidSubscription):
        parse_subscription("orders", expression, expression_type=kind)


def test_sql_filters_by_properties_not_by_tags() -> None:
    subscription = parse_subscription("orders", "price > 3", expression_type=SQL92, version=1)
    assert subscription == Subscription(
        topic="orders", expression="price > 3", expression_type="SQL92", version=1
    )
    assert tag_filter(subscription) is None
    assert subscription.compiled_filter is not None
    assert subscription.compiled_filter.matches_encoded(b"price\x014\x02")


def test_an_expression_of_a_heartbeat_is_compiled_when_it_is_needed() -> None:
    heard = parse_heartbeat_subscription("orders", " price > 3 ", expression_type=SQL92, version=7)
    assert heard.compiled_filter is None
    needed = compile_subscription(heard)
    assert needed == heard
    assert needed.compiled_filter is not None
    assert needed.compiled_filter.matches_encoded(b"price\x014\x02")
    flawed = parse_heartbeat_subscription("orders", "price >", expression_type=SQL92, version=7)
    with pytest.raises(InvalidSubscription, match="at character 8"):
        compile_subscription(flawed)
    for expression, kind in (("||", TAG), ("x" * (EXPRESSION_CHARS_MAX + 1), SQL92)):
        with pytest.raises(InvalidSubscription):
            parse_heartbeat_subscription("orders", expression, expression_type=kind, version=7)


def test_everything_needs_no_filter() -> None:
    assert tag_filter(parse_subscription("orders", "*")) is None


@pytest.mark.parametrize(
    ("properties", "passes"),
    [
        (b"TAGS\x01paid\x02", True),
        (b"TAGS\x01shipped\x02", True),
        (b"TAGS\x01lost\x02", False),
        (b"KEYS\x01paid\x02", False),
        (b"", False),
    ],
)
def test_the_filter_is_asked_with_what_the_store_puts_into_a_queue(
    properties: bytes, passes: bool
) -> None:
    accepts = tag_filter(parse_subscription("orders", "paid || shipped"))
    assert accepts is not None
    code, _ = tags_and_keys("orders", properties, 0)
    assert accepts(code) is passes


def test_tags_with_the_same_hash_pass_and_are_the_clients_to_drop() -> None:
    accepts = tag_filter(parse_subscription("orders", "Aa"))
    assert accepts is not None
    assert accepts(java_hash("BB"))
