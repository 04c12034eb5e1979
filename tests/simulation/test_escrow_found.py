"""Bugs that the simulation has found, each as the shortest scenario that shows it."""

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


def move_half(world: World) -> None:
    """Move the half as if its segment expired."""
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


def park_unanswered(world: World, checks: int) -> str:
    """Park a half that is never ended, with checks that are never answered."""
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


def test_checks_before_a_move_still_count() -> None:
    with World(1, producers=1) as world:
        key = park_unanswered(world, checks=2)
        move_half(world)
        assert only_half(world).previous_offsets
        start_again(world)
        assert only_half(world).checks == world.truth.asked[key] == 2
        judge_disk(served(world))


def test_a_stranded_half_is_not_checked_because_it_moves() -> None:
    with World(1, producers=1) as world:
        world.operator.die()
        key = park_unanswered(world, checks=ESCROW.checks_max)
        while not only_half(world).is_stranded:
            world.step()
        move_half(world)
        assert only_half(world).is_stranded
        start_again(world)
        assert only_half(world).is_stranded
        world.run(40)
        assert world.truth.asked[key] == ESCROW.checks_max
        judge_disk(served(world))


def test_a_position_that_the_log_has_lost_still_leads_to_its_half() -> None:
    with World(1, producers=1) as world:
        world.operator.die()
        key = park_unanswered(world, checks=1)
        place = world.truth.parked[key]
        for _ in range(2):
            move_half(world)
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
def test_groups_in_pieces_do_not_hide_parts_of_each_other(seed: int) -> None:
    with World(seed, producers=2) as world:
        world.run(2)
        for producer in world.producers:
            for count in (9, 4, 2):
                producer.begin(count, size=300)
        world.run(40)  # the truth looks at every step
        world.rest()


def test_hidden_messages_do_not_expire() -> None:
    with World(2, producers=1) as world:
        world.run(2)
        world.producers[0].begin(30, size=300)
        transactions = served(world).broker.transactions
        while not transactions.coordinator.unfinished_decisions:
            world.step()
        assert transactions.oldest_needed_offset() == served(world).store.begin
        world.rest()
        assert transactions.coordinator.unfinished_decisions == set()
