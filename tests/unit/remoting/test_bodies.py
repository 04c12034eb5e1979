"""JSON bodies as Java, C++ and JavaScript clients write them."""

from __future__ import annotations

import json
from functools import partial

import pytest

from escrowmq.errors import BrokenBody, LocalProtocolError
from escrowmq.remoting.bodies import (
    BrokerRoute,
    ClusterInfo,
    ConsumerList,
    Heartbeat,
    LockBatch,
    LockBatchResponse,
    QueueName,
    QueueRoute,
    RegisterBrokerBody,
    TopicList,
    TopicRoute,
    decode_body,
    decode_registration,
    encode_body,
)

ROUTE = TopicRoute(
    queue_datas=[QueueRoute(broker_name="a", read_queue_nums=4, write_queue_nums=4, perm=6)],
    broker_datas=[
        BrokerRoute(broker_name="a", cluster="c", broker_addrs={0: "10.0.0.1:10911", 1: "x:1"})
    ],
)


def test_a_route_with_unquoted_number_keys_is_decoded() -> None:
    body = (
        b'{"brokerDatas":[{"brokerAddrs":{0:"10.0.0.1:10911",1:"x:1"},"brokerName":"a",'
        b'"cluster":"c","zoneName":null}],"filterServerTable":{},"orderTopicConf":null,'
        b'"queueDatas":[{"brokerName":"a","perm":6,"readQueueNums":4,"topicSysFlag":0,'
        b'"writeQueueNums":4}]}'
    )
    assert decode_body(TopicRoute, body) == ROUTE


def test_a_route_is_encoded_as_strict_json() -> None:
    body = json.loads(encode_body(ROUTE))
    assert body["brokerDatas"] == [
        {"brokerName": "a", "cluster": "c", "brokerAddrs": {"0": "10.0.0.1:10911", "1": "x:1"}}
    ]
    assert decode_body(TopicRoute, encode_body(ROUTE)) == ROUTE


def test_a_heartbeat_of_a_cpp_client_is_decoded() -> None:
    heartbeat = decode_body(
        Heartbeat,
        b'{"clientID":"10.0.0.2@77#x","consumerDataSet":[{"consumeFromWhere":0,"consumeType":1,'
        b'"groupName":"g","messageModel":1,"subscriptionDataSet":[{"subString":"*",'
        b'"subVersion":"1700000000000","topic":"orders"}]}],"producerDataSet":[{"groupName":"p"}]}\n',
    )
    (consumer,) = heartbeat.consumer_data_set
    assert consumer.consume_type == "CONSUME_PASSIVELY"
    assert consumer.message_model == "CLUSTERING"
    assert consumer.consume_from_where == "CONSUME_FROM_LAST_OFFSET"
    assert consumer.subscription_data_set[0].sub_version == 1_700_000_000_000
    assert [producer.group_name for producer in heartbeat.producer_data_set] == ["p"]


def test_a_heartbeat_of_a_java_client_is_decoded() -> None:
    heartbeat = decode_body(
        Heartbeat,
        b'{"clientID":"10.0.0.2@77#x","consumerDataSet":[{"consumeFromWhere":'
        b'"CONSUME_FROM_FIRST_OFFSET","consumeType":"CONSUME_ACTIVELY","groupName":"g",'
        b'"messageModel":"BROADCASTING","subscriptionDataSet":[{"classFilterMode":false,'
        b'"codeSet":[2598919],"expressionType":"TAG","subString":"TagA","subVersion":17,'
        b'"tagsSet":["TagA"],"topic":"orders"}],"unitMode":false}],"heartbeatFingerprint":0,'
        b'"producerDataSet":[],"withoutSub":false}',
    )
    assert heartbeat.consumer_data_set[0].consume_type == "CONSUME_ACTIVELY"
    assert heartbeat.consumer_data_set[0].subscription_data_set[0].code_set == [2598919]
    assert decode_body(Heartbeat, encode_body(heartbeat)) == heartbeat


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"clientID":null}',
        b'{"clientID":"c","consumerDataSet":[{"groupName":"g","messageModel":7}]}',
        b'{"clientID":"c","consumerDataSet":[{"groupName":"g","messageModel":"%s"}]}'
        % (b"9" * 5000),
        b'{"clientID":"\xff"}',
        b'{"clientID":"c","x":' + b"[" * 100_000,
    ],
)
def test_a_broken_body_is_refused(body: bytes) -> None:
    with pytest.raises(BrokenBody):
        decode_body(Heartbeat, body)


def test_a_null_counts_as_a_missing_field() -> None:
    heartbeat = decode_body(
        Heartbeat,
        b'{"clientID":"c","producerDataSet":null,"withoutSub":null,"consumerDataSet":'
        b'[{"groupName":"g","messageModel":null,"subscriptionDataSet":[{"topic":"t",'
        b'"subVersion":null,"tagsSet":null,"expressionType":null}]}]}',
    )
    assert heartbeat.producer_data_set == []
    assert heartbeat.consumer_data_set[0].message_model == "CLUSTERING"
    assert heartbeat.consumer_data_set[0].subscription_data_set[0].expression_type == "TAG"


def test_a_lock_request_is_decoded_and_its_response_encoded() -> None:
    queue = QueueName(topic="orders", broker_name="a", queue_id=3)
    body = (
        b'{"clientId":"c","consumerGroup":"g",'
        b'"mqSet":[{"brokerName":"a","queueId":3,"topic":"orders"}]}'
    )
    assert decode_body(LockBatch, body).mq_set == [queue]
    assert json.loads(encode_body(LockBatchResponse(locked=[queue]))) == {
        "lockOKMQSet": [{"topic": "orders", "brokerName": "a", "queueId": 3}]
    }


def test_a_registration_is_decoded_and_encoded() -> None:
    body = (
        b'{"filterServerList":[],"topicConfigSerializeWrapper":{"dataVersion":{"counter":2,'
        b'"stateVersion":0,"timestamp":1700000000000},"topicConfigTable":{"orders":{"attributes":{},'
        b'"order":false,"perm":6,"readQueueNums":4,"topicFilterType":"SINGLE_TAG",'
        b'"topicName":"orders","topicSysFlag":0,"writeQueueNums":4}}}}'
    )
    topics = decode_body(RegisterBrokerBody, body).topic_config_serialize_wrapper
    assert topics.data_version.counter == 2
    assert topics.topic_config_table["orders"].write_queue_nums == 4
    assert json.loads(encode_body(decode_body(RegisterBrokerBody, body))) == json.loads(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"t":{"topicName":"t"}}}}',
        b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"t":{"topicName":"t","perm":"4"}}}}',
        b'{"topicConfigSerializeWrapper":{"dataVersion":null}}',
        b'{"topicConfigSerializeWrapper":{"topicConfigTable":{"t":{"topicName":"null"}}}}',
        b'{"filterServerList":["f",null],"other":{0:1}}',
        b'{"filterServerList":["f"],"other":{0:1}}',
    ],
)
def test_both_decoders_of_a_registration_agree(body: bytes) -> None:
    assert decode_registration(body) == decode_body(RegisterBrokerBody, body)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"x":"\xff"}', b'{"x":' + b"[" * 100_000])
def test_both_decoders_refuse_a_broken_registration(body: bytes) -> None:
    for decode in (decode_registration, partial(decode_body, RegisterBrokerBody)):
        with pytest.raises(BrokenBody):
            decode(body)


def test_a_topic_named_null_is_encoded() -> None:
    assert encode_body(TopicList(topic_list=["null"])) == b'{"topicList":["null"]}'


def test_a_cluster_is_decoded_and_a_consumer_list_encoded() -> None:
    cluster = decode_body(
        ClusterInfo,
        b'{"brokerAddrTable":{"a":{"brokerAddrs":{0:"x:1"},"brokerName":"a","cluster":"c"}},'
        b'"clusterAddrTable":{"c":["a"]}}',
    )
    assert cluster.broker_addr_table["a"].broker_addrs == {0: "x:1"}
    assert encode_body(ConsumerList(consumer_id_list=["x"])) == b'{"consumerIdList":["x"]}'


def test_text_that_is_not_unicode_is_a_local_error() -> None:
    with pytest.raises(LocalProtocolError):
        encode_body(ConsumerList(consumer_id_list=["\ud800"]))
