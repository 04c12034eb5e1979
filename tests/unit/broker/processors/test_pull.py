"""Pulls: which are refused, which are held, and what their responses contain."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from escrowmq.broker.dispatch import Channel
from escrowmq.broker.metadata import SubscriptionGroups, TopicTable
from escrowmq.broker.processors.pull import PullProcessor
from escrowmq.clock import ManualClock
from escrowmq.config import BrokerConfig, ConsumeConfig
from escrowmq.consume.members import ConsumerGroups, ConsumerGroupSettings, GroupClient
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.consume.subscription import parse_subscription
from escrowmq.message.topic_config import TopicConfig
from escrowmq.sliced_work import SliceScheduler
from escrowmq.store.config_files import GroupConfig, groups_file, topics_file
from escrowmq.testing.disks import MemoryDisk
from tests.interop.records import decode_records
from tests.interop.remoting import Response
from tests.support.broker_requests import FakeChannel, pull_request
from tests.support.sliced import finish
from tests.support.stores import NOW_MS, open_store, properties, sample


class Bench:
    """The processor of pulls with its tables and a store."""

    def __init__(
        self, config: ConsumeConfig | None = None, *, auto_create: bool = True, permission: int = 6
    ) -> None:
        disk = MemoryDisk()
        self.store = open_store(disk)
        self.topics = TopicTable(topics_file(disk), BrokerConfig())
        self.groups = SubscriptionGroups(groups_file(disk), auto_create=auto_create)
        self.connected = ConsumerGroups[Channel]()
        self.offsets = ConsumerOffsets()
        self.clock = ManualClock()
        self.background_work = SliceScheduler(self.clock.elapsed_s)
        self.pulls = PullProcessor(
            self.store,
            self.topics,
            self.groups,
            self.connected,
            self.offsets,
            config or ConsumeConfig(),
            broker_permission=permission,
            background_work=self.background_work,
            elapsed_s=self.clock.elapsed_s,
        )
        self.channel = FakeChannel()
        self.topics.ensure("T", queue_count=2, now_ms=NOW_MS)

    def pull(self, queue_offset: int = 0, **changes: Any) -> list[Response]:
        channel = changes.pop("channel", self.channel)
        finish(self.pulls.pull(channel, pull_request(queue_offset=queue_offset, **changes), NOW_MS))
        return self.channel.responses()

    def send(self, *messages: bytes, tag: str = "", queue_id: int = 0) -> None:
        tags = properties(TAGS=tag) if tag else b""
        records = [
            sample(topic="T", queue_id=queue_id, body=body, properties=tags) for body in messages
        ]
        self.store.append(records, now_ms=NOW_MS)
        self.pulls.messages_arrived(records)
        self.background_work.run_turn()

    def expire(self, now_ms: int) -> None:
        self.pulls.expire(now_ms)
        self.background_work.run_turn()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def bodies(response: Response) -> list[bytes]:
    return [record.body for record in decode_records(response.body)]


def test_stored_messages_are_found(bench: Bench) -> None:
    bench.send(b"0", b"1", b"2")
    topic = msgspec.structs.replace(bench.topics.get("T"), topic_sys_flag=2)
    bench.topics.put(topic, now_ms=NOW_MS)
    bench.groups.put(GroupConfig(group_name="g", group_sys_flag=3), now_ms=NOW_MS)
    [response] = bench.pull(1, max_msg_nums=1)
    assert (response.code, response.remark, bodies(response)) == (0, "FOUND", [b"1"])
    assert response.ext_fields == {
        "suggestWhichBrokerId": "0",
        "nextBeginOffset": "2",
        "minOffset": "0",
        "maxOffset": "3",
        "topicSysFlag": "2",
        "groupSysFlag": "3",
    }


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (ConsumeConfig(), 32),
        (ConsumeConfig(pull_messages_max=40), 40),
        (ConsumeConfig(pull_messages_max=3), 3),
        (ConsumeConfig(pull_bytes_max=1), 1),
    ],
)
def test_the_settings_limit_a_response(config: ConsumeConfig, count: int) -> None:
    bench = Bench(config)
    bench.send(*(b"x" for _ in range(50)))
    [response] = bench.pull(max_msg_nums=1000)
    assert len(bodies(response)) == count


@pytest.mark.parametrize(
    ("permission", "changes", "code"),
    [
        (2, {"consumer_group": "unknown"}, 16),
        (6, {"consumer_group": "unknown", "topic": "none"}, 26),
        (6, {"consumer_group": "off", "topic": "none"}, 16),
        (6, {"topic": "none", "queue_id": 9}, 17),
        (6, {"topic": "write-only", "queue_id": 9}, 16),
        (6, {"queue_id": 2, "expression_type": "XPATH"}, 29),
        (6, {"queue_id": -1}, 29),
        (6, {"subscription": "||"}, 23),
        (6, {"expression_type": "XPATH"}, 23),
        (6, {"sys_flag": 2}, 24),
        (6, {"subscription": "a > 1", "expression_type": "SQL92"}, 1),
    ],
)
def test_the_first_failed_check_gives_the_response_code(
    permission: int, changes: dict[str, Any], code: int
) -> None:
    bench = Bench(auto_create=False, permission=permission)
    bench.groups.put(GroupConfig(group_name="g"), now_ms=NOW_MS)
    bench.groups.put(GroupConfig(group_name="off", consume_enable=False), now_ms=NOW_MS)
    bench.topics.put(TopicConfig(topic_name="write-only", perm=2), now_ms=NOW_MS)
    topic = changes.pop("topic", "T")
    bench.pulls.pull(bench.channel, pull_request(topic, **changes), NOW_MS)
    response = bench.channel.response()
    assert response.code == code, response.remark
    assert {"nextBeginOffset", "minOffset", "maxOffset"} <= set(response.ext_fields)
    assert bench.pulls.held_count == 0


def test_without_a_subscription_in_the_request_that_of_the_group_applies(bench: Bench) -> None:
    subscriptions = [parse_subscription("T", "b", version=5)]
    bench.connected.heartbeat(
        "g",
        GroupClient(client_id="c", channel=bench.channel),
        settings=ConsumerGroupSettings(),
        subscriptions=subscriptions,
        now_ms=NOW_MS,
    )
    bench.send(b"0", tag="a")
    bench.send(b"1", tag="b")
    [response] = bench.pull(sys_flag=2, sub_version=5)
    assert bodies(response) == [b"1"]
    [response] = bench.pull(sys_flag=2, sub_version=6)
    assert response.code == 25


def test_a_bulk_pull_gets_more_than_32_messages(bench: Bench) -> None:
    bench.send(*(b"%d" % number for number in range(100)))
    [ordinary] = bench.pull(max_msg_nums=1000)
    [bulk] = bench.pull(max_msg_nums=1000, bulk=True)
    [small_bulk] = bench.pull(max_msg_nums=40, bulk=True)
    assert [len(bodies(response)) for response in (ordinary, bulk, small_bulk)] == [32, 100, 40]


def test_the_next_offset_is_after_messages_that_do_not_match(bench: Bench) -> None:
    bench.send(b"0", b"1", tag="a")
    [response] = bench.pull(subscription="b")
    assert (response.code, response.ext_fields["nextBeginOffset"]) == (20, "2")


@pytest.mark.parametrize("queue_offset", [3, 2**62, -1])
def test_a_pull_outside_the_queue_is_not_held(bench: Bench, queue_offset: int) -> None:
    bench.send(b"0")
    [response] = bench.pull(queue_offset)
    assert response.code == 21
    assert response.ext_fields["nextBeginOffset"] in ("0", "1")
    assert bench.pulls.held_count == 0


# --- held ----------------------------------------------------------------------------------------


def test_a_pull_at_the_end_is_held_until_a_message_arrives(bench: Bench) -> None:
    assert bench.pull() == []
    assert bench.pulls.held_count == 1
    bench.send(b"other queue", queue_id=1)
    assert bench.channel.responses() == []
    bench.send(b"0", b"1")
    response = bench.channel.response()
    assert (response.code, bodies(response)) == (0, [b"0", b"1"])
    bench.send(b"2")
    bench.expire(NOW_MS + 10**6)
    assert bench.channel.responses() == []  # each pull gets one response


def test_a_held_pull_ends_exactly_when_its_time_is_over(bench: Bench) -> None:
    bench.pull(suspend_timeout_millis=1000)
    bench.expire(NOW_MS + 999)
    assert bench.channel.responses() == []
    bench.expire(NOW_MS + 1000)
    response = bench.channel.response()
    assert (response.code, response.ext_fields["nextBeginOffset"]) == (19, "0")
    bench.send(b"0")
    assert bench.channel.responses() == []


def test_a_held_pull_gets_only_its_tags(bench: Bench) -> None:
    bench.pull(subscription="a||b")
    bench.send(b"0", tag="c")
    bench.send(b"1")
    assert bench.channel.responses() == []
    bench.send(b"2", tag="b")
    assert bodies(bench.channel.response()) == [b"2"]


@pytest.mark.parametrize(
    "changes",
    [
        {"sys_flag": 4},
        {"suspend_timeout_millis": 0},
        {"suspend_timeout_millis": -5},
    ],
    ids=["not suspendable", "no timeout", "negative timeout"],
)
def test_a_pull_that_may_not_be_held_gets_its_response_at_once(
    bench: Bench, changes: dict[str, Any]
) -> None:
    [response] = bench.pull(**changes)
    assert response.code == 19


def test_no_pull_is_held_longer_than_two_minutes(bench: Bench) -> None:
    bench.pull(suspend_timeout_millis=2**63 - 1)
    bench.expire(NOW_MS + 120_000)
    assert bench.channel.response().code == 19


def test_pulls_beyond_the_limit_are_not_held() -> None:
    bench = Bench(ConsumeConfig(waiting_pulls_max=2))
    assert bench.pull() == []
    assert bench.pull() == []
    [response] = bench.pull()
    assert response.code == 19


def test_a_held_pull_of_a_closed_channel_gets_no_response(bench: Bench) -> None:
    closed = FakeChannel("closed")
    bench.pull(channel=closed)
    bench.pull()
    bench.pulls.channel_closed(closed)
    bench.send(b"0")
    assert closed.responses() == []
    assert bodies(bench.channel.response()) == [b"0"]


def test_all_held_pulls_get_a_response_when_the_broker_stops(bench: Bench) -> None:
    channels = [FakeChannel(str(number)) for number in range(3)]
    for channel in channels:
        bench.pull(channel=channel)
    bench.pulls.release_all()
    assert [channel.response().code for channel in channels] == [19, 19, 19]
    assert bench.pulls.held_count == 0


def test_a_record_without_queue_entry_releases_no_held_pull(bench: Bench) -> None:
    """A prepared half must not be read."""
    bench.pull()
    half = sample(topic="T", queue_id=0, sys_flag=4, properties=b"")
    bench.store.append([half], now_ms=NOW_MS)
    bench.pulls.messages_arrived([half])
    bench.background_work.run_turn()
    assert bench.channel.responses() == []


# --- offsets committed by a pull -----------------------------------------------------------------


def test_the_offset_in_a_pull_is_committed_if_its_flag_says_so(bench: Bench) -> None:
    bench.pull(sys_flag=7, commit_offset=5)
    assert bench.offsets.query("T", "g", 0) == 5
    bench.pull(sys_flag=6, commit_offset=9)
    assert bench.offsets.query("T", "g", 0) == 5
    bench.pull(sys_flag=7, commit_offset=-1)
    assert bench.offsets.query("T", "g", 0) == 5


def test_a_refused_pull_commits_nothing(bench: Bench) -> None:
    bench.pull(sys_flag=7, commit_offset=5, queue_id=9)
    assert bench.offsets.query("T", "g", 9) is None


def test_the_next_pull_after_a_reset_gets_the_new_offset(bench: Bench) -> None:
    bench.send(*(b"%d" % number for number in range(5)))
    bench.offsets.reset("T", "g", {0: 2})
    [response] = bench.pull(4)
    assert (response.code, response.ext_fields["nextBeginOffset"]) == (21, "2")
    [response] = bench.pull(2)
    assert bodies(response) == [b"2", b"3", b"4"]


# --- SQL92 ---------------------------------------------------------------------------------------

SQL = {"expression_type": "SQL92", "sys_flag": 4}


def test_a_held_pull_with_sql_gets_only_matching_messages() -> None:
    bench = Bench(ConsumeConfig(filters_by_sql=True))
    assert bench.pull(0, subscription="TAGS IN ('b')", **{**SQL, "sys_flag": 6}) == []
    bench.send(b"0", b"1", tag="a")
    assert bench.channel.responses() == []
    bench.send(b"2", tag="b")
    [response] = bench.channel.responses()
    assert bodies(response) == [b"2"]
    assert response.ext_fields["nextBeginOffset"] == "3"


def test_a_long_expression_scans_fewer_messages_at_a_time() -> None:
    bench = Bench(ConsumeConfig(filters_by_sql=True))
    bench.send(*(b"%d" % number for number in range(100)), tag="a")
    long_expression = " OR ".join(f"a = {number}" for number in range(600))
    next_offsets = [0]
    while next_offsets[-1] < 100:
        [response] = bench.pull(next_offsets[-1], subscription=long_expression, **SQL)
        assert response.code == 20
        next_offsets.append(int(response.ext_fields["nextBeginOffset"]))
    assert len(next_offsets) > 2  # one pull scans about 33 of the 100 messages
    assert next_offsets[-1] == 100
    [response] = bench.pull(0, subscription="a = 1", **SQL)
    assert response.ext_fields["nextBeginOffset"] == "100"
