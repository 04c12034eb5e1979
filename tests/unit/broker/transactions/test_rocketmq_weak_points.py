"""Weak points of RocketMQ's transactions, with a test for each that shows our behaviour.

The numbers are those of our list. Two are missing, because this broker has no replicas and no such
thread:

    W18  a slave that acts for a dead master forwards halves
    W27  a thread spins while it flushes metrics
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from escrowmq.config import StoreConfig
from escrowmq.escrow.checks import UNANSWERED_CHECKS_MAX
from escrowmq.message import names
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import NewRecord, decode_record
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import SettleTransaction
from escrowmq.store.store import MessageStore
from tests.support.broker_requests import FakeChannel, a_send, ask, bodies, stored
from tests.support.escrows import (
    COMMIT,
    ESCROW,
    ROLLBACK,
    UNKNOWN,
    EscrowBench,
    HalfPosition,
    a_half,
    an_end,
    append_final_without_op,
    position_of,
    sent_checks,
)
from tests.support.stores import NOW_MS, assert_clean

IMMUNITY_MS, INTERVAL_MS, CHECKS_MAX = (
    ESCROW.immunity_ms,
    ESCROW.check_interval_ms,
    ESCROW.checks_max,
)
CONTRADICTED = 3701


@pytest.fixture
def bench() -> EscrowBench:
    return EscrowBench()


def checked_keys(bench: EscrowBench) -> list[str]:
    return [key for key, _ in sent_checks(bench.channel)]


class CountingStore(MessageStore):
    """A store that counts its calls."""

    reads = appends = 0

    def record_at(self, log_offset: int) -> Any:
        self.reads += 1
        return super().record_at(log_offset)

    def append(self, *arguments: Any, **named: Any) -> Any:
        self.appends += 1
        return super().append(*arguments, **named)


def counting(bench: EscrowBench) -> CountingStore:
    bench.store.__class__ = CountingStore
    assert isinstance(bench.store, CountingStore)
    return bench.store


# --- duplicates and wrong outcomes ---------------------------------------------------------------


def test_w01_a_commit_after_the_first_check_is_delivered_once(bench: EscrowBench) -> None:
    # A check makes no copy with a position of its own: both ENDs name the same half.
    position = bench.park("k")
    bench.tick(IMMUNITY_MS)
    [(_, asked_about)] = sent_checks(bench.channel)
    assert asked_about == position
    assert bench.end(position, COMMIT).code == 0
    assert bench.end(asked_about, COMMIT, check=True).code == 0
    bench.tick(10 * INTERVAL_MS)
    assert checked_keys(bench) == []
    assert bench.bodies() == [b"k"]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "code", "delivered"),
    [
        (COMMIT, COMMIT, 0, [b"k"]),
        (COMMIT, ROLLBACK, CONTRADICTED, [b"k"]),
        (ROLLBACK, COMMIT, CONTRADICTED, []),
        (ROLLBACK, ROLLBACK, 0, []),
    ],
)
def test_w02_the_first_decision_stands(
    bench: EscrowBench, first: int, second: int, code: int, delivered: list[bytes], restart: bool
) -> None:
    # The state of a half is known for as long as the log holds it.
    position = bench.park("k")
    assert bench.end(position, first).code == 0
    if restart:
        bench = bench.killed()
    assert bench.end(position, second).code == code
    assert bench.end(position, second, check=True).code == code
    assert bench.bodies() == delivered


def test_w02_a_decision_after_it_was_stranded_is_the_only_one(bench: EscrowBench) -> None:
    # Stranded is not decided: a late producer may still decide it, once.
    position = bench.park("k")
    for _ in range(CHECKS_MAX + 1):
        bench.tick(INTERVAL_MS)
    assert bench.state(position) == "stranded"
    assert [bench.end(position, COMMIT).code for _ in range(2)] == [0, 0]
    assert bench.bodies() == [b"k"]


@pytest.mark.parametrize("with_snapshot", [True, False])
def test_w03_a_crash_between_final_and_op_delivers_once(
    bench: EscrowBench, with_snapshot: bool
) -> None:
    # The final names its half, which proves the commit.
    position = bench.park("k")
    bench.store.flush()
    bench.broker.transactions.save(force=True)
    [half] = bench.coordinator.halves
    append_final_without_op(bench, half)
    again = bench.killed(with_snapshot=with_snapshot)
    again.heartbeat(again.channel, "p")
    again.tick(10 * INTERVAL_MS)
    assert checked_keys(again) == []
    assert again.state(position) == "committed"
    assert again.end(position, COMMIT).code == 0
    assert again.bodies() == [b"k"]
    assert bodies(again.store, names.OP_TOPIC) == [b"0"]


@pytest.mark.parametrize("stop", ["restarted", "killed", "power_cut"])
def test_w04_what_was_decided_just_before_a_stop_is_not_checked(stop: str) -> None:
    # Final and op are one append, and the response waits until both are durable.
    bench = EscrowBench(sync=True)
    positions = [bench.park(f"k{number}") for number in range(10)]
    for position in positions:
        assert bench.end(position, COMMIT).code == 0
    again: EscrowBench = getattr(bench, stop)()
    again.heartbeat(again.channel, "p")
    again.tick(10 * INTERVAL_MS)
    assert checked_keys(again) == []
    assert len(again.bodies()) == 10


def test_w05_a_commit_within_a_long_immunity_is_delivered_once(bench: EscrowBench) -> None:
    # The half does not move before it is due, so the END finds it.
    position = bench.park("k", CHECK_IMMUNITY_TIME_IN_SECONDS="120")
    for _ in range(3):
        bench.tick(INTERVAL_MS)
    assert bench.end(position, COMMIT).code == 0
    for _ in range(10):
        bench.tick(INTERVAL_MS)
    assert checked_keys(bench) == []
    assert bench.bodies() == [b"k"]


def test_w06_a_long_immunity_uses_up_no_checks(bench: EscrowBench) -> None:
    # Only a check that was sent counts.
    immunity_ms = 100 * INTERVAL_MS
    position = bench.park("k", CHECK_IMMUNITY_TIME_IN_SECONDS=str(immunity_ms // 1000))
    for _ in range(99):
        bench.tick(INTERVAL_MS)
    assert checked_keys(bench) == []
    bench.tick(INTERVAL_MS)
    assert checked_keys(bench) == ["k"]
    assert bench.end(position, COMMIT).code == 0


@pytest.mark.parametrize("off_ms", [-(10**9), -5_000, 5_000, 10**9])
def test_w07_the_producers_clock_decides_nothing(bench: EscrowBench, off_ms: int) -> None:
    # The due time is counted by the broker's own clock.
    position = bench.park("k", born_timestamp=NOW_MS + off_ms)
    bench.tick(IMMUNITY_MS - 1)
    assert checked_keys(bench) == []
    bench.tick(1)
    assert checked_keys(bench) == ["k"]
    assert bench.end(position, COMMIT, check=True).code == 0


def test_w08_a_repeated_send_is_the_same_half(bench: EscrowBench) -> None:
    # It is recognised by unique key and group, and the lost response is sent again.
    first = bench.park("k")
    retry = bench.park("k", channel=FakeChannel("another channel"))
    assert retry == first
    assert bench.end(retry, COMMIT).code == 0
    assert bench.park("k") == first
    assert bench.end(first, COMMIT).code == 0
    bench.tick(10 * INTERVAL_MS)
    assert bench.bodies() == [b"k"]
    assert len(bodies(bench.store, names.HALF_TOPIC)) == 1


def test_w08_a_send_that_is_repeated_in_its_own_turn_is_the_same_half(bench: EscrowBench) -> None:
    # Two channels, one turn: the first is not in the log yet.
    other = FakeChannel("other")
    bench.broker.handle(bench.channel, a_half("k"), bench.now_ms)
    bench.turn(a_half("k"), channel=other)
    assert position_of(bench.channel.answer()) == position_of(other.answer()) == (0, 0)


def test_w08_a_send_of_another_group_with_the_same_key_is_another_half(bench: EscrowBench) -> None:
    # Keys are unique within a group; another group with the same key has its own half.
    other = FakeChannel("other")
    bench.broker.handle(bench.channel, a_half("k"), bench.now_ms)
    bench.turn(a_half("k", group="q"), channel=other)
    mine, theirs = position_of(bench.channel.answer()), position_of(other.answer())
    assert mine != theirs
    assert bench.park("k") == mine
    assert bench.park("k", group="q") == theirs
    assert bench.end(mine, COMMIT).code == 0
    assert bench.park("k", group="q") == theirs


@pytest.mark.parametrize("with_snapshot", [True, False])
def test_w09_a_crash_between_checks_makes_no_second_half(with_snapshot: bool) -> None:
    # A check appends nothing to the half queue that a crash could repeat.
    bench = EscrowBench()
    position = bench.park("k")
    for _ in range(CHECKS_MAX):
        bench = bench.killed(with_snapshot=with_snapshot)
        bench.heartbeat(bench.channel, "p")
        bench.tick(INTERVAL_MS)
        assert checked_keys(bench) == ["k"]
    assert bodies(bench.store, names.HALF_TOPIC) == [b"k"]
    assert bench.end(position, COMMIT).code == 0
    assert bench.bodies() == [b"k"]


def test_w10_an_op_about_several_halves_decides_only_those(bench: EscrowBench) -> None:
    # RocketMQ 5 writes such ops; the cursors wait for the half in between.
    positions = [bench.park(f"k{number}") for number in range(4)]
    op = NewRecord(names.OP_TOPIC, 0, b"0,2,3,", b"TAGS\x01d\x02")
    bench.store.append([op], now_ms=NOW_MS)
    again = bench.killed(with_snapshot=False)
    assert [half.queue_offset for half in again.coordinator.halves] == [1]
    again.tick()
    again.store.flush()
    again.tick()
    assert again.cursors() == (1, 0)
    assert again.end(positions[1], ROLLBACK).code == 0


def test_w11_an_end_gets_a_response_with_the_outcome(bench: EscrowBench) -> None:
    # An END gets a response, or an error with a reason; a one-way END gets none.
    position = bench.park("k")
    assert "group" in bench.end(position, COMMIT, group="q").remark
    assert "log offset" in bench.end((0, 7), COMMIT).remark
    assert "no half" in bench.end((7, 0), COMMIT).remark
    assert bench.end(position, 5).code == 1
    assert bench.state(position) == "open"
    bench.turn(an_end(position, COMMIT, one_way=True), an_end(position, ROLLBACK, one_way=True))
    bench.turn()
    assert bench.channel.answers() == []
    answer = bench.end(position, COMMIT)
    assert (answer.code, answer.ext_fields["state"]) == (0, "committed")
    assert bench.bodies() == [b"k"]


def test_w12_an_end_that_names_no_half_delivers_nothing(bench: EscrowBench) -> None:
    # The table of parked halves counts, not the record at the log offset.
    text = "PGROUP\x01p\x02REAL_TOPIC\x01T\x02REAL_QID\x010\x02UNIQ_KEY\x01u\x02"
    bench.turn(a_send(body=b"ordinary", properties=text))
    sent = position_of(bench.channel.answer())
    assert bench.end(sent, COMMIT).code == 1
    position = bench.park("k")
    assert bench.end(position, COMMIT).code == 0
    [_, final] = bench.messages()
    assert bench.end((final.queue_offset, final.log_offset), COMMIT).code == 1
    assert bench.bodies() == [b"ordinary", b"k"]
    nobodys = bench.park("nobody's", PGROUP="")
    assert bench.end(nobodys, COMMIT).code == 1
    assert bench.state(position) == "committed"


# --- loss ----------------------------------------------------------------------------------------


def test_w13_a_group_that_was_away_is_checked_when_it_is_back(bench: EscrowBench) -> None:
    # A check that was not sent does not count.
    position = bench.park("k")
    bench.disconnect(bench.channel)
    for _ in range(10 * CHECKS_MAX):
        bench.tick(INTERVAL_MS)
    back = FakeChannel("back")
    bench.heartbeat(back, "p")
    bench.tick()
    assert [key for key, _ in sent_checks(back)] == ["k"]
    assert bench.end(position, COMMIT, channel=back).code == 0
    assert bench.bodies() == [b"k"]


def test_w14_stranding_is_counted_and_logged_and_survives_a_full_disk(bench: EscrowBench) -> None:
    # Stranded is only a state: the half stays until it is decided.
    position = bench.park("k")
    for _ in range(CHECKS_MAX):
        bench.tick(INTERVAL_MS)
    bench.store.has_disk_space = False
    bench.tick(INTERVAL_MS)
    assert bench.state_in_memory(position) == "open"
    bench.store.has_disk_space = True
    bench.tick(INTERVAL_MS)
    assert bench.state(position) == "stranded"
    assert bench.coordinator.counters.stranded == 1
    [copy] = stored(bench.store, names.STRANDED_TOPIC)
    assert "3 times" in decode_properties(copy.properties)["ESCROW_REASON"]
    again = bench.killed(with_snapshot=False)
    assert again.state(position) == "stranded"
    assert again.end(position, ROLLBACK).code == 0


@pytest.mark.parametrize("with_snapshot", [True, False])
def test_w15_an_open_half_outlives_its_log_file(with_snapshot: bool) -> None:
    # It moves, and its old position still leads to it.
    settings = StoreConfig(
        segment_bytes=4096, queue_file_bytes=200, index_slots=7, index_entries=99
    )
    bench = EscrowBench(settings=settings)
    position = bench.park("k")
    for number in range(40):
        bench.end(bench.park(f"other {number}", body=b"x" * 200), ROLLBACK)
    while bench.store.begin == 0:
        assert bench.remove_log_file()
    assert bench.state_in_memory(position) == "open"
    bench.store.flush()
    bench.broker.transactions.save(force=True)
    bench = bench.killed(with_snapshot=with_snapshot)
    bench.heartbeat(bench.channel, "p")
    bench.tick(IMMUNITY_MS)
    assert [(key, at == position) for key, at in sent_checks(bench.channel)] == [("k", False)]
    assert bench.end(position, COMMIT).code == 0
    assert bench.bodies() == [b"k"]
    bench.store.close()
    assert_clean(bench.disk, settings)


@pytest.mark.parametrize("with_snapshot", [True, False])
def test_w15_a_stranded_half_outlives_its_log_file(with_snapshot: bool) -> None:
    # RocketMQ's cursor is past the copy; only the record itself says that it is stranded.
    settings = StoreConfig(
        segment_bytes=4096, queue_file_bytes=200, index_slots=7, index_entries=99
    )
    bench = EscrowBench(settings=settings)
    position = bench.park("k")
    for _ in range(CHECKS_MAX + 1):
        bench.tick(INTERVAL_MS)
    for number in range(40):
        bench.end(bench.park(f"other {number}", body=b"x" * 200), ROLLBACK)
    while bench.store.begin == 0:
        assert bench.remove_log_file()
    bench.tick()
    bench.store.flush()
    bench.tick()  # a cursor is saved when the log behind it is durable
    bench.broker.save()
    assert bench.cursors()[0] > bench.coordinator.aliases[position.queue_offset]
    again = bench.killed(with_snapshot=with_snapshot)
    assert again.state(position) == "stranded"
    assert again.end(position, COMMIT).code == 0
    assert again.bodies() == [b"k"]


def test_w16_a_half_that_is_decided_in_the_turn_of_the_tick_is_not_stranded(
    bench: EscrowBench,
) -> None:
    # An END of the same turn comes before the tick.
    position = bench.park("k")
    for _ in range(CHECKS_MAX):
        bench.tick(INTERVAL_MS)
    bench.now_ms += INTERVAL_MS
    bench.broker.handle(bench.channel, an_end(position, COMMIT), bench.now_ms)
    bench.broker.tick(bench.now_ms)
    bench.turn()
    bench.tick(INTERVAL_MS)
    assert bench.bodies() == [b"k"]
    assert bodies(bench.store, names.STRANDED_TOPIC) == []
    assert bench.coordinator.counters.stranded == 0


@pytest.mark.parametrize("delay", [{"DELAY": "1"}, {"TIMER_DELAY_MS": "1000"}])
def test_w17_a_delay_counts_from_the_commit(bench: EscrowBench, delay: dict[str, str]) -> None:
    # The half is parked like any other; the final goes to the delayed messages.
    position = bench.park("k", **delay)
    bench.tick(5_000)
    assert bench.bodies() == []
    assert bench.end(position, COMMIT).code == 0
    bench.tick(999)
    assert bench.bodies() == []
    bench.tick(1)
    [final] = bench.messages()
    assert final.body == b"k"
    assert decode_properties(final.properties).items() >= delay.items()


def test_w19_flag_and_properties_are_those_of_the_send(bench: EscrowBench) -> None:
    # However often it was checked or moved.
    position = bench.park("k", flag=7, TAGS="red", KEYS="order-1", mine="yes", born_timestamp=5)
    for _ in range(2):
        bench.tick(INTERVAL_MS)
    [half] = bench.coordinator.halves
    bench.broker.transactions.move_half(half, bench.now_ms)
    bench.turn()
    assert bench.end(position, COMMIT).code == 0
    [final] = bench.messages()
    assert (final.flag, final.born_ms, final.sys_flag) == (7, 5, COMMIT)
    found = decode_properties(final.properties)
    assert {
        "TAGS": "red",
        "KEYS": "order-1",
        "mine": "yes",
        "UNIQ_KEY": "k",
    }.items() <= found.items()
    assert not {"TRAN_MSG", "REAL_TOPIC", "REAL_QID", "ESCROW_COPY_OF"} & found.keys()


# --- cost and latency ----------------------------------------------------------------------------


def test_w20_the_halves_and_ends_of_one_turn_are_one_append(bench: EscrowBench) -> None:
    # One half queue is no bottleneck if a hundred sends are one write.
    store = counting(bench)
    bench.turn(*(a_half(f"k{number}") for number in range(100)))
    assert store.appends == 1
    positions = [position_of(answer) for answer in bench.channel.answers()]
    bench.turn(*(an_end(position, COMMIT) for position in positions))
    assert store.appends == 2
    assert len(bench.bodies()) == 100


def test_w21_a_check_makes_no_copy_of_the_message(bench: EscrowBench) -> None:
    # One journal entry, whatever the size of the body.
    bench.park("k", body=b"x" * 100_000)
    before = bench.store.end
    for number in range(CHECKS_MAX):
        bench.tick(INTERVAL_MS)
        assert checked_keys(bench) == ["k"]
        assert bench.store.end - before < 200 * (number + 1)


def test_w22_halves_that_are_not_due_cost_nothing(bench: EscrowBench) -> None:
    # A tick reads the due halves only, not all open ones.
    for number in range(200):
        bench.park(f"patient {number}", CHECK_IMMUNITY_TIME_IN_SECONDS="3600")
    bench.park("due")
    store = counting(bench)
    for _ in range(10):
        bench.tick(IMMUNITY_MS // 10)
    assert checked_keys(bench) == ["due"]
    assert store.reads == 1


def test_w23_an_unanswered_half_does_not_delay_others(bench: EscrowBench) -> None:
    # Every half has its own due time.
    bench.park("never answered")
    bench.park("patient", CHECK_IMMUNITY_TIME_IN_SECONDS="3600")
    bench.park("hasty", CHECK_IMMUNITY_TIME_IN_SECONDS="1")
    bench.tick(1_000)
    assert checked_keys(bench) == ["hasty"]
    bench.tick(IMMUNITY_MS - 1_000)
    assert checked_keys(bench) == ["never answered"]
    bench.park("new")
    bench.tick(IMMUNITY_MS)
    assert checked_keys(bench) == ["new"]


def test_w24_a_check_is_sent_when_it_is_due(bench: EscrowBench) -> None:
    # At the next tick, not at the next interval; and never earlier.
    due_ms = {}
    for number in range(20):
        bench.park(f"k{number}")
        due_ms[f"k{number}"] = bench.now_ms + IMMUNITY_MS
        bench.now_ms += 137
    while due_ms:
        for key in checked_keys(bench):
            late_ms = bench.now_ms - due_ms.pop(key)
            assert 0 <= late_ms <= 200
        bench.tick(100)


def test_w25_intervals_grow_and_differ_by_topic_and_group() -> None:
    # If configured; otherwise all intervals are the same, as in RocketMQ.
    config = replace(
        ESCROW, check_backoff_percent=200, check_intervals_ms=(("fast", 1_000),), checks_max=99
    )
    bench = EscrowBench(config=config)
    bench.park("slow")
    bench.park("quick", group="fast")
    times: dict[str, list[int]] = {"slow": [], "quick": []}
    for _ in range(3_000):
        bench.tick(100)
        for key in checked_keys(bench):
            times[key].append(bench.now_ms - NOW_MS)
    assert times["slow"][:3] == [6_000, 36_000, 96_000]
    assert times["quick"][:4] == [6_000, 7_000, 9_000, 13_000]


def test_w25_one_group_does_not_delay_another(bench: EscrowBench) -> None:
    # A group with many due checks leaves capacity for the others.
    for number in range(UNANSWERED_CHECKS_MAX + 100):
        bench.park(f"many {number}")
    other = FakeChannel("other")
    bench.park("one", group="q", channel=other)
    bench.tick(IMMUNITY_MS)
    assert len(sent_checks(bench.channel)) == UNANSWERED_CHECKS_MAX
    assert [key for key, _ in sent_checks(other)] == ["one"]


def test_w26_a_decision_without_disk_space_is_tried_again_after_a_pause(bench: EscrowBench) -> None:
    # Not at every tick, which would burden a full disk.
    bench.park("k")
    for _ in range(CHECKS_MAX):
        bench.tick(INTERVAL_MS)
    store = counting(bench)
    store.has_disk_space = False
    bench.now_ms += INTERVAL_MS
    for _ in range(9):
        bench.tick(100)
    assert store.appends == 1
    store.has_disk_space = True
    bench.tick(1_000)
    assert bench.coordinator.counters.stranded == 1


def test_w28_checks_above_the_limit_of_a_channel_are_sent_later(bench: EscrowBench) -> None:
    # Limited per channel and second, none lost, each counted once.
    count = 2 * UNANSWERED_CHECKS_MAX + 100
    bench.turn(*(a_half(f"k{number}") for number in range(count)))
    bench.channel.answers()
    bench.tick(IMMUNITY_MS)
    found = checked_keys(bench)
    assert len(found) == UNANSWERED_CHECKS_MAX
    for _ in range(30):
        bench.tick(100)
        found += checked_keys(bench)
    assert sorted(found) == sorted(f"k{number}" for number in range(count))
    assert {half.checks for half in bench.coordinator.halves} == {1}


# --- operations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("verdict", "delivered"), [(COMMIT, [b"k"]), (ROLLBACK, [])])
def test_w29_an_operator_can_decide(
    bench: EscrowBench, verdict: int, delivered: list[bytes]
) -> None:
    # By transaction id, with a reason. A late END gets the outcome.
    position = bench.park("k")
    fields = SettleTransaction(
        transaction_id="k", commit_or_rollback=verdict, reason="the books say so"
    )
    assert bench.request(ask(RequestCode.SETTLE_TRANSACTION, fields)).code == 0
    assert bench.bodies() == delivered
    assert bench.end(position, verdict).code == 0
    other = COMMIT if verdict == ROLLBACK else ROLLBACK
    assert bench.end(position, other).code == CONTRADICTED


def test_w30_the_channel_that_sent_it_is_checked_first(bench: EscrowBench) -> None:
    # Other channels of the group follow when it is closed.
    others = [FakeChannel(f"other {number}") for number in range(3)]
    for channel in (*others, bench.channel):
        bench.heartbeat(channel, "p")
    for number in range(8):
        bench.park(f"k{number}")
    bench.tick(IMMUNITY_MS)
    assert len(sent_checks(bench.channel)) == 8
    bench.disconnect(bench.channel)
    bench.tick(INTERVAL_MS)
    assert sorted(len(sent_checks(channel)) for channel in others) == [2, 3, 3]


def test_w31_an_unanswered_check_is_sent_again(bench: EscrowBench) -> None:
    # A client may drop a check silently; the next one may know the outcome.
    position = bench.park("k")
    bench.tick(IMMUNITY_MS)
    bench.tick(INTERVAL_MS - 1)
    assert checked_keys(bench) == ["k"]
    bench.tick(1)
    assert checked_keys(bench) == ["k"]
    assert bench.end(position, UNKNOWN, check=True).ext_fields["state"] == "open"
    bench.tick(INTERVAL_MS)
    assert checked_keys(bench) == ["k"]


def test_w32_a_slow_client_is_not_flooded(bench: EscrowBench) -> None:
    # The number of unanswered checks is limited; an answer makes room for the next at once.
    bench.turn(*(a_half(f"k{number}") for number in range(UNANSWERED_CHECKS_MAX + 1)))
    bench.channel.answers()
    bench.tick(IMMUNITY_MS)
    found = sent_checks(bench.channel)
    assert len(found) == UNANSWERED_CHECKS_MAX
    assert bench.end(found[0][1], ROLLBACK, check=True).code == 0
    assert len(sent_checks(bench.channel)) == 1


def test_w33_the_count_of_open_transactions_is_right(bench: EscrowBench) -> None:
    # Repeated and contradicting ENDs, repeated sends and restarts do not change it.
    positions = [bench.park(f"k{number}") for number in range(6)]
    bench.park("k0")
    for position in (positions[0], positions[0], positions[1]):
        bench.end(position, COMMIT)
        bench.end(position, ROLLBACK)
    bench.end((99, 0), COMMIT)
    counts, total = bench.coordinator.counters, bench.coordinator.halves.total
    assert (total.count, total.size) == (4, sum(half.size for half in bench.coordinator.halves))
    assert (counts.parked, counts.committed, counts.rolled_back) == (6, {"T": 2}, {})
    assert (counts.repeated_ends, counts.conflicts, counts.duplicate_sends) == (1, 3, 1)
    again = bench.killed(with_snapshot=False)
    assert again.coordinator.halves.total == total
    assert again.coordinator.halves.group_totals("p") == total


def test_a_check_shows_the_message_as_it_was_sent(bench: EscrowBench) -> None:
    position: HalfPosition = bench.park("k", queue_id=1, TAGS="red")
    bench.tick(IMMUNITY_MS)
    [(code, _, body)] = bench.channel.oneway_requests
    record = decode_record(body, 0, position.log_offset)  # type: ignore[arg-type]
    assert code == RequestCode.CHECK_TRANSACTION_STATE
    assert (record.topic, record.queue_id, record.queue_offset) == ("T", 1, position.queue_offset)
    assert bytes(record.body) == b"k"
    found = decode_properties(record.properties)
    assert (found["PGROUP"], found["UNIQ_KEY"], found["TAGS"]) == ("p", "k", "red")
    assert found["TRANSACTION_CHECK_TIMES"] == "1"
