"""What the simulation of the escrow has found, each as the shortest story that shows it."""

from __future__ import annotations

import pytest

from escrowmq.escrow.half_table import Half
from escrowmq.message.record import LogOffset
from tests.simulation.escrow_broker import ESCROW, BrokerProcess
from tests.simulation.escrow_truth import judge_disk
from tests.simulation.escrow_world import World


def served(world: World) -> BrokerProcess:
    assert world.process is not None
    return world.process


def only_half(world: World) -> Half:
    [half] = served(world).broker.transactions.coordinator.halves
    return half


def append_again(world: World) -> None:
    """As if its log file had to go."""
    process = served(world)
    process.broker.transactions.move_halves_below(
        LogOffset(process.store.end), world.clock.now_ms()
    )
    process.end_turn()
    process.flush()


def start_again(world: World) -> None:
    world.doing(world.kill)
    while world.process is None:
        world.step()


def a_forgotten_one(world: World, checks: int) -> str:
    """A transaction that nobody ends, and nobody answers for."""
    world.is_silent = True
    world.run(2)
    [producer] = world.producers
    transaction = producer.begin(how="forgotten")
    for _ in range(300):
        world.step()
        if world.truth.asked[f"{transaction}.0"] == checks:
            break
    served(world).flush()
    return f"{transaction}.0"


def test_checks_from_before_it_was_appended_again_still_count() -> None:
    with World(1, producers=1) as world:
        key = a_forgotten_one(world, checks=2)
        append_again(world)
        assert only_half(world).previous_offsets
        start_again(world)
        assert only_half(world).checks == world.truth.asked[key] == 2
        judge_disk(served(world))


def test_a_stranded_one_is_not_asked_about_because_its_log_file_goes() -> None:
    with World(1, producers=1) as world:
        world.operator.die()
        key = a_forgotten_one(world, checks=ESCROW.checks_max)
        while not only_half(world).is_stranded:
            world.step()
        append_again(world)
        assert only_half(world).is_stranded
        start_again(world)
        assert only_half(world).is_stranded
        world.run(40)
        assert world.truth.asked[key] == ESCROW.checks_max
        judge_disk(served(world))


def test_a_place_that_the_log_has_lost_still_leads_to_its_half() -> None:
    with World(1, producers=1) as world:
        world.operator.die()
        key = a_forgotten_one(world, checks=1)
        place = world.truth.parked[key]
        for _ in range(2):
            append_again(world)
        [producer] = world.producers
        while served(world).store.begin <= place[1]:
            producer.begin(commits=False, size=1_000)
            world.run(2)
            world.tend("begin_checkpoint")
            world.tend("finish_checkpoint")
            world.tend("expire")
        start_again(world)
        escrow = served(world).broker.transactions.coordinator
        half = escrow.find_open(*place)
        assert half is not None
        assert half.key.decode() == key


@pytest.mark.parametrize("seed", range(6))
def test_groups_that_are_stored_in_pieces_do_not_keep_parts_of_each_other_back(seed: int) -> None:
    with World(seed, producers=2) as world:
        world.run(2)
        for producer in world.producers:
            for count in (9, 4, 2):
                producer.begin(count, size=300)
        world.run(40)  # the truth looks at every step
        world.rest()


def test_what_is_out_of_sight_does_not_expire() -> None:
    with World(2, producers=1) as world:
        world.run(2)
        world.producers[0].begin(30, size=300)
        transactions = served(world).broker.transactions
        while not transactions.coordinator.unfinished_decisions:
            world.step()
        assert transactions.oldest_needed_offset() == served(world).store.begin
        world.rest()
        assert transactions.coordinator.unfinished_decisions == set()
