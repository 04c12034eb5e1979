"""Consumer offsets: commits, queries, resets, and where a new group starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from escrowmq.consume.offsets import ConsumerOffsets, initial_offset
from escrowmq.message.record import QueueOffset


def test_the_last_commit_counts_even_if_it_is_lower() -> None:
    offsets = ConsumerOffsets()
    assert offsets.query("orders", "g", 0) is None
    assert offsets.commit("orders", "g", 0, 12)
    assert offsets.commit("orders", "g", 0, 5)
    assert offsets.query("orders", "g", 0) == 5
    assert offsets.query("orders", "g", 1) is None
    assert offsets.query("orders", "h", 0) is None


def test_a_negative_offset_changes_nothing() -> None:
    offsets = ConsumerOffsets()
    offsets.commit("orders", "g", 0, 12)
    version = offsets.version
    assert not offsets.commit("orders", "g", 0, -1)
    assert offsets.query("orders", "g", 0) == 12
    assert offsets.version == version


def test_the_version_advances_when_there_is_something_to_save() -> None:
    offsets = ConsumerOffsets({"orders@g": {0: 3}})
    assert offsets.version == 0
    offsets.commit("orders", "g", 0, 3)
    assert offsets.version == 0
    offsets.commit("orders", "g", 0, 4)
    assert offsets.version == 1
    offsets.remove_group("unknown")
    assert offsets.version == 1
    offsets.remove_group("g")
    assert offsets.version == 2


def test_a_dump_is_a_copy_in_the_format_of_the_file() -> None:
    offsets = ConsumerOffsets({"orders@g": {0: 3, 1: 4}, "no separator": {0: 1}})
    dumped = offsets.dump()
    offsets.commit("orders", "g", 0, 9)
    assert dumped == {"orders@g": {0: 3, 1: 4}, "no separator": {0: 1}}
    assert ConsumerOffsets(offsets.dump()).dump() == offsets.dump()


def test_the_offsets_of_a_group_are_listed_by_topic() -> None:
    offsets = ConsumerOffsets({"stock@g": {1: 4}, "orders@g": {0: 3}, "orders@h": {0: 1}})
    assert offsets.group_offsets("g") == {"orders": {0: 3}, "stock": {1: 4}}
    assert offsets.groups_of("orders") == ["g", "h"]
    assert sorted(offsets.topics_of("g")) == ["orders", "stock"]
    assert offsets.topics_of("none") == []
    assert offsets.queue_offsets("orders", "h") == {0: 1}
    assert offsets.group_offsets("unknown") == {}


def test_a_group_is_removed_with_all_its_topics() -> None:
    offsets = ConsumerOffsets({"stock@g": {1: 4}, "orders@g": {0: 3}, "orders@h": {0: 1}})
    offsets.reset("stock", "g", {1: 0})
    offsets.remove_group("g")
    assert offsets.dump() == {"orders@h": {0: 1}}
    assert offsets.take_reset("stock", "g", 1) is None


def test_a_topic_is_removed_from_all_groups() -> None:
    offsets = ConsumerOffsets({"stock@g": {1: 4}, "orders@g": {0: 3}, "orders@h": {0: 1}})
    offsets.remove_topic("orders")
    assert offsets.dump() == {"stock@g": {1: 4}}
    assert offsets.group_offsets("h") == {}
    offsets.remove_topic("orders")


def test_offsets_of_many_topics_are_set_at_once_and_others_stay() -> None:
    offsets = ConsumerOffsets({"orders@g": {0: 3, 1: 4}})
    offsets.put_topics("g", {"orders": {1: 7, 2: 8}, "stock": {0: 5}})
    assert offsets.group_offsets("g") == {"orders": {0: 3, 1: 7, 2: 8}, "stock": {0: 5}}
    assert len(offsets) == 4


@pytest.mark.parametrize(
    "change",
    [
        lambda offsets: offsets.remove_topic("orders"),
        lambda offsets: offsets.remove_group("g"),
        lambda offsets: offsets.reset("orders", "g", {0: 1, 5: 1}),
        lambda offsets: offsets.set_offsets("orders", "g", {1: 1}),
        lambda offsets: offsets.put_topics("new", {"orders": {0: 3}, "stock": {0: 1}}),
        lambda offsets: offsets.put_topics("g", {"orders": {0: 9}}),
    ],
    ids=["topic removed", "group removed", "reset", "moved", "cloned", "overwritten"],
)
def test_a_change_that_was_not_saved_is_undone(change: Callable[[ConsumerOffsets], None]) -> None:
    offsets = ConsumerOffsets({"orders@g": {0: 3, 1: 4}, "stock@g": {0: 1}, "orders@h": {0: 9}})
    offsets.reset("orders", "g", {1: 2})
    before, version = offsets.dump(), offsets.version
    offsets.begin_changes()
    change(offsets)
    assert offsets.dump() != before
    offsets.end_changes(is_kept=False)
    assert offsets.dump() == before
    assert offsets.groups_of("orders") == ["g", "h"]
    assert offsets.topics_of("new") == []
    assert offsets.version > version  # the file may have the change
    assert offsets.take_reset("orders", "g", 0) is None
    assert offsets.take_reset("orders", "g", 1) == 2


def test_a_change_that_was_saved_is_kept() -> None:
    offsets = ConsumerOffsets({"orders@g": {0: 3}})
    offsets.begin_changes()
    offsets.remove_group("g")
    offsets.end_changes(is_kept=True)
    assert offsets.dump() == {}


def test_a_reset_is_taken_once_and_commits_are_refused_until_then() -> None:
    offsets = ConsumerOffsets({"orders@g": {0: 100, 1: 100}})
    offsets.reset("orders", "g", {0: 20})
    assert offsets.query("orders", "g", 0) == 20
    assert not offsets.commit("orders", "g", 0, 101)
    assert offsets.commit("orders", "g", 1, 101)
    assert offsets.take_reset("orders", "g", 1) is None
    assert offsets.take_reset("orders", "g", 0) == 20
    assert offsets.take_reset("orders", "g", 0) is None
    assert offsets.commit("orders", "g", 0, 21)


@pytest.mark.parametrize(
    ("committed", "min_offset", "set_zero", "is_recent", "expected"),
    [
        (12, 0, True, True, 12),
        (0, 5, False, False, 0),
        (None, 0, True, True, 0),
        (None, 0, False, True, None),
        (None, 0, True, False, None),
        (None, 5, True, True, None),
    ],
    ids=[
        "committed",
        "committed zero",
        "recent queue",
        "client refuses zero",
        "old queue",
        "first message has expired",
    ],
)
def test_a_group_starts_at_its_commit_or_at_the_first_message_of_a_recent_queue(
    committed: int | None, min_offset: int, set_zero: bool, is_recent: bool, expected: int | None
) -> None:
    offset = None if committed is None else QueueOffset(committed)
    assert initial_offset(offset, min_offset, set_zero, is_recent) == expected
