"""Busy polling after turns: when the event loop polls, and when it sleeps."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable

import pytest

from escrowmq.clock import ManualClock
from escrowmq.config import NetworkConfig
from escrowmq.server.remoting_server import (
    SKIPPED_TURNS_MAX,
    BusyPoll,
    RemotingServer,
    bind,
    bound_port,
)
from tests.unit.server.test_unsent_responses import GenerousHandler, frame

POLLS = 5


class Turns:
    """Turns of an event loop that has nothing else to do."""

    def __init__(self, polls_max: int = POLLS) -> None:
        self._callbacks: list[Callable[[], None]] = []
        self._busy_poll = BusyPoll(self._callbacks.append, polls_max)

    def polls_in_vain(self) -> int:
        """End a turn that no request follows. Return how often the loop polls."""
        self._busy_poll.turn_ended()
        return self._run_callbacks()

    def polls_until_request(self, polls: int) -> int:
        """End a turn that a request follows after so many polls. Return how often it polls."""
        self._busy_poll.turn_ended()
        count = self._run_callbacks(polls)
        self._busy_poll.turn_began()
        return count + self._run_callbacks() if count < polls else count

    def _run_callbacks(self, count_max: int = 1_000) -> int:
        count = 0
        while self._callbacks and count < count_max:
            self._callbacks.pop()()
            count += 1
        return count


def test_a_turn_is_followed_by_a_bounded_number_of_polls() -> None:
    assert Turns().polls_in_vain() == POLLS


def test_without_polls_the_loop_sleeps_at_once() -> None:
    assert Turns(polls_max=0).polls_in_vain() == 0


def test_polls_in_vain_become_rare() -> None:
    turns = Turns()
    polled = [turn for turn in range(10 * SKIPPED_TURNS_MAX) if turns.polls_in_vain()]
    gaps = [second - first for first, second in itertools.pairwise(polled)]
    assert gaps[:4] == [2, 3, 5, 9]
    assert max(gaps) == gaps[-1] == SKIPPED_TURNS_MAX + 1


def test_polls_that_find_requests_follow_every_turn() -> None:
    turns = Turns()
    assert [turns.polls_until_request(3) for _ in range(20)] == [3] * 20


def test_one_success_ends_the_waiting() -> None:
    turns = Turns()
    for _ in range(100):
        turns.polls_in_vain()
    while not turns.polls_until_request(2):
        pass
    assert turns.polls_until_request(2) == 2


@pytest.mark.parametrize("polls_max", [0, 1, 32])
async def test_a_server_answers_with_and_without_polls(polls_max: int) -> None:
    config = NetworkConfig(busy_polls_max=polls_max)
    server = RemotingServer(GenerousHandler(), ManualClock(), config)
    listening_socket = bind("127.0.0.1", 0)
    await server.listen(listening_socket)
    peer = socket.create_connection(("127.0.0.1", bound_port(listening_socket)))
    peer.setblocking(False)
    loop = asyncio.get_running_loop()
    try:
        for number in range(20):
            await loop.sock_sendall(peer, frame(number))
            data = b""
            while len(data) < 4 or len(data) < 4 + int.from_bytes(data[:4], "big"):
                data += await loop.sock_recv(peer, 1 << 20)
            assert b'"opaque":%d,' % number in data
    finally:
        peer.close()
        await server.close()
