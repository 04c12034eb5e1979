"""A refused send has no effect: it creates neither a topic nor a group."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.config import BrokerConfig, Config, OverloadConfig
from escrowmq.message.topic_config import TopicConfig
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import ConsumerSendMessageBack, SendMessage
from escrowmq.store.config_files import GroupConfig
from tests.support.broker_bench import BrokerBench
from tests.support.broker_requests import CallableChannel, bodies, new_request, send_request
from tests.support.escrows import heartbeat_request
from tests.support.stores import NOW_MS, TINY

BUSY, TOPIC_NOT_EXIST = 2, 17


def new_bench(**settings: Any) -> BrokerBench:
    bench = BrokerBench(
        config=Config(broker=BrokerConfig(cluster_name="C", **settings), store=TINY)
    )
    bench.broker.groups.put(GroupConfig(group_name="g"), now_ms=NOW_MS)
    bench.turn()
    return bench


def reply_request(topic: str, **changes: Any) -> Any:
    text = changes.pop("properties", "REPLY_TO_CLIENT\x01c\x02")
    fields = SendMessage(
        producer_group="p",
        topic=topic,
        default_topic="TBW102",
        queue_id=changes.pop("queue_id", 0),
        properties=text,
        **changes,
    )
    return new_request(RequestCode.SEND_REPLY_MESSAGE, fields, b"x")


REFUSED: dict[str, Any] = {
    "no such queue": {"queue_id": 99},
    "too long": {"body": b"x" * 4096},
    "too many properties": {"properties": "a" * 40_000},
    "a zero byte": {"properties": "a\x01\0\x02"},
    "marked as prepared": {"properties": "UNIQ_KEY\x01k\x02", "sys_flag": 4},
    "a broken batch": {"batch": True},
    "a batch of halves": {"batch": True, "sys_flag": 4},
    "an invalid timer": {"properties": "UNIQ_KEY\x01k\x02TIMER_DELAY_MS\x01soon\x02"},
    "a half with a long key": {"properties": f"TRAN_MSG\x01true\x02UNIQ_KEY\x01{'k' * 300}\x02"},
    "no queues": {"default_topic_queue_nums": 0},
}


@pytest.mark.parametrize("topic", ["new", "%RETRY%g", "%RETRY%new-group"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_send_creates_nothing(name: str, topic: str) -> None:
    if name == "no queues" and topic != "new":
        return  # a retry topic has as many queues as its group wants
    bench = new_bench()
    topics, groups = bench.broker.topics.configs(), bench.broker.groups.configs()
    version = bench.broker.topics.version
    changes = dict(REFUSED[name])
    if topic.startswith("%RETRY%") and "TIMER" in str(changes.get("properties")):
        changes["reconsume_times"] = 1
    [response] = bench.turn(send_request(topic, changes.pop("body", b"x"), **changes))
    assert response.code != 0
    assert (bench.broker.topics.configs(), bench.broker.groups.configs()) == (topics, groups)
    assert bench.broker.topics.version == version
    assert topic not in bench.broker.topics.sendable_queue_counts


@pytest.mark.parametrize("topic", ["new", "%RETRY%new-group"])
def test_a_refused_reply_creates_nothing(topic: str) -> None:
    bench = new_bench()
    topics, groups = bench.broker.topics.configs(), bench.broker.groups.configs()
    [response] = bench.turn(reply_request(topic, queue_id=99))
    assert response.code != 0
    assert (bench.broker.topics.configs(), bench.broker.groups.configs()) == (topics, groups)


def test_a_refused_send_back_creates_nothing() -> None:
    bench = new_bench()
    topics, groups = bench.broker.topics.configs(), bench.broker.groups.configs()
    fields = ConsumerSendMessageBack(offset=4711, group="new-group", delay_level=0)
    [response] = bench.turn(new_request(RequestCode.CONSUMER_SEND_MSG_BACK, fields))
    assert response.code != 0
    assert (bench.broker.topics.configs(), bench.broker.groups.configs()) == (topics, groups)


def test_an_accepted_send_creates_its_topic() -> None:
    bench = new_bench()
    [response] = bench.turn(send_request("new"))
    assert response.code == 0
    assert bench.broker.topics.sendable_queue_counts["new"] == 4
    [response] = bench.turn(send_request("%RETRY%new-group", reconsume_times=1))
    assert response.code == 0
    assert bench.broker.groups.find("new-group") is not None


@pytest.mark.parametrize("template", ["TBW102", "C", "broker-a", "inheritable", "T", ""])
@pytest.mark.parametrize("make_request", [send_request, reply_request])
def test_no_template_creates_topics_if_this_is_disabled(make_request: Any, template: str) -> None:
    bench = new_bench(creates_topics=False, broker_name="broker-a")
    for name, perm in (("inheritable", 7), ("T", 6)):
        config = TopicConfig(topic_name=name, read_queue_nums=4, write_queue_nums=4, perm=perm)
        bench.broker.topics.put(config, now_ms=NOW_MS)
    request = make_request("new")
    fields = SendMessage(
        producer_group="p",
        topic="new",
        queue_id=0,
        default_topic=template,
        properties=request.head.fields.properties,
    )
    [response] = bench.turn(new_request(request.head.code, fields, b"x"))
    assert response.code == TOPIC_NOT_EXIST
    assert bench.broker.topics.find("new") is None


# --- rate limits ---------------------------------------------------------------------------------


def test_replies_and_messages_sent_back_count_like_sends() -> None:
    overload = OverloadConfig(connection_sends_max=2)
    bench = BrokerBench(config=Config(store=TINY, overload=overload))
    bench.broker.groups.put(GroupConfig(group_name="g"), now_ms=NOW_MS)
    requester = CallableChannel("127.0.0.1:40001")
    bench.turn(heartbeat_request(requester, "p"), channel=requester)
    reply = reply_request("T", properties=f"REPLY_TO_CLIENT\x01client of {requester.address}\x02")
    bench.turn(send_request("T"))
    fields = ConsumerSendMessageBack(offset=0, group="g", delay_level=-1)
    back = new_request(RequestCode.CONSUMER_SEND_MSG_BACK, fields)
    assert [response.code for response in bench.turn(back)] == [0]
    for request in (reply, back, send_request("T")):
        [response] = bench.turn(request)
        assert response.code == BUSY
    assert len(requester.calls) == 0
    bench.turn(reply, at_ms=NOW_MS + 5_000)
    assert len(requester.calls) == 1
    assert len(bodies(bench.store, "T")) == 2


@pytest.mark.parametrize("limit", ["connection_send_bytes_max", "topic_send_bytes_max"])
def test_a_message_sent_back_costs_the_bytes_it_stores(limit: str) -> None:
    bench = BrokerBench(config=Config(store=TINY, overload=OverloadConfig(**{limit: 600})))
    bench.broker.groups.put(GroupConfig(group_name="g"), now_ms=NOW_MS)
    sender = CallableChannel("127.0.0.1:40001")
    bench.turn(send_request("T", b"x" * 1000), channel=sender)
    fields = ConsumerSendMessageBack(offset=0, group="g", delay_level=-1)
    codes = [
        bench.turn(new_request(RequestCode.CONSUMER_SEND_MSG_BACK, fields))[0].code
        for _ in range(3)
    ]
    assert codes == [0, BUSY, BUSY]
