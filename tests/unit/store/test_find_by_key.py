"""Records are found by key, the newest first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from escrowmq.message.keys import java_hash
from escrowmq.store.store import MessageStore
from escrowmq.testing import MemoryDisk
from tests.support.store_appends import append, found_bodies, keyed, plain
from tests.support.stores import (
    NOW_MS,
    TINY,
    open_store,
    properties,
    sample,
)


@pytest.fixture(params=["in memory", "in files", "in both"])
def after_append(request: pytest.FixtureRequest) -> Callable[[MessageStore, int], None]:
    """Return a function to call after each append. It never, always or sometimes checkpoints.

    A checkpoint writes the keys to files, so they are in memory, in files or in both.
    """

    def checkpoint_sometimes(store: MessageStore, number: int) -> None:
        if request.param == "in files" or (request.param == "in both" and number % 7 == 3):
            store.checkpoint()

    return checkpoint_sometimes


@pytest.mark.parametrize("slots", [1, 7])
def test_keys_are_found_newest_first(
    after_append: Callable[[MessageStore, int], None], slots: int
) -> None:
    store = open_store(MemoryDisk(), replace(TINY, index_slots=slots))
    for number in range(30):
        append(store, sample(number), now_ms=NOW_MS + number)
        after_append(store, number)
    for number in range(30):
        body = sample(number).body
        topic = sample(number).topic
        assert found_bodies(store, topic, f"U{number:04d}") == [body]
        assert found_bodies(store, topic, f"k{number}") == [body]
    expected = [sample(number).body for number in range(28, -1, -2)]
    assert found_bodies(store, "T0", "all") == expected
    assert found_bodies(store, "T0", "all", count_max=4) == expected[:4]
    assert found_bodies(store, "T2", "all") == []
    assert found_bodies(store, "T0", "k") == []


def test_keys_with_the_same_hash_are_distinguished(
    after_append: Callable[[MessageStore, int], None],
) -> None:
    store = open_store(MemoryDisk(), replace(TINY, index_slots=1))
    assert java_hash("T#Aa") == java_hash("T#BB")
    for number, key in enumerate(["Aa", "BB", "Aa", "AaAa", "AaBB", "BBAa"]):
        append(store, keyed(key, b"%d" % number))
        after_append(store, number)
    assert found_bodies(store, "T", "Aa") == [b"2", b"0"]
    assert found_bodies(store, "T", "BB") == [b"1"]
    assert found_bodies(store, "T", "AaBB") == [b"4"]
    assert found_bodies(store, "T", "BBBB") == []


def test_a_separator_in_a_topic_or_key_does_not_match_another_topic(
    after_append: Callable[[MessageStore, int], None], store: MessageStore
) -> None:
    # The index joins topic and key with "#": both lookups have the same hash.
    append(store, keyed("b#c", b"body", topic="a"))
    after_append(store, 3)
    assert found_bodies(store, "a", "b#c") == [b"body"]
    assert found_bodies(store, "a#b", "c") == []


def test_a_record_with_a_repeated_key_is_found_once(
    after_append: Callable[[MessageStore, int], None], store: MessageStore
) -> None:
    append(store, plain(b"body", properties=properties(UNIQ_KEY="k", KEYS="k k")))
    after_append(store, 3)
    assert found_bodies(store, "T", "k") == [b"body"]


@pytest.mark.parametrize(
    ("begin_ms", "end_ms", "expected"),
    [
        (0, 10_000, [4, 3, 2, 1, 0]),
        (0, 0, [0]),
        (1, 999, [1]),
        (500, 500, [1]),
        (501, 1499, []),
        (1500, 2500, [3, 2]),
        (2501, 10_000, [4]),
        (9_001, 10_000, []),
    ],
)
def test_a_time_window_includes_both_ends(
    after_append: Callable[[MessageStore, int], None],
    store: MessageStore,
    begin_ms: int,
    end_ms: int,
    expected: list[int],
) -> None:
    for number, stored_ms in enumerate((0, 500, 1500, 2500, 9000)):
        append(store, keyed("k", b"%d" % number), now_ms=NOW_MS + stored_ms)
        after_append(store, number)
    actual = found_bodies(store, "T", "k", begin_ms=NOW_MS + begin_ms, end_ms=NOW_MS + end_ms)
    assert actual == [b"%d" % number for number in expected]


def test_at_most_64_records_are_found(after_append: Callable[[MessageStore, int], None]) -> None:
    store = open_store(MemoryDisk(), replace(TINY, segment_bytes=1 << 16))
    for number in range(70):
        append(store, keyed("k", b"%d" % number))
        after_append(store, number)
    newest_first = [b"%d" % number for number in reversed(range(70))]
    assert found_bodies(store, "T", "k", count_max=1000) == newest_first[:64]
    assert found_bodies(store, "T", "k") == newest_first[:32]


def test_expired_records_are_not_found_by_key(store: MessageStore) -> None:
    append(store, *(keyed("k", b"%d" % number + b"x" * 1000) for number in range(6)))
    store.checkpoint()
    store.remove_oldest_file()
    assert [body[:1] for body in found_bodies(store, "T", "k")] == [b"5", b"4", b"3"]
