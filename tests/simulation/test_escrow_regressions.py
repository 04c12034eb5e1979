"""Bugs that the simulation has found, each with the shortest scenario that shows it."""

from __future__ import annotations

import pytest

from escrowmq.escrow.half_table import Half
from escrowmq.message.record import LogOffset
from tests.simulation.escrow_broker import ESCROW, BrokerProcess
from tests.simulation.escrow_model import check_disk
from tests.simulation.escrow_simulation import Simulation

pytestmark = pytest.mark.both_paths


def running_process(simulation: Simulation) -> BrokerProcess:
    assert simulation.process is not None
    return simulation.process


def only_half(simulation: Simulation) -> Half:
    [half] = running_process(simulation).broker.transactions.coordinator.halves
    return half


def move_half(simulation: Simulation) -> None:
    """Move all open halves, as if their segments expired."""
    process = running_process(simulation)
    process.broker.transactions.move_halves_below(LogOffset(process.store.end), process.now_ms())
    process.end_turn()
    process.flush()


def restart(simulation: Simulation) -> None:
    simulation.attempt(simulation.kill)
    while simulation.process is None:
        simulation.step()


def park_without_verdict(simulation: Simulation, checks: int) -> str:
    """Park a half that gets no verdict, wait for this number of checks and return its key."""
    simulation.ignores_checks = True
    simulation.run(2)
    [producer] = simulation.producers
    transaction = producer.begin(end_mode="never")
    for _ in range(300):
        simulation.step()
        if simulation.model.check_counts[f"{transaction}m0"] == checks:
            break
    running_process(simulation).flush()
    return f"{transaction}m0"


def test_checks_before_a_move_still_count() -> None:
    with Simulation(1, producers=1) as simulation:
        key = park_without_verdict(simulation, checks=2)
        move_half(simulation)
        assert only_half(simulation).previous_offsets
        restart(simulation)
        assert only_half(simulation).checks == simulation.model.check_counts[key] == 2
        check_disk(running_process(simulation))


def test_a_stranded_half_is_not_checked_again_after_a_move() -> None:
    with Simulation(1, producers=1) as simulation:
        simulation.operator.die()
        key = park_without_verdict(simulation, checks=ESCROW.checks_max)
        while not only_half(simulation).is_stranded:
            simulation.step()
        move_half(simulation)
        assert only_half(simulation).is_stranded
        restart(simulation)
        assert only_half(simulation).is_stranded
        simulation.run(40)
        assert simulation.model.check_counts[key] == ESCROW.checks_max
        check_disk(running_process(simulation))


def test_an_expired_position_of_a_moved_half_still_finds_the_half() -> None:
    with Simulation(1, producers=1) as simulation:
        simulation.operator.die()
        key = park_without_verdict(simulation, checks=1)
        position = simulation.model.parked[key]
        for _ in range(2):
            move_half(simulation)
        [producer] = simulation.producers
        while running_process(simulation).store.begin <= position[1]:
            producer.begin(commits=False, size=1_000)
            simulation.run(2)
            simulation.maintain(BrokerProcess.begin_checkpoint)
            simulation.maintain(BrokerProcess.finish_checkpoint)
            simulation.maintain(BrokerProcess.expire)
        restart(simulation)
        coordinator = running_process(simulation).broker.transactions.coordinator
        half = coordinator.find_open(*position)
        assert half is not None
        assert half.key.decode() == key


@pytest.mark.parametrize("seed", range(6))
def test_messages_decided_in_pieces_become_visible_together(seed: int) -> None:
    with Simulation(seed, producers=2) as simulation:
        simulation.run(2)
        for producer in simulation.producers:
            for count in (9, 4, 2):
                producer.begin(count, size=300)
        simulation.run(40)  # the model checks every step
        simulation.run_until_idle()


def test_hidden_messages_do_not_expire() -> None:
    with Simulation(2, producers=1) as simulation:
        simulation.run(2)
        simulation.producers[0].begin(30, size=300)
        transactions = running_process(simulation).broker.transactions
        while not transactions.coordinator.unfinished_decisions:
            simulation.step()
        assert transactions.oldest_needed_offset() == running_process(simulation).store.begin
        simulation.run_until_idle()
        assert transactions.coordinator.unfinished_decisions == set()
