"""Both tables of half messages keep the same promises: the native one and the one in Python."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from escrowmq.escrow.half_table import (
    CHECK_HISTORY,
    REMARK_OFFSET,
    Attempt,
    Half,
    HalfTable,
    PythonHalfTable,
    new_half_table,
)
from escrowmq.native import load_native
from escrowmq.peer import DISCONNECTED, Peer

NATIVE = load_native({})
DECIDED_MAX = 3
MANY = 3_000  # halves, more than the native table keeps as objects


def python_table() -> HalfTable:
    return PythonHalfTable(decided_max=DECIDED_MAX)


def native_table() -> HalfTable:
    assert NATIVE.module is not None
    table: HalfTable = NATIVE.module.HalfTable(decided_max=DECIDED_MAX)
    return table


needs_native = pytest.mark.skipif(NATIVE.module is None, reason=NATIVE.reason)
NewTable = Callable[[], HalfTable]


@pytest.fixture(params=[python_table, pytest.param(native_table, marks=needs_native)])
def table(request: pytest.FixtureRequest) -> HalfTable:
    new_table: NewTable = request.param
    return new_table()


def add_half(
    table: HalfTable,
    queue_offset: int,
    *,
    key: bytes | None = None,
    group: str = "p",
    topic: str = "T",
    size: int = 100,
) -> Half:
    own_key = b"key %d" % queue_offset if key is None else key
    half = table.new_half(topic, 1, group, own_key, 1_000, 7_000, None)
    half.queue_offset, half.log_offset, half.size = queue_offset, queue_offset * 1000, size
    table.add(half)
    return half


def offsets(table: HalfTable) -> list[int]:
    return [half.queue_offset for half in table]


def test_a_new_half_has_what_it_was_made_of(table: HalfTable) -> None:
    half = table.new_half("T", 3, "p", b"key", 1_000, 7_000, None)
    assert (half.topic, half.queue_id, half.group, half.key) == ("T", 3, "p", b"key")
    assert (half.parked_ms, half.due_ms, half.producer) == (1_000, 7_000, None)
    assert (half.checks, half.unknown_answers, half.reason, half.last_remark) == (0, 0, "", "")
    assert (half.is_stranded, half.is_being_decided, half.is_unreadable) == (False, False, False)
    assert (half.previous_offsets, half.attempt) == ((), None)
    assert half.group_topic_key == ("p", "T", b"key")
    assert not len(table)


def test_a_key_that_is_decided_again_is_remembered_from_then_on(table: HalfTable) -> None:
    for queue_offset, key in enumerate([b"a", b"b", b"c", b"a", b"d"]):
        table.close(add_half(table, queue_offset, key=key))
    assert table.find_duplicate("p", "T", b"b") is None  # the oldest of four
    assert table.find_duplicate("p", "T", b"a") == (3, 3_000)


def test_a_half_can_be_changed_after_it_was_added(table: HalfTable) -> None:
    half = add_half(table, 5)
    half.checks += 2
    half.unknown_answers = 1
    half.due_ms = 9_000
    half.reason = "unreadable: a flipped bit"
    half.last_remark = "database is down"
    half.previous_offsets += (1, 2)
    half.attempt = Attempt("w", 1, "a", 2)
    half.is_being_decided = True
    found = table.find(5)
    assert found is not None
    assert (found.checks, found.unknown_answers, found.due_ms) == (2, 1, 9_000)
    assert (found.reason, found.last_remark) == ("unreadable: a flipped bit", "database is down")
    assert found.is_unreadable
    assert found.previous_offsets == (1, 2)
    assert found.attempt == Attempt("w", 1, "a", 2)
    assert found.is_being_decided
    found.reason, found.last_remark, found.previous_offsets, found.attempt = "", "", (), None
    changed = table.find(5)
    assert changed is not None
    assert (changed.reason, changed.last_remark, changed.attempt) == ("", "", None)
    assert not changed.previous_offsets


@pytest.mark.parametrize("length", [0, 1, 32, 38, 39, 255])
def test_keys_have_any_length(table: HalfTable, length: int) -> None:
    key = b"k" * length
    half = add_half(table, 5, key=key)
    assert half.key == key
    found = table.find_by_key("p", "T", key)
    assert (None if found is None else found.queue_offset) == (5 if key else None)


def test_halves_are_found_by_offset_and_by_key(table: HalfTable) -> None:
    add_half(table, 5)
    add_half(table, 6, key=b"key 5", group="q")
    add_half(table, 7, key=b"key 5", topic="U")
    assert table.find(4) is None
    for group, topic, expected in (("p", "T", 5), ("q", "T", 6), ("p", "U", 7)):
        half = table.find_by_key(group, topic, b"key 5")
        assert half is not None
        assert half.queue_offset == expected
        assert table.find_duplicate(group, topic, b"key 5") == (expected, expected * 1000)
    assert table.find_by_key("q", "U", b"key 5") is None
    assert table.find_duplicate("q", "U", b"key 5") is None


def test_halves_are_iterated_in_the_order_of_the_log(table: HalfTable) -> None:
    halves = [add_half(table, number) for number in (1, 3, 4, 8)]
    table.remove(halves[0])
    assert offsets(table) == [3, 4, 8]
    oldest = table.oldest()
    assert oldest is not None
    assert oldest.queue_offset == 3
    assert len(table) == 3


def test_a_half_that_moves_is_found_at_its_new_offset_only(table: HalfTable) -> None:
    half = add_half(table, 1)
    add_half(table, 2)
    table.remove(half)
    half.queue_offset = 9
    table.add(half)
    assert offsets(table) == [2, 9]
    assert table.find(1) is None
    assert table.find_duplicate("p", "T", b"key 1") == (9, 1000)


def test_halves_before_a_log_offset_are_listed(table: HalfTable) -> None:
    for number in (1, 3, 4, 8):
        add_half(table, number)
    assert list(table.stored_before(4_000, 10)) == [1, 3]
    assert list(table.stored_before(4_001, 2)) == [1, 3]
    assert list(table.stored_before(1_000, 10)) == []


def test_what_came_of_checks_is_packed(table: HalfTable) -> None:
    halves = [add_half(table, number, topic="T" if number < 3 else "U") for number in range(6)]
    halves[1].last_remark = halves[4].last_remark = "database is down"
    for half in halves[2:4]:
        half.checks, half.unknown_answers, half.due_ms = 3, 2, 9_000
    halves[3].last_remark = "é"
    halves[5].last_remark, halves[0].reason = "", "stranded"

    def interval_ms(topic: str, group: str, checks: int) -> int:
        assert group == "p"
        return checks * (10 if topic == "T" else 100)

    histories, remarks = table.check_histories(interval_ms)
    assert list(CHECK_HISTORY.iter_unpack(histories)) == [
        (1, 7_000, 0, 0),
        (2, 8_970, 3, 2),
        (3, 8_700, 3, 2),
        (4, 7_000, 0, 0),
    ]
    assert remarks == {
        "database is down": REMARK_OFFSET.pack(1) + REMARK_OFFSET.pack(4),
        "é": REMARK_OFFSET.pack(3),
    }


def test_what_came_of_checks_is_restored(table: HalfTable) -> None:
    for number in range(4):
        add_half(table, number)
    histories = [(0, 5_000, 3, 1), (1, 5_000, 2, 5), (2, 6_000, 0, 0), (9, 6_000, 1, 0)]
    packed = b"".join(CHECK_HISTORY.pack(*history) for history in histories)
    due = table.restore_checks(packed, -100, lambda _topic, _group, checks: 10 if checks > 1 else 5)
    restored = [(due_ms, list(array("q", offsets))) for due_ms, offsets in due]
    assert [(due_ms, offset) for due_ms, offsets in restored for offset in offsets] == [
        (4_910, 0),
        (4_910, 1),
    ]
    table.restore_remark("database is down", [1, 2, 9])
    rows = [(half.checks, half.unknown_answers, half.due_ms, half.last_remark) for half in table]
    assert rows == [
        (3, 1, 4_910, ""),
        (2, 2, 4_910, "database is down"),
        (0, 0, 7_000, "database is down"),
        (0, 0, 7_000, ""),
    ]


def test_a_half_that_is_kept_stays_the_same_object_among_very_many(table: HalfTable) -> None:
    kept = add_half(table, 0)
    for number in range(1, MANY):
        add_half(table, number)
    kept.checks = 7
    assert table.find(0) is kept
    assert sum(half.checks for half in table) == 7
    assert table.oldest() is kept


def test_a_half_that_is_not_kept_stays_as_it_was(table: HalfTable) -> None:
    producer = DISCONNECTED
    for number in range(MANY):
        change_all_fields(add_half(table, number), producer)
    for number in range(MANY):
        half = table.find(number)
        assert half is not None
        assert (half.key, half.topic, half.group) == (b"key %d" % number, "T", "p")
        assert (half.queue_offset, half.log_offset, half.size) == (number, number * 1000, 100)
        assert (half.checks, half.unknown_answers, half.due_ms) == (number, number + 1, number + 2)
        assert (half.reason, half.last_remark) == (f"reason {number}", f"remark {number}")
        assert (half.previous_offsets, half.attempt) == ((number,), Attempt("w", number, "a", 1))
        assert (half.producer is producer, half.is_stranded) == (True, number % 2 == 0)
        assert (half.queue_id, half.parked_ms, half.is_being_decided) == (1, 1_000, False)


def change_all_fields(half: Half, producer: Peer) -> None:
    number = half.queue_offset
    half.checks, half.unknown_answers, half.due_ms = number, number + 1, number + 2
    half.reason, half.last_remark = f"reason {number}", f"remark {number}"
    half.previous_offsets, half.attempt = (number,), Attempt("w", number, "a", 1)
    half.producer, half.is_stranded = producer, number % 2 == 0


def test_undecided_halves_are_selected(table: HalfTable) -> None:
    for number in (1, 3, 8):
        add_half(table, number)
    assert table.undecided(array("q", [8, 2, 1, 9, -1])) == [8, 1]
    assert table.undecided(array("q")) == []


def test_an_unknown_half_cannot_be_removed(table: HalfTable) -> None:
    half = table.new_half("T", 0, "p", b"k", 0, 0, None)
    with pytest.raises(KeyError):
        table.remove(half)
    with pytest.raises(KeyError):
        table.close(half)


def test_a_reserved_key_is_taken_until_it_is_released_or_added(table: HalfTable) -> None:
    first = table.new_half("T", 0, "p", b"k", 0, 0, None)
    second = table.new_half("T", 0, "p", b"k", 0, 0, None)
    assert table.reserve(first)
    assert not table.reserve(second)
    assert table.find_duplicate("p", "T", b"k") is None  # it has no position yet
    table.release(first)
    assert table.reserve(second)
    second.queue_offset, second.log_offset = 1, 10
    table.add(second)
    assert not table.reserve(first)
    table.remove(second)
    assert table.reserve(first)


def test_the_keys_of_decided_halves_are_remembered_for_a_while(table: HalfTable) -> None:
    for number in range(5):
        table.close(add_half(table, number))
    known = [table.find_duplicate("p", "T", b"key %d" % number) for number in range(5)]
    assert known == [None, None, (2, 2000), (3, 3000), (4, 4000)]
    assert not table.reserve(table.new_half("T", 0, "p", b"key 4", 0, 0, None))
    assert not len(table)


def test_a_key_that_is_decided_again_has_its_last_position(table: HalfTable) -> None:
    table.remember_decided("p", "T", b"k", 1, 10)
    table.remember_decided("p", "T", b"k", 2, 20)
    assert table.find_duplicate("p", "T", b"k") == (2, 20)


def test_a_decided_half_without_a_key_is_not_remembered(table: HalfTable) -> None:
    table.close(add_half(table, 1, key=b""))
    assert table.find_duplicate("p", "T", b"") is None


def test_totals_follow_groups_topics_and_stranded_halves(table: HalfTable) -> None:
    first = add_half(table, 1, size=10)
    second = add_half(table, 2, group="q", size=20)
    add_half(table, 3, topic="U", size=30)
    table.strand(second)
    assert (table.total.count, table.total.size) == (3, 60)
    assert (table.group_totals("p").count, table.group_totals("p").size) == (2, 40)
    assert (table.group_totals("unknown").count, table.group_totals("unknown").size) == (0, 0)
    assert dict(table.count_by_topic) == {"T": 2, "U": 1}
    assert (table.stranded_count, second.is_stranded) == (1, True)
    table.remove(second)
    table.close(first)
    assert (table.group_totals("q").count, table.stranded_count) == (0, 0)
    assert dict(table.count_by_topic) == {"U": 1}
    assert (table.total.count, table.total.size) == (1, 30)


def test_halves_share_the_names_of_their_topic_and_group(table: HalfTable) -> None:
    first = add_half(table, 1, group="".join(["produ", "cers"]))
    second = add_half(table, 2, group="".join(["produce", "rs"]))
    assert first.group is second.group


def test_the_table_is_chosen_by_the_path() -> None:
    assert isinstance(new_half_table(load_native({"ESCROWMQ_NATIVE": "0"})), PythonHalfTable)
    if NATIVE.module is not None:
        assert not isinstance(new_half_table(NATIVE), PythonHalfTable)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["add", "add", "add", "close", "remove", "strand", "reserve", "release"]),
        st.integers(0, 5),
        st.sampled_from(["p", "q"]),
        st.sampled_from([b"a", b"b", b"c", b"a long key, longer than those of all clients"]),
    ),
    max_size=60,
)


@needs_native
@given(ACTIONS)
@settings(deadline=None)
def test_both_tables_behave_alike(actions: list[tuple[str, int, str, bytes]]) -> None:
    tables = (python_table(), native_table())
    halves: list[tuple[Half, Half]] = []
    reserved: list[tuple[Half, Half]] = []
    for number, (action, choice, group, key) in enumerate(actions):
        fields = "T", choice, group, key, number, number, None
        new = tables[0].new_half(*fields), tables[1].new_half(*fields)
        if action == "add":
            if tables[0].find_by_key(group, "T", key) is not None:
                continue  # only recovery adds a key twice
            for table, half in zip(tables, new, strict=True):
                half.queue_offset, half.log_offset, half.size = number, number * 10, choice
                table.add(half)
            halves.append(new)
        elif action == "reserve":
            assert tables[0].reserve(new[0]) == tables[1].reserve(new[1])
            reserved.append(new)
        elif action == "release" and reserved:
            chosen = reserved.pop(choice % len(reserved))
            for table, half in zip(tables, chosen, strict=True):
                table.release(half)
        elif action in ("close", "remove") and halves:
            chosen = halves.pop(choice % len(halves))
            for table, half in zip(tables, chosen, strict=True):
                table.close(half) if action == "close" else table.remove(half)
        elif action == "strand" and halves:
            for table, half in zip(tables, halves[choice % len(halves)], strict=True):
                if not half.is_stranded:
                    table.strand(half)
        assert offsets(tables[0]) == offsets(tables[1])
        assert tables[0].stranded_count == tables[1].stranded_count
        assert dict(tables[0].count_by_topic) == dict(tables[1].count_by_topic)
        for each in ("p", "q"):
            totals = [table.group_totals(each) for table in tables]
            assert (totals[0].count, totals[0].size) == (totals[1].count, totals[1].size)
            for each_key in (b"a", b"b", b"c"):
                found = [table.find_duplicate(each, "T", each_key) for table in tables]
                assert found[0] == found[1]
