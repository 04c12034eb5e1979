"""Pulls get the same responses on the native path and on the Python path.

Both get the same requests while everything changes that a pull depends on: messages arrive, old
ones expire, bits flip on the disk, subscriptions, topics, groups, offsets and settings change, and
the broker is killed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from escrowmq.config import ConsumeConfig
from escrowmq.message.topic_config import TopicConfig
from escrowmq.native import load_native
from escrowmq.server.server_connection import ServerConnection
from escrowmq.store.config_files import GroupConfig
from tests.support.fake_transport import FakeTransport
from tests.support.path_pair import CONNECTIONS, PathBroker, PathPair
from tests.support.request_bytes import (
    SEND_V2,
    RequestGenerator,
    message_properties,
    request_bytes,
    send_fields,
)

pytestmark = pytest.mark.skipif(
    load_native({}).module is None, reason="the native module is not installed: it needs cargo"
)

PULL, LITE_PULL, HEARTBEAT = 11, 361, 34
COMMIT_OFFSET, SUSPEND, SUBSCRIPTION = 1, 2, 4
GROUPS = ("readers", "audit")
ALL_OF_QUEUE = {
    "consumerGroup": "readers",
    "topic": "T",
    "queueId": "0",
    "maxMsgNums": "32",
    "sysFlag": "4",
    "subscription": "*",
}
TAGS = ("*", "paid", "TagA || x", "never-sent", "")


class PullRun:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.pair = PathPair()
        self.requests = RequestGenerator(self.random)
        self._version = 0
        self._commit_offset = 0
        for path in self.pair.both:
            for group in GROUPS:
                path.broker.groups.put(GroupConfig(group_name=group), now_ms=0)
            path.broker.save()

    def run(self, turns: int) -> None:
        self.send(60)
        changes = [
            self.send_some,
            self.heartbeat,
            self.change_topic,
            self.change_group,
            self.reset_offset,
            self.change_limits,
            self.hide,
            self.kill,
            self.damage,
            self.expire,
        ]
        for _ in range(turns):
            if self.random.random() < 0.25:
                self.random.choices(changes, [6, 4, 1, 1, 1, 1, 1, 1, 1, 1])[0]()
            self.pull_some()
            self.pair.end_turn(advance_ms=self.random.choice([0, 1, 50]))

    # --- pulls -----------------------------------------------------------------------------------

    def pull_some(self) -> None:
        # The same in all pulls of a turn: requests of several connections have no order.
        self._commit_offset = self.random.randrange(-1, 40)
        for connection in range(CONNECTIONS):
            frames = [self.pull() for _ in range(self.random.randint(0, 5))]
            self.pair.receive(connection, b"".join(frames))

    def pull(self, **changes: str) -> bytes:
        random = self.random
        sys_flag = SUBSCRIPTION if random.random() < 0.6 else 0
        sys_flag |= COMMIT_OFFSET if random.random() < 0.3 else 0
        sys_flag |= SUSPEND if random.random() < 0.1 else 0
        fields = {
            "consumerGroup": random.choice(GROUPS),
            "topic": random.choice(["T", "orders"]),
            "queueId": str(random.randrange(2)),
            "queueOffset": str(random.choice([0, random.randrange(30), random.randrange(200)])),
            "maxMsgNums": random.choice(["1", "3", "32", "32", "32"]),
            "sysFlag": str(sys_flag),
            "commitOffset": str(self._commit_offset),
            "suspendTimeoutMillis": "1000",
            "subscription": random.choice(TAGS),
            "subVersion": str(random.choice([0, 0, self._version])),
            "expressionType": "TAG",
        }
        if random.random() < 0.15:
            fields |= self.odd_fields()
        code = LITE_PULL if random.random() < 0.2 else PULL
        return request_bytes(code, {**fields, **changes}, opaque=self.requests.opaque())

    def odd_fields(self) -> dict[str, str]:
        choices: list[dict[str, str]] = [
            {"consumerGroup": "strangers"},
            {"consumerGroup": "no such group!"},
            {"topic": "unknown"},
            {"topic": "RMQ_SYS_TRANS_HALF_TOPIC"},
            {"queueId": "99"},
            {"queueId": "-1"},
            {"queueOffset": "-5"},
            {"queueOffset": "99999999999999999"},
            {"maxMsgNums": "0"},
            {"maxMsgNums": "-1"},
            {"maxMsgNums": "1000000"},
            {"maxMsgBytes": "100"},
            {"maxMsgBytes": "2147483647"},
            {"bulk": "true"},
            {"expressionType": "SQL92", "subscription": "a > 3"},
            {"expressionType": "NONE"},
            {"subscription": "a && b"},
            {"bname": "broker-a"},
            {"requestSource": "1"},
            {"sysFlag": "28"},
        ]
        return self.random.choice(choices)

    # --- changes ---------------------------------------------------------------------------------

    def send(self, count: int) -> None:
        self.pair.receive(0, b"".join(self.requests.send() for _ in range(count)))
        self.pair.end_turn()

    def send_some(self) -> None:
        self.send(self.random.randint(1, 10))

    def heartbeat(self) -> None:
        self._version += self.random.randint(0, 1)
        subscription = {
            "topic": self.random.choice(["T", "orders"]),
            "subString": self.random.choice(TAGS[:3]),
            "subVersion": self._version,
            "expressionType": "TAG",
        }
        consumer = {
            "groupName": self.random.choice(GROUPS),
            "messageModel": self.random.choice(["CLUSTERING", "BROADCASTING"]),
            "subscriptionDataSet": [subscription],
        }
        body = json.dumps({"clientID": "client", "consumerDataSet": [consumer]}).encode()
        self.pair.receive(0, request_bytes(HEARTBEAT, {}, opaque=self.requests.opaque(), body=body))
        self.pair.end_turn()

    def change_topic(self) -> None:
        topic = TopicConfig(
            topic_name="orders",
            read_queue_nums=self.random.choice([1, 2]),
            write_queue_nums=2,
            perm=self.random.choice([2, 6]),
            topic_sys_flag=self.random.choice([0, 3]),
        )
        self.on_both(lambda path: path.broker.topics.put(topic, now_ms=0))

    def change_group(self) -> None:
        group = GroupConfig(
            group_name="audit",
            consume_enable=self.random.random() < 0.7,
            consume_broadcast_enable=self.random.random() < 0.5,
            group_sys_flag=self.random.choice([0, 1]),
        )
        if self.random.random() < 0.3:
            self.on_both(lambda path: path.broker.groups.remove("audit", now_ms=0))
        else:
            self.on_both(lambda path: path.broker.groups.put(group, now_ms=0))

    def reset_offset(self) -> None:
        queue_id = self.random.randrange(2)
        offsets = {queue_id: self.random.randrange(20)}
        self.on_both(lambda path: path.broker.offsets.reset("T", "readers", offsets))
        # One pull gets it. Of several connections, it could be any.
        fields = {**ALL_OF_QUEUE, "queueId": str(queue_id), "expressionType": "TAG"}
        self.pair.receive(0, self.pull(**fields))
        self.pair.end_turn()

    def change_limits(self) -> None:
        consume = ConsumeConfig(
            pull_messages_max=self.random.choice([2, 32]),
            pull_bytes_max=self.random.choice([1500, 8000, 256 << 10]),
        )
        self.pair.change_config(consume=consume)

    def hide(self) -> None:
        """Append messages that nobody may see until a group decision is complete."""
        self.on_both(lambda path: path.store.hide("T", 0, path.store.max_offset("T", 0)))
        self.send(5)
        self.pull_some()
        self.pair.end_turn()
        self.on_both(lambda path: path.store.unhide("T", 0))

    def kill(self) -> None:
        self.pair.kill()

    def damage(self) -> None:
        """Flip a bit of a record. It is read from the disk after the next start."""
        store = self.pair.native.store
        log_offset = self.random.randrange(store.begin, store.end)
        bit = 1 << self.random.randrange(8)
        segment_bytes = self.pair.native.config.store.segment_bytes
        base = log_offset - log_offset % segment_bytes

        def flip(path: PathBroker) -> None:
            file = path.disk.open(f"commitlog/{base:020d}")
            byte = file.read_at(log_offset - base, 1)[0]
            file.write_at(log_offset - base, bytes([byte ^ bit]))
            file.close()

        self.pair.kill()
        self.on_both(flip)

    def expire(self) -> None:
        """Remove the oldest segment, if it is not the last one."""

        if len(self.pair.native.store.log_files()) > 1:
            self.on_both(lambda path: path.store.checkpoint())
            self.on_both(lambda path: path.store.remove_oldest_file())

    def on_both(self, change: Callable[[PathBroker], object]) -> None:
        for path in self.pair.both:
            change(path)
            path.broker.save()


@given(st.integers(0, 2**32))
@settings(max_examples=25, deadline=None)
def test_pulls_get_the_same_responses_on_both_paths(seed: int) -> None:
    async def run() -> None:  # a server needs a running event loop
        PullRun(seed).run(25)

    asyncio.run(run())


def test_most_pulls_take_the_native_path() -> None:
    """Otherwise the other test would compare the Python path with itself."""

    async def run() -> None:
        run = PullRun(1)
        run.send(60)
        for number in range(100):
            fields = {"topic": "T", "queueOffset": str(number % 10), "subscription": "*"}
            run.pair.receive(number % CONNECTIONS, run.pull(**fields, sysFlag="4"))
            responses = run.pair.end_turn()
            assert sum(map(len, responses)) == 1
        native = run.pair.native.broker
        assert native.native_requests is not None
        assert native.native_requests.count > 60 + 80

    asyncio.run(run())


def test_hidden_messages_and_the_byte_limit_are_respected() -> None:
    async def run() -> None:
        run = PullRun(4)
        run.send(60)
        run.on_both(lambda path: path.store.hide("T", 0, path.store.max_offset("T", 0)))
        run.send(30)
        end = run.pair.python.store.max_offset("T", 0)
        for offset in (0, end - 1, end):
            for limit in ("1500", "20000"):
                run.pair.receive(0, run.pull(**ALL_OF_QUEUE, queueOffset=str(offset)))
                fields = {**ALL_OF_QUEUE, "queueOffset": str(offset), "maxMsgBytes": limit}
                run.pair.receive(1, run.pull(**fields))
                run.pair.end_turn()
        run.on_both(lambda path: path.store.unhide("T", 0))
        run.pair.receive(0, run.pull(**ALL_OF_QUEUE, queueOffset=str(end)))
        assert b"FOUND" in run.pair.end_turn()[0][0]

    asyncio.run(run())


def test_a_pull_behind_a_send_of_its_connection_is_answered_after_it() -> None:
    async def run() -> None:
        run = PullRun(2)
        run.send(60)
        properties = message_properties(UNIQ_KEY="KEY")
        send = request_bytes(SEND_V2, send_fields(i=properties), opaque=10**6, body=b"body")
        pull = run.pull(topic="T", sysFlag="4", subscription="*", queueOffset="0")
        for frames in ([send, pull, pull], [pull, send, pull]):
            for path in run.pair.both:
                path.connections[0].data_received(b"".join(frames))
                path.server.end_turn()
                path.server.end_turn()
                assert len(path.take_responses()[0]) == 3

    asyncio.run(run())


def test_records_of_many_sizes_are_read_from_the_disk() -> None:
    """They lie in blocks that pulls share, across their boundaries, and in several segments."""

    async def run() -> None:
        run = PullRun(3)
        store = replace(run.pair.native.config.store, segment_bytes=2 << 20)
        run.pair = PathPair(config=replace(run.pair.native.config, store=store))
        run.on_both(
            lambda path: path.broker.groups.put(GroupConfig(group_name="readers"), now_ms=0)
        )
        for _ in range(12):
            run.send(200)
        run.pair.kill()
        for queue_id in range(2):
            for offset in range(0, 700, 25):
                fields = {"queueId": str(queue_id), "queueOffset": str(offset), "topic": "T"}
                run.pair.receive(0, run.pull(**fields, consumerGroup="readers", sysFlag="4"))
                run.pair.end_turn()

    asyncio.run(run())


def test_the_pulls_of_one_turn_get_so_many_bytes_on_the_native_path_and_no_more() -> None:
    """Each of many connections has its share, and all together would make a turn too long."""

    async def run() -> None:
        run = PullRun(5)
        store = replace(run.pair.native.config.store, segment_bytes=2 << 20)
        run.pair = PathPair(config=replace(run.pair.native.config, store=store))
        path = run.pair.native
        path.broker.groups.put(GroupConfig(group_name="readers"), now_ms=0)
        body = b"x" * 8_000
        for number in range(32):
            send = request_bytes(SEND_V2, send_fields(e="0"), opaque=10**6 + number, body=body)
            path.connections[0].data_received(send)
        path.server.end_turn()
        plain_requests = path.broker.native_requests
        assert plain_requests is not None
        fields = {"queueOffset": "0", "commitOffset": "0", "suspendTimeoutMillis": "0"}
        pull = request_bytes(PULL, {**ALL_OF_QUEUE, **fields, "subVersion": "0"}, opaque=1)
        transports = []
        for port in range(50_000, 50_100):
            connection, transport = ServerConnection(path.server), FakeTransport(port)
            connection.connection_made(transport)
            transports.append(transport)
            connection.data_received(pull)
        before = plain_requests.count
        path.server.handle_chunks()
        pulled_bytes = 32 * len(body)
        assert 1 << 20 < (plain_requests.count - before) * pulled_bytes < 12 << 20
        for _ in range(100):
            path.server.end_turn()
        assert all(sum(map(len, side.written)) > pulled_bytes // 2 for side in transports)

    asyncio.run(run())
