"""Silent lines, on a clock that moves when told; and how few of them are looked at."""

from __future__ import annotations

import asyncio
import socket
from random import Random

import pytest

from escrowmq.clock import ManualClock
from escrowmq.config import NetworkConfig
from escrowmq.server.remoting_server import (
    IdleTracker,
    RemotingServer,
    ServerConnection,
    bind,
    bound_port,
)

IDLE_S = 120


class Quiet:
    """Knows how often it was looked at."""

    def __init__(self, last_active_s: float = 0) -> None:
        self._active_s = last_active_s
        self.looks = 0

    @property
    def last_active_s(self) -> float:
        self.looks += 1
        return self._active_s

    @last_active_s.setter
    def last_active_s(self, now_s: float) -> None:
        self._active_s = now_s


@pytest.mark.parametrize("last_active_s", [0, 0.001, 0.5, 0.999])
def test_a_connection_is_idle_after_exactly_the_idle_time(last_active_s: float) -> None:
    silence: IdleTracker[Quiet] = IdleTracker(IDLE_S, now_s=0)
    line = Quiet(last_active_s)
    silence.watch(line)
    assert silence.find_idle(last_active_s + IDLE_S) == []
    assert silence.find_idle(last_active_s + IDLE_S + 1) == [line]


def test_activity_restarts_the_idle_time() -> None:
    silence: IdleTracker[Quiet] = IdleTracker(IDLE_S, now_s=0)
    line = Quiet()
    silence.watch(line)
    line.last_active_s = 119.5
    assert silence.find_idle(121) == []
    assert silence.find_idle(239.5) == []
    assert silence.find_idle(241) == [line]


def test_an_idle_connection_that_stays_is_found_again() -> None:
    silence: IdleTracker[Quiet] = IdleTracker(IDLE_S, now_s=0)
    line = Quiet()
    silence.watch(line)
    assert silence.find_idle(121) == [line]
    assert silence.find_idle(122) == [line]


def test_a_removed_connection_is_not_found() -> None:
    silence: IdleTracker[Quiet] = IdleTracker(IDLE_S, now_s=0)
    line = Quiet()
    silence.watch(line)
    silence.remove(line)
    silence.remove(line)
    assert silence.find_idle(1000) == []


def test_a_connection_is_checked_once_per_idle_time() -> None:
    silence: IdleTracker[Quiet] = IdleTracker(IDLE_S, now_s=0)
    lines = [Quiet(number / 100) for number in range(1000)]
    for line in lines:
        silence.watch(line)
        line.looks = 0
    for second in range(1, IDLE_S):
        assert silence.find_idle(second) == []
    assert [line.looks for line in lines] == [0] * 1000


def test_the_tracker_agrees_with_a_full_scan() -> None:
    rng = Random(1)
    silence: IdleTracker[Quiet] = IdleTracker(5, now_s=0)
    lines: list[Quiet] = []
    now_s = 0.0
    for _ in range(2000):
        now_s += rng.choice((0, 0.1, 0.7, 1, 3))
        if rng.random() < 0.5:
            lines.append(Quiet(now_s))
            silence.watch(lines[-1])
        if lines and rng.random() < 0.5:
            rng.choice(lines).last_active_s = now_s
        found = silence.find_idle(now_s)
        assert all(now_s - line.last_active_s > 5 for line in found)
        assert not [line for line in lines if now_s - line.last_active_s > 6 and line not in found]
        for line in [*found, *rng.sample(lines, min(len(lines), rng.choice((0, 0, 1))))]:
            silence.remove(line)
            if line in lines:
                lines.remove(line)
    assert now_s > 100


class Nobody:
    """Answers nothing."""

    def __init__(self, *, turns: int = 1) -> None:
        self.turns_left = turns

    def handle(self, line: ServerConnection, request: object, now_ms: int) -> None: ...
    def end_turn(self, now_ms: int) -> bool:
        self.turns_left -= 1
        return self.turns_left > 0

    def channel_closed(self, line: ServerConnection) -> None: ...


def test_a_server_drops_idle_connections_even_if_they_do_not_read() -> None:
    clock = ManualClock()

    async def watch() -> None:
        port = RemotingServer(Nobody(), clock, NetworkConfig(idle_max_s=IDLE_S))
        bound = bind("127.0.0.1", 0)
        await port.listen(bound)
        loop = asyncio.get_running_loop()
        peers = [socket.create_connection(("127.0.0.1", bound_port(bound))) for _ in range(3)]
        while len(port.connections) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        deaf, silent, loud = peers
        by_peer = {line.address: line for line in port.connections}
        line_of = [by_peer[f"127.0.0.1:{peer.getsockname()[1]}"] for peer in peers]
        line_of[0].write(b"\0" * (64 << 20))
        port.end_turn()
        clock.advance(ms=IDLE_S * 1000)
        loud.sendall(b"\0\0\0\x05")  # the beginning of a frame
        while line_of[2].last_active_s == 0:  # noqa: ASYNC110
            await asyncio.sleep(0)
        clock.advance(ms=2000)
        port.sweep_connections()
        while len(port.connections) > 1:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert port.connections == {line_of[2]}
        silent.setblocking(False)
        assert await loop.sock_recv(silent, 1) == b""
        await port.close()
        for peer in (deaf, silent, loud):
            peer.close()

    asyncio.run(asyncio.wait_for(watch(), 20))


def test_a_server_runs_turns_while_the_handler_asks_for_more() -> None:
    async def watch() -> None:
        service = Nobody(turns=5)
        port = RemotingServer(service, ManualClock(), NetworkConfig())
        port.schedule_turn()
        for _ in range(20):
            await asyncio.sleep(0)
        assert service.turns_left == 0

    asyncio.run(watch())
