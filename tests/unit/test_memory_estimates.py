"""The estimates of what is kept for a client are not lower than what it really takes.

Each case keeps thousands of objects in the table that keeps them in a broker, all of them different
and each in the way that takes most memory: with a connection, group, topic and queue of its own.
`tracemalloc` measures what they take; what the allocator of the system adds is not measured.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Callable

import pytest

from escrowmq.broker.processors.pull import _request_to_keep  # private: it is what is kept
from escrowmq.client_memory import NAME_BYTES_MAX, ClientMemory, MemoryUse, text_bytes
from escrowmq.clock import ManualClock
from escrowmq.config import NetworkConfig
from escrowmq.consume.long_polling import HeldPull, LongPolls
from escrowmq.consume.members import (
    ConsumerGroups,
    ConsumerGroupSettings,
    GroupClient,
    MemberTable,
    QueueLocks,
)

# Private: the public functions keep what they return in a cache, which would be measured too.
from escrowmq.consume.subscription import _compile_sql, _parse
from escrowmq.message.filter import TAG
from escrowmq.message.record import QueueOffset
from escrowmq.message.topic_config import TopicConfig
from escrowmq.namesrv.route_table import BrokerRegistration, RouteTable
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import ConsumerGroupHeader, NoFields
from escrowmq.remoting.requests import request_for_response
from escrowmq.server.remoting_server import RemotingServer
from escrowmq.server.server_connection import ServerConnection
from escrowmq.sliced_work import run_to_end
from tests.support.broker_requests import pull_request
from tests.support.fake_transport import FakeTransport
from tests.support.silent_handler import SilentHandler

COUNT = 1_400  # a dict has just grown, and is half empty
NOW_MS = 1_700_000_000_000

# Keeps so many objects, and returns the bytes that are counted for them and the objects.
Keep = Callable[[int], tuple[int, object]]


class QuietPeer:
    """A peer that is compared by identity, as a connection is."""

    def __init__(self, number: int) -> None:
        self.address = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}:1"
        self.origin = self.address[:-2]
        self.is_open = True


PEERS = [QuietPeer(number) for number in range(COUNT)]
LETTERS = {"ascii": "x", "two bytes": "\u00e9", "three bytes": "\u4e2d", "four bytes": "\U0001d11e"}


def long_name(letter: str, number: int) -> str:
    """Return a new text, as long as a name may be."""
    digits = str(1_000_000 + number)
    count = (NAME_BYTES_MAX - len(digits)) // len(letter.encode())
    return digits + letter * count


def assert_counted(keep: Keep, count: int = COUNT) -> None:
    keep(10)  # fill caches
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        counted, kept = keep(count)
        gc.collect()
        measured = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert measured <= counted, f"{measured / count:.0f} bytes each, counted {counted / count:.0f}"
    assert kept is not None


each_letter = pytest.mark.parametrize("letter", LETTERS.values(), ids=LETTERS)


@each_letter
def test_a_text_is_not_underestimated(letter: str) -> None:
    def keep(count: int) -> tuple[int, object]:
        texts = [long_name(letter, number) for number in range(count)]
        for text in texts:
            hash(text)
        return sum(map(text_bytes, texts)), texts

    assert_counted(keep)


@each_letter
@pytest.mark.parametrize("is_alone", [True, False], ids=["own connection", "one connection"])
def test_a_member_is_not_underestimated(letter: str, is_alone: bool) -> None:
    def keep(count: int) -> tuple[int, object]:
        memory = ClientMemory()
        members: MemberTable[QuietPeer] = MemberTable(memory=memory, per_channel_max=count)
        for heartbeat in range(2):  # the second one brings new copies of the names
            for number in range(count):
                client_id = long_name(letter, number)
                peer = PEERS[number if is_alone else 0]
                client = GroupClient(client_id=client_id, channel=peer, language=f"{number}")
                members.join(long_name(letter, number), client, now_ms=NOW_MS + heartbeat)
        return memory.total, (memory, members)

    assert_counted(keep)


def test_a_consumer_group_is_not_underestimated() -> None:
    def keep(count: int) -> tuple[int, object]:
        memory = ClientMemory()
        groups: ConsumerGroups[QuietPeer] = ConsumerGroups(memory=memory)
        for number in range(count):
            settings = ConsumerGroupSettings(
                consume_type=long_name("t", number),
                message_model=long_name("m", number),
                consume_from_where=long_name("w", number),
            )
            groups.heartbeat(
                long_name("g", number),
                GroupClient(client_id=long_name("c", number), channel=PEERS[number]),
                settings=settings,
                subscriptions=[],
                fingerprint=NOW_MS,
                without_sub=True,
                now_ms=NOW_MS + number,
            )
        return memory.total, (memory, groups)

    assert_counted(keep)


@pytest.mark.parametrize("is_alone", [True, False], ids=["own connection", "one connection"])
def test_a_held_pull_is_not_underestimated(is_alone: bool) -> None:
    def keep(count: int) -> tuple[int, object]:
        memory = ClientMemory()
        pulls: LongPolls[object] = LongPolls(pulls_max=count, per_channel_max=count, memory=memory)
        for number in range(count):
            topic, group = long_name("t", number), long_name("g", number)
            request = pull_request(topic=topic, queue_offset=NOW_MS + number, consumer_group=group)
            peer = PEERS[number if is_alone else 0]
            pulls.add(
                HeldPull(
                    topic=topic,
                    queue_id=1_000 + number,
                    queue_offset=QueueOffset(request.head.fields.queue_offset),
                    due_ms=NOW_MS + number,
                    channel=peer,
                    payload=(peer, _request_to_keep(request)),
                )
            )
        assert len(pulls) == count
        return memory.total, (memory, pulls)

    assert_counted(keep)


@each_letter
@pytest.mark.parametrize("is_alone", [True, False], ids=["own connection", "one connection"])
def test_a_lock_is_not_underestimated(letter: str, is_alone: bool) -> None:
    def keep(count: int) -> tuple[int, object]:
        memory = ClientMemory()
        locks = QueueLocks(locks_max=10 * count, memory=memory)
        for number in range(count):
            group, client_id = long_name(letter, number), long_name(letter, number)
            queue = long_name(letter, number), 1_000 + number
            peer = PEERS[number if is_alone else 0]
            assert locks.lock(group, client_id, [queue], now_ms=NOW_MS + number, channel=peer)
        return memory.total, (memory, locks)

    assert_counted(keep)


@each_letter
@pytest.mark.parametrize("tag_count", [0, 1, 5, 20, 308])
def test_a_subscription_is_not_underestimated(letter: str, tag_count: int) -> None:
    def keep(count: int) -> tuple[int, object]:
        subscriptions = []
        for number in range(count):
            tags = (f"{letter}{number:x}-{tag:x}" for tag in range(tag_count))
            expression = "||".join(tags) or "*"
            work = _parse(long_name("t", number), expression, TAG, NOW_MS + number)
            subscriptions.append(run_to_end(work))
        return sum(each.retained_bytes for each in subscriptions), subscriptions

    assert_counted(keep, max(20, COUNT // (tag_count + 1)))


@pytest.mark.parametrize("repetitions", [0, 5, 40])
@pytest.mark.parametrize(
    "comparison",
    [
        "a=1or ",
        "a>1and ",
        "a=b or ",
        "1=1or ",
        "a or ",
        "not a or ",
        "a in('b')or ",
        "a=''or ",
        "a>0.1or ",
        "a between 1and 2or ",
        "a is null or ",
        "a contains'b'or ",
    ],
)
def test_a_compiled_expression_is_not_underestimated(comparison: str, repetitions: int) -> None:
    def keep(count: int) -> tuple[int, object]:
        filters = [_compile_sql(f"{comparison * repetitions}b={n}") for n in range(count)]
        return sum(each.retained_bytes for each in filters), filters

    assert_counted(keep, 50)


@each_letter
def test_the_routes_of_a_broker_are_not_underestimated(letter: str) -> None:
    def keep(count: int) -> tuple[int, object]:
        memory = ClientMemory()
        table = RouteTable(memory=memory)
        topics = tuple(
            TopicConfig(
                topic_name=long_name(letter, number),
                read_queue_nums=1_000 + number,
                write_queue_nums=2_000 + number,
                perm=6,
                topic_sys_flag=3_000 + number,
            )
            for number in range(count)
        )
        registration = BrokerRegistration(
            cluster="c", name="b", broker_id=0, address="a:1", topics=topics
        )
        table.register(registration, PEERS[0], now_ms=NOW_MS)
        return memory.total, (memory, table)

    assert_counted(keep)


@pytest.mark.parametrize("is_alone", [True, False], ids=["own requester", "one requester"])
def test_a_pending_call_is_not_underestimated(is_alone: bool) -> None:
    async def measure() -> None:
        server = RemotingServer(SilentHandler(), ManualClock(), NetworkConfig())

        def connect(port: int) -> ServerConnection:
            connection = ServerConnection(server)
            connection.connection_made(FakeTransport(port))
            return connection

        requesters = [connect(port) for port in range(COUNT if is_alone else 1)]

        def keep(count: int) -> tuple[int, object]:
            target = connect(65_000)
            before = server.memory.bytes_for(MemoryUse.PENDING_CALLS)
            for number in range(count):
                requester = requesters[number if is_alone else 0]
                kept_request = request_for_response(pull_request(), NoFields())
                names = long_name("g", number), long_name("c", number)
                target.call(
                    RequestCode.GET_CONSUMER_RUNNING_INFO,
                    ConsumerGroupHeader(consumer_group="g"),
                    b"",
                    lambda command, body, kept=(requester, kept_request, names): None,  # type: ignore[misc]
                    requester=requester,
                    timeout_s=10.0 + number,
                )
                target.flush()
            return server.memory.bytes_for(MemoryUse.PENDING_CALLS) - before, target

        assert_counted(keep)

    asyncio.run(measure())
