"""Decisions about many halves, and writers: atomic, made once, durable before the response."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.escrow.writers import decode_decision
from escrowmq.message import names
from tests.support.broker_requests import FakeChannel, bodies, stored_records
from tests.support.escrows import (
    COMMIT,
    ROLLBACK,
    SMALL_SEGMENTS,
    EscrowBench,
    HalfPosition,
    decide_batch_request,
    end_many_request,
    end_request,
    fill_segments,
    half_request,
    position_of,
    query_writer_request,
    register_writer_request,
    writer_state,
)
from tests.support.sliced import finish

CONFLICT, FENCED = 3701, 3702
PIECE_BYTES = 1000
MANY = 8  # their decision needs more than one piece


def attempt(writer: str = "w", batch: int = 0, name: str = "a", fence: int = 1) -> dict[str, str]:
    return {
        "ESCROW_WRITER": writer,
        "ESCROW_BATCH": str(batch),
        "ESCROW_ATTEMPT": name,
        "ESCROW_FENCE": str(fence),
    }


def park_two(bench: EscrowBench) -> list[tuple[int, int]]:
    return [bench.park("a"), bench.park("b")]


def park_many(bench: EscrowBench, count: int = MANY) -> list[HalfPosition]:
    return [bench.park(f"k{number}", body=b"x" * 200) for number in range(count)]


# --- groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("verdict", "delivered"), [(COMMIT, [b"a", b"b"]), (ROLLBACK, [])])
def test_a_group_is_decided_together(verdict: int, delivered: list[bytes]) -> None:
    bench = EscrowBench()
    positions = park_two(bench)
    response = bench.request(end_many_request(positions, verdict))
    assert (response.code, response.ext_fields["count"]) == (0, "2")
    assert bench.bodies() == delivered
    repeated = bench.request(end_many_request(positions, verdict))
    assert (repeated.code, repeated.ext_fields["count"]) == (0, "0")
    assert bench.bodies() == delivered


@pytest.mark.parametrize(
    "spoil",
    [
        lambda bench, positions: bench.end(positions[1], ROLLBACK),
        lambda bench, positions: positions.append((99, 99)),
        lambda bench, positions: positions.append((positions[0][0], 12345)),
        lambda bench, positions: positions.append(bench.park("other", group="q")),
    ],
    ids=["rolled back", "unknown", "wrong log offset", "another group's"],
)
def test_one_half_that_cannot_be_committed_fails_the_whole_group(spoil: Any) -> None:
    bench = EscrowBench()
    positions = park_two(bench)
    spoil(bench, positions)
    assert bench.request(end_many_request(positions, COMMIT)).code != 0
    assert bench.bodies() == []
    assert bench.end(positions[0], COMMIT).code == 0


def test_a_half_named_twice_is_delivered_once() -> None:
    bench = EscrowBench()
    position = bench.park("a")
    [half] = bench.coordinator.halves
    bench.broker.transactions.move_half(half, bench.now_ms)
    bench.turn()
    new_position = (half.queue_offset, half.log_offset)
    assert new_position != position
    request = end_many_request([position, new_position, position], COMMIT)
    assert bench.request(request).code == 0
    assert bench.bodies() == [b"a"]


def test_a_group_decision_repeated_in_the_same_turn_is_no_conflict() -> None:
    bench = EscrowBench()
    positions = park_two(bench)
    other = FakeChannel("other")
    finish(bench.broker.handle(bench.channel, end_many_request(positions, COMMIT), bench.now_ms))
    finish(bench.broker.handle(other, end_many_request(positions, COMMIT), bench.now_ms))
    finish(bench.broker.handle(other, end_many_request(positions, ROLLBACK), bench.now_ms))
    bench.turn()
    bench.turn()
    assert bench.channel.response().code == 0
    assert sorted(response.code for response in other.responses()) == [0, CONFLICT]
    assert bench.bodies() == [b"a", b"b"]


def test_a_group_decision_without_disk_space_changes_nothing() -> None:
    bench = EscrowBench()
    positions = park_two(bench)
    bench.store.has_disk_space = False
    assert bench.request(end_many_request(positions, COMMIT)).code != 0
    bench.store.has_disk_space = True
    assert bench.state(positions[0]) == "open"
    assert bench.request(end_many_request(positions, ROLLBACK)).code == 0
    assert bench.bodies() == []


def test_a_large_group_is_visible_only_when_all_of_it_is_stored() -> None:
    bench = EscrowBench(piece_bytes=PIECE_BYTES)
    positions = park_many(bench)
    bench.turn(end_many_request(list(positions), COMMIT))
    assert bench.bodies() == []
    assert bench.channel.responses() == []
    while not (responses := bench.channel.responses()):
        assert bench.bodies() == []
        bench.tick(100)
    assert responses[0].code == 0
    assert len(bench.bodies()) == MANY


def test_a_large_group_is_completed_by_turns_without_a_tick() -> None:
    bench = EscrowBench(piece_bytes=PIECE_BYTES)
    positions = park_many(bench)
    finish(
        bench.broker.handle(bench.channel, end_many_request(list(positions), COMMIT), bench.now_ms)
    )
    turns = 1
    while bench.broker.end_turn(bench.now_ms):
        assert bench.bodies() == []
        turns += 1
    assert turns > 2
    assert bench.channel.response().code == 0
    assert len(bench.bodies()) == MANY


def test_a_large_group_without_disk_space_can_be_decided_later() -> None:
    bench = EscrowBench(piece_bytes=PIECE_BYTES)
    positions = park_many(bench)
    bench.store.has_disk_space = False
    assert bench.request(end_many_request(list(positions), COMMIT)).code != 0
    bench.store.has_disk_space = True
    assert bench.end(positions[0], COMMIT).code == 0
    assert len(bench.bodies()) == 1


def test_a_later_piece_without_disk_space_is_stored_later() -> None:
    bench = EscrowBench(piece_bytes=PIECE_BYTES)
    positions = park_many(bench)
    bench.turn(end_many_request(list(positions), COMMIT))
    bench.store.has_disk_space = False
    bench.tick(100)
    assert not bench.broker.end_turn(bench.now_ms), "no further turn is due while the disk is full"
    bench.store.has_disk_space = True
    for _ in range(MANY):
        bench.tick(100)
    assert bench.channel.response().code == 0
    assert len(bench.bodies()) == MANY


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_a_large_group_is_completed_after_a_crash(has_snapshot: bool) -> None:
    """With has_snapshot, the snapshot was saved between two pieces of the group."""
    bench = EscrowBench(piece_bytes=PIECE_BYTES)
    positions = park_many(bench)
    bench.turn(end_many_request(list(positions), COMMIT))
    if has_snapshot:
        bench.store.flush()
        bench.broker.transactions.save(force=True)
    restarted = bench.killed()
    assert len(restarted.bodies()) == MANY
    assert len(restarted.coordinator.halves) == 0


# --- writers -------------------------------------------------------------------------------------


def test_the_winners_of_a_batch_are_delivered_and_the_others_rolled_back() -> None:
    bench = EscrowBench()
    fence = bench.register().fence
    winners = [bench.park(f"a{number}", **attempt(name="a", fence=fence)) for number in range(2)]
    loser = bench.park("b0", **attempt(name="b", fence=fence))
    assert bench.request(decide_batch_request(0, fence, [("a", 2)])).code == 0
    assert bench.bodies() == [b"a0", b"a1"]
    assert [bench.state(winner) for winner in winners] == ["committed", "committed"]
    assert bench.state(loser) == "rolled_back"
    assert all("ESCROW" not in str(record.properties) for record in bench.messages())


def test_a_repeated_batch_decision_gets_the_first_one() -> None:
    bench = EscrowBench()
    fence = bench.register().fence
    bench.park("a0", **attempt(name="a", fence=fence))
    first = writer_state(bench.request(decide_batch_request(0, fence, [("a", 1)])))
    repeated = writer_state(bench.request(decide_batch_request(0, fence, [("b", 5)])))
    assert repeated == first
    assert bench.bodies() == [b"a0"]


@pytest.mark.parametrize("winners", [[("a", 2)], [("a", 1), ("b", 1)], [("a", 0)]])
def test_a_winner_with_missing_halves_fails_the_decision(
    winners: list[tuple[str, int]],
) -> None:
    bench = EscrowBench()
    fence = bench.register().fence
    position = bench.park("a0", **attempt(name="a", fence=fence))
    assert bench.request(decide_batch_request(0, fence, winners)).code == CONFLICT
    assert bench.state(position) == "open"
    assert bench.request(decide_batch_request(0, fence, [("a", 1)])).code == 0


def test_a_winner_named_twice_is_delivered_once() -> None:
    bench = EscrowBench()
    fence = bench.register().fence
    bench.park("a0", **attempt(name="a", fence=fence))
    assert bench.request(decide_batch_request(0, fence, [("a", 1), ("a", 1)])).code == 0
    assert bench.bodies() == [b"a0"]
    assert bench.end(bench.park("after"), COMMIT).code == 0


def test_a_negative_batch_is_refused() -> None:
    bench = EscrowBench()
    fence = bench.register().fence
    assert bench.request(decide_batch_request(-1, fence, [("a", 1)])).code != 0


def test_an_older_fence_decides_nothing() -> None:
    bench = EscrowBench()
    old, new = bench.register().fence, bench.register().fence
    assert new > old
    assert bench.request(decide_batch_request(0, old, [])).code == FENCED
    assert bench.request(decide_batch_request(5, new, [])).code == 0
    assert bench.request(decide_batch_request(4, new, [])).code == FENCED
    restarted = bench.killed()
    assert restarted.request(decide_batch_request(6, old, [])).code == FENCED
    assert writer_state(restarted.request(query_writer_request())).batch == 5


def test_two_registrations_in_one_turn_get_two_fences() -> None:
    bench, other = EscrowBench(), FakeChannel("other")
    finish(bench.broker.handle(bench.channel, register_writer_request(), bench.now_ms))
    finish(bench.broker.handle(other, register_writer_request(), bench.now_ms))
    bench.turn()
    fences = [writer_state(bench.channel.response()).fence, writer_state(other.response()).fence]
    assert fences == [1, 2]


def test_two_registrations_before_one_flush_get_two_fences() -> None:
    bench, other = EscrowBench(sync=True), FakeChannel("other")
    bench.turn(register_writer_request())
    bench.turn(register_writer_request(), channel=other)
    bench.flush()
    fences = [writer_state(bench.channel.response()).fence, writer_state(other.response()).fence]
    assert fences == [1, 2]


def test_the_response_to_a_query_has_no_decision_that_is_not_durable() -> None:
    bench, other = EscrowBench(sync=True), FakeChannel("other")
    bench.turn(half_request("not durable yet"))
    bench.turn(query_writer_request(), channel=other)  # waits for the flush of the half
    flush = bench.store.begin_flush()
    bench.turn(decide_batch_request(0, 0, []))
    bench.finish(flush)
    assert writer_state(other.response()).batch == -1


def test_decisions_without_disk_space_change_nothing() -> None:
    bench = EscrowBench()
    fence = bench.register().fence
    position = bench.park("a0", **attempt(batch=2, name="a", fence=fence))
    bench.store.has_disk_space = False
    bench.turn(decide_batch_request(0, fence, []), decide_batch_request(1, fence, []))
    assert all(response.code for response in bench.channel.responses())
    assert bench.request(decide_batch_request(2, fence, [("a", 1)])).code != 0
    bench.store.has_disk_space = True
    assert bench.state(position) == "open"
    assert writer_state(bench.request(query_writer_request())).batch == -1
    assert bench.request(decide_batch_request(2, fence, [("a", 1)])).code == 0
    assert bench.bodies() == [b"a0"]


def test_a_registration_without_disk_space_raises_no_fence() -> None:
    bench = EscrowBench()
    bench.store.has_disk_space = False
    bench.turn(register_writer_request(), register_writer_request())
    assert all(response.code for response in bench.channel.responses())
    bench.store.has_disk_space = True
    assert bench.register().fence == 1


def test_an_end_and_a_batch_decision_in_one_turn_do_not_both_win() -> None:
    bench, other = EscrowBench(), FakeChannel("other")
    fence = bench.register().fence
    position = bench.park("a0", **attempt(fence=fence))
    finish(bench.broker.handle(bench.channel, end_request(position, ROLLBACK), bench.now_ms))
    finish(bench.broker.handle(other, decide_batch_request(0, fence, [("a", 1)]), bench.now_ms))
    bench.turn()
    bench.turn()
    assert bench.channel.response().code == 0
    assert other.response().code == CONFLICT
    assert bench.bodies() == []
    assert len(bodies(bench.store, names.OP_TOPIC)) == 1


def test_a_batch_decision_and_an_end_in_one_turn_do_not_both_win() -> None:
    bench, other = EscrowBench(), FakeChannel("other")
    fence = bench.register().fence
    position = bench.park("a0", **attempt(fence=fence))
    finish(bench.broker.handle(other, decide_batch_request(0, fence, [("a", 1)]), bench.now_ms))
    finish(bench.broker.handle(bench.channel, end_request(position, ROLLBACK), bench.now_ms))
    bench.turn()
    bench.turn()
    assert bench.channel.response().code == CONFLICT
    assert other.response().code == 0
    assert bench.bodies() == [b"a0"]


def test_a_late_half_of_a_decided_batch_is_rolled_back_without_a_check() -> None:
    bench = EscrowBench()
    fence = bench.register().fence
    bench.request(decide_batch_request(3, fence, []))
    late = bench.park("late", **attempt(batch=3, fence=fence))
    early = bench.park("early", **attempt(batch=4, fence=fence))
    bench.tick(bench.config.immunity_ms)
    assert bench.channel.oneway_requests == []
    assert [bench.state(late), bench.state(early)] == ["rolled_back", "open"]


def test_a_late_half_is_rolled_back_when_there_is_disk_space_again() -> None:
    bench = EscrowBench()
    fence = bench.register().fence
    bench.request(decide_batch_request(3, fence, []))
    late = bench.park("late", **attempt(batch=3, fence=fence))
    bench.store.has_disk_space = False
    bench.tick(bench.config.immunity_ms)
    bench.store.has_disk_space = True
    bench.tick(bench.config.check_interval_ms)
    assert bench.state(late) == "rolled_back"


def test_a_writer_outlives_the_segment_with_its_decision() -> None:
    bench = EscrowBench(settings=SMALL_SEGMENTS)
    fence = bench.register().fence
    bench.request(decide_batch_request(7, fence, []))
    fill_segments(bench)
    assert bench.remove_log_file()
    assert bench.remove_log_file()
    restarted = bench.killed(with_snapshot=False)
    state = writer_state(restarted.request(query_writer_request()))
    assert (state.fence, state.batch) == (fence, 7)


def test_only_an_active_writer_is_moved_when_its_segment_expires() -> None:
    bench = EscrowBench()
    for writer, is_last in (("finished", True), ("active", False)):
        fence = bench.register(writer).fence
        bench.request(decide_batch_request(7, fence, [], writer=writer, last=is_last))
    log_end = bench.store.end
    old_count = len(stored_records(bench.store, names.DECISION_TOPIC))
    for _ in range(2):  # the second time the active writer has moved already
        bench.broker.transactions.move_halves_below(log_end, bench.now_ms)
        bench.turn()
    new_records = stored_records(bench.store, names.DECISION_TOPIC)[old_count:]
    assert [decode_decision(record).writer for record in new_records] == ["active"]


def test_a_writer_that_decided_its_last_batch_is_purged_with_the_segment() -> None:
    bench = EscrowBench(settings=SMALL_SEGMENTS)
    bench.request(decide_batch_request(7, bench.register().fence, [], last=True))
    fill_segments(bench)
    assert bench.remove_log_file()
    restarted = bench.restarted()
    assert list(restarted.coordinator.writers) == []
    state = writer_state(restarted.request(query_writer_request()))
    assert (state.fence, state.batch) == (0, -1)


def test_a_decision_is_not_reported_before_it_is_durable() -> None:
    bench = EscrowBench(sync=True)
    positions = park_two(bench)
    for request in (
        end_many_request(positions, COMMIT),
        end_many_request(positions, COMMIT),
        register_writer_request(),
        decide_batch_request(0, 1, []),
        decide_batch_request(0, 1, []),
        query_writer_request(),
    ):
        bench.turn(request)
        assert bench.channel.responses() == []
    bench.flush()
    assert [response.code for response in bench.channel.responses()] == [0] * 6
    position_of(bench.request(half_request("c")))
