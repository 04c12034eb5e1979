"""What the store derives from a record: tags code, due time, keys, visibility."""

from __future__ import annotations

import pytest

from escrowmq.config import DelayConfig
from escrowmq.message.keys import has_keys, has_queue_entry, tags_and_keys
from escrowmq.message.properties import encode_properties

STORED_MS = 1_700_000_000_000
SCHEDULE = "SCHEDULE_TOPIC_XXXX"


def code(topic: str = "T", **properties: str) -> int:
    encoded = encode_properties(properties)
    return tags_and_keys(topic, encoded, STORED_MS, DelayConfig().delay_levels_ms)[0]


def keys(**properties: str) -> list[bytes]:
    return tags_and_keys("T", encode_properties(properties), STORED_MS)[1]


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("TagA", 2598919),
        ("d", 100),
        ("中文tag", 2076969056),
        ("polygenelubricants", -2147483648),
    ],
)
def test_the_tags_code_is_the_hash_of_the_whole_value(tag: str, expected: int) -> None:
    assert code(TAGS=tag) == expected
    assert code(A="x", TAGS=tag, Z="y") == expected


def test_without_tags_the_code_is_zero() -> None:
    assert code() == 0
    assert code(MYTAGS="TagA", TAGSX="TagA", A="TAGS") == 0


def test_the_last_separator_may_be_missing() -> None:
    assert tags_and_keys("T", b"KEYS\x01k\x02TAGS\x01TagA", 0) == (2598919, [b"k"])


def test_the_unique_key_comes_first_then_the_users_in_order() -> None:
    assert keys(KEYS="b a c", UNIQ_KEY="U") == [b"U", b"b", b"a", b"c"]
    assert keys(UNIQ_KEY="U", KEYS="b") == [b"U", b"b"]
    assert keys(KEYS="b") == [b"b"]
    assert keys(UNIQ_KEY="U") == [b"U"]
    assert keys(TAGS="t") == []


def test_several_spaces_make_no_empty_key() -> None:
    assert keys(KEYS="  a  b ") == [b"a", b"b"]
    assert keys(KEYS=" ") == []


@pytest.mark.parametrize("key", ["a\tb", "a\nb", "a\rb", "a\x0bb", "a\u00a0b"])
def test_only_a_space_separates_keys(key: str) -> None:
    assert keys(KEYS=f"{key} c") == [key.encode(), b"c"]


def test_a_unique_key_is_one_key_whatever_is_in_it() -> None:
    assert keys(UNIQ_KEY="a b") == [b"a b"]


@pytest.mark.parametrize(
    ("level", "delay_ms"),
    [
        ("1", 1_000),
        ("2", 5_000),
        ("3", 10_000),
        ("4", 30_000),
        ("5", 60_000),
        ("14", 600_000),
        ("15", 1_200_000),
        ("16", 1_800_000),
        ("17", 3_600_000),
        ("18", 7_200_000),
        ("19", 7_200_000),
        ("999999999999", 7_200_000),
    ],
)
def test_in_the_schedule_topic_the_code_is_the_due_time(level: str, delay_ms: int) -> None:
    assert code(SCHEDULE, TAGS="TagA", DELAY=level) == STORED_MS + delay_ms


@pytest.mark.parametrize("level", ["0", "-1", "x", "1.5", " ", "٣"])
def test_an_invalid_level_leaves_the_tags_code(level: str) -> None:
    assert code(SCHEDULE, TAGS="TagA", DELAY=level) == 2598919


def test_a_level_with_thousands_of_digits_is_only_a_high_level() -> None:
    assert code(SCHEDULE, DELAY="9" * 5_000) == STORED_MS + 7_200_000


def test_elsewhere_a_level_changes_nothing() -> None:
    assert code("T", TAGS="TagA", DELAY="3") == 2598919


@pytest.mark.parametrize(("level", "delay_ms"), [(b"1", 7_000), (b"2", 900), (b"3", 900)])
def test_the_due_time_follows_from_the_configured_levels(level: bytes, delay_ms: int) -> None:
    levels_ms = (7_000, 900)
    code, _ = tags_and_keys(SCHEDULE, b"DELAY\x01" + level, STORED_MS, levels_ms)
    assert code == STORED_MS + delay_ms


@pytest.mark.parametrize(
    ("sys_flag", "in_queue", "by_key"),
    [
        (0, True, True),
        (4, False, True),
        (8, True, True),
        (12, False, False),
        (0xFF3, True, True),
        (0xFF7, False, True),
        (0xFFB, True, True),
        (0xFFF, False, False),
    ],
)
def test_the_transaction_bits_decide_about_queue_entry_and_keys(
    sys_flag: int, in_queue: bool, by_key: bool
) -> None:
    assert has_queue_entry(sys_flag) is in_queue
    assert has_keys(sys_flag) is by_key
