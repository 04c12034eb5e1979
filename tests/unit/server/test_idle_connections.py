"""Idle connections: when they are dropped, and how few of them are examined."""

from __future__ import annotations

import asyncio
import socket
from random import Random

import pytest

from escrowmq.clock import ManualClock
from escrowmq.config import NetworkConfig
from escrowmq.server.connection_limits import IdleTracker
from escrowmq.server.remoting_server import RemotingServer, bind, bound_port
from tests.support.silent_handler import SilentHandler
from tests.support.waiting import wait_until_async

IDLE_S = 120


class FakeConnection:
    """A connection that counts how often its activity is examined."""

    def __init__(self, last_active_s: float = 0) -> None:
        self._active_s = last_active_s
        self.examinations = 0

    @property
    def last_active_s(self) -> float:
        self.examinations += 1
        return self._active_s

    @last_active_s.setter
    def last_active_s(self, now_s: float) -> None:
        self._active_s = now_s


@pytest.mark.parametrize("last_active_s", [0, 0.001, 0.5, 0.999])
def test_a_connection_is_idle_after_exactly_the_idle_time(last_active_s: float) -> None:
    tracker: IdleTracker[FakeConnection] = IdleTracker(IDLE_S, now_s=0)
    connection = FakeConnection(last_active_s)
    tracker.watch(connection)
    assert tracker.find_idle(last_active_s + IDLE_S) == []
    assert tracker.find_idle(last_active_s + IDLE_S + 1) == [connection]


def test_activity_restarts_the_idle_time() -> None:
    tracker: IdleTracker[FakeConnection] = IdleTracker(IDLE_S, now_s=0)
    connection = FakeConnection()
    tracker.watch(connection)
    connection.last_active_s = 119.5
    assert tracker.find_idle(121) == []
    assert tracker.find_idle(239.5) == []
    assert tracker.find_idle(241) == [connection]


def test_an_idle_connection_that_stays_is_found_again() -> None:
    tracker: IdleTracker[FakeConnection] = IdleTracker(IDLE_S, now_s=0)
    connection = FakeConnection()
    tracker.watch(connection)
    assert tracker.find_idle(121) == [connection]
    assert tracker.find_idle(122) == [connection]


def test_a_removed_connection_is_not_found() -> None:
    tracker: IdleTracker[FakeConnection] = IdleTracker(IDLE_S, now_s=0)
    connection = FakeConnection()
    tracker.watch(connection)
    tracker.remove(connection)
    tracker.remove(connection)
    assert tracker.find_idle(1000) == []


def test_a_connection_is_not_examined_before_its_idle_time_is_over() -> None:
    tracker: IdleTracker[FakeConnection] = IdleTracker(IDLE_S, now_s=0)
    connections = [FakeConnection(number / 100) for number in range(1000)]
    for connection in connections:
        tracker.watch(connection)
        connection.examinations = 0
    for second in range(1, IDLE_S):
        assert tracker.find_idle(second) == []
    assert [connection.examinations for connection in connections] == [0] * 1000


def test_the_tracker_agrees_with_a_full_scan() -> None:
    rng = Random(1)
    tracker: IdleTracker[FakeConnection] = IdleTracker(5, now_s=0)
    connections: list[FakeConnection] = []
    now_s = 0.0
    for _ in range(2000):
        now_s += rng.choice((0, 0.1, 0.7, 1, 3))
        if rng.random() < 0.5:
            connections.append(FakeConnection(now_s))
            tracker.watch(connections[-1])
        if connections and rng.random() < 0.5:
            rng.choice(connections).last_active_s = now_s
        idle = tracker.find_idle(now_s)
        assert all(now_s - connection.last_active_s > 5 for connection in idle)
        assert not [
            connection
            for connection in connections
            if now_s - connection.last_active_s > 6 and connection not in idle
        ]
        for connection in [
            *idle,
            *rng.sample(connections, min(len(connections), rng.choice((0, 0, 1)))),
        ]:
            tracker.remove(connection)
            if connection in connections:
                connections.remove(connection)
    assert now_s > 100


async def test_a_server_drops_idle_connections_even_if_they_do_not_read() -> None:
    clock = ManualClock()
    server = RemotingServer(SilentHandler(), clock, NetworkConfig(idle_max_s=IDLE_S))
    bound = bind("127.0.0.1", 0)
    await server.listen(bound)
    peers = [socket.create_connection(("127.0.0.1", bound_port(bound))) for _ in range(3)]
    await wait_until_async(lambda: len(server.connections) == 3)
    by_address = {connection.address: connection for connection in server.connections}
    not_reading, silent, active = (
        by_address[f"127.0.0.1:{peer.getsockname()[1]}"] for peer in peers
    )
    not_reading.write(b"\0" * (64 << 20))  # more than the socket buffers hold
    server.end_turn()
    clock.advance(ms=IDLE_S * 1000)
    peers[2].sendall(b"\0\0\0\x05")  # the beginning of a frame
    await wait_until_async(lambda: active.last_active_s > 0)
    clock.advance(ms=2000)
    server.sweep_connections()
    await wait_until_async(lambda: not_reading not in server.connections)
    await wait_until_async(lambda: silent not in server.connections)
    assert server.connections == {active}
    peers[1].setblocking(False)
    assert await asyncio.get_running_loop().sock_recv(peers[1], 1) == b""
    await server.close()
    for peer in peers:
        peer.close()


async def test_a_server_runs_turns_while_the_handler_needs_more() -> None:
    handler = SilentHandler(turns=5)
    server = RemotingServer(handler, ManualClock(), NetworkConfig())
    server.schedule_turn()
    for _ in range(20):
        await asyncio.sleep(0)
    assert handler.turns_left == 0
