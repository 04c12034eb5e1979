"""Administration of a broker: deletions, resets, statistics, settings, relayed requests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from escrowmq.broker.statistics import BrokerCounters, Statistics
from escrowmq.errors import ConfigError
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.headers import (
    ConsumeMessageDirectly,
    GetConsumerRunningInfo,
    Header,
    NoFields,
    UpdateConsumerOffset,
)
from escrowmq.remoting.headers_admin import (
    CloneGroupOffset,
    CreateTopic,
    DeleteGroup,
    GetConsumeStats,
    QueryConsumeQueue,
    ResetOffset,
    TopicHeader,
    ViewBrokerStats,
)
from escrowmq.testing.disks import FaultyDisk
from tests.interop.remoting import Response
from tests.support.broker_requests import AskedChannel, FakeChannel, a_pull, a_send, ask
from tests.support.stores import NOW_MS
from tests.unit.broker.test_broker import Bench

code = RequestCode


def filled(count: int = 5) -> Bench:
    """Return a broker with a topic of messages, and a group that has consumed two of them."""
    bench = Bench(FaultyDisk())
    for number in range(count):
        bench.turn(a_send(body=b"%d" % number), at_ms=NOW_MS + number * 1000)
    create = ask(code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, NoFields(), b'{"groupName":"g"}')
    commit = UpdateConsumerOffset(consumer_group="g", topic="T", queue_id=0, commit_offset=2)
    bench.turn(create, ask(code.UPDATE_CONSUMER_OFFSET, commit))
    return bench


def one(
    bench: Bench, request_code: int, fields: Header, body: bytes = b"", **turn: Any
) -> Response:
    [answer] = bench.turn(ask(request_code, fields, body), **turn)
    return answer


def connect(bench: Bench, channel: FakeChannel, *, language: str = "JAVA") -> None:
    beat = {
        "clientID": "c",
        "consumerDataSet": [
            {"groupName": "g", "subscriptionDataSet": [{"topic": "T", "subVersion": 1}]}
        ],
    }
    request = ask(code.HEART_BEAT, NoFields(), json.dumps(beat).encode())
    head = type(request.head)(
        **{**{f: getattr(request.head, f) for f in request.head.__struct_fields__}}
        | {"language": language}
    )
    bench.broker.handle(channel, type(request)(head, request.body, request.serializer), NOW_MS)
    bench.broker.end_turn(NOW_MS)
    channel.answers()


# --- deletions -----------------------------------------------------------------------------------


def test_a_deleted_topic_and_its_offsets_stay_deleted_after_a_power_cut() -> None:
    bench = filled()
    assert one(bench, code.DELETE_TOPIC_IN_BROKER, TopicHeader(topic="T")).code == 0
    for now in (bench, bench.after_power_cut()):
        assert now.broker.topics.find("T") is None
        assert now.broker.offsets.query("T", "g", 0) is None
        assert now.store.max_offset("T", 0) == 0


def test_a_deletion_waits_for_a_running_checkpoint() -> None:
    bench = filled()
    job = bench.store.begin_checkpoint()
    assert bench.turn(ask(code.DELETE_TOPIC_IN_BROKER, TopicHeader(topic="T"))) == []
    bench.tick(NOW_MS + 100)
    assert bench.channel.answers() == []
    job.run()
    bench.store.finish_checkpoint(job)
    bench.tick(NOW_MS + 200)
    assert bench.channel.answer().code == 0
    assert bench.store.max_offset("T", 0) == 0


def test_a_failed_deletion_gets_an_error_response() -> None:
    bench = filled()
    assert isinstance(bench.disk, FaultyDisk)
    bench.disk.fail_from = bench.disk.calls + 1
    answer = one(bench, code.DELETE_TOPIC_IN_BROKER, TopicHeader(topic="T"))
    assert answer.code == ResponseCode.SYSTEM_ERROR
    assert "not deleted" in answer.remark


@pytest.mark.parametrize("topic", ["", "../x", "TBW102", "SCHEDULE_TOPIC_XXXX", "x" * 200])
def test_system_topics_cannot_be_deleted(topic: str) -> None:
    answer = one(filled(), code.DELETE_TOPIC_IN_BROKER, TopicHeader(topic=topic))
    assert answer.code == ResponseCode.INVALID_PARAMETER


@pytest.mark.parametrize("flags", [{}, {"clean_offset": True}, {"remove_offset": True}])
def test_a_group_is_deleted(flags: dict[str, bool]) -> None:
    bench = filled()
    bench.broker.save_offsets()
    fields = DeleteGroup(group_name="g", **flags)
    assert one(bench, code.DELETE_SUBSCRIPTIONGROUP, fields).code == 0
    for now in (bench, bench.after_power_cut()):
        assert now.broker.groups.find("g") is None
        assert now.broker.offsets.query("T", "g", 0) == (None if flags else 2)


def test_system_groups_cannot_be_deleted() -> None:
    answer = one(filled(), code.DELETE_SUBSCRIPTIONGROUP, DeleteGroup(group_name="TOOLS_CONSUMER"))
    assert answer.code == ResponseCode.INVALID_PARAMETER


def test_queues_without_a_topic_are_deleted() -> None:
    bench = filled()
    bench.broker.topics.remove("T", now_ms=NOW_MS)
    assert one(bench, code.CLEAN_UNUSED_TOPIC, NoFields()).code == 0
    assert ("T", 0) not in bench.store.queues()


# --- topics --------------------------------------------------------------------------------------


def create(bench: Bench, **changes: Any) -> Response:
    fields: dict[str, Any] = {"topic": "T", "read_queue_nums": 4, "write_queue_nums": 4, "perm": 6}
    return one(bench, code.UPDATE_AND_CREATE_TOPIC, CreateTopic(**{**fields, **changes}))


def test_attributes_are_set_and_removed() -> None:
    bench = filled()
    assert create(bench, attributes="+message.type=FIFO,+a=b").code == 0
    assert create(bench, attributes="-a").code == 0
    found = bench.broker.topics.find("T")
    assert found is not None
    assert found.attributes == {"message.type": "FIFO"}


@pytest.mark.parametrize(
    "bad", [{"attributes": "a=b"}, {"attributes": "+=b"}, {"perm": 8}, {"perm": -1}]
)
def test_an_invalid_topic_is_refused(bad: dict[str, Any]) -> None:
    assert create(filled(), **bad).code == ResponseCode.INVALID_PARAMETER


# --- offsets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "target"),
    [
        ({"timestamp": 0, "is_force": True}, 0),
        ({"timestamp": 0}, 0),
        ({"timestamp": NOW_MS + 3000, "is_force": True}, 3),
        ({"timestamp": NOW_MS + 3000}, 2),  # never forwards unless forced
        ({"timestamp": -1}, 5),
        ({"timestamp": 0, "offset": 4, "queue_id": 0}, 4),
    ],
)
def test_offsets_of_a_group_are_reset(wanted: dict[str, Any], target: int) -> None:
    bench = filled()
    fields = ResetOffset(topic="T", group="g", **wanted)
    answer = one(bench, code.INVOKE_BROKER_TO_RESET_OFFSET, fields)
    assert answer.code == 0
    assert b'"queueId":0}:%d' % target in answer.body
    assert bench.broker.offsets.query("T", "g", 0) == target
    assert bench.broker.offsets.commit("T", "g", 0, 3), "nobody is connected: nothing waits"


@pytest.mark.parametrize(
    ("wanted", "refused"),
    [
        ({"topic": "none"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"group": "none"}, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST),
        ({"queue_id": 99}, ResponseCode.INVALID_PARAMETER),
        ({"offset": 99, "queue_id": 0}, ResponseCode.INVALID_PARAMETER),
    ],
)
def test_a_reset_to_an_invalid_target_is_refused(wanted: dict[str, Any], refused: int) -> None:
    fields = ResetOffset(**{"topic": "T", "group": "g", "timestamp": 0, **wanted})
    assert one(filled(), code.INVOKE_BROKER_TO_RESET_OFFSET, fields).code == refused


@pytest.mark.parametrize("language", ["JAVA", "CPP"])
def test_members_are_notified_of_a_reset(language: str) -> None:
    bench, member = filled(), FakeChannel("127.0.0.1:40001")
    connect(bench, member, language=language)
    fields = ResetOffset(topic="T", group="g", timestamp=0, is_force=True)
    one(bench, code.INVOKE_BROKER_TO_RESET_OFFSET, fields)
    [(asked, _, body)] = [
        post for post in member.oneway_requests if post[0] == code.RESET_CONSUMER_CLIENT_OFFSET
    ]
    assert asked == 220
    assert (b'"offsetTable":[{' in body) == (language == "CPP")
    # What it holds on to does not count any more; its next pull is sent to the new place, once.
    assert not bench.broker.offsets.commit("T", "g", 0, 5)
    pull = a_pull(queue_offset=5, consumer_group="g")
    [moved] = bench.turn(pull)
    assert (moved.code, moved.ext_fields["nextBeginOffset"]) == (21, "0")
    [found] = bench.turn(a_pull(queue_offset=0, consumer_group="g"))
    assert found.code == 0


def test_a_pull_from_the_new_offset_is_served_at_once() -> None:
    bench, member = filled(), FakeChannel("127.0.0.1:40001")
    connect(bench, member)
    fields = ResetOffset(topic="T", group="g", timestamp=0, is_force=True)
    one(bench, code.INVOKE_BROKER_TO_RESET_OFFSET, fields)
    [found] = bench.turn(a_pull(queue_offset=0, consumer_group="g"))
    assert found.code == 0
    assert bench.broker.offsets.commit("T", "g", 0, 1)


def test_offsets_are_cloned_to_another_group() -> None:
    bench = filled()
    fields = CloneGroupOffset(src_group="g", dest_group="h")
    assert one(bench, code.CLONE_GROUP_OFFSET, fields).code == 0
    assert bench.broker.offsets.query("T", "h", 0) == 2
    nobody = CloneGroupOffset(src_group="none", dest_group="h")
    assert one(bench, code.CLONE_GROUP_OFFSET, nobody).code == 26


@pytest.mark.parametrize(
    ("index", "count", "found"), [(0, 10, 5), (3, 1, 1), (-9, 2, 2), (9, 9, 0)]
)
def test_the_entries_of_a_queue_are_listed(index: int, count: int, found: int) -> None:
    fields = QueryConsumeQueue(topic="T", queue_id=0, index=index, count=count)
    answer = one(filled(), code.QUERY_CONSUME_QUEUE, fields)
    assert len(json.loads(answer.body)["queueData"]) == found


def test_entries_of_a_queue_that_does_not_exist_are_refused() -> None:
    fields = QueryConsumeQueue(topic="T", queue_id=9, index=0, count=1)
    assert one(filled(), code.QUERY_CONSUME_QUEUE, fields).code == ResponseCode.SYSTEM_ERROR


# --- figures -------------------------------------------------------------------------------------


def test_the_progress_of_a_group_is_shown() -> None:
    answer = one(filled(), code.GET_CONSUME_STATS, GetConsumeStats(consumer_group="g"))
    assert b'"topic":"T"' in answer.body
    assert b'"brokerOffset":5,"consumerOffset":2' in answer.body
    assert b'"lastTimestamp":%d' % (NOW_MS + 1000) in answer.body


def test_statistics_of_a_topic_and_of_a_group_are_shown() -> None:
    bench = filled()
    bench.tick(NOW_MS)
    bench.turn(a_pull(consumer_group="g"))
    answer = one(
        bench,
        code.VIEW_BROKER_STATS_DATA,
        ViewBrokerStats(stats_name="TOPIC_PUT_NUMS", stats_key="T"),
    )
    assert json.loads(answer.body)["statsDay"]["sum"] == 0  # all of them before the first sample
    bench.turn(a_send())
    later = NOW_MS + 30_000
    answer = one(
        bench,
        code.VIEW_BROKER_STATS_DATA,
        ViewBrokerStats(stats_name="TOPIC_PUT_NUMS", stats_key="T"),
        at_ms=later,
    )
    assert json.loads(answer.body)["statsMinute"] == {"sum": 1, "tps": 1 / 30, "avgpt": 0.0}
    fields = ViewBrokerStats(stats_name="GROUP_GET_NUMS", stats_key="T@g")
    answer = one(bench, code.VIEW_BROKER_STATS_DATA, fields, at_ms=later)
    assert json.loads(answer.body)["statsMinute"]["sum"] == 5
    nothing = ViewBrokerStats(stats_name="GROUP_GET_NUMS", stats_key="T@none")
    assert one(bench, code.VIEW_BROKER_STATS_DATA, nothing).code == 1


def test_runtime_information_is_shown() -> None:
    bench = filled()
    bench.tick(NOW_MS)
    answer = one(bench, code.GET_BROKER_RUNTIME_INFO, NoFields(), at_ms=NOW_MS + 3_661_000)
    table = json.loads(answer.body)["table"]
    assert table["msgPutTotalTodayNow"] == "5"
    assert table["bootTimestamp"] == str(NOW_MS)
    assert table["runtime"] == "[ 0 days, 1 hours, 1 minutes, 1 seconds ]"
    assert all(isinstance(value, str) for value in table.values())


def test_totals_of_the_morning_are_taken_when_a_day_begins() -> None:
    counts = BrokerCounters()
    day_ms = 86_400_000
    statistics = Statistics(counts, now_ms=day_ms)
    for day in (1, 2, 3):
        counts.stored_messages += 10
        statistics.tick(day * day_ms + 1)
    assert statistics.yesterday_morning.put == 20
    assert statistics.morning.put == 30
    statistics.tick(day_ms)  # the clock is set back
    counts.stored_messages += 1
    assert statistics.broker_rates("put", day_ms + 1000)[0].count == 1


# --- settings ------------------------------------------------------------------------------------


class TakesNothing:
    def text(self) -> str:
        return "a=1\n"

    def change(self, text: str) -> None:
        raise ConfigError(f"not {text}")


def test_settings_are_shown_and_an_invalid_change_is_refused() -> None:
    bench = filled()
    assert one(bench, code.UPDATE_BROKER_CONFIG, NoFields(), b"a=2").code == 29
    bench.broker.settings = TakesNothing()
    shown = one(bench, code.GET_BROKER_CONFIG, NoFields())
    assert shown.body == b"a=1\n"
    assert "counter" in shown.ext_fields["version"]
    refused = one(bench, code.UPDATE_BROKER_CONFIG, NoFields(), b"a=2")
    assert (refused.code, refused.remark) == (29, "not a=2")
    assert one(bench, code.UPDATE_BROKER_CONFIG, NoFields(), b"\xff").code == 29
    assert one(bench, code.UPDATE_BROKER_CONFIG, NoFields(), b"a" * 100_000).code == 29


# --- relays --------------------------------------------------------------------------------------


def test_the_response_of_a_consumer_is_relayed() -> None:
    bench, consumer = filled(), AskedChannel("127.0.0.1:40001")
    connect(bench, consumer)
    fields = GetConsumerRunningInfo(consumer_group="g", client_id="c")
    assert bench.turn(ask(code.GET_CONSUMER_RUNNING_INFO, fields)) == []
    [(asked, _, _, answered)] = consumer.asked
    answered(Command(code=0, opaque=1, remark="so"), b"{}")
    answer = bench.channel.answer()
    assert (asked, answer.code, answer.remark, answer.body) == (307, 0, "so", b"{}")


def test_a_relayed_request_without_response_times_out() -> None:
    bench, consumer = filled(), AskedChannel("127.0.0.1:40001")
    connect(bench, consumer)
    fields = GetConsumerRunningInfo(consumer_group="g", client_id="c")
    bench.turn(ask(code.GET_CONSUMER_RUNNING_INFO, fields))
    consumer.asked[0][3](None, b"")
    assert bench.channel.answer().code == ResponseCode.CONSUME_MSG_TIMEOUT
    consumer.is_open = False
    assert one(bench, code.GET_CONSUMER_RUNNING_INFO, fields).code == ResponseCode.SYSTEM_ERROR


def test_a_message_is_consumed_directly() -> None:
    bench, consumer = filled(), AskedChannel("127.0.0.1:40001")
    connect(bench, consumer)
    [sent] = bench.turn(a_send(body=b"directly"))
    fields = ConsumeMessageDirectly(
        consumer_group="g", client_id="c", msg_id=sent.ext_fields["msgId"], broker_name="broker-a"
    )
    bench.turn(ask(code.CONSUME_MESSAGE_DIRECTLY, fields))
    assert b"directly" in consumer.asked[0][2]


@pytest.mark.parametrize("message_id", ["", "zz", "00", "7F00000100002A9F0000000000FFFFFF"])
def test_a_message_that_does_not_exist_cannot_be_consumed_directly(message_id: str) -> None:
    fields = ConsumeMessageDirectly(consumer_group="g", client_id="c", msg_id=message_id)
    assert one(filled(), code.CONSUME_MESSAGE_DIRECTLY, fields).code == 22
