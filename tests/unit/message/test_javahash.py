"""Java's hash code, compared with values computed by a JDK."""

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
def test_a_hash_equals_that_of_a_jdk(text: str, value: int) -> None:
    assert java_hash(text) == value
    assert unsigned_hash(text) == value % (1 << 32)


def test_two_texts_collide_as_in_java() -> None:
    assert java_hash("Aa") == java_hash("BB") == 2112


@pytest.mark.parametrize("length", [255, 256, 257, 512, 513, 32_767])
def test_a_long_text_hashed_in_parts_equals_the_plain_algorithm(length: int) -> None:
    expected = 0
    for _ in range(length):
        expected = (31 * expected + ord("z")) % (1 << 32)
    assert unsigned_hash("z" * length) == expected
