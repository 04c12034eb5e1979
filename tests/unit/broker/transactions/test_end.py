"""Ends and checks under difficult conditions: a full disk, late flushes, a clock set back."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

from escrowmq.errors import FlushTimeout
from escrowmq.message import names
from tests.support.broker_requests import FakeChannel, bodies, pull_request
from tests.support.escrows import (
    COMMIT,
    ESCROW,
    ROLLBACK,
    UNKNOWN,
    EscrowBench,
    end_request,
    half_request,
    sent_checks,
)

IMMUNITY_MS, INTERVAL_MS = ESCROW.immunity_ms, ESCROW.check_interval_ms


def test_responses_wait_until_their_records_are_durable() -> None:
    bench = EscrowBench(sync=True)
    position = bench.park("k")
    for request in (
        end_request(position, COMMIT),
        end_request(position, COMMIT),
        end_request(position, UNKNOWN),
        half_request("k"),
        half_request("new"),
    ):
        bench.turn(request)
        assert bench.channel.responses() == []
    bench.flush()
    responses = bench.channel.responses()
    assert [response.code for response in responses] == [0] * 5
    assert responses[2].ext_fields["state"] == "committed"
    restarted = bench.power_cut()
    assert restarted.bodies() == [b"k"]


@pytest.mark.parametrize("verdict", [COMMIT, ROLLBACK])
def test_an_end_that_is_not_flushed_in_time_is_not_successful(verdict: int) -> None:
    bench = EscrowBench(sync=True)
    position = bench.park("k")
    bench.turn(end_request(position, verdict))
    bench.flush(FlushTimeout("not flushed in time"))
    assert bench.channel.response().code == 10
    assert bench.end(position, verdict).code == 0


def test_an_end_without_disk_space_changes_nothing() -> None:
    bench = EscrowBench()
    position = bench.park("k")
    bench.store.has_disk_space = False
    assert bench.end(position, COMMIT).code == 14
    bench.store.has_disk_space = True
    assert bench.state(position) == "open"
    assert bench.end(position, ROLLBACK).code == 0
    assert bench.bodies() == []


def test_the_second_of_two_ends_in_one_turn_counts_if_the_first_had_no_disk_space() -> None:
    bench, other = EscrowBench(), FakeChannel("other")
    position = bench.park("k")
    bench.store.has_disk_space = False
    bench.broker.handle(bench.channel, end_request(position, ROLLBACK), bench.now_ms)
    bench.turn(end_request(position, COMMIT), channel=other)
    bench.store.has_disk_space = True
    bench.turn()
    assert bench.channel.response().code == 14
    assert other.response().code == 0
    assert bench.bodies() == [b"k"]


@pytest.mark.parametrize(("first", "second"), [(COMMIT, ROLLBACK), (ROLLBACK, COMMIT)])
def test_the_first_of_two_ends_in_one_turn_counts(first: int, second: int) -> None:
    bench, other = EscrowBench(sync=True), FakeChannel("other")
    position = bench.park("k")
    bench.broker.handle(bench.channel, end_request(position, first), bench.now_ms)
    bench.turn(end_request(position, second), channel=other)
    bench.flush()
    assert bench.channel.response().code == 0
    assert other.response().code == 3701
    assert bench.bodies() == ([b"k"] if first == COMMIT else [])
    assert bodies(bench.store, names.OP_TOPIC) == [b"0"]


def test_a_half_that_is_refused_can_be_sent_again() -> None:
    bench = EscrowBench()
    bench.store.has_disk_space = False
    bench.turn(half_request("k"), half_request("k"))
    assert [response.code == 0 for response in bench.channel.responses()] == [False, False]
    bench.store.has_disk_space = True
    assert bench.end(bench.park("k"), COMMIT).code == 0
    assert bench.bodies() == [b"k"]


def test_halves_above_the_limit_are_refused_until_some_are_decided() -> None:
    bench = EscrowBench(config=replace(ESCROW, open_max=2))
    first, _ = bench.park("a"), bench.park("b")
    assert bench.request(half_request("c")).code == 2
    assert bench.park("a") == first  # a repeated send does not open a transaction
    bench.end(first, ROLLBACK)
    bench.park("c")


@pytest.mark.parametrize("check", [False, True], ids=["from a producer", "as a check's answer"])
def test_unknown_for_a_half_that_was_never_parked_is_refused(check: bool) -> None:
    bench = EscrowBench()
    parked = bench.park("k")
    never_parked = (parked.queue_offset + 1, parked.log_offset)
    response = bench.end(never_parked, UNKNOWN, check=check)
    assert response.code == 1
    assert f"no half message at queue offset {never_parked[0]}" in response.remark
    assert bench.state(parked) == "open"


def test_a_moved_half_is_also_open_at_its_old_position() -> None:
    bench = EscrowBench()
    position = bench.park("k")
    [half] = bench.coordinator.halves
    bench.broker.transactions.move_half(half, bench.now_ms)
    bench.turn()
    assert bench.state(position) == "open"
    assert bench.end((position[0], position[1] + 1), COMMIT).code == 1
    assert bench.end(position, COMMIT, group="q").code == 1
    assert bench.end(position, ROLLBACK).code == 0
    assert bench.state(position) == "rolled_back"


def test_a_half_in_the_backlog_is_checked_after_the_clock_was_set_back() -> None:
    bench = EscrowBench()
    bench.park("k")
    bench.disconnect(bench.channel)
    bench.tick(IMMUNITY_MS)
    bench.now_ms -= 5_000
    reconnected = FakeChannel("reconnected")
    bench.heartbeat(reconnected, "p")
    for _ in range(3):
        bench.tick(5_000)
    assert [key for key, _ in sent_checks(reconnected)] == ["k"]


def test_a_half_in_the_backlog_is_checked_after_its_end_had_no_disk_space() -> None:
    bench = EscrowBench()
    position = bench.park("k")
    bench.disconnect(bench.channel)
    bench.tick(IMMUNITY_MS)
    reconnected = FakeChannel("reconnected")
    bench.store.has_disk_space = False
    bench.broker.handle(reconnected, end_request(position, COMMIT), bench.now_ms)
    bench.heartbeat(reconnected, "p")
    bench.store.has_disk_space = True
    for _ in range(3):
        bench.tick(5_000)
    assert [key for key, _ in sent_checks(reconnected)] == ["k"]


def test_a_check_that_was_not_sent_does_not_count() -> None:
    class CongestedChannel(FakeChannel):
        def send_oneway(self, *_: object) -> bool:
            return False

    bench, channel = EscrowBench(), CongestedChannel("congested")
    bench.park("k", channel=channel)
    for _ in range(10 * ESCROW.checks_max):
        bench.tick(INTERVAL_MS)
    [half] = bench.coordinator.halves
    assert (half.checks, half.is_stranded) == (0, False)
    bench.heartbeat(bench.channel, "p")
    bench.tick(INTERVAL_MS)
    bench.tick(INTERVAL_MS)
    assert "k" in [key for key, _ in sent_checks(bench.channel)]


def test_a_producer_that_hangs_is_not_the_only_one_that_is_checked() -> None:
    bench, hanging, other = EscrowBench(), FakeChannel("hanging"), FakeChannel("other")
    bench.heartbeat(hanging, "p")
    bench.heartbeat(other, "p")
    bench.park("k", channel=hanging)
    bench.tick(IMMUNITY_MS)
    assert [key for key, _ in sent_checks(hanging)] == ["k"]
    for _ in range(2):
        bench.tick(INTERVAL_MS)
    assert [key for key, _ in sent_checks(other)] == ["k"]


def test_the_channel_that_answered_last_is_checked_first() -> None:
    bench, hanging, other = EscrowBench(), FakeChannel("hanging"), FakeChannel("other")
    bench.heartbeat(hanging, "p")
    bench.heartbeat(other, "p")
    position = bench.park("k", channel=hanging)
    bench.tick(IMMUNITY_MS)
    bench.broker.handle(other, end_request(position, 0, check=True), bench.now_ms)
    bench.tick(INTERVAL_MS)
    assert [key for key, _ in sent_checks(other)] == ["k"]


def test_a_closed_channel_with_unanswered_checks_is_released() -> None:
    bench, checked_channel = EscrowBench(), FakeChannel("checked")
    bench.park("k")
    bench.disconnect(bench.channel)
    bench.heartbeat(checked_channel, "p")
    bench.tick(IMMUNITY_MS)
    assert [key for key, _ in sent_checks(checked_channel)] == ["k"]
    bench.disconnect(checked_channel)
    reference = weakref.ref(checked_channel)
    del checked_channel
    gc.collect()
    assert reference() is None


def test_a_half_that_is_scheduled_twice_is_stranded_once() -> None:
    bench = EscrowBench()
    bench.park("k")
    for _ in range(ESCROW.checks_max):
        bench.tick(INTERVAL_MS)
    restarted = bench.killed()  # schedules the half for its first check and for its last one
    restarted.tick(10 * INTERVAL_MS)
    restarted.tick(10 * INTERVAL_MS)
    assert len(bodies(restarted.store, names.STRANDED_TOPIC)) == 1
    assert restarted.coordinator.counters.stranded == 1


def test_a_held_pull_gets_a_message_when_it_is_committed_and_not_before() -> None:
    bench, reader = EscrowBench(), FakeChannel("reader")
    bench.turn(pull_request(suspend_timeout_millis=600_000), channel=reader)
    first, second = bench.park("a"), bench.park("b")
    bench.end(first, ROLLBACK)
    assert reader.responses() == []
    bench.end(second, COMMIT)
    response = reader.response()
    assert response.code == 0
    assert b"\x00\x00\x00\x01b" in response.body
