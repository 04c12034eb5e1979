"""Namespaces in RocketMQ's form, for topics, groups, retries and dead letters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.client.messages import Namespace
from escrowmq.message.names import is_shared_name

names = st.text(st.sampled_from("abcXYZ_-1"), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("plain", "wrapped"),
    [
        ("orders", "shop%orders"),
        ("%RETRY%billing", "%RETRY%shop%billing"),
        ("%DLQ%billing", "%DLQ%shop%billing"),
        ("TBW102", "TBW102"),
        ("rmq_sys_wheel_timer", "rmq_sys_wheel_timer"),
        ("CID_RMQ_SYS_TRANS", "CID_RMQ_SYS_TRANS"),
        ("", ""),
    ],
)
def test_a_name_is_wrapped_as_rocketmq_does(plain: str, wrapped: str) -> None:
    namespace = Namespace("shop")
    assert namespace.wrap(plain) == wrapped
    assert namespace.unwrap(wrapped) == plain


def test_without_a_namespace_names_do_not_change() -> None:
    assert Namespace().wrap("orders") == Namespace().unwrap("orders") == "orders"


def test_a_name_of_another_namespace_does_not_change() -> None:
    assert Namespace("shop").unwrap("bank%orders") == "bank%orders"


def test_a_namespace_with_a_separator_is_refused() -> None:
    with pytest.raises(ValueError, match="%"):
        Namespace("a%b")


@given(names, names, st.sampled_from(["", "%RETRY%", "%DLQ%"]))
def test_unwrapping_undoes_wrapping_and_wrapping_twice_equals_wrapping_once(
    namespace: str, name: str, prefix: str
) -> None:
    wrapper = Namespace(namespace)
    wrapped = wrapper.wrap(prefix + name)
    assert wrapper.wrap(wrapped) == wrapped
    assert wrapper.unwrap(wrapped) == prefix + name
    assert is_shared_name(name) or namespace in wrapped
