"""Many connections of one account or host: they have one share, and others keep theirs."""

from __future__ import annotations

import pytest

from escrowmq.client_memory import ClientMemory, MemoryLimits, MemoryUse
from escrowmq.clock import ManualClock
from escrowmq.config import NetworkConfig
from escrowmq.errors import TableFull
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.headers import ConsumerGroupHeader
from escrowmq.server.connection_limits import MemoryWatermark
from escrowmq.server.remoting_server import RemotingServer
from escrowmq.server.server_connection import CALL_BYTES, ServerConnection
from tests.support.fake_transport import FakeTransport
from tests.support.silent_handler import SilentHandler

ATTACKER, HONEST = "10.0.0.1", "10.0.0.2"
MIB = 1 << 20
CONNECTIONS_MAX = 10


class Port:
    """A server whose connections have no sockets."""

    def __init__(self, *, hard_max: int = 1 << 30) -> None:
        config = NetworkConfig(connections_max=CONNECTIONS_MAX)
        limits = MemoryLimits(connection_max=32 * MIB, hard_max=hard_max)
        self.memory = ClientMemory(limits)
        self.watermark = MemoryWatermark(self.memory)
        self.clock = ManualClock()
        self.server = RemotingServer(SilentHandler(), self.clock, config, watermark=self.watermark)
        self.ports = iter(range(1, 60_000))

    def connect(self, host: str, *, account: str = "") -> ServerConnection:
        """Open a connection on which a request was received."""
        connection = ServerConnection(self.server)
        connection.connection_made(FakeTransport(next(self.ports), host=host))
        self.server.request_received(connection)
        if account:
            connection.set_account(account)
        return connection

    def is_open(self, connection: ServerConnection) -> bool:
        return connection in self.server.connections


async def test_a_full_port_makes_room_for_another_host() -> None:
    port = Port()
    attackers = [port.connect(ATTACKER) for _ in range(CONNECTIONS_MAX)]
    honest = port.connect(HONEST)
    assert port.is_open(honest)
    assert [attacker.is_open for attacker in attackers] == [True] * 9 + [False]
    assert port.is_open(port.connect("10.0.0.3"))
    assert port.is_open(honest)
    assert len(port.server.connections) == CONNECTIONS_MAX


async def test_a_full_port_refuses_more_connections_of_the_same_host() -> None:
    port = Port()
    attackers = [port.connect(ATTACKER) for _ in range(CONNECTIONS_MAX - 1)]
    honest = port.connect(HONEST)
    assert not port.is_open(port.connect(ATTACKER))
    assert all(map(port.is_open, [*attackers, honest]))
    assert port.server.refused_connections == 1


async def test_a_connection_without_a_request_is_not_closed_for_a_host_that_has_more() -> None:
    port = Port()
    attackers = [port.connect(ATTACKER) for _ in range(CONNECTIONS_MAX - 1)]
    silent = ServerConnection(port.server)
    silent.connection_made(FakeTransport(9, host=HONEST))
    assert not port.is_open(port.connect(ATTACKER))
    assert port.is_open(silent)
    assert port.is_open(port.connect(HONEST))  # at the cost of the silent one, or of an attacker
    assert sum(map(port.is_open, attackers)) >= CONNECTIONS_MAX - 2


async def test_connections_of_an_account_count_together_from_wherever_they_come() -> None:
    port = Port()
    hosts = [f"10.0.1.{number}" for number in range(CONNECTIONS_MAX - 1)]
    attackers = [port.connect(host, account="mallory") for host in hosts]
    honest = port.connect(hosts[0], account="alice")
    assert port.is_open(port.connect(hosts[1], account="bob"))
    assert port.is_open(honest)
    assert sum(map(port.is_open, attackers)) == CONNECTIONS_MAX - 2


async def test_only_the_first_account_of_a_connection_counts() -> None:
    port = Port()
    connection = port.connect(ATTACKER, account="mallory")
    connection.set_account("alice")
    assert connection.origin == "account mallory"


async def test_the_connections_of_a_greedy_host_are_closed_before_a_larger_one_of_another() -> None:
    """Each attacker has less than the honest connection. By connections, that was closed first."""
    port = Port(hard_max=16 * MIB)
    honest = port.connect(HONEST)
    attackers = [port.connect(ATTACKER) for _ in range(CONNECTIONS_MAX - 1)]
    port.memory.add(honest, MemoryUse.UNSENT_RESPONSES, 3 * MIB)
    for attacker in attackers:
        port.memory.add(attacker, MemoryUse.HELD_PULLS, 2 * MIB)
    port.watermark.enforce(port.clock.now_ms())
    assert honest.is_open
    assert (
        port.memory.total
        - sum(port.memory.bytes_of(attacker) for attacker in attackers if not attacker.is_open)
        <= port.memory.limits.soft_max
    )


async def test_above_the_soft_limit_a_host_with_little_is_read_from() -> None:
    port = Port(hard_max=16 * MIB)
    honest = port.connect(HONEST)
    attackers = [port.connect(ATTACKER) for _ in range(CONNECTIONS_MAX - 1)]
    port.memory.add(honest, MemoryUse.UNSENT_RESPONSES, 2 * MIB)
    for attacker in attackers:
        port.memory.add(attacker, MemoryUse.HELD_PULLS, int(1.3 * MIB))
    port.watermark.enforce(port.clock.now_ms())
    assert port.watermark.held_count > 0
    assert not port.watermark.is_holding(honest)
    port.memory.reserve(honest, MemoryUse.MEMBERS, 1_000)
    with pytest.raises(TableFull):
        port.memory.reserve(attackers[0], MemoryUse.MEMBERS, 1_000)


# --- calls that wait for a client ----------------------------------------------------------------

Responses = list[Command | None]


def call(target: ServerConnection, requester: ServerConnection, responses: Responses) -> bool:
    def on_response(command: Command | None, _: bytes) -> None:
        responses.append(command)

    return target.call(
        RequestCode.GET_CONSUMER_RUNNING_INFO,
        ConsumerGroupHeader(consumer_group="g"),
        b"",
        on_response,
        requester=requester,
        timeout_s=10,
    )


async def test_a_call_is_counted_for_the_connection_that_wants_its_response() -> None:
    port, responses = Port(), Responses()
    target, requester = port.connect(HONEST), port.connect(ATTACKER)
    before = port.memory.bytes_of(target), port.memory.bytes_of(requester)
    assert call(target, requester, responses)
    after = port.memory.bytes_of(target), port.memory.bytes_of(requester)
    assert after == (before[0], before[1] + CALL_BYTES)
    assert port.memory.bytes_for(MemoryUse.PENDING_CALLS) == CALL_BYTES
    assert not target.expire_calls(port.clock.elapsed_s() + 11)
    assert responses == [None]
    assert port.memory.bytes_for(MemoryUse.PENDING_CALLS) == 0


async def test_a_call_is_refused_if_its_requester_keeps_too_much() -> None:
    port, responses = Port(), Responses()
    target, requester = port.connect(HONEST), port.connect(ATTACKER)
    port.memory.add(requester, MemoryUse.HELD_PULLS, 32 * MIB)
    with pytest.raises(TableFull):
        call(target, requester, responses)
    assert call(target, port.connect(HONEST), responses)
    target.connection_lost(None)
    assert responses == [None]  # only the call that was made
    assert port.memory.bytes_for(MemoryUse.PENDING_CALLS) == 0


async def test_nothing_is_kept_of_a_call_whose_requester_has_gone() -> None:
    port, responses = Port(), Responses()
    target, requester = port.connect(HONEST), port.connect(ATTACKER)
    call(target, requester, responses)
    requester.connection_lost(None)
    assert not target.expire_calls(port.clock.elapsed_s())
    assert port.memory.bytes_for(MemoryUse.PENDING_CALLS) == 0
    target.connection_lost(None)
    assert responses == []
