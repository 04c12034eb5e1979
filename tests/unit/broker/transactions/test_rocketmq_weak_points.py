"""Weak points of RocketMQ's transactions, each with a test that shows EscrowMQ's behaviour.

The numbers are those of docs/compatibility.md. Two are missing, because this broker has no replicas
and no such thread:

    W18  a slave that acts for a dead master forwards halves
    W27  a thread spins while it flushes metrics
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from escrowmq.escrow.checks import UNANSWERED_CHECKS_MAX
from escrowmq.message import names
from escrowmq.message.properties import decode_properties
from escrowmq.message.record import NewRecord, decode_record
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import SettleTransaction
from escrowmq.store.store import MessageStore
from tests.support.broker_requests import (
    FakeChannel,
    bodies,
    new_request,
    send_request,
    stored_records,
)
from tests.support.escrows import (
    COMMIT,
    ESCROW,
    ROLLBACK,
    SMALL_SEGMENTS,
    UNKNOWN,
    EscrowBench,
    HalfPosition,
    append_final_without_op,
    end_request,
    fill_segments,
    half_request,
    position_of,
    sent_checks,
)
from tests.support.stores import NOW_MS, assert_clean

IMMUNITY_MS, INTERVAL_MS, CHECKS_MAX = (
    ESCROW.immunity_ms,
    ESCROW.check_interval_ms,
    ESCROW.checks_max,
)
CONFLICT = 3701


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
    # A check makes no copy with its own position, so that both ends name the same half.
    position = bench.park("k")
    bench.tick(IMMUNITY_MS)
    [(_, checked_position)] = sent_checks(bench.channel)
    assert checked_position == position
    assert bench.end(position, COMMIT).code == 0
    assert bench.end(checked_position, COMMIT, check=True).code == 0
    bench.tick(10 * INTERVAL_MS)
    assert checked_keys(bench) == []
    assert bench.bodies() == [b"k"]


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "code", "delivered"),
    [
        (COMMIT, COMMIT, 0, [b"k"]),
        (COMMIT, ROLLBACK, CONFLICT, [b"k"]),
        (ROLLBACK, COMMIT, CONFLICT, []),
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


def test_w02_a_stranded_half_can_be_decided_once(bench: EscrowBench) -> None:
    # Stranded is not decided: a late producer may still decide the half.
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
    restarted = bench.killed(with_snapshot=with_snapshot)
    restarted.heartbeat(restarted.channel, "p")
    restarted.tick(10 * INTERVAL_MS)
    assert checked_keys(restarted) == []
    assert restarted.state(position) == "committed"
    assert restarted.end(position, COMMIT).code == 0
    assert restarted.bodies() == [b"k"]
    assert bodies(restarted.store, names.OP_TOPIC) == [b"0"]


@pytest.mark.parametrize("stop", ["restarted", "killed", "power_cut"])
def test_w04_a_half_decided_just_before_a_stop_is_not_checked(stop: str) -> None:
    # Final and op are one append, and the response waits until both are durable.
    bench = EscrowBench(sync=True)
    positions = [bench.park(f"k{number}") for number in range(10)]
    for position in positions:
        assert bench.end(position, COMMIT).code == 0
    restarted: EscrowBench = getattr(bench, stop)()
    restarted.heartbeat(restarted.channel, "p")
    restarted.tick(10 * INTERVAL_MS)
    assert checked_keys(restarted) == []
    assert len(restarted.bodies()) == 10


def test_w05_a_commit_within_a_long_immunity_is_delivered_once(bench: EscrowBench) -> None:
    # The half does not move before it is due, so that the end finds it.
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
    # The broker recognises it by unique key and group, and repeats the lost response.
    first = bench.park("k")
    retry = bench.park("k", channel=FakeChannel("another channel"))
    assert retry == first
    assert bench.end(retry, COMMIT).code == 0
    assert bench.park("k") == first
    assert bench.end(first, COMMIT).code == 0
    bench.tick(10 * INTERVAL_MS)
    assert bench.bodies() == [b"k"]
    assert len(bodies(bench.store, names.HALF_TOPIC)) == 1


def test_w08_a_send_repeated_in_the_same_turn_is_the_same_half(bench: EscrowBench) -> None:
    # The first send is not in the log when the second one arrives on another channel.
    other = FakeChannel("other")
    bench.broker.handle(bench.channel, half_request("k"), bench.now_ms)
    bench.turn(half_request("k"), channel=other)
    assert position_of(bench.channel.response()) == position_of(other.response()) == (0, 0)


def test_w08_a_send_of_another_group_with_the_same_key_is_another_half(bench: EscrowBench) -> None:
    # Keys are unique within a group; another group with the same key has its own half.
    other = FakeChannel("other")
    bench.broker.handle(bench.channel, half_request("k"), bench.now_ms)
    bench.turn(half_request("k", group="q"), channel=other)
    of_p, of_q = position_of(bench.channel.response()), position_of(other.response())
    assert of_p != of_q
    assert bench.park("k") == of_p
    assert bench.park("k", group="q") == of_q
    assert bench.end(of_p, COMMIT).code == 0
    assert bench.park("k", group="q") == of_q


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
    restarted = bench.killed(with_snapshot=False)
    assert [half.queue_offset for half in restarted.coordinator.halves] == [1]
    restarted.tick()
    restarted.store.flush()
    restarted.tick()
    assert restarted.cursors() == (1, 0)
    assert restarted.end(positions[1], ROLLBACK).code == 0


def test_w11_an_end_gets_a_response_with_the_outcome(bench: EscrowBench) -> None:
    # An end gets a success or an error with a reason; a one-way end gets no response.
    position = bench.park("k")
    assert "group" in bench.end(position, COMMIT, group="q").remark
    assert "log offset" in bench.end((0, 7), COMMIT).remark
    assert "no half" in bench.end((7, 0), COMMIT).remark
    assert bench.end(position, 5).code == 1
    assert bench.state(position) == "open"
    bench.turn(
        end_request(position, COMMIT, one_way=True), end_request(position, ROLLBACK, one_way=True)
    )
    bench.turn()
    assert bench.channel.responses() == []
    response = bench.end(position, COMMIT)
    assert (response.code, response.ext_fields["state"]) == (0, "committed")
    assert bench.bodies() == [b"k"]


def test_w12_an_end_that_names_no_half_delivers_nothing(bench: EscrowBench) -> None:
    # The table of parked halves counts, not the record at the log offset.
    text = "PGROUP\x01p\x02REAL_TOPIC\x01T\x02REAL_QID\x010\x02UNIQ_KEY\x01u\x02"
    bench.turn(send_request(body=b"ordinary", properties=text))
    ordinary = position_of(bench.channel.response())
    assert bench.end(ordinary, COMMIT).code == 1
    position = bench.park("k")
    assert bench.end(position, COMMIT).code == 0
    [_, final] = bench.messages()
    assert bench.end((final.queue_offset, final.log_offset), COMMIT).code == 1
    assert bench.bodies() == [b"ordinary", b"k"]
    without_group = bench.park("without group", PGROUP="")
    assert bench.end(without_group, COMMIT).code == 1
    assert bench.state(position) == "committed"


# --- loss ----------------------------------------------------------------------------------------


def test_w13_a_group_that_was_disconnected_is_checked_when_it_is_back(bench: EscrowBench) -> None:
    # A check that was not sent does not count.
    position = bench.park("k")
    bench.disconnect(bench.channel)
    for _ in range(10 * CHECKS_MAX):
        bench.tick(INTERVAL_MS)
    reconnected = FakeChannel("reconnected")
    bench.heartbeat(reconnected, "p")
    bench.tick()
    assert [key for key, _ in sent_checks(reconnected)] == ["k"]
    assert bench.end(position, COMMIT, channel=reconnected).code == 0
    assert bench.bodies() == [b"k"]


def test_w14_stranding_is_counted_and_survives_a_full_disk(bench: EscrowBench) -> None:
    # Stranded is only a state: the half remains until it is decided.
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
    [copy] = stored_records(bench.store, names.STRANDED_TOPIC)
    assert "3 times" in decode_properties(copy.properties)["ESCROW_REASON"]
    restarted = bench.killed(with_snapshot=False)
    assert restarted.state(position) == "stranded"
    assert restarted.end(position, ROLLBACK).code == 0


@pytest.mark.parametrize("with_snapshot", [True, False])
def test_w15_an_open_half_outlives_its_log_file(with_snapshot: bool) -> None:
    # The half is moved, and its old position still leads to it.
    bench = EscrowBench(settings=SMALL_SEGMENTS)
    position = bench.park("k")
    fill_segments(bench)
    while bench.store.begin == 0:
        assert bench.remove_log_file()
    assert bench.state_in_memory(position) == "open"
    bench.store.flush()
    bench.broker.transactions.save(force=True)
    bench = bench.killed(with_snapshot=with_snapshot)
    bench.heartbeat(bench.channel, "p")
    bench.tick(IMMUNITY_MS)
    [(key, checked_position)] = sent_checks(bench.channel)
    assert key == "k"
    assert checked_position != position
    assert bench.end(position, COMMIT).code == 0
    assert bench.bodies() == [b"k"]
    bench.store.close()
    assert_clean(bench.disk, SMALL_SEGMENTS)


@pytest.mark.parametrize("with_snapshot", [True, False])
def test_w15_a_stranded_half_outlives_its_log_file(with_snapshot: bool) -> None:
    # RocketMQ's cursor is after the copy, so that only the record itself says that it is stranded.
    bench = EscrowBench(settings=SMALL_SEGMENTS)
    position = bench.park("k")
    for _ in range(CHECKS_MAX + 1):
        bench.tick(INTERVAL_MS)
    fill_segments(bench)
    while bench.store.begin == 0:
        assert bench.remove_log_file()
    bench.tick()
    bench.store.flush()
    bench.tick()  # a cursor advances when the log up to it is durable
    bench.broker.save()
    assert bench.cursors()[0] > bench.coordinator.aliases[position.queue_offset]
    restarted = bench.killed(with_snapshot=with_snapshot)
    assert restarted.state(position) == "stranded"
    assert restarted.end(position, COMMIT).code == 0
    assert restarted.bodies() == [b"k"]


def test_w16_a_half_that_is_decided_in_the_turn_of_the_tick_is_not_stranded(
    bench: EscrowBench,
) -> None:
    # An end of the same turn is handled before the tick.
    position = bench.park("k")
    for _ in range(CHECKS_MAX):
        bench.tick(INTERVAL_MS)
    bench.now_ms += INTERVAL_MS
    bench.broker.handle(bench.channel, end_request(position, COMMIT), bench.now_ms)
    bench.broker.tick(bench.now_ms)
    bench.turn()
    bench.tick(INTERVAL_MS)
    assert bench.bodies() == [b"k"]
    assert bodies(bench.store, names.STRANDED_TOPIC) == []
    assert bench.coordinator.counters.stranded == 0


@pytest.mark.parametrize("delay", [{"DELAY": "1"}, {"TIMER_DELAY_MS": "1000"}])
def test_w17_a_delay_counts_from_the_commit(bench: EscrowBench, delay: dict[str, str]) -> None:
    # The half is parked like any other; the final is a delayed message.
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
    # Checks and moves do not change them.
    position = bench.park("k", flag=7, TAGS="red", KEYS="order-1", mine="yes", born_timestamp=5)
    for _ in range(2):
        bench.tick(INTERVAL_MS)
    [half] = bench.coordinator.halves
    bench.broker.transactions.move_half(half, bench.now_ms)
    bench.turn()
    assert bench.end(position, COMMIT).code == 0
    [final] = bench.messages()
    assert (final.flag, final.born_ms, final.sys_flag) == (7, 5, COMMIT)
    values = decode_properties(final.properties)
    sent_values = {"TAGS": "red", "KEYS": "order-1", "mine": "yes", "UNIQ_KEY": "k"}
    assert sent_values.items() <= values.items()
    assert not {"TRAN_MSG", "REAL_TOPIC", "REAL_QID", "ESCROW_COPY_OF"} & values.keys()


# --- cost and latency ----------------------------------------------------------------------------


def test_w20_the_halves_and_ends_of_one_turn_are_one_append(bench: EscrowBench) -> None:
    # A single half queue is no bottleneck if a hundred sends are one write.
    store = counting(bench)
    bench.turn(*(half_request(f"k{number}") for number in range(100)))
    assert store.appends == 1
    positions = [position_of(response) for response in bench.channel.responses()]
    bench.turn(*(end_request(position, COMMIT) for position in positions))
    assert store.appends == 2
    assert len(bench.bodies()) == 100


def test_w21_a_check_makes_no_copy_of_the_message(bench: EscrowBench) -> None:
    # A check appends one small journal entry, whatever the size of the body.
    bench.park("k", body=b"x" * 100_000)
    before = bench.store.end
    for number in range(CHECKS_MAX):
        bench.tick(INTERVAL_MS)
        assert checked_keys(bench) == ["k"]
        assert bench.store.end - before < 200 * (number + 1)


def test_w22_halves_that_are_not_due_cost_nothing(bench: EscrowBench) -> None:
    # A tick reads only the due halves, not all open ones.
    for number in range(200):
        bench.park(f"not due {number}", CHECK_IMMUNITY_TIME_IN_SECONDS="3600")
    bench.park("due")
    store = counting(bench)
    for _ in range(10):
        bench.tick(IMMUNITY_MS // 10)
    assert checked_keys(bench) == ["due"]
    assert store.reads == 1


def test_w23_an_unanswered_half_does_not_delay_others(bench: EscrowBench) -> None:
    # Every half has its own due time.
    bench.park("unanswered")
    bench.park("late", CHECK_IMMUNITY_TIME_IN_SECONDS="3600")
    bench.park("early", CHECK_IMMUNITY_TIME_IN_SECONDS="1")
    bench.tick(1_000)
    assert checked_keys(bench) == ["early"]
    bench.tick(IMMUNITY_MS - 1_000)
    assert checked_keys(bench) == ["unanswered"]
    bench.park("new")
    bench.tick(IMMUNITY_MS)
    assert checked_keys(bench) == ["new"]


def test_w24_a_check_is_sent_when_it_is_due(bench: EscrowBench) -> None:
    # It is sent at the first tick after the due time, not at the next interval, and never earlier.
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
    # Without these settings all intervals are the same, as in RocketMQ.
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
    bench.park("single", group="q", channel=other)
    bench.tick(IMMUNITY_MS)
    assert [key for key, _ in sent_checks(other)] == ["single"]
    for _ in range(100):
        bench.tick(1)
    assert len(sent_checks(bench.channel)) == UNANSWERED_CHECKS_MAX


def test_w26_stranding_without_disk_space_is_repeated_after_a_pause(bench: EscrowBench) -> None:
    # Repeating it at every tick would burden a full disk.
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
    # Checks are limited per channel and second; each is sent and counted once.
    count = 2 * UNANSWERED_CHECKS_MAX + 100
    bench.turn(*(half_request(f"k{number}") for number in range(count)))
    bench.channel.responses()
    bench.tick(IMMUNITY_MS)
    keys = checked_keys(bench)
    assert len(keys) == UNANSWERED_CHECKS_MAX
    for _ in range(30):
        bench.tick(100)
        keys += checked_keys(bench)
    assert sorted(keys) == sorted(f"k{number}" for number in range(count))
    assert {half.checks for half in bench.coordinator.halves} == {1}


# --- operations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("verdict", "delivered"), [(COMMIT, [b"k"]), (ROLLBACK, [])])
def test_w29_an_operator_can_decide(
    bench: EscrowBench, verdict: int, delivered: list[bytes]
) -> None:
    # An operator names the transaction id and a reason. A late end gets the outcome.
    position = bench.park("k")
    fields = SettleTransaction(
        transaction_id="k", commit_or_rollback=verdict, reason="the order is paid"
    )
    assert bench.request(new_request(RequestCode.SETTLE_TRANSACTION, fields)).code == 0
    assert bench.bodies() == delivered
    assert bench.end(position, verdict).code == 0
    opposite = COMMIT if verdict == ROLLBACK else ROLLBACK
    assert bench.end(position, opposite).code == CONFLICT


def test_w30_the_channel_that_sent_the_half_is_checked_first(bench: EscrowBench) -> None:
    # When it is closed, the checks are spread over the other channels of the group.
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
    # A client may drop a check silently, or answer the next one.
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
    # The number of unanswered checks is limited. After an answer the next check is sent.
    bench.turn(*(half_request(f"k{number}") for number in range(UNANSWERED_CHECKS_MAX + 1)))
    bench.channel.responses()
    bench.tick(IMMUNITY_MS)
    checks = sent_checks(bench.channel)
    assert len(checks) == UNANSWERED_CHECKS_MAX
    _, position = checks[0]
    bench.now_ms += 1
    assert bench.end(position, ROLLBACK, check=True).code == 0
    assert len(sent_checks(bench.channel)) == 1


def test_w33_the_count_of_open_transactions_is_right(bench: EscrowBench) -> None:
    # Repeated and conflicting ends, repeated sends and restarts do not change it.
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
    restarted = bench.killed(with_snapshot=False)
    assert restarted.coordinator.halves.total == total
    assert restarted.coordinator.halves.group_totals("p") == total


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
