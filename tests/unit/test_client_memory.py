"""The bytes that are kept for each client: who is refused, and what is left after a release."""

from __future__ import annotations

import pytest

from escrowmq.client_memory import (
    FAIR_BYTES_MIN,
    ClientMemory,
    MemoryLimits,
    MemoryUse,
    name_error,
)
from escrowmq.errors import TableFull
from tests.support.fake_peers import FakePeer

MIB = 1 << 20
LIMITS = MemoryLimits(connection_max=2 * MIB, hard_max=8 * MIB)
USE = MemoryUse.MEMBERS


def test_a_connection_gets_no_more_than_its_limit() -> None:
    memory, owner = ClientMemory(LIMITS), FakePeer("a")
    memory.reserve(owner, USE, 2 * MIB)
    with pytest.raises(TableFull, match="the limit is 2097152"):
        memory.reserve(owner, USE, 1)
    assert memory.bytes_of(owner) == memory.total == 2 * MIB
    assert memory.refused == 1


def test_a_registration_may_exceed_the_limit_of_a_connection() -> None:
    memory, owner = ClientMemory(LIMITS), FakePeer("a")
    memory.reserve(owner, MemoryUse.REGISTRATIONS, 3 * MIB, ignores_connection_max=True)
    assert memory.bytes_for(MemoryUse.REGISTRATIONS) == 3 * MIB


def test_above_the_soft_limit_only_the_greedy_are_refused() -> None:
    memory = ClientMemory(LIMITS)
    greedy = [FakePeer(str(number)) for number in range(4)]
    for owner in greedy:
        memory.reserve(owner, USE, int(1.5 * MIB))
    assert memory.total == LIMITS.soft_max
    for owner in greedy:
        with pytest.raises(TableFull, match="escrowClientMemoryMax"):
            memory.reserve(owner, USE, 10_000)
    memory.reserve(FakePeer("honest"), USE, FAIR_BYTES_MIN)
    assert memory.is_above_soft
    assert not memory.is_above_hard


ATTACKERS = [FakePeer(f"10.0.0.1:{number}") for number in range(1_000)]


def test_a_thousand_connections_of_one_host_leave_another_host_its_share() -> None:
    """Each attacker has less than a connection may always have; together they have too much."""
    limits = MemoryLimits(connection_max=32 * MIB, hard_max=256 * MIB)
    memory, honest = ClientMemory(limits), FakePeer("10.0.0.2:1")
    for attacker in ATTACKERS:
        memory.reserve(attacker, USE, FAIR_BYTES_MIN)
    assert memory.is_above_soft
    memory.reserve(honest, USE, 4 * MIB)
    assert memory.is_greedy(ATTACKERS[0], 1)
    assert not memory.is_greedy(honest)
    assert memory.greediest()[-1] == (honest, 4 * MIB)


def test_the_greediest_come_first() -> None:
    memory = ClientMemory(LIMITS)
    for size, name in ((1, "small"), (3, "large"), (2, "medium")):
        memory.add(FakePeer(name), USE, size)
    assert [str(owner) for owner, _ in memory.greediest()] == ["large", "medium", "small"]


def test_nothing_is_left_of_a_forgotten_connection() -> None:
    memory, owner = ClientMemory(LIMITS), FakePeer("a")
    memory.add(owner, USE, 10)
    memory.set(owner, MemoryUse.UNSENT_RESPONSES, 20)
    memory.set(owner, MemoryUse.UNSENT_RESPONSES, 5)
    assert dict(memory.uses_of(owner)) == {USE: 10, MemoryUse.UNSENT_RESPONSES: 5}
    memory.forget(owner)
    memory.release(owner, USE, 10)  # a table that notices later
    assert memory.total == 0
    assert memory.greediest() == []
    assert all(memory.bytes_for(use) == 0 for use in MemoryUse)


@pytest.mark.parametrize("name", ["", "a" * 255, "\u00e9" * 127, "\U0001d11e" * 63])
def test_a_name_of_255_bytes_is_allowed(name: str) -> None:
    assert name_error("clientId", name) == ""


@pytest.mark.parametrize("name", ["a" * 256, "\u00e9" * 128, "\U0001d11e" * 64, "x" * 15_000_000])
def test_a_longer_name_is_refused(name: str) -> None:
    text = f"clientId has {len(name)} characters, the limit is 255 bytes"
    assert name_error("clientId", name) == text
