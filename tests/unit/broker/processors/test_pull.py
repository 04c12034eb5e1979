"""Pulls on a store in memory: found, refused, held, and answered once."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.broker.dispatch import Channel
from escrowmq.broker.metadata import SubscriptionGroups, TopicTable
from escrowmq.broker.processors.pull import PullProcessor
from escrowmq.config import BrokerConfig, ConsumeConfig
from escrowmq.consume.members import ConsumerGroups, ConsumerGroupSettings, GroupClient
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.consume.subscription import parse_subscription
from escrowmq.message.topic_config import TopicConfig
from escrowmq.store.config_files import GroupConfig, groups_file, topics_file
from escrowmq.testing.disks import MemoryDisk
from tests.interop.records import decode_records
from tests.interop.remoting import Answer
from tests.support.broker_requests import FakeLine, a_pull
from tests.support.stores import NOW_MS, open_store, properties, sample


class Bench:
    def __init__(
        self, config: ConsumeConfig | None = None, *, auto_create: bool = True, permission: int = 6
    ) -> None:
        disk = MemoryDisk()
        self.store = open_store(disk)
        self.topics = TopicTable(topics_file(disk), BrokerConfig())
        self.groups = SubscriptionGroups(groups_file(disk), auto_create=auto_create)
        self.connected = ConsumerGroups[Channel]()
        self.offsets = ConsumerOffsets()
        self.pulls = PullProcessor(
            self.store,
            self.topics,
            self.groups,
            self.connected,
            self.offsets,
            config or ConsumeConfig(),
            broker_permission=permission,
        )
        self.line = FakeLine()
        self.topics.ensure("T", queue_count=2, now_ms=NOW_MS)

    def pull(self, queue_offset: int = 0, **changes: Any) -> list[Answer]:
        line = changes.pop("line", self.line)
        self.pulls.pull(line, a_pull(queue_offset=queue_offset, **changes), NOW_MS)
        return self.line.answers()

    def send(self, *messages: bytes, tag: str = "", queue_id: int = 0) -> None:
        given = properties(TAGS=tag) if tag else b""
        records = [
            sample(topic="T", queue_id=queue_id, body=body, properties=given) for body in messages
        ]
        self.store.append(records, now_ms=NOW_MS)
        self.pulls.messages_arrived(records, NOW_MS)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def bodies(answer: Answer) -> list[bytes]:
    return [record.body for record in decode_records(answer.body)]


def test_what_is_there_is_found(bench: Bench) -> None:
    bench.send(b"0", b"1", b"2")
    [answer] = bench.pull(1, max_msg_nums=1)
    assert (answer.code, answer.remark, bodies(answer)) == (0, "FOUND", [b"1"])
    assert answer.ext_fields == {
        "suggestWhichBrokerId": "0",
        "nextBeginOffset": "2",
        "minOffset": "0",
        "maxOffset": "3",
    }


@pytest.mark.parametrize(
    ("permission", "changes", "code"),
    [
        (2, {"consumer_group": "nobody"}, 16),
        (6, {"consumer_group": "nobody", "topic": "none"}, 26),
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
def test_the_first_thing_that_is_wrong_is_named(
    permission: int, changes: dict[str, Any], code: int
) -> None:
    bench = Bench(auto_create=False, permission=permission)
    bench.groups.put(GroupConfig(group_name="g"), now_ms=NOW_MS)
    bench.groups.put(GroupConfig(group_name="off", consume_enable=False), now_ms=NOW_MS)
    bench.topics.put(TopicConfig(topic_name="write-only", perm=2), now_ms=NOW_MS)
    topic = changes.pop("topic", "T")
    bench.pulls.pull(bench.line, a_pull(topic, **changes), NOW_MS)
    answer = bench.line.answer()
    assert answer.code == code, answer.remark
    assert {"nextBeginOffset", "minOffset", "maxOffset"} <= set(answer.ext_fields)
    assert bench.pulls.held_count == 0


def test_without_a_subscription_in_the_request_the_groups_counts(bench: Bench) -> None:
    wanted = [parse_subscription("T", "b", version=5)]
    bench.connected.heartbeat(
        "g",
        GroupClient(client_id="c", channel=bench.line),
        settings=ConsumerGroupSettings(),
        subscriptions=wanted,
        now_ms=NOW_MS,
    )
    bench.send(b"0", tag="a")
    bench.send(b"1", tag="b")
    [answer] = bench.pull(sys_flag=2, sub_version=5)
    assert bodies(answer) == [b"1"]
    [answer] = bench.pull(sys_flag=2, sub_version=6)
    assert answer.code == 25


def test_whoever_reads_whole_queues_gets_more_than_32(bench: Bench) -> None:
    bench.send(*(b"%d" % number for number in range(100)))
    [usual] = bench.pull(max_msg_nums=1000)
    [bulk] = bench.pull(max_msg_nums=1000, bulk=True)
    [some] = bench.pull(max_msg_nums=40, bulk=True)
    assert [len(bodies(answer)) for answer in (usual, bulk, some)] == [32, 100, 40]


def test_what_was_filtered_out_moves_the_client_on(bench: Bench) -> None:
    bench.send(b"0", b"1", tag="a")
    [answer] = bench.pull(subscription="b")
    assert (answer.code, answer.ext_fields["nextBeginOffset"]) == (20, "2")


@pytest.mark.parametrize("queue_offset", [3, 2**62, -1])
def test_an_offset_outside_is_not_waited_for(bench: Bench, queue_offset: int) -> None:
    bench.send(b"0")
    [answer] = bench.pull(queue_offset)
    assert answer.code == 21
    assert answer.ext_fields["nextBeginOffset"] in ("0", "1")
    assert bench.pulls.held_count == 0


# --- held ----------------------------------------------------------------------------------------


def test_a_pull_at_the_end_is_held_until_a_message_comes(bench: Bench) -> None:
    assert bench.pull() == []
    assert bench.pulls.held_count == 1
    bench.send(b"elsewhere", queue_id=1)
    assert bench.line.answers() == []
    bench.send(b"0", b"1")
    answer = bench.line.answer()
    assert (answer.code, bodies(answer)) == (0, [b"0", b"1"])
    bench.send(b"2")
    bench.pulls.expire(NOW_MS + 10**6)
    assert bench.line.answers() == []  # once


def test_a_held_pull_ends_exactly_when_its_time_is_over(bench: Bench) -> None:
    bench.pull(suspend_timeout_millis=1000)
    bench.pulls.expire(NOW_MS + 999)
    assert bench.line.answers() == []
    bench.pulls.expire(NOW_MS + 1000)
    answer = bench.line.answer()
    assert (answer.code, answer.ext_fields["nextBeginOffset"]) == (19, "0")
    bench.send(b"0")
    assert bench.line.answers() == []


def test_a_held_pull_wants_its_tags_only(bench: Bench) -> None:
    bench.pull(subscription="a||b")
    bench.send(b"0", tag="c")
    bench.send(b"1")
    assert bench.line.answers() == []
    bench.send(b"2", tag="b")
    assert bodies(bench.line.answer()) == [b"2"]


@pytest.mark.parametrize(
    "changes",
    [
        {"sys_flag": 4},
        {"suspend_timeout_millis": 0},
        {"suspend_timeout_millis": -5},
    ],
    ids=["may not", "no time", "less than no time"],
)
def test_a_pull_that_does_not_want_to_wait_is_answered(
    bench: Bench, changes: dict[str, Any]
) -> None:
    [answer] = bench.pull(**changes)
    assert answer.code == 19


def test_nobody_waits_longer_than_two_minutes(bench: Bench) -> None:
    bench.pull(suspend_timeout_millis=2**63 - 1)
    bench.pulls.expire(NOW_MS + 120_000)
    assert bench.line.answer().code == 19


def test_too_many_waiting_pulls_are_answered_at_once() -> None:
    bench = Bench(ConsumeConfig(waiting_pulls_max=2))
    assert bench.pull() == []
    assert bench.pull() == []
    [answer] = bench.pull()
    assert answer.code == 19


def test_a_closed_line_is_not_answered(bench: Bench) -> None:
    gone = FakeLine("gone")
    bench.pull(line=gone)
    bench.pull()
    bench.pulls.channel_closed(gone)
    bench.send(b"0")
    assert gone.answers() == []
    assert bodies(bench.line.answer()) == [b"0"]


def test_at_the_end_everybody_is_answered(bench: Bench) -> None:
    lines = [FakeLine(str(number)) for number in range(3)]
    for line in lines:
        bench.pull(line=line)
    bench.pulls.release_all(NOW_MS)
    assert [line.answer().code for line in lines] == [19, 19, 19]
    assert bench.pulls.held_count == 0


def test_a_message_without_a_place_in_its_queue_wakes_nobody(bench: Bench) -> None:
    """A half that is prepared is not to be read yet."""
    bench.pull()
    half = sample(topic="T", queue_id=0, sys_flag=4, properties=b"")
    bench.store.append([half], now_ms=NOW_MS)
    bench.pulls.messages_arrived([half], NOW_MS)
    assert bench.line.answers() == []


# --- offsets that come with a pull ---------------------------------------------------------------


def test_a_commit_that_comes_with_a_pull_is_kept(bench: Bench) -> None:
    bench.pull(sys_flag=7, commit_offset=5)
    assert bench.offsets.query("T", "g", 0) == 5
    bench.pull(sys_flag=6, commit_offset=9)
    assert bench.offsets.query("T", "g", 0) == 5
    bench.pull(sys_flag=7, commit_offset=-1)
    assert bench.offsets.query("T", "g", 0) == 5


def test_a_refused_pull_commits_nothing(bench: Bench) -> None:
    bench.pull(sys_flag=7, commit_offset=5, queue_id=9)
    assert bench.offsets.query("T", "g", 9) is None


def test_a_group_that_was_sent_elsewhere_learns_of_it_with_its_next_pull(bench: Bench) -> None:
    bench.send(*(b"%d" % number for number in range(5)))
    bench.offsets.reset("T", "g", 0, 2)
    [answer] = bench.pull(4)
    assert (answer.code, answer.ext_fields["nextBeginOffset"]) == (21, "2")
    [answer] = bench.pull(2)
    assert bodies(answer) == [b"2", b"3", b"4"]


# --- SQL92 ---------------------------------------------------------------------------------------

SQL = {"expression_type": "SQL92", "sys_flag": 4}


def test_sql_wakes_by_properties_and_steps_over_the_rest() -> None:
    bench = Bench(ConsumeConfig(filters_by_sql=True))
    assert bench.pull(0, subscription="TAGS IN ('b')", **{**SQL, "sys_flag": 6}) == []
    bench.send(b"0", b"1", tag="a")
    assert bench.line.answers() == []
    bench.send(b"2", tag="b")
    [answer] = bench.line.answers()
    assert bodies(answer) == [b"2"]
    assert answer.ext_fields["nextBeginOffset"] == "3"


def test_a_long_expression_looks_at_fewer_messages_at_a_time() -> None:
    bench = Bench(ConsumeConfig(filters_by_sql=True))
    bench.send(*(b"%d" % number for number in range(100)), tag="a")
    costly = " OR ".join(f"a = {number}" for number in range(600))  # some 33 messages of 100
    seen, at = [], 0
    while at < 100:
        [answer] = bench.pull(at, subscription=costly, **SQL)
        assert answer.code == 20
        at = int(answer.ext_fields["nextBeginOffset"])
        seen.append(at)
    assert len(seen) > 1
    assert seen[-1] == 100
    [answer] = bench.pull(0, subscription="a = 1", **SQL)
    assert answer.ext_fields["nextBeginOffset"] == "100"
