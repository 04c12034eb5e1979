"""The longest time for which each request holds up all other clients, in its most expensive form.

The broker runs in this process, without a socket. A stall is the CPU time of one step between two
points at which other clients are served: a request until it is done or interrupted, a slice, the
end of a turn. CPU time, so that other processes on the machine do not count.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.broker import ResultTable
from bench.measure import Plan
from escrowmq.broker.broker import Broker
from escrowmq.config import Config, ConsumeConfig
from escrowmq.message.batch import BATCH_MESSAGES_MAX, BULK_MESSAGES_MAX, BatchItem, encode_batch
from escrowmq.message.keys import UniqueKeyGenerator
from escrowmq.message.record import NewRecord
from escrowmq.namesrv.name_server import NameServer
from escrowmq.remoting import headers, headers_admin
from escrowmq.remoting.bodies import (
    HEARTBEAT_BYTES_MAX,
    REQUEST_BODY_BYTES_MAX,
    HalfPositions,
    encode_body,
)
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import Header
from escrowmq.remoting.requests import Request
from escrowmq.sliced_work import SliceScheduler
from escrowmq.store.disk import RealDisk
from escrowmq.store.store import MessageStore
from tests.support.broker_requests import FakeChannel, new_request, pull_request, send_request
from tests.support.escrows import half_request
from tests.support.stores import HOST

COLUMNS = ("request", "longest stall", "slices", "goal: at most 50 ms")
GOAL_MS = 50.0
NOW_MS = 1_700_000_000_000
MANY = 10_000
FEW = 200  # each is a file
COLLIDING = 20_000


@dataclass(frozen=True)
class Stall:
    longest_ms: float
    step_count: int


class StallBench:
    """A broker on a directory, driven step by step as the server drives it."""

    def __init__(self, directory: Path) -> None:
        self.disk = RealDisk(directory)
        config = Config()
        self.store = MessageStore.open(self.disk, config.store, store_host=HOST)
        self.broker = Broker(
            self.disk,
            self.store,
            config,
            UniqueKeyGenerator(address="127.0.0.1", process_id=1, salt=2),
            store_host=HOST,
            elapsed_s=time.thread_time,
        )
        self.broker.pull_processor.config = ConsumeConfig(filters_by_sql=True)
        self.channel = FakeChannel()
        self._waiting = SliceScheduler(time.thread_time)

    def run(self, *requests: Request[Any], channel: FakeChannel | None = None) -> Stall:
        """Handle requests and all that follows from them. Return the longest step."""
        gc.collect()
        gc.disable()  # responses stay in memory here, unlike those that a server writes
        taken: list[float] = []

        def timed(step: Callable[[], object]) -> Any:
            began = time.thread_time()
            result = step()
            taken.append((time.thread_time() - began) * 1000)
            return result

        for request in requests:
            handle = partial(self.broker.handle, channel or self.channel, request, NOW_MS)
            work = timed(handle)
            if work is not None:
                self._waiting.add(work)
                while timed(self._waiting.run_turn):
                    pass
        while timed(lambda: self.broker.end_turn(NOW_MS)):
            pass
        self.channel.responses()
        return Stall(max(taken), len(taken))

    def tick(self, now_ms: int) -> Stall:
        taken = []
        for _ in range(MANY):
            began = time.thread_time()
            self.broker.tick(now_ms)
            is_done = not self.broker.end_turn(now_ms)
            taken.append((time.thread_time() - began) * 1000)
            if is_done:
                break
        return Stall(max(taken), len(taken))

    def fill(self, records: Iterator[NewRecord]) -> None:
        while part := list(itertools.islice(records, 1_000)):
            self.store.append(part, now_ms=NOW_MS)


Case = tuple[str, Callable[[StallBench], Stall]]


def rows(plan: Plan) -> ResultTable:
    report: list[Sequence[str]] = []
    for name, case in CASES:
        with tempfile.TemporaryDirectory(prefix="escrowmq-stalls-") as directory:
            bench = StallBench(Path(directory))
            stall = case(bench)
            bench.store.abandon()
        is_met = "yes" if stall.longest_ms <= GOAL_MS else "**no**"
        row = name, f"{stall.longest_ms:.1f} ms", f"{stall.step_count:,}", is_met
        print(*row, sep="  ")
        report.append(row)
    notes = [
        "Each request in the most expensive form that is accepted, on an idle broker. The "
        "stall is CPU time of the longest step in which no other client is served; slices are all "
        "steps until the last response.",
    ]
    return ResultTable(report, notes, COLUMNS)


# --- the requests --------------------------------------------------------------------------------


def heartbeat(bench: StallBench, body: bytes) -> Stall:
    return bench.run(new_request(RequestCode.HEART_BEAT, headers.NoFields(), body))


def heartbeat_of_groups(bench: StallBench) -> Stall:
    groups = b",".join(b'{"groupName":"g%d"}' % number for number in range(900))
    return heartbeat(bench, b'{"clientID":"c","consumerDataSet":[%b]}' % groups)


def heartbeat_of_subscriptions(bench: StallBench) -> Stall:
    items = b",".join(b'{"topic":"t%d"}' % number for number in range(1_000))
    groups = b",".join(
        b'{"groupName":"g%d","subscriptionDataSet":[%b]}' % (number, items) for number in range(4)
    )
    return heartbeat(bench, b'{"clientID":"c","consumerDataSet":[%b]}' % groups)


def heartbeat_of_rubbish(bench: StallBench) -> Stall:
    return heartbeat(
        bench, b'{"clientID":"c","x":[%b1]}' % (b"[]," * (HEARTBEAT_BYTES_MAX // 3 - 20))
    )


def heartbeat_too_long(bench: StallBench) -> Stall:
    return heartbeat(bench, b'{"clientID":"%b"}' % (b"c" * (16_000_000)))


def lock(bench: StallBench) -> Stall:
    queue = b'{"topic":"t","brokerName":"b","queueId":%d}'
    queues = b",".join(queue % number for number in range(REQUEST_BODY_BYTES_MAX // 48))
    body = b'{"consumerGroup":"g","clientId":"c","mqSet":[%b]}' % queues
    return bench.run(new_request(RequestCode.LOCK_BATCH_MQ, headers.NoFields(), body))


def sql_pulls(bench: StallBench) -> Stall:
    bench.run(send_request("T"))
    properties = b"".join(b"a%d\x01x\x02" % number for number in range(3_000))
    bench.fill(NewRecord("T", 0, b"", properties) for _ in range(2_000))
    expression = " OR ".join(f"a{number} = 'y'" for number in range(900))
    pulls = [
        pull_request("T", number, subscription=expression, expression_type="SQL92")
        for number in range(100)
    ]
    return bench.run(*pulls)


def sql_expression(bench: StallBench) -> Stall:
    bench.run(send_request("T"))
    expression = " OR ".join(f"a{number} = 'y'" for number in range(1_000))
    return bench.run(pull_request("T", subscription=expression, expression_type="SQL92"))


def key_query(bench: StallBench) -> Stall:
    bench.run(send_request("T"))
    # "Aa" and "BB" have the same hash in Java, so all these keys have.
    keys = ("".join(parts).encode() for parts in itertools.product(("Aa", "BB"), repeat=15))
    bench.fill(
        NewRecord("T", 0, b"x" * 1_000, b"KEYS\x01%b\x02" % key)
        for key in itertools.islice(keys, COLLIDING)
    )
    bench.store.checkpoint()
    fields = headers.QueryMessage(
        topic="T", key="BB" * 15, max_num=64, begin_timestamp=0, end_timestamp=1 << 60
    )
    return bench.run(new_request(RequestCode.QUERY_MESSAGE, fields))


def batch(bench: StallBench) -> Stall:
    bench.run(send_request("T"))
    body = encode_batch(
        BatchItem(0, b"x", b"TAGS\x01a\x02UNIQ_KEY\x01%d\x02" % number)
        for number in range(BATCH_MESSAGES_MAX)
    )
    return bench.run(send_request("T", body, batch=True))


def bulk_batch(bench: StallBench) -> Stall:
    bench.run(send_request("T"))
    body = encode_batch(
        BatchItem(0, b"x", b"UNIQ_KEY\x01%08d\x02" % number) for number in range(BULK_MESSAGES_MAX)
    )
    return bench.run(send_request("T", body, batch=True))


def wake_up(bench: StallBench) -> Stall:
    bench.run(send_request("T"))
    for client in range(10):
        channel = FakeChannel(f"127.0.0.1:{50_000 + client}")
        for _ in range(MANY):
            bench.broker.handle(
                channel, pull_request("T", 1, suspend_timeout_millis=100_000), NOW_MS
            )
    assert bench.broker.pull_processor.held_count > MANY
    return bench.run(send_request("T"))


def expire_pulls(bench: StallBench) -> Stall:
    bench.run(send_request("T"))
    for client in range(10):
        channel = FakeChannel(f"127.0.0.1:{50_000 + client}")
        for _ in range(MANY):
            bench.broker.handle(channel, pull_request("T", 1), NOW_MS)
    return bench.tick(NOW_MS + 100_000)


def _topic_of_many_queues(bench: StallBench, count: int = MANY) -> None:
    fields = headers_admin.CreateTopic(
        topic="T", read_queue_nums=count, write_queue_nums=count, perm=6, default_topic="TBW102"
    )
    bench.run(new_request(RequestCode.UPDATE_AND_CREATE_TOPIC, fields))
    bench.fill(NewRecord("T", number, b"x") for number in range(count))


def topic_stats(bench: StallBench) -> Stall:
    _topic_of_many_queues(bench)
    return bench.run(
        new_request(RequestCode.GET_TOPIC_STATS_INFO, headers_admin.TopicHeader(topic="T"))
    )


def consume_stats(bench: StallBench) -> Stall:
    _topic_of_many_queues(bench)
    fields = headers_admin.GetConsumeStats(consumer_group="g", topic="T")
    return bench.run(new_request(RequestCode.GET_CONSUME_STATS, fields))


def reset_offsets(bench: StallBench) -> Stall:
    _topic_of_many_queues(bench)
    bench.run(pull_request("T"))
    fields = headers_admin.ResetOffset(topic="T", group="g", timestamp=0, is_force=True)
    return bench.run(new_request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields))


def delete_topic(bench: StallBench) -> Stall:
    _topic_of_many_queues(bench, FEW)
    bench.store.checkpoint()
    fields = headers_admin.TopicHeader(topic="T")
    return bench.run(new_request(RequestCode.DELETE_TOPIC_IN_BROKER, fields))


def end_transactions(bench: StallBench) -> Stall:
    bench.run(send_request("T"))
    for number in range(0, 2 * MANY, 1_000):
        bench.run(*(half_request(f"k{number + index}") for index in range(1_000)))
    halves = bench.broker.transactions.coordinator.halves
    positions = [(half.queue_offset, half.log_offset) for half in halves]
    group = next(iter(halves)).group
    fields = headers.EndTransactions(producer_group=group, commit_or_rollback=8)
    body = encode_body(HalfPositions(halves=positions))
    return bench.run(new_request(RequestCode.END_TRANSACTIONS, fields, body))


def list_transactions(bench: StallBench) -> Stall:
    bench.run(send_request("T"))
    for number in range(0, 2 * MANY, 1_000):
        bench.run(*(half_request(f"k{number + index}") for index in range(1_000)))
    fields = headers.ListTransactions(count_max=2_000, group="nobody")
    return bench.run(new_request(RequestCode.LIST_TRANSACTIONS, fields))


def unknown_topics(bench: StallBench) -> Stall:
    for number in range(0, MANY, 1_000):
        bench.run(*(send_request(f"T{number + index}") for index in range(1_000)))
    return bench.run(send_request("another"))


# --- the name server -----------------------------------------------------------------------------


def _run_name_server(name_server: NameServer, code: int, fields: Header, body: bytes) -> Stall:
    request = new_request(code, fields, body)
    taken = []
    scheduler = SliceScheduler(time.thread_time)

    def work() -> Any:
        yield from name_server.handle_in_slices(request, FakeChannel(), now_ms=NOW_MS)

    scheduler.add(work())
    is_left = True
    while is_left:
        began = time.thread_time()
        is_left = scheduler.run_turn()
        taken.append((time.thread_time() - began) * 1000)
    return Stall(max(taken), len(taken))


def _register(name_server: NameServer, body: bytes, *, is_packed: bool = False) -> Stall:
    fields = headers_admin.RegisterBroker(
        broker_name="b",
        broker_addr="10.0.0.1:1",
        cluster_name="c",
        ha_server_addr="",
        broker_id=0,
        compressed=is_packed,
    )
    return _run_name_server(name_server, RequestCode.REGISTER_BROKER, fields, body)


def _topics_body(count: int) -> bytes:
    topic = b'"t%d":{"topicName":"t%d","readQueueNums":4,"writeQueueNums":4,"perm":6}'
    topics = b",".join(topic % (number, number) for number in range(count))
    return b'{"topicConfigSerializeWrapper":{"topicConfigTable":{%b}}}' % topics


def registration(bench: StallBench) -> Stall:
    return _register(NameServer(), _topics_body(90_000))


def packed_registration(bench: StallBench) -> Stall:
    def sized(data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + data

    topics = [sized(b"t%d 4 4 6 SINGLE_TAG" % number) for number in range(100_000)]
    body = sized(b"{}") + len(topics).to_bytes(4, "big") + b"".join(topics) + sized(b"[]")
    return _register(NameServer(), zlib.compress(body), is_packed=True)


def topic_list(bench: StallBench) -> Stall:
    name_server = NameServer()
    _register(name_server, _topics_body(90_000))
    return _run_name_server(
        name_server,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
        headers.NoFields(),
        b"",
    )


CASES: Sequence[Case] = (
    ("HEART_BEAT, 900 new groups", heartbeat_of_groups),
    ("HEART_BEAT, 4,000 subscriptions", heartbeat_of_subscriptions),
    ("HEART_BEAT, 512 KiB of empty lists", heartbeat_of_rubbish),
    ("HEART_BEAT, 16 MB: refused", heartbeat_too_long),
    ("LOCK_BATCH_MQ, 1 MiB", lock),
    ("PULL_MESSAGE, 100 with 900 SQL92 conditions, none matches", sql_pulls),
    ("PULL_MESSAGE, a new SQL92 expression of 1,000 conditions", sql_expression),
    (f"QUERY_MESSAGE, {COLLIDING:,} keys with one hash", key_query),
    (f"SEND_BATCH_MESSAGE, {BATCH_MESSAGES_MAX:,} messages with tags", batch),
    (f"SEND_BATCH_MESSAGE, {BULK_MESSAGES_MAX:,} messages as one run", bulk_batch),
    (f"SEND_MESSAGE that wakes {10 * MANY:,} pulls", wake_up),
    (f"expiry of {10 * MANY:,} pulls", expire_pulls),
    (f"GET_TOPIC_STATS_INFO, {MANY:,} queues", topic_stats),
    (f"GET_CONSUME_STATS, {MANY:,} queues", consume_stats),
    (f"INVOKE_BROKER_TO_RESET_OFFSET, {MANY:,} queues", reset_offsets),
    (f"DELETE_TOPIC_IN_BROKER, {FEW:,} queues", delete_topic),
    (f"END_TRANSACTIONS, {2 * MANY:,} halves", end_transactions),
    (f"LIST_TRANSACTIONS, none of {2 * MANY:,} matches", list_transactions),
    (f"SEND_MESSAGE that creates a topic beside {MANY:,}", unknown_topics),
    ("REGISTER_BROKER, 90,000 topics", registration),
    ("REGISTER_BROKER, packed, 100,000 topics", packed_registration),
    ("GET_ALL_TOPIC_LIST, 90,000 topics", topic_list),
)
