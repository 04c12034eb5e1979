"""The native path and the Python path do the same: log, queues, responses, transactions, counters.

Both get the same bytes, cut anywhere. A turn in which only plain requests arrive may have any
number of connections. If it has others too, it has one connection: the native path stores plain
requests before all others, so that requests of several connections, which have no order among
each other, may be stored in another order than by the Python path.
"""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from escrowmq.broker.native_requests import SHARE_REQUESTS_MAX
from escrowmq.config import TransactionConfig
from escrowmq.errors import FlushTimeout, StoreFailed
from escrowmq.native import load_native
from escrowmq.remoting.codes import JSON
from escrowmq.remoting.frame import encode_frame
from tests.support.path_pair import CONFIG, CONNECTIONS, PathPair
from tests.support.request_bytes import (
    COMMIT,
    END,
    SEND_V2,
    RequestGenerator,
    end_fields,
    message_properties,
    request_bytes,
    send_fields,
)
from tests.support.request_signing import HERE_ONLY, OTHER_RULES, RULES, RequestSigner, sign

pytestmark = pytest.mark.skipif(
    load_native({}).module is None, reason="the native module is not installed: it needs cargo"
)

HEADER_BEGIN = 8  # in a frame


class PathRun:
    """A random run of both paths."""

    def __init__(
        self,
        seed: int,
        *,
        is_sync: bool,
        limits: TransactionConfig | None,
        signer: RequestSigner | None = None,
    ) -> None:
        """With a signer, requests need accounts."""
        self.random = Random(seed)
        config = CONFIG
        if limits is not None:
            config = type(CONFIG)(store=CONFIG.store, transaction=limits)
        self.pair = PathPair(
            config=config, is_sync=is_sync, rules=None if signer is None else RULES
        )
        self.requests = RequestGenerator(self.random, signer or (lambda fields, body: fields))
        self._unsent = [b""] * CONNECTIONS
        self._has_odd = [False] * CONNECTIONS  # among what was not handled in an earlier turn

    def run(self, turns: int) -> None:
        for _ in range(turns):
            self.turn()

    def turn(self) -> None:
        random = self.random
        action = random.random()
        if action < 0.05:
            self.kill()
            return
        if action < 0.08 and not any(self._unsent):
            self.pair.receive(0, self.requests.read())
            self.pair.end_turn()
            return
        if action < 0.12:
            for path in self.pair.both:
                path.broker.tick(path.clock.now_ms())
            self.pair.end_turn()
            return
        is_plain = action >= 0.5
        if is_plain:
            self.plain_turn()
        else:
            self.one_connection_turn(random.randrange(CONNECTIONS))
        self.end_turn(is_plain=is_plain)

    def end_turn(self, *, is_plain: bool) -> None:
        random = self.random
        advance_ms = random.choice([0, 0, 1, 50, 7_000])
        self.pair.end_turn(advance_ms=advance_ms)
        if self.pair.python.flush_callbacks:
            error = random.choice([None, None, None, FlushTimeout("slow"), StoreFailed("broken")])
            for path in self.pair.both:
                path.finish_flush(error)
            self.pair.compare()
        self.requests.end_turn()
        self.note_halves(is_plain=is_plain)

    def plain_turn(self) -> None:
        plain = [number for number in range(CONNECTIONS) if not self._has_odd[number]]
        for connection in self.random.sample(plain, self.random.randint(0, len(plain))):
            count = self.random.randint(1, 12)
            self.receive(connection, b"".join(self.requests.plain() for _ in range(count)))

    def one_connection_turn(self, connection: int) -> None:
        makers = [self.requests.odd, self.requests.plain, self.requests.end_any]
        frames = [
            self.random.choices(makers, [3, 6, 1])[0]() for _ in range(self.random.randint(1, 12))
        ]
        self._has_odd[connection] = True
        self.receive(connection, b"".join(frames))

    def receive(self, connection: int, data: bytes) -> None:
        """Hand bytes over in chunks. Some of them may follow in a later turn."""
        data = self._unsent[connection] + data
        while data and self.random.random() < 0.8:
            size = self.random.choice([len(data), self.random.randint(1, len(data)), 7])
            self.pair.receive(connection, data[:size])
            data = data[size:]
        self._unsent[connection] = data
        self._has_odd[connection] = self._has_odd[connection] and bool(data)

    def note_halves(self, *, is_plain: bool) -> None:
        """Remember the halves that were stored, to end them later.

        The native path ends only halves that it has parked, in this process. To end another one is
        not a plain request.
        """
        requests = self.requests
        halves = [*requests.plain_halves, *requests.open_halves, *requests.ended_halves]
        known = {half[1:] for half in halves}
        for half in self.pair.python.broker.transactions.coordinator.halves:
            if (half.queue_offset, half.log_offset) not in known:
                noted = requests.plain_halves if is_plain else requests.open_halves
                noted.append((half.group, half.queue_offset, half.log_offset))

    def park_half(self) -> tuple[str, int, int]:
        """Let both paths store a half. Return its group, queue offset and log offset."""
        self.pair.receive(0, self.requests.half())
        self.pair.end_turn()
        self.note_halves(is_plain=True)
        return self.requests.plain_halves[-1]

    def kill(self) -> None:
        self.pair.kill()
        self.requests.forget_plain()
        self._unsent = [b""] * CONNECTIONS
        self._has_odd = [False] * CONNECTIONS


def run_paths(
    seed: int, turns: int, *, is_sync: bool = False, limits: TransactionConfig | None = None
) -> None:
    async def run() -> None:  # a server needs a running event loop
        PathRun(seed, is_sync=is_sync, limits=limits).run(turns)

    asyncio.run(run())


class SignedRun(PathRun):
    """A random run of both paths with accounts, whose rules change."""

    def __init__(self, seed: int) -> None:
        self.signer = RequestSigner(Random(seed))
        super().__init__(seed, is_sync=False, limits=None, signer=self.signer)
        self._rules_name = ""
        self.learn_grants()

    def turn(self) -> None:
        if self.random.random() < 0.15:
            self.change_rules(self.random.choice(["", *OTHER_RULES]))
        elif self.random.random() < 0.05:
            self.kill()
        elif self._rules_name or self.random.random() < 0.6:
            self.one_connection_turn(self.random.randrange(CONNECTIONS))
        else:
            self.plain_turn()
        self.end_turn(is_plain=False)

    def one_connection_turn(self, connection: int) -> None:
        self.signer.is_odd = True
        super().one_connection_turn(connection)
        self.signer.is_odd = False

    def change_rules(self, name: str) -> None:
        """Change the rules. With those of the beginning, all plain requests are granted again."""
        self.receive_unsent()
        self._rules_name = name
        self.pair.replace_rules(OTHER_RULES[name] if name else RULES)
        self.learn_grants()

    def learn_grants(self) -> None:
        """Let the Python path grant what plain requests need, from every host.

        A request that it has to grant first is stored later than plain requests of the same turn.
        """
        for connection in range(CONNECTIONS):
            for topic in ("T", "orders"):
                self.pair.receive(connection, self.requests.send(b=topic))
                self.end_turn(is_plain=False)

    def receive_unsent(self) -> None:
        for connection, data in enumerate(self._unsent):
            self.pair.receive(connection, data)
            self.end_turn(is_plain=False)
        self._unsent = [b""] * CONNECTIONS
        self._has_odd = [False] * CONNECTIONS

    def kill(self) -> None:
        super().kill()
        self.learn_grants()


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_both_paths_do_the_same(seed: int) -> None:
    run_paths(seed, 20)


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_both_paths_do_the_same_with_accounts(seed: int) -> None:
    async def run() -> None:
        SignedRun(seed).run(20)

    asyncio.run(run())


@given(st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_both_paths_do_the_same_if_responses_wait_for_the_flush(seed: int) -> None:
    run_paths(seed, 15, is_sync=True)


@pytest.mark.parametrize(
    "limits",
    [
        TransactionConfig(open_max=4),
        TransactionConfig(group_open_max=3),
        TransactionConfig(open_bytes_max=3_000),
        TransactionConfig(group_open_bytes_max=2_000),
        TransactionConfig(refuses_halves=True),
    ],
)
def test_both_paths_have_the_same_limits(limits: TransactionConfig) -> None:
    """One request per turn: a limit counts what was stored in earlier turns."""

    async def run() -> None:
        paths = PathRun(3, is_sync=False, limits=limits)
        for number in range(60):
            half = paths.requests.half if number % 3 else paths.requests.plain
            paths.pair.receive(0, half())
            paths.pair.end_turn(advance_ms=10)
            paths.requests.end_turn()
            paths.note_halves(is_plain=True)
        refused = paths.pair.native.broker.counters.refused
        assert sum(refused.values()) > 5

    asyncio.run(run())


def test_a_batch_that_cannot_be_stored_is_refused_and_leaves_nothing() -> None:
    async def run() -> None:
        paths = PathRun(4, is_sync=False, limits=None)
        paths.run(5)
        for path in paths.pair.both:
            path.store.has_disk_space = False
        before = [path.state() for path in paths.pair.both]
        paths.pair.receive(0, b"".join(paths.requests.plain() for _ in range(20)))
        responses = paths.pair.end_turn()
        assert all(
            b"the disk is nearly full" in frame or b"not stored" in frame for frame in responses[0]
        )
        for path, state in zip(paths.pair.both, before, strict=True):
            for name in ("log", "entries", "halves", "totals", "states"):
                assert path.state()[name] == state[name], name
            path.store.has_disk_space = True
        paths.requests.end_turn()
        paths.run(5)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("valid", "invalid"),
    [
        ('"a":"producers"', r'"a":"\q"'),
        ('"c":"TBW102"', r'"c":"\ud800"'),
        ('"language":"JAVA"', r'"language":"\q"'),
    ],
)
def test_a_send_with_an_invalid_escape_stores_nothing(valid: str, invalid: str) -> None:
    async def run() -> None:
        paths = PathRun(7, is_sync=False, limits=None)
        send = request_bytes(SEND_V2, send_fields(i="UNIQ_KEY\x01K1\x02"), opaque=1)
        header = send[HEADER_BEGIN:].decode().replace(valid, invalid)
        log_end = paths.pair.python.store.end
        paths.pair.receive(0, encode_frame(JSON, header.encode(), b""))
        paths.pair.end_turn()
        assert paths.pair.native.store.end == log_end

    asyncio.run(run())


def test_a_refused_batch_can_be_sent_again() -> None:
    """Nothing stays reserved: neither the keys of new halves, nor halves that were to be ended."""

    async def run() -> None:
        paths = PathRun(8, is_sync=False, limits=None)
        half = paths.park_half()
        data = paths.requests.half() + commit(half, opaque=1)
        for path in paths.pair.both:
            path.store.has_disk_space = False
        paths.pair.receive(0, data)
        assert len(paths.pair.end_turn()[0]) == 2
        for path in paths.pair.both:
            path.store.has_disk_space = True
        paths.pair.receive(0, data)
        assert [b'"code":0' in frame for frame in paths.pair.end_turn()[0]] == [True, True]

    asyncio.run(run())


def test_a_half_that_is_committed_twice_in_a_turn_has_one_final() -> None:
    async def run() -> None:
        paths = PathRun(9, is_sync=False, limits=None)
        half = paths.park_half()
        paths.pair.receive(0, commit(half, opaque=1) + commit(half, opaque=2))
        assert len(paths.pair.end_turn()[0]) == 2
        assert (
            sum(paths.pair.native.broker.transactions.coordinator.counters.committed.values()) == 1
        )

    asyncio.run(run())


def test_both_paths_do_the_same_with_odd_requests_one_by_one() -> None:
    """A random run has few of each kind."""

    async def run() -> None:
        paths = PathRun(10, is_sync=False, limits=None)
        for _ in range(600):
            paths.pair.receive(0, paths.requests.odd())
            paths.pair.end_turn()

    asyncio.run(run())


def commit(half: tuple[str, int, int], *, opaque: int) -> bytes:
    return request_bytes(END, end_fields(*half, COMMIT), opaque=opaque)


def test_a_connection_has_its_share_of_a_turn_in_the_native_path() -> None:
    async def run() -> None:
        paths = PathRun(6, is_sync=False, limits=None)
        sends = [
            request_bytes(
                SEND_V2, send_fields(i=message_properties(UNIQ_KEY=f"K{number}")), opaque=number
            )
            for number in range(SHARE_REQUESTS_MAX + 10)
        ]
        paths.pair.receive(0, b"".join(sends))
        while len(paths.pair.end_turn()[0]):
            pass
        native = paths.pair.native.broker
        assert native.native_requests is not None
        assert native.native_requests.count == SHARE_REQUESTS_MAX
        assert native.counters.requests[SEND_V2] == len(sends)

    asyncio.run(run())


def test_an_end_with_an_invalid_escape_decides_nothing() -> None:
    async def run() -> None:
        paths = PathRun(8, is_sync=False, limits=None)
        paths.pair.receive(0, paths.requests.half())
        paths.pair.end_turn()
        paths.note_halves(is_plain=True)
        end = request_bytes(END, end_fields(*paths.requests.plain_halves[0], COMMIT), opaque=9)
        header = end[HEADER_BEGIN:].decode().replace('"msgId":"7F0000010001"', r'"msgId":"\q"')
        paths.pair.receive(0, encode_frame(JSON, header.encode(), b""))
        paths.pair.end_turn()
        assert len(paths.pair.native.broker.transactions.coordinator.halves) == 1

    asyncio.run(run())


def test_a_permission_holds_only_for_the_host_that_has_it() -> None:
    async def run() -> None:
        paths = SignedRun(9)
        native = paths.pair.native.broker.native_requests
        assert native is not None
        for opaque, (connection, is_native, is_stored) in enumerate(
            [(0, False, True), (0, True, True), (2, False, False), (0, True, True)]
        ):
            fields = sign(HERE_ONLY, send_fields(i=f"UNIQ_KEY\x01HOST{opaque}\x02"), b"")
            before, log_end = native.count, paths.pair.native.store.end
            paths.pair.receive(connection, request_bytes(SEND_V2, fields, opaque=opaque))
            paths.pair.end_turn()
            assert native.count - before == is_native
            assert (paths.pair.native.store.end > log_end) == is_stored

    asyncio.run(run())


def test_plain_requests_take_the_native_path() -> None:
    """Otherwise the other tests here would compare the Python path with itself."""

    async def run() -> None:
        paths = PathRun(5, is_sync=False, limits=None)
        for _ in range(30):
            paths.plain_turn()
            paths.pair.end_turn()
            paths.requests.end_turn()
            paths.note_halves(is_plain=True)
        native = paths.pair.native.broker
        assert native.native_requests is not None
        assert native.native_requests.count == sum(native.counters.requests.values()) > 100

    asyncio.run(run())


def test_signed_requests_take_the_native_path_once_they_are_granted() -> None:
    async def run() -> None:
        paths = SignedRun(6)
        native = paths.pair.native.broker
        assert native.native_requests is not None
        before = native.native_requests.count, sum(native.counters.requests.values())
        for _ in range(30):
            paths.plain_turn()
            paths.end_turn(is_plain=True)
        native_count = native.native_requests.count - before[0]
        assert native_count == sum(native.counters.requests.values()) - before[1] > 100

    asyncio.run(run())
