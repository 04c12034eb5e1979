"""The longest time for which each request holds up all other clients, in its most expensive form.

The broker runs in this process, without a socket. A stall is the CPU time of one step between two
points at which other clients are served: a request until it is done or interrupted, a slice, the
end of a turn. CPU time, so that other processes on the machine do not count.
"""

from __future__ import annotations

import gc
import itertools
import json
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
from escrowmq.auth.acl import parse_rules
from escrowmq.auth.validator import AccessValidator
from escrowmq.broker.broker import Broker
from escrowmq.broker.dispatch import Channel
from escrowmq.broker.processors.admin_metadata import QUEUES_MAX
from escrowmq.config import Config, ConsumeConfig
from escrowmq.consume.members import ConsumerGroupSettings, GroupClient
from escrowmq.escrow.coordinator import DECISION_HALVES_MAX
from escrowmq.message.batch import BATCH_MESSAGES_MAX, BULK_MESSAGES_MAX, BatchItem, encode_batch
from escrowmq.message.keys import UniqueKeyGenerator
from escrowmq.message.record import NewRecord
from escrowmq.message.topic_config import TopicConfig
from escrowmq.namesrv.name_server import NameServer
from escrowmq.remoting import headers, headers_admin
from escrowmq.remoting.bodies import (
    HEARTBEAT_BYTES_MAX,
    REQUEST_BODY_BYTES_MAX,
    HalfPositions,
    encode_body,
)
from escrowmq.remoting.codes import JSON, RequestCode
from escrowmq.remoting.headers import Header
from escrowmq.remoting.requests import Request
from escrowmq.sliced_work import SliceScheduler
from escrowmq.store.config_files import GroupConfig
from escrowmq.store.disk import RealDisk
from escrowmq.store.store import MessageStore
from tests.support.broker_requests import FakeChannel, new_request, pull_request, send_request
from tests.support.escrows import half_request
from tests.support.signing import signature
from tests.support.stores import HOST

COLUMNS = ("request", "longest stall", "slices", "goal: at most 50 ms")
GOAL_MS = 50.0
NOW_MS = 1_700_000_000_000
MANY = 10_000
FILES = 2_000
MEMBERS = 100_000
COLLIDING = 20_000
KEY, SECRET = "bench-key", "bench-secret"
RULES = f"accounts: [{{accessKey: {KEY}, secretKey: {SECRET}, defaultTopicPerm: PUB}}]"


@dataclass(frozen=True)
class Stall:
    longest_ms: float
    step_count: int


class StallBench:
    """A broker on a directory, driven step by step as the server drives it."""

    def __init__(self, directory: Path) -> None:
        self.disk = RealDisk(directory)
        self.channel = FakeChannel()
        self.channels: list[FakeChannel] = []
        self._waiting = SliceScheduler(time.thread_time)
        self._open()

    def _open(self, validator: AccessValidator | None = None) -> None:
        config = Config()
        self.store = MessageStore.open(self.disk, config.store, store_host=HOST)
        self.broker = Broker(
            self.disk,
            self.store,
            config,
            UniqueKeyGenerator(address="127.0.0.1", process_id=1, salt=2),
            store_host=HOST,
            elapsed_s=time.thread_time,
            access_validator=validator,
        )
        self.broker.pull_processor.config = ConsumeConfig(filters_by_sql=True)

    def restart_with_rules(self) -> None:
        """Restart the broker; from now on requests must be signed."""
        self.store.close()
        self._open(AccessValidator(parse_rules(RULES)))

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

    def close_channels(self) -> Stall:
        """Close all channels, as an event loop may do it before anything else."""
        began = time.thread_time()
        for channel in self.channels:
            self.broker.channel_closed(channel)
        taken = [(time.thread_time() - began) * 1000]
        is_left = True
        while is_left:
            began = time.thread_time()
            is_left = self.broker.end_turn(NOW_MS)
            taken.append((time.thread_time() - began) * 1000)
        return Stall(max(taken), len(taken))

    def new_channel(self) -> FakeChannel:
        self.channels.append(FakeChannel(f"127.0.0.1:{41_000 + len(self.channels)}"))
        return self.channels[-1]

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


def heartbeat_of_tags(bench: StallBench) -> Stall:
    tags = b"||".join(b"%05x" % number for number in range(7_000))
    items = b",".join(b'{"topic":"t%d","subString":"%b"}' % (number, tags) for number in range(10))
    group = b'{"groupName":"g","subscriptionDataSet":[%b]}' % items
    return heartbeat(bench, b'{"clientID":"c","consumerDataSet":[%b]}' % group)


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


def _colliding_keys(count: int = COLLIDING) -> list[str]:
    # "Aa" and "BB" have the same hash in Java, so all these keys have.
    keys = itertools.product(("Aa", "BB"), repeat=15)
    return ["".join(parts) for parts in itertools.islice(keys, count)]


def key_query(bench: StallBench) -> Stall:
    bench.run(send_request("T"))
    bench.fill(
        NewRecord("T", 0, b"x" * 1_000, b"KEYS\x01%b\x02" % key.encode())
        for key in _colliding_keys()
    )
    bench.store.checkpoint()
    fields = headers.QueryMessage(
        topic="T", key="BB" * 15, max_num=64, begin_timestamp=0, end_timestamp=1 << 60
    )
    return bench.run(new_request(RequestCode.QUERY_MESSAGE, fields))


def show_transaction(bench: StallBench) -> Stall:
    bench.run(send_request("T"))
    keys = _colliding_keys()
    for number in range(0, len(keys), 1_000):
        bench.run(*(half_request(key) for key in keys[number : number + 1_000]))
    bench.store.checkpoint()
    fields = headers.TransactionHeader(transaction_id=keys[0])
    return bench.run(new_request(RequestCode.SHOW_TRANSACTION, fields))


def send_back(bench: StallBench) -> Stall:
    keys = _colliding_keys()
    bench.run(send_request("T", properties=f"UNIQ_KEY\x01{keys[0]}\x02"))
    bench.fill(
        NewRecord("SCHEDULE_TOPIC_XXXX", 17, b"x" * 1_000, b"UNIQ_KEY\x01%b\x02" % key.encode())
        for key in keys[1:]
    )
    bench.store.checkpoint()
    fields = headers.ConsumerSendMessageBack(offset=0, group="g", delay_level=1)
    return bench.run(new_request(RequestCode.CONSUMER_SEND_MSG_BACK, fields))


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


def batch_to_new_topic(bench: StallBench) -> Stall:
    body = encode_batch(
        BatchItem(0, b"x", b"TAGS\x01a\x02UNIQ_KEY\x01%d\x02" % number)
        for number in range(BATCH_MESSAGES_MAX)
    )
    return bench.run(send_request("new", body, batch=True))


def _hold_pulls(bench: StallBench, wait_ms: int) -> None:
    bench.run(send_request("T"))
    for _ in range(10):
        channel = bench.new_channel()
        for _ in range(MANY):
            pull = pull_request("T", 1, suspend_timeout_millis=wait_ms)
            bench.broker.handle(channel, pull, NOW_MS)
    assert bench.broker.pull_processor.held_count > MANY


def wake_up(bench: StallBench) -> Stall:
    _hold_pulls(bench, 100_000)
    return bench.run(send_request("T"))


def expire_pulls(bench: StallBench) -> Stall:
    _hold_pulls(bench, 1_000)
    return bench.tick(NOW_MS + 100_000)


def close_with_pulls(bench: StallBench) -> Stall:
    _hold_pulls(bench, 100_000)
    return bench.close_channels()


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


def time_spans(bench: StallBench) -> Stall:
    _topic_of_many_queues(bench, QUEUES_MAX)
    fields = headers_admin.TopicGroupHeader(topic="T", group="g")
    return bench.run(new_request(RequestCode.QUERY_CONSUME_TIME_SPAN, fields))


def reset_offsets(bench: StallBench) -> Stall:
    _topic_of_many_queues(bench, QUEUES_MAX)
    bench.run(pull_request("T"))
    fields = headers_admin.ResetOffset(topic="T", group="g", timestamp=0, is_force=True)
    return bench.run(new_request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields))


def queue_entries(bench: StallBench) -> Stall:
    bench.run(send_request("T"))
    bench.fill(NewRecord("T", 0, b"x") for _ in range(MANY))
    fields = headers_admin.QueryConsumeQueue(topic="T", queue_id=0, index=0, count=MANY)
    return bench.run(new_request(RequestCode.QUERY_CONSUME_QUEUE, fields))


def delete_topic(bench: StallBench) -> Stall:
    _topic_of_many_queues(bench, FILES)
    bench.store.checkpoint()
    fields = headers_admin.TopicHeader(topic="T")
    return bench.run(new_request(RequestCode.DELETE_TOPIC_IN_BROKER, fields))


def _offsets_of_many_topics(bench: StallBench) -> None:
    """Let a group have offsets of many topics, and other groups of as many more."""
    for number in range(MANY):
        config = TopicConfig(topic_name=f"T{number}", read_queue_nums=4, write_queue_nums=4)
        bench.broker.topics.put(config, now_ms=NOW_MS)
        for group in ("g", "g1", "g2"):
            for queue_id in range(4):
                bench.broker.offsets.commit(f"T{number}", group, queue_id, number)
            bench.broker.counters.record_pull(f"T{number}", group, 1, 100)
    for group in ("g", "g1", "g2"):
        bench.broker.groups.put(GroupConfig(group_name=group), now_ms=NOW_MS)
    bench.broker.save_offsets()


def clone_offsets(bench: StallBench) -> Stall:
    _offsets_of_many_topics(bench)
    fields = headers_admin.CloneGroupOffset(src_group="g", dest_group="new")
    return bench.run(new_request(RequestCode.CLONE_GROUP_OFFSET, fields))


def delete_group(bench: StallBench) -> Stall:
    _offsets_of_many_topics(bench)
    fields = headers_admin.DeleteGroup(group_name="g", clean_offset=True)
    return bench.run(new_request(RequestCode.DELETE_SUBSCRIPTIONGROUP, fields))


def broker_consume_stats(bench: StallBench) -> Stall:
    _offsets_of_many_topics(bench)
    fields = headers_admin.GetBrokerConsumeStats(is_order=False)
    return bench.run(new_request(RequestCode.GET_BROKER_CONSUME_STATS, fields))


def runtime_info(bench: StallBench) -> Stall:
    _offsets_of_many_topics(bench)
    return bench.run(new_request(RequestCode.GET_BROKER_RUNTIME_INFO, headers.NoFields()))


def list_topics(bench: StallBench) -> Stall:
    _offsets_of_many_topics(bench)
    return bench.run(new_request(RequestCode.GET_ALL_TOPIC_CONFIG, headers.NoFields()))


def _join(bench: StallBench) -> None:
    """Let many clients join one consumer group and one producer group."""
    for _ in range(MEMBERS // MANY):
        for number in range(MANY):
            if number % 1_000 == 0:
                channel = bench.new_channel()
            client_id = f"{channel.address}@{number}"
            client: GroupClient[Channel] = GroupClient(client_id=client_id, channel=channel)
            bench.broker.producers.heartbeat("p", client, now_ms=NOW_MS)
            bench.broker.consumers.heartbeat(
                "g", client, settings=ConsumerGroupSettings(), subscriptions=[], now_ms=NOW_MS
            )


def list_members(bench: StallBench) -> Stall:
    _join(bench)
    fields = headers.ConsumerGroupHeader(consumer_group="g")
    return bench.run(new_request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, fields))


def list_connections(bench: StallBench) -> Stall:
    _join(bench)
    fields = headers.ConsumerGroupHeader(consumer_group="g")
    return bench.run(new_request(RequestCode.GET_CONSUMER_CONNECTION_LIST, fields))


def list_producers(bench: StallBench) -> Stall:
    _join(bench)
    return bench.run(new_request(RequestCode.GET_ALL_PRODUCER_INFO, headers.NoFields()))


def expire_members(bench: StallBench) -> Stall:
    _join(bench)
    return bench.tick(NOW_MS + 1_000_000)


def close_members(bench: StallBench) -> Stall:
    _join(bench)
    return bench.close_channels()


def _park(bench: StallBench, count: int) -> None:
    bench.run(send_request("T"))
    for number in range(0, count, 1_000):
        bench.run(*(half_request(f"k{number + index}") for index in range(1_000)))


def end_transactions(bench: StallBench) -> Stall:
    """End as many as one request may, with access rules."""
    _park(bench, DECISION_HALVES_MAX)
    bench.restart_with_rules()
    halves = bench.broker.transactions.coordinator.halves
    positions = [(half.queue_offset, half.log_offset) for half in halves]
    group = next(iter(halves)).group
    fields = headers.EndTransactions(producer_group=group, commit_or_rollback=8)
    body = encode_body(HalfPositions(halves=positions))
    return bench.run(_signed(new_request(RequestCode.END_TRANSACTIONS, fields, body)))


def _signed(request: Request[Any]) -> Request[Any]:
    fields = {"AccessKey": KEY}
    fields["Signature"] = signature(SECRET, fields, bytes(request.body))
    command = {"code": request.head.code, "language": "JAVA", "version": 401, "extFields": fields}
    return Request(request.head, request.body, JSON, json.dumps(command).encode())


def list_transactions(bench: StallBench) -> Stall:
    _park(bench, 2 * MANY)
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
    ("HEART_BEAT, 10 subscriptions to 7,000 tags", heartbeat_of_tags),
    ("HEART_BEAT, 512 KiB of empty lists", heartbeat_of_rubbish),
    ("HEART_BEAT, 16 MB: refused", heartbeat_too_long),
    ("LOCK_BATCH_MQ, 1 MiB", lock),
    ("PULL_MESSAGE, 100 with 900 SQL92 conditions, none matches", sql_pulls),
    ("PULL_MESSAGE, a new SQL92 expression of 1,000 conditions", sql_expression),
    (f"QUERY_MESSAGE, {COLLIDING:,} keys with one hash", key_query),
    (f"SHOW_TRANSACTION, {COLLIDING:,} keys with one hash", show_transaction),
    (f"CONSUMER_SEND_MSG_BACK, {COLLIDING:,} keys with one hash", send_back),
    (f"SEND_BATCH_MESSAGE, {BATCH_MESSAGES_MAX:,} messages with tags", batch),
    (f"SEND_BATCH_MESSAGE, {BATCH_MESSAGES_MAX:,} messages, a new topic", batch_to_new_topic),
    (f"SEND_BATCH_MESSAGE, {BULK_MESSAGES_MAX:,} messages as one run", bulk_batch),
    (f"SEND_MESSAGE that wakes {10 * MANY:,} pulls", wake_up),
    (f"expiry of {10 * MANY:,} pulls", expire_pulls),
    (f"10 connections with {10 * MANY:,} pulls close", close_with_pulls),
    (f"GET_TOPIC_STATS_INFO, {MANY:,} queues", topic_stats),
    (f"GET_CONSUME_STATS, {MANY:,} queues", consume_stats),
    (f"GET_BROKER_CONSUME_STATS, 3 groups, {MANY:,} topics", broker_consume_stats),
    (f"GET_BROKER_RUNTIME_INFO beside {MANY:,} topics", runtime_info),
    (f"GET_ALL_TOPIC_CONFIG, {MANY:,} topics", list_topics),
    (f"QUERY_CONSUME_TIME_SPAN, {QUEUES_MAX:,} queues", time_spans),
    (f"INVOKE_BROKER_TO_RESET_OFFSET, {QUEUES_MAX:,} queues", reset_offsets),
    (f"CLONE_GROUP_OFFSET, {MANY:,} topics", clone_offsets),
    (f"DELETE_SUBSCRIPTIONGROUP, offsets of {MANY:,} topics", delete_group),
    (f"QUERY_CONSUME_QUEUE, {MANY:,} entries", queue_entries),
    (f"DELETE_TOPIC_IN_BROKER, {FILES:,} queues", delete_topic),
    (f"GET_CONSUMER_LIST_BY_GROUP, {MEMBERS:,} members", list_members),
    (f"GET_CONSUMER_CONNECTION_LIST, {MEMBERS:,} members", list_connections),
    (f"GET_ALL_PRODUCER_INFO, {MEMBERS:,} members", list_producers),
    (f"expiry of {2 * MEMBERS:,} members", expire_members),
    (f"100 connections with {2 * MEMBERS:,} members close", close_members),
    (f"END_TRANSACTIONS with access rules, {DECISION_HALVES_MAX:,} halves", end_transactions),
    (f"LIST_TRANSACTIONS, none of {2 * MANY:,} matches", list_transactions),
    (f"SEND_MESSAGE that creates a topic beside {MANY:,}", unknown_topics),
    ("REGISTER_BROKER, 90,000 topics", registration),
    ("REGISTER_BROKER, packed, 100,000 topics", packed_registration),
    ("GET_ALL_TOPIC_LIST, 90,000 topics", topic_list),
)
