"""Administration requests: deletions, resets, statistics, settings, relayed requests."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from escrowmq.broker.statistics import BrokerCounters, Statistics
from escrowmq.errors import ConfigError
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.frame import FRAME_LENGTH_MAX
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
from escrowmq.remoting.requests import Request
from escrowmq.testing.disks import FaultyDisk
from tests.interop.remoting import Response
from tests.support.broker_bench import BrokerBench
from tests.support.broker_requests import (
    CallableChannel,
    FakeChannel,
    new_request,
    pull_request,
    send_request,
)
from tests.support.stores import NOW_MS


def filled(count: int = 5) -> BrokerBench:
    """Return a broker with a topic of messages, and a group that has consumed two of them."""
    bench = BrokerBench(FaultyDisk())
    for number in range(count):
        bench.turn(send_request(body=b"%d" % number), at_ms=NOW_MS + number * 1000)
    create = new_request(
        RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, NoFields(), b'{"groupName":"g"}'
    )
    commit = UpdateConsumerOffset(consumer_group="g", topic="T", queue_id=0, commit_offset=2)
    bench.turn(create, new_request(RequestCode.UPDATE_CONSUMER_OFFSET, commit))
    return bench


def request(
    bench: BrokerBench, request_code: int, fields: Header, body: bytes = b"", **turn: Any
) -> Response:
    """Send one request in a turn of its own, and return the response."""
    [response] = bench.turn(new_request(request_code, fields, body), **turn)
    return response


def connect(bench: BrokerBench, channel: FakeChannel, *, language: str = "JAVA") -> None:
    """Send the heartbeat of a consumer of group g."""
    heartbeat = {
        "clientID": "c",
        "consumerDataSet": [
            {"groupName": "g", "subscriptionDataSet": [{"topic": "T", "subVersion": 1}]}
        ],
    }
    body = json.dumps(heartbeat).encode()
    java = new_request(RequestCode.HEART_BEAT, NoFields(), body)
    head = msgspec.structs.replace(java.head, language=language)
    bench.turn(Request(head, java.body, java.serializer), channel=channel)


# --- deletions -----------------------------------------------------------------------------------


def test_a_deleted_topic_and_its_offsets_stay_deleted_after_a_power_cut() -> None:
    bench = filled()
    assert request(bench, RequestCode.DELETE_TOPIC_IN_BROKER, TopicHeader(topic="T")).code == 0
    for current in (bench, bench.after_power_cut()):
        assert current.broker.topics.find("T") is None
        assert current.broker.offsets.query("T", "g", 0) is None
        assert current.store.max_offset("T", 0) == 0


def test_a_deletion_waits_for_a_running_checkpoint() -> None:
    bench = filled()
    job = bench.store.begin_checkpoint()
    assert bench.turn(new_request(RequestCode.DELETE_TOPIC_IN_BROKER, TopicHeader(topic="T"))) == []
    bench.tick(NOW_MS + 100)
    assert bench.channel.responses() == []
    job.run()
    bench.store.finish_checkpoint(job)
    bench.tick(NOW_MS + 200)
    assert bench.channel.response().code == 0
    assert bench.store.max_offset("T", 0) == 0


def test_a_failed_deletion_gets_an_error_response() -> None:
    bench = filled()
    assert isinstance(bench.disk, FaultyDisk)
    bench.disk.fail_from = bench.disk.calls + 1
    response = request(bench, RequestCode.DELETE_TOPIC_IN_BROKER, TopicHeader(topic="T"))
    assert response.code == ResponseCode.SYSTEM_ERROR
    assert "not deleted" in response.remark


@pytest.mark.parametrize("topic", ["", "../x", "TBW102", "SCHEDULE_TOPIC_XXXX", "x" * 200])
def test_system_topics_cannot_be_deleted(topic: str) -> None:
    response = request(filled(), RequestCode.DELETE_TOPIC_IN_BROKER, TopicHeader(topic=topic))
    assert response.code == ResponseCode.INVALID_PARAMETER


@pytest.mark.parametrize("flags", [{}, {"clean_offset": True}, {"remove_offset": True}])
def test_a_group_is_deleted(flags: dict[str, bool]) -> None:
    bench = filled()
    bench.broker.save_offsets()
    fields = DeleteGroup(group_name="g", **flags)
    assert request(bench, RequestCode.DELETE_SUBSCRIPTIONGROUP, fields).code == 0
    for current in (bench, bench.after_power_cut()):
        assert current.broker.groups.find("g") is None
        assert current.broker.offsets.query("T", "g", 0) == (None if flags else 2)


def test_system_groups_cannot_be_deleted() -> None:
    response = request(
        filled(), RequestCode.DELETE_SUBSCRIPTIONGROUP, DeleteGroup(group_name="TOOLS_CONSUMER")
    )
    assert response.code == ResponseCode.INVALID_PARAMETER


def test_queues_without_a_topic_are_deleted() -> None:
    bench = filled()
    bench.broker.topics.remove("T", now_ms=NOW_MS)
    assert request(bench, RequestCode.CLEAN_UNUSED_TOPIC, NoFields()).code == 0
    assert ("T", 0) not in bench.store.queues()


# --- topics --------------------------------------------------------------------------------------


def create(bench: BrokerBench, **changes: Any) -> Response:
    fields: dict[str, Any] = {"topic": "T", "read_queue_nums": 4, "write_queue_nums": 4, "perm": 6}
    return request(bench, RequestCode.UPDATE_AND_CREATE_TOPIC, CreateTopic(**{**fields, **changes}))


def test_attributes_are_set_and_removed() -> None:
    bench = filled()
    assert create(bench, attributes="+message.type=FIFO,+a=b").code == 0
    assert create(bench, attributes="-a").code == 0
    topic = bench.broker.topics.find("T")
    assert topic is not None
    assert topic.attributes == {"message.type": "FIFO"}


@pytest.mark.parametrize(
    "changes",
    [
        {"attributes": "a=b"},
        {"attributes": "+=b"},
        {"perm": 8},
        {"perm": -1},
        # Every registration has the filter type of every topic, and must fit into a frame.
        {"topic_filter_type": "x" * 500_000},
        {"attributes": "+a=" + "x" * 256},
        {"attributes": "+" + "x" * 256 + "=b"},
    ],
)
def test_an_invalid_topic_is_refused(changes: dict[str, Any]) -> None:
    assert create(filled(), **changes).code == ResponseCode.INVALID_PARAMETER


# --- offsets -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "queue_offset"),
    [
        ({"timestamp": 0, "is_force": True}, 0),
        ({"timestamp": 0}, 0),
        ({"timestamp": NOW_MS + 3000, "is_force": True}, 3),
        ({"timestamp": NOW_MS + 3000}, 2),  # never forwards unless forced
        ({"timestamp": -1}, 5),
        ({"timestamp": 0, "offset": 4, "queue_id": 0}, 4),
    ],
)
def test_offsets_of_a_group_are_reset(target: dict[str, Any], queue_offset: int) -> None:
    bench = filled()
    fields = ResetOffset(topic="T", group="g", **target)
    response = request(bench, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields)
    assert response.code == 0
    assert b'"queueId":0}:%d' % queue_offset in response.body
    assert bench.broker.offsets.query("T", "g", 0) == queue_offset
    assert bench.broker.offsets.commit("T", "g", 0, 3), "no member has to learn of the reset first"


@pytest.mark.parametrize(
    ("changes", "response_code"),
    [
        ({"topic": "none"}, ResponseCode.TOPIC_NOT_EXIST),
        ({"group": "none"}, ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST),
        ({"queue_id": 99}, ResponseCode.INVALID_PARAMETER),
        ({"offset": 99, "queue_id": 0}, ResponseCode.INVALID_PARAMETER),
    ],
)
def test_a_reset_to_an_invalid_target_is_refused(
    changes: dict[str, Any], response_code: int
) -> None:
    fields = ResetOffset(**{"topic": "T", "group": "g", "timestamp": 0, **changes})
    assert (
        request(filled(), RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields).code == response_code
    )


@pytest.mark.parametrize("language", ["JAVA", "CPP"])
def test_members_are_notified_of_a_reset(language: str) -> None:
    bench, member = filled(), FakeChannel("127.0.0.1:40001")
    connect(bench, member, language=language)
    fields = ResetOffset(topic="T", group="g", timestamp=0, is_force=True)
    request(bench, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields)
    bodies = {request_code: body for request_code, _, body in member.oneway_requests}
    body = bodies[220]  # RESET_CONSUMER_CLIENT_OFFSET
    assert (b'"offsetTable":[{' in body) == (language == "CPP")
    # A commit of the old progress is refused, and the next pull is moved to the new offset, once.
    assert not bench.broker.offsets.commit("T", "g", 0, 5)
    [moved] = bench.turn(pull_request(queue_offset=5, consumer_group="g"))
    assert (moved.code, moved.ext_fields["nextBeginOffset"]) == (21, "0")
    [response] = bench.turn(pull_request(queue_offset=0, consumer_group="g"))
    assert response.code == 0


def test_a_pull_from_the_new_offset_is_served_at_once() -> None:
    bench, member = filled(), FakeChannel("127.0.0.1:40001")
    connect(bench, member)
    fields = ResetOffset(topic="T", group="g", timestamp=0, is_force=True)
    request(bench, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, fields)
    [response] = bench.turn(pull_request(queue_offset=0, consumer_group="g"))
    assert response.code == 0
    assert bench.broker.offsets.commit("T", "g", 0, 1)


def test_offsets_are_cloned_to_another_group() -> None:
    bench = filled()
    fields = CloneGroupOffset(src_group="g", dest_group="h")
    assert request(bench, RequestCode.CLONE_GROUP_OFFSET, fields).code == 0
    assert bench.broker.offsets.query("T", "h", 0) == 2
    unknown_group = CloneGroupOffset(src_group="none", dest_group="h")
    assert request(bench, RequestCode.CLONE_GROUP_OFFSET, unknown_group).code == 26


@pytest.mark.parametrize(
    ("index", "count", "entry_count"), [(0, 10, 5), (3, 1, 1), (-9, 2, 2), (9, 9, 0)]
)
def test_the_entries_of_a_queue_are_listed(index: int, count: int, entry_count: int) -> None:
    fields = QueryConsumeQueue(topic="T", queue_id=0, index=index, count=count)
    response = request(filled(), RequestCode.QUERY_CONSUME_QUEUE, fields)
    assert len(json.loads(response.body)["queueData"]) == entry_count


def test_entries_of_a_queue_that_does_not_exist_are_refused() -> None:
    fields = QueryConsumeQueue(topic="T", queue_id=9, index=0, count=1)
    assert (
        request(filled(), RequestCode.QUERY_CONSUME_QUEUE, fields).code == ResponseCode.SYSTEM_ERROR
    )


# --- statistics ----------------------------------------------------------------------------------


def test_the_progress_of_a_group_is_shown() -> None:
    response = request(filled(), RequestCode.GET_CONSUME_STATS, GetConsumeStats(consumer_group="g"))
    assert b'"topic":"T"' in response.body
    assert b'"brokerOffset":5,"consumerOffset":2' in response.body
    assert b'"lastTimestamp":%d' % (NOW_MS + 1000) in response.body


def test_statistics_of_a_topic_and_of_a_group_are_shown() -> None:
    bench = filled()
    bench.tick(NOW_MS)
    bench.turn(pull_request(consumer_group="g"))
    response = request(
        bench,
        RequestCode.VIEW_BROKER_STATS_DATA,
        ViewBrokerStats(stats_name="TOPIC_PUT_NUMS", stats_key="T"),
    )
    assert json.loads(response.body)["statsDay"]["sum"] == 0  # all sends precede the first sample
    bench.turn(send_request())
    later = NOW_MS + 30_000
    response = request(
        bench,
        RequestCode.VIEW_BROKER_STATS_DATA,
        ViewBrokerStats(stats_name="TOPIC_PUT_NUMS", stats_key="T"),
        at_ms=later,
    )
    assert json.loads(response.body)["statsMinute"] == {"sum": 1, "tps": 1 / 30, "avgpt": 0.0}
    fields = ViewBrokerStats(stats_name="GROUP_GET_NUMS", stats_key="T@g")
    response = request(bench, RequestCode.VIEW_BROKER_STATS_DATA, fields, at_ms=later)
    assert json.loads(response.body)["statsMinute"]["sum"] == 5
    unknown_group = ViewBrokerStats(stats_name="GROUP_GET_NUMS", stats_key="T@none")
    assert request(bench, RequestCode.VIEW_BROKER_STATS_DATA, unknown_group).code == 1


def test_runtime_information_is_shown() -> None:
    bench = filled()
    bench.tick(NOW_MS)
    response = request(
        bench, RequestCode.GET_BROKER_RUNTIME_INFO, NoFields(), at_ms=NOW_MS + 3_661_000
    )
    table = json.loads(response.body)["table"]
    assert table["msgPutTotalTodayNow"] == "5"
    assert table["bootTimestamp"] == str(NOW_MS)
    assert table["runtime"] == "[ 0 days, 1 hours, 1 minutes, 1 seconds ]"
    assert all(isinstance(value, str) for value in table.values())


def test_the_totals_at_the_start_of_a_day_are_recorded() -> None:
    counts = BrokerCounters()
    day_ms = 86_400_000
    statistics = Statistics(counts, now_ms=day_ms)
    for day in (1, 2, 3):
        counts.stored_messages += 10
        statistics.tick(day * day_ms + 1)
    assert statistics.yesterday_morning.put == 20
    assert statistics.morning.put == 30
    statistics.tick(day_ms)  # the clock was set back
    counts.stored_messages += 1
    assert statistics.broker_rates("put", day_ms + 1000)[0].count == 1


# --- settings ------------------------------------------------------------------------------------


class RefusingSettings:
    """Settings that refuse every change."""

    def text(self) -> str:
        return "a=1\n"

    def change(self, text: str) -> None:
        raise ConfigError(f"not {text}")


def test_settings_are_shown_and_an_invalid_change_is_refused() -> None:
    bench = filled()
    assert request(bench, RequestCode.UPDATE_BROKER_CONFIG, NoFields(), b"a=2").code == 29
    bench.broker.settings = RefusingSettings()
    shown = request(bench, RequestCode.GET_BROKER_CONFIG, NoFields())
    assert shown.body == b"a=1\n"
    assert "counter" in shown.ext_fields["version"]
    refused = request(bench, RequestCode.UPDATE_BROKER_CONFIG, NoFields(), b"a=2")
    assert (refused.code, refused.remark) == (29, "not a=2")
    assert request(bench, RequestCode.UPDATE_BROKER_CONFIG, NoFields(), b"\xff").code == 29
    assert request(bench, RequestCode.UPDATE_BROKER_CONFIG, NoFields(), b"a" * 100_000).code == 29


# --- relays --------------------------------------------------------------------------------------


def test_the_response_of_a_consumer_is_relayed() -> None:
    bench, consumer = filled(), CallableChannel("127.0.0.1:40001")
    connect(bench, consumer)
    fields = GetConsumerRunningInfo(consumer_group="g", client_id="c")
    assert bench.turn(new_request(RequestCode.GET_CONSUMER_RUNNING_INFO, fields)) == []
    [(request_code, _, _, on_response)] = consumer.calls
    on_response(Command(code=0, opaque=1, remark="so"), b"{}")
    response = bench.channel.response()
    assert (request_code, response.code) == (307, 0)
    assert (response.remark, response.body) == ("so", b"{}")


def test_a_relayed_request_without_response_times_out() -> None:
    bench, consumer = filled(), CallableChannel("127.0.0.1:40001")
    connect(bench, consumer)
    fields = GetConsumerRunningInfo(consumer_group="g", client_id="c")
    bench.turn(new_request(RequestCode.GET_CONSUMER_RUNNING_INFO, fields))
    [(_, _, _, on_response)] = consumer.calls
    on_response(None, b"")
    assert bench.channel.response().code == ResponseCode.CONSUME_MSG_TIMEOUT
    consumer.is_open = False
    assert (
        request(bench, RequestCode.GET_CONSUMER_RUNNING_INFO, fields).code
        == ResponseCode.SYSTEM_ERROR
    )


def test_requests_that_wait_for_a_consumer_are_limited() -> None:
    bench, consumer = filled(), CallableChannel("127.0.0.1:40001")
    connect(bench, consumer)
    fields = GetConsumerRunningInfo(consumer_group="g", client_id="c")
    for _ in range(100):
        assert bench.turn(new_request(RequestCode.GET_CONSUMER_RUNNING_INFO, fields)) == []
    response = request(bench, RequestCode.GET_CONSUMER_RUNNING_INFO, fields)
    assert response.code == ResponseCode.SYSTEM_BUSY
    other = FakeChannel("127.0.0.1:40002")
    running_info = new_request(RequestCode.GET_CONSUMER_RUNNING_INFO, fields)
    assert bench.turn(running_info, channel=other) == []  # it waits
    consumer.calls[0][3](None, b"")
    assert bench.channel.response().code == ResponseCode.CONSUME_MSG_TIMEOUT
    assert bench.turn(new_request(RequestCode.GET_CONSUMER_RUNNING_INFO, fields)) == []


def test_a_response_that_is_too_long_to_be_relayed_is_reported() -> None:
    bench, consumer = filled(), CallableChannel("127.0.0.1:40001")
    connect(bench, consumer)
    fields = GetConsumerRunningInfo(consumer_group="g", client_id="c")
    bench.turn(new_request(RequestCode.GET_CONSUMER_RUNNING_INFO, fields))
    consumer.calls[0][3](Command(code=0, opaque=1), bytes(FRAME_LENGTH_MAX + 1))
    assert bench.channel.response().code == ResponseCode.SYSTEM_ERROR


def test_a_reset_of_very_many_queues_is_not_announced() -> None:
    bench, consumer = filled(), FakeChannel("127.0.0.1:40001")
    connect(bench, consumer)
    assert create(bench, read_queue_nums=30_000, write_queue_nums=30_000).code == 0
    reset = ResetOffset(topic="T", group="g", timestamp=-1, is_force=True)
    assert request(bench, RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, reset).code == 0
    announced = [code for code, _, _ in consumer.oneway_requests]
    assert RequestCode.RESET_CONSUMER_CLIENT_OFFSET not in announced


def test_a_message_is_consumed_directly() -> None:
    bench, consumer = filled(), CallableChannel("127.0.0.1:40001")
    connect(bench, consumer)
    [response] = bench.turn(send_request(body=b"directly"))
    message_id = response.ext_fields["msgId"]
    fields = ConsumeMessageDirectly(
        consumer_group="g", client_id="c", msg_id=message_id, broker_name="broker-a"
    )
    bench.turn(new_request(RequestCode.CONSUME_MESSAGE_DIRECTLY, fields))
    [(_, _, body, _)] = consumer.calls
    assert b"directly" in body


@pytest.mark.parametrize("message_id", ["", "zz", "00", "7F00000100002A9F0000000000FFFFFF"])
def test_a_message_that_does_not_exist_cannot_be_consumed_directly(message_id: str) -> None:
    fields = ConsumeMessageDirectly(consumer_group="g", client_id="c", msg_id=message_id)
    assert request(filled(), RequestCode.CONSUME_MESSAGE_DIRECTLY, fields).code == 22
