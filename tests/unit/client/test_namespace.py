"""Names inside a namespace, and outside again."""

from __future__ import annotations

import pytest

from escrowmq.client.namespace import unwrap, wrap


@pytest.mark.parametrize(
    ("name", "wrapped"),
    [
        ("orders", "ns%orders"),
        ("ns%orders", "ns%orders"),
        ("%RETRY%group", "%RETRY%ns%group"),
        ("%DLQ%group", "%DLQ%ns%group"),
        ("TBW102", "TBW102"),
        ("rmq_sys_wheel_timer", "rmq_sys_wheel_timer"),
        ("", ""),
    ],
)
def test_a_name_is_wrapped_once_behind_its_mark(name: str, wrapped: str) -> None:
    assert wrap("ns", name) == wrapped
    assert wrap("ns", wrapped) == wrapped
    assert unwrap("ns", wrapped) == name.replace("ns%", "")
    assert wrap("", name) == unwrap("", name) == name
