"""Requests whose work grows with a request or with the state of the broker are done in slices.

Time passes only when the broker looks at the clock: each look takes a millisecond, as long as a
slice. So work that may be interrupted is interrupted, and work that may not shows up as one slice.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from escrowmq.auth.acl import parse_rules
from escrowmq.auth.validator import AccessValidator
from escrowmq.broker.processors.pull import CLOSED_PER_SLICE
from escrowmq.client_memory import ClientMemory
from escrowmq.clock import ManualClock
from escrowmq.config import Config
from escrowmq.errors import StoreUnavailable
from escrowmq.message.batch import BatchItem, encode_batch
from escrowmq.remoting import headers, headers_admin
from escrowmq.remoting.bodies import HalfPositions, encode_body
from escrowmq.remoting.codes import JSON, RequestCode, ResponseCode
from escrowmq.remoting.requests import Request
from escrowmq.store.store_reader import PIECE_BYTES
from escrowmq.testing.disks import MemoryDisk
from tests.interop.remoting import COMMIT
from tests.support.broker_bench import BrokerBench
from tests.support.broker_requests import FakeChannel, new_request, pull_request, send_request
from tests.support.brokers import SETTINGS
from tests.support.escrows import half_request
from tests.support.signing import signature
from tests.support.stores import NOW_MS, open_store

MANY = 32
# "Aa" and "BB" have the same hash in Java, so all these keys have.
COLLIDING = ["".join(parts) for parts in itertools.product(("Aa", "BB"), repeat=5)]


def slow_clock() -> Callable[[], float]:
    """Return a function that reads a clock, which takes a millisecond."""
    clock = ManualClock()

    def elapsed_s() -> float:
        clock.advance(ms=1)
        return clock.elapsed_s()

    return elapsed_s


def slice_count(bench: BrokerBench, request: Request[Any]) -> int:
    """Handle a request, and return how often it was or could be interrupted."""
    while bench.broker.end_turn(NOW_MS):  # what was begun before is no part of it
        pass
    work = bench.broker.handle(bench.channel, request, NOW_MS)
    count = 0 if work is None else sum(1 for _ in work)
    bench.broker.end_turn(NOW_MS)
    while not (responses := bench.channel.responses()):
        bench.broker.end_turn(NOW_MS)
        count += 1
    assert [response.code for response in responses] == [ResponseCode.SUCCESS]
    return count


def create_topic(bench: BrokerBench, topic: str, queues: int = 1) -> None:
    fields = headers_admin.CreateTopic(
        topic=topic, read_queue_nums=queues, write_queue_nums=queues, perm=6, default_topic="TBW102"
    )
    bench.turn(new_request(RequestCode.UPDATE_AND_CREATE_TOPIC, fields))


def create_groups(bench: BrokerBench, count: int) -> None:
    for number in range(count):
        body = b'{"groupName":"g%d"}' % number
        code = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        bench.turn(new_request(code, headers.NoFields(), body))


def join(bench: BrokerBench, client_id: str) -> None:
    """Let a client join a consumer group and a producer group."""
    body = {
        "clientID": client_id,
        "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [{"topic": "T"}]}],
        "producerDataSet": [{"groupName": "p"}],
    }
    request = new_request(RequestCode.HEART_BEAT, headers.NoFields(), json.dumps(body).encode())
    bench.turn(request, channel=FakeChannel(f"127.0.0.1:{41_000 + len(client_id)}"))


# --- lists ---------------------------------------------------------------------------------------


def many_topics(bench: BrokerBench) -> None:
    for number in range(MANY):
        create_topic(bench, f"T{number}")


def many_groups(bench: BrokerBench) -> None:
    create_groups(bench, MANY)


def many_members(bench: BrokerBench) -> None:
    for number in range(MANY):
        join(bench, "c" * (number + 1))


def many_queues(bench: BrokerBench) -> None:
    create_topic(bench, "T", MANY)
    bench.turn(*(send_request("T", queue_id=number) for number in range(MANY)))
    bench.turn(pull_request("T"))
    bench.channel.responses()


def members_and_queues(bench: BrokerBench) -> None:
    many_queues(bench)
    many_members(bench)


GROWING: dict[str, tuple[Callable[[BrokerBench], None], Request[Any]]] = {
    "topics": (many_topics, new_request(RequestCode.GET_ALL_TOPIC_CONFIG, headers.NoFields())),
    "system topics": (
        many_topics,
        new_request(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER, headers.NoFields()),
    ),
    "groups": (
        many_groups,
        new_request(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, headers.NoFields()),
    ),
    "consumers": (
        many_members,
        new_request(
            RequestCode.GET_CONSUMER_CONNECTION_LIST,
            headers.ConsumerGroupHeader(consumer_group="g"),
        ),
    ),
    "ids of members": (
        many_members,
        new_request(
            RequestCode.GET_CONSUMER_LIST_BY_GROUP,
            headers.ConsumerGroupHeader(consumer_group="g"),
        ),
    ),
    "producers": (
        many_members,
        new_request(
            RequestCode.GET_PRODUCER_CONNECTION_LIST,
            headers_admin.ProducerGroupHeader(producer_group="p"),
        ),
    ),
    "all producers": (
        many_members,
        new_request(RequestCode.GET_ALL_PRODUCER_INFO, headers.NoFields()),
    ),
    "time spans": (
        many_queues,
        new_request(
            RequestCode.QUERY_CONSUME_TIME_SPAN,
            headers_admin.TopicGroupHeader(topic="T", group="g"),
        ),
    ),
    "deleted queues": (
        many_queues,
        new_request(RequestCode.DELETE_TOPIC_IN_BROKER, headers_admin.TopicHeader(topic="T")),
    ),
    "notified members": (
        members_and_queues,
        new_request(
            RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
            headers_admin.ResetOffset(topic="T", group="g", timestamp=0, is_force=True, queue_id=0),
        ),
    ),
}


@pytest.mark.parametrize("name", GROWING)
def test_a_request_about_many_things_may_be_interrupted_after_each(name: str) -> None:
    bench = BrokerBench(elapsed_s=slow_clock())
    prepare, request = GROWING[name]
    prepare(bench)
    count_min = MANY / 2 if name == "deleted queues" else MANY  # two are deleted in a turn
    assert slice_count(bench, request) >= count_min


def test_the_queues_of_a_reset_are_looked_at_and_encoded_one_by_one() -> None:
    bench = BrokerBench(elapsed_s=slow_clock())
    many_queues(bench)
    fields = headers_admin.ResetOffset(topic="T", group="g", timestamp=0, is_force=True)
    request = new_request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields)
    assert slice_count(bench, request) >= 2 * MANY


def test_a_reset_that_is_dropped_changes_nothing() -> None:
    bench = BrokerBench(elapsed_s=slow_clock())
    many_queues(bench)
    fields = headers_admin.ResetOffset(topic="T", group="g", timestamp=-1, is_force=True)
    request = new_request(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields)
    work = bench.broker.handle(bench.channel, request, NOW_MS)
    assert work is not None
    for _ in range(2 * MANY):  # the last queue is looked at and encoded, but nothing is saved
        next(work)
    work.close()
    assert bench.broker.offsets.queue_offsets("T", "g") == {}


# --- long filters --------------------------------------------------------------------------------

TAGS = 6_000
LONG_FILTER = "||".join(f"tag{number}" for number in range(TAGS))
FILTER_SLICES = TAGS // 256


def test_a_pull_with_many_tags_is_parsed_in_slices_once() -> None:
    bench = BrokerBench(elapsed_s=slow_clock())
    bench.turn(send_request("T", properties="TAGS\x01tag7\x02"))
    bench.channel.responses()
    pull = pull_request("T", subscription=LONG_FILTER)
    assert slice_count(bench, pull) >= FILTER_SLICES
    assert slice_count(bench, pull) == 0


def test_the_subscriptions_of_a_heartbeat_are_parsed_in_slices() -> None:
    bench = BrokerBench(elapsed_s=slow_clock())
    subscriptions = [{"topic": f"T{number}", "subString": LONG_FILTER} for number in range(4)]
    groups = [{"groupName": "g", "subscriptionDataSet": subscriptions}]
    body = json.dumps({"clientID": "c", "consumerDataSet": groups}).encode()
    heartbeat = new_request(RequestCode.HEART_BEAT, headers.NoFields(), body)
    assert slice_count(bench, heartbeat) >= 4 * FILTER_SLICES
    subscription = bench.broker.consumers.subscription("g", "T3")
    assert subscription is not None
    assert len(subscription.tags) == TAGS


# --- batches -------------------------------------------------------------------------------------


def batch_request(*tags: str) -> Request[Any]:
    properties = (f"TAGS\x01{tag}\x02".encode() for tag in tags)
    body = encode_batch(BatchItem(0, b"x", encoded) for encoded in properties)
    return send_request("new", body, batch=True, queue_id=-1)


def test_a_batch_for_a_new_topic_is_validated_in_slices() -> None:
    bench = BrokerBench(elapsed_s=slow_clock())
    assert slice_count(bench, batch_request(*"a" * MANY)) >= MANY
    assert bench.store.max_offset("new", 0) == MANY


def test_a_batch_that_is_refused_creates_no_topic() -> None:
    bench = BrokerBench(elapsed_s=slow_clock())
    [response] = bench.turn(batch_request("a", "a\x02TRAN_MSG\x01true"))
    assert response.code == ResponseCode.MESSAGE_ILLEGAL
    assert bench.broker.topics.find("new") is None


# --- keys with one hash --------------------------------------------------------------------------


def bench_with_colliding_halves() -> BrokerBench:
    bench = BrokerBench(elapsed_s=slow_clock())
    bench.turn(*(half_request(key) for key in COLLIDING))
    bench.store.checkpoint()  # the keys in memory are compared as they are
    bench.channel.responses()
    return bench


@pytest.mark.parametrize(
    "request_",
    [
        new_request(
            RequestCode.SHOW_TRANSACTION, headers.TransactionHeader(transaction_id=COLLIDING[0])
        ),
        new_request(
            RequestCode.SETTLE_TRANSACTION,
            headers.SettleTransaction(
                transaction_id=COLLIDING[0], commit_or_rollback=COMMIT, reason="it is paid"
            ),
        ),
    ],
    ids=["show", "settle"],
)
def test_the_search_for_a_transaction_may_be_interrupted(request_: Request[Any]) -> None:
    assert slice_count(bench_with_colliding_halves(), request_) >= len(COLLIDING)


def test_the_history_shows_a_decision_that_is_made_between_two_slices() -> None:
    bench = bench_with_colliding_halves()
    fields = headers.TransactionHeader(transaction_id=COLLIDING[0])
    show = bench.broker.handle(
        bench.channel, new_request(RequestCode.SHOW_TRANSACTION, fields), NOW_MS
    )
    assert show is not None
    for _ in range(len(COLLIDING) + 3):  # it is located, and its steps are searched
        next(show)
    settle = headers.SettleTransaction(
        transaction_id=COLLIDING[0], commit_or_rollback=COMMIT, reason="it is paid"
    )
    operator = FakeChannel("127.0.0.1:40001")
    [settled] = bench.turn(new_request(RequestCode.SETTLE_TRANSACTION, settle), channel=operator)
    assert settled.code == ResponseCode.SUCCESS
    for _ in show:
        pass
    [shown] = bench.turn()
    history = json.loads(shown.body)
    assert history["transaction"]["state"] == "committed"
    assert history["steps"][-1]["what"] == "committed"


def test_long_messages_that_are_searched_by_key_are_read_in_pieces() -> None:
    bench = BrokerBench(config=Config(store=SETTINGS), elapsed_s=slow_clock())
    bodies = [bytes([number]) * (3 * PIECE_BYTES) for number in range(3)]
    bench.turn(*(send_request("T", body, properties="KEYS\x01k\x02") for body in bodies))
    bench.channel.responses()
    fields = headers.QueryMessage(
        topic="T", key="k", max_num=32, begin_timestamp=0, end_timestamp=1 << 62
    )
    work = bench.broker.handle(
        bench.channel, new_request(RequestCode.QUERY_MESSAGE, fields), NOW_MS
    )
    assert work is not None
    assert sum(1 for _ in work) >= 3 * len(bodies)
    [response] = bench.turn()
    assert response.body == b"".join(
        bench.store.record_bytes(record) for record in reversed(list(bench.store.records()))
    )


def bench_with_colliding_retries() -> tuple[BrokerBench, Request[Any]]:
    """Return a broker with delayed messages, and a request that sends a message back."""
    bench = BrokerBench(elapsed_s=slow_clock())
    bench.turn(send_request("T", b"failed", properties=f"UNIQ_KEY\x01{COLLIDING[0]}\x02"))
    delayed = (f"UNIQ_KEY\x01{key}\x02DELAY\x0118\x02" for key in COLLIDING[1:])
    bench.turn(*(send_request("T", properties=properties) for properties in delayed))
    bench.store.checkpoint()
    bench.channel.responses()
    [failed] = [record for record in bench.store.records() if record.body == b"failed"]
    fields = headers.ConsumerSendMessageBack(offset=failed.log_offset, group="g", delay_level=1)
    return bench, new_request(RequestCode.CONSUMER_SEND_MSG_BACK, fields)


def test_the_search_for_an_earlier_retry_may_be_interrupted() -> None:
    bench, request = bench_with_colliding_retries()
    assert slice_count(bench, request) >= len(COLLIDING) - 1


def test_a_message_that_is_sent_back_by_two_clients_at_a_time_is_retried_once() -> None:
    bench, request = bench_with_colliding_retries()
    end = bench.store.max_offset("SCHEDULE_TOPIC_XXXX", 0)
    work = bench.broker.handle(bench.channel, request, NOW_MS)
    assert work is not None
    next(work)
    other = FakeChannel("127.0.0.1:40001")
    assert bench.turn(request, channel=other) == []  # it waits for the first one
    for _ in work:
        pass
    for _ in range(2 * len(COLLIDING)):
        bench.tick(NOW_MS)
    assert bench.channel.response().code == other.response().code == ResponseCode.SUCCESS
    assert bench.store.max_offset("SCHEDULE_TOPIC_XXXX", 0) == end + 1


def test_a_message_whose_first_send_back_was_dropped_can_be_sent_back() -> None:
    bench, request = bench_with_colliding_retries()
    work = bench.broker.handle(bench.channel, request, NOW_MS)
    assert work is not None
    next(work)
    work.close()
    [response] = bench.turn(request)
    assert response.code == ResponseCode.SUCCESS


# --- deletions -----------------------------------------------------------------------------------


DELETE = new_request(RequestCode.DELETE_TOPIC_IN_BROKER, headers_admin.TopicHeader(topic="T"))


def bench_that_deletes() -> BrokerBench:
    """Return a broker that has begun to delete a topic with many queues."""
    bench = BrokerBench(elapsed_s=slow_clock())
    many_queues(bench)
    bench.store.checkpoint()
    assert bench.turn(DELETE) == []
    assert bench.store.is_removing_files
    return bench


def test_other_clients_are_served_while_a_topic_is_deleted() -> None:
    bench, other = bench_that_deletes(), FakeChannel("127.0.0.1:40001")
    served = 0
    while bench.store.is_removing_files:
        [response] = bench.turn(send_request("U"), channel=other)
        assert response.code == ResponseCode.SUCCESS
        served += 1
    assert served >= MANY / 2
    bench.broker.end_turn(NOW_MS)
    assert bench.channel.response().code == ResponseCode.SUCCESS
    assert not bench.disk.exists("consumequeue/T")


def test_a_topic_is_empty_as_soon_as_its_deletion_has_begun() -> None:
    bench = bench_that_deletes()
    assert bench.broker.topics.find("T") is None
    assert [queue for queue in bench.store.queues() if queue[0] == "T"] == []


def test_a_message_that_is_sent_to_a_topic_while_it_is_deleted_begins_a_new_queue() -> None:
    bench = bench_that_deletes()
    [sent] = bench.turn(send_request("T", b"new"), channel=FakeChannel("127.0.0.1:40001"))
    assert sent.ext_fields["queueOffset"] == "0"
    while bench.store.is_removing_files:
        bench.broker.end_turn(NOW_MS)
    bench.store.close()
    store = open_store(bench.disk, bench.config.store)
    assert store.max_offset("T", 0) == 1
    assert [record.body for record in store.records() if record.log_offset >= 0][-1] == b"new"


def test_no_checkpoint_is_made_while_files_are_removed_and_a_stop_removes_them_first() -> None:
    bench = bench_that_deletes()
    with pytest.raises(StoreUnavailable, match="deleted topic"):
        bench.store.begin_checkpoint()
    bench.turn(send_request("T", b"new"), channel=FakeChannel("127.0.0.1:40001"))
    bench.store.close()
    assert bench.disk.names("consumequeue/T") == ["0"]
    assert open_store(bench.disk, bench.config.store).max_offset("T", 0) == 1


def test_a_power_cut_between_two_slices_of_a_deletion_loses_no_later_message() -> None:
    bench = bench_that_deletes()
    bench.turn(send_request("T", b"new"), channel=FakeChannel("127.0.0.1:40001"))
    bench.store.flush()
    restarted = bench.after_power_cut()
    assert restarted.store.max_offset("T", 0) == 1
    assert [queue for queue in restarted.store.queues() if queue[0] == "T"] == [("T", 0)]


def test_deletions_are_finished_one_after_the_other_also_without_their_clients() -> None:
    bench = BrokerBench(elapsed_s=slow_clock())
    for topic in ("T", "U"):
        create_topic(bench, topic, MANY)
        bench.turn(*(send_request(topic, queue_id=number) for number in range(MANY)))
    bench.store.checkpoint()
    fields = headers_admin.TopicHeader(topic="U")
    bench.turn(DELETE, new_request(RequestCode.DELETE_TOPIC_IN_BROKER, fields))
    bench.broker.channel_closed(bench.channel)
    while bench.broker.end_turn(NOW_MS):
        pass
    assert bench.disk.names("consumequeue") == []


def test_unused_topics_are_deleted_in_slices() -> None:
    bench = BrokerBench(elapsed_s=slow_clock())
    many_queues(bench)
    bench.broker.topics.remove("T", now_ms=NOW_MS)
    request = new_request(RequestCode.CLEAN_UNUSED_TOPIC, headers.NoFields())
    assert slice_count(bench, request) >= MANY / 2
    assert bench.store.max_offset("T", 0) == 0


# --- permissions ---------------------------------------------------------------------------------

KEY, SECRET = "writer-key", "writer-secret-22"
RULES = f"""
accounts:
- accessKey: {KEY}
  secretKey: {SECRET}
  topicPerms: [T=PUB]
  defaultGroupPerm: SUB
"""


def signed(request: Request[Any]) -> Request[Any]:
    """Return a request with a header that the account has signed."""
    fields = {"AccessKey": KEY}
    fields["Signature"] = signature(SECRET, fields, bytes(request.body))
    command = {"code": request.head.code, "language": "JAVA", "version": 401, "extFields": fields}
    return Request(request.head, request.body, JSON, json.dumps(command).encode())


def end_transactions(bench: BrokerBench) -> Request[Any]:
    halves = bench.broker.transactions.coordinator.halves
    positions = [(half.queue_offset, half.log_offset) for half in halves]
    fields = headers.EndTransactions(producer_group="p", commit_or_rollback=COMMIT)
    body = encode_body(HalfPositions(halves=positions))
    return signed(new_request(RequestCode.END_TRANSACTIONS, fields, body))


def bench_with_halves(topic: str = "T") -> BrokerBench:
    """Return a broker with access rules, and with halves from the time before them."""
    disk = MemoryDisk()
    before = BrokerBench(disk)
    before.turn(*(half_request(f"k{number}", topic=topic) for number in range(MANY)))
    before.store.close()
    return BrokerBench(
        disk,
        elapsed_s=slow_clock(),
        access_validator=AccessValidator(parse_rules(RULES)),
    )


def test_the_permission_for_each_half_is_checked_in_slices() -> None:
    bench = bench_with_halves()
    # Each half is checked, found, and reserved.
    assert slice_count(bench, end_transactions(bench)) >= 3 * MANY


def test_no_half_is_decided_without_the_permission_for_all() -> None:
    bench = bench_with_halves("forbidden")
    [response] = bench.turn(end_transactions(bench))
    assert response.code == ResponseCode.NO_PERMISSION
    assert len(bench.broker.transactions.coordinator.halves) == MANY


def test_the_permissions_of_a_heartbeat_are_checked_in_slices() -> None:
    bench = BrokerBench(
        elapsed_s=slow_clock(), access_validator=AccessValidator(parse_rules(RULES))
    )
    groups = [{"groupName": f"g{number}"} for number in range(MANY)]
    body = json.dumps({"clientID": "c", "consumerDataSet": groups}).encode()
    request = signed(new_request(RequestCode.HEART_BEAT, headers.NoFields(), body))
    assert slice_count(bench, request) >= 2 * MANY  # each is checked, and joined


# --- what no request waits for -------------------------------------------------------------------


def turn_count(bench: BrokerBench) -> int:
    """End turns until no work is left, and return how many it took."""
    count = 1
    while bench.broker.end_turn(NOW_MS):
        count += 1
    return count


def test_what_a_closed_connection_had_is_forgotten_in_slices() -> None:
    bench, greedy = BrokerBench(elapsed_s=slow_clock()), FakeChannel("127.0.0.1:40001")
    bench.turn(send_request("T"))
    pulls = [pull_request("T", 1) for _ in range(MANY * CLOSED_PER_SLICE)]
    bench.turn(*pulls, channel=greedy)
    bench.broker.channel_closed(greedy)
    assert bench.broker.pull_processor.held_count == (MANY - 1) * CLOSED_PER_SLICE
    assert turn_count(bench) >= MANY / 2
    assert bench.broker.pull_processor.held_count == 0


def test_nothing_is_counted_for_connections_that_have_closed() -> None:
    memory = ClientMemory()
    bench = BrokerBench(elapsed_s=slow_clock(), memory=memory)
    channels = [FakeChannel(f"127.0.0.1:{40_001 + number}") for number in range(3)]
    for number, channel in enumerate(channels):
        for member in range(MANY):
            groups = [{"groupName": "g", "subscriptionDataSet": [{"topic": "T"}]}]
            heartbeat = {"clientID": f"{number}-{member}", "consumerDataSet": groups}
            body = json.dumps(heartbeat).encode()
            request = new_request(RequestCode.HEART_BEAT, headers.NoFields(), body)
            bench.turn(request, channel=channel)
    for channel in channels:
        bench.broker.channel_closed(channel)
    turn_count(bench)
    assert memory.total == 0
    # Private: an account without bytes has no public view, and would stay for ever.
    assert memory._uses == {}


def test_members_without_heartbeats_are_removed_in_slices() -> None:
    bench = BrokerBench(elapsed_s=slow_clock())
    many_members(bench)
    bench.broker.tick(NOW_MS + 1_000_000)
    assert len(bench.broker.consumers.members("g")) > 0
    assert turn_count(bench) >= MANY / 2
    assert bench.broker.consumers.members("g") == []


def test_a_member_that_comes_back_while_others_are_removed_stays() -> None:
    bench = BrokerBench(elapsed_s=slow_clock())
    many_members(bench)
    later_ms = NOW_MS + 1_000_000
    bench.broker.tick(later_ms)
    last = bench.broker.consumers.members("g")[-1].client
    body = {"clientID": last.client_id, "consumerDataSet": [{"groupName": "g"}]}
    heartbeat = new_request(RequestCode.HEART_BEAT, headers.NoFields(), json.dumps(body).encode())
    bench.turn(heartbeat, at_ms=later_ms, channel=FakeChannel("127.0.0.1:40001"))
    turn_count(bench)
    assert bench.broker.consumers.member_ids("g") == [last.client_id]
