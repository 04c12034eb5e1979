"""Java's hash code: values that a JDK gave."""

from __future__ import annotations

import pytest

from escrowmq.message.keys import java_hash, unsigned_hash


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", 0),
        ("d", 100),
        ("TagA", 2598919),
        ("中文tag", 2076969056),
        ("\U0001f600", 1772899),
        ("TopicTest#KEY1", -1656969516),
        ("polygenelubricants", -2147483648),
    ],
)
def test_known_hashes(text: str, value: int) -> None:
    assert java_hash(text) == value
    assert unsigned_hash(text) == value % (1 << 32)


def test_text_with_the_same_sum_of_products_collides_as_in_java() -> None:
    assert java_hash("Aa") == java_hash("BB") == 2112


@pytest.mark.parametrize("length", [255, 256, 257, 512, 513, 32_767])
def test_long_text_is_hashed_in_parts_to_the_same(length: int) -> None:
    expected = 0
    for _ in range(length):
        expected = (31 * expected + ord("z")) % (1 << 32)
    assert unsigned_hash("z" * length) == expected
