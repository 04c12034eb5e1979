"""TAG expressions, row by row, and the filter made of them."""

from __future__ import annotations

import pytest

from escrowmq.consume.subscription import (
    EXPRESSION_CHARS_MAX,
    SQL92,
    TAG,
    Subscription,
    heard_subscription,
    parse_subscription,
    tag_filter,
    with_filter,
)
from escrowmq.errors import BadSubscription
from escrowmq.message.keys import derive, java_hash


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
    assert subscription.codes == {java_hash(tag) for tag in tags}
    assert (subscription.topic, subscription.kind, subscription.version) == ("orders", "TAG", 7)


@pytest.mark.parametrize("kind", [None, "", "TAG"])
def test_no_kind_means_tags(kind: str | None) -> None:
    assert parse_subscription("orders", "a", kind=kind).tags == ("a",)


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
    with pytest.raises(BadSubscription):
        parse_subscription("orders", expression, kind=kind)


def test_sql_filters_by_properties_not_by_tags() -> None:
    subscription = parse_subscription("orders", "price > 3", kind=SQL92, version=1)
    assert subscription == Subscription(
        topic="orders", expression="price > 3", kind="SQL92", version=1
    )
    assert tag_filter(subscription) is None
    assert subscription.sql is not None
    assert subscription.sql.wants(b"price\x014\x02")


def test_an_expression_of_a_heartbeat_is_compiled_when_it_is_needed() -> None:
    heard = heard_subscription("orders", " price > 3 ", kind=SQL92, version=7)
    assert heard.sql is None
    needed = with_filter(heard)
    assert needed == heard
    assert needed.sql is not None
    assert needed.sql.wants(b"price\x014\x02")
    flawed = heard_subscription("orders", "price >", kind=SQL92, version=7)
    with pytest.raises(BadSubscription, match="at character 8"):
        with_filter(flawed)
    for expression, kind in (("||", TAG), ("x" * (EXPRESSION_CHARS_MAX + 1), SQL92)):
        with pytest.raises(BadSubscription):
            heard_subscription("orders", expression, kind=kind, version=7)


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
    code, _ = derive("orders", properties, 0)
    assert accepts(code) is passes


def test_tags_with_the_same_hash_pass_and_are_the_clients_to_drop() -> None:
    accepts = tag_filter(parse_subscription("orders", "Aa"))
    assert accepts is not None
    assert accepts(java_hash("BB"))
