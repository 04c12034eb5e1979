"""Every request of the name server, sent as frames."""

from __future__ import annotations

import struct
import zlib

import pytest

from escrowmq.message.topic_config import DataVersion
from escrowmq.namesrv.name_server import NameServer, NamesrvCounters
from escrowmq.namesrv.registration import (
    registration_request,
    unregistration_request,
)
from escrowmq.namesrv.route_table import BrokerRegistration
from escrowmq.remoting import headers_admin as headers
from escrowmq.remoting.bodies import TopicConfigs, TopicList, TopicRoute, encode_body
from escrowmq.remoting.codes import ROCKETMQ, RequestCode, ResponseCode
from tests.support.namesrv_requests import (
    NOW,
    SLAVE,
    A,
    B,
    NameServerHarness,
    data_version_request,
    topic,
    version,
)


@pytest.fixture
def harness() -> NameServerHarness:
    return NameServerHarness()


def route_of(harness: NameServerHarness, name: str) -> TopicRoute:
    reply = harness.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, headers.GetRoute(topic=name))
    assert reply.code == ResponseCode.SUCCESS, reply.remark
    return reply.read(TopicRoute)


# --- routes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("client_version", [0, 317, 400, 401, 479])
def test_a_route_is_strict_json_whoever_asks(
    harness: NameServerHarness, client_version: int
) -> None:
    harness.register(A, topic("orders"))
    reply = harness.ask(
        RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"}, version=client_version
    )
    assert reply.json() == {
        "queueDatas": [
            {
                "brokerName": "a",
                "readQueueNums": 4,
                "writeQueueNums": 4,
                "perm": 6,
                "topicSysFlag": 0,
            }
        ],
        "brokerDatas": [
            {
                "brokerName": "a",
                "cluster": "c",
                "brokerAddrs": {"0": "10.0.0.1:10911"},
                "enableActingMaster": False,
            }
        ],
        "filterServerTable": {},
    }


def test_an_unknown_topic_gets_code_17(harness: NameServerHarness) -> None:
    reply = harness.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"})
    assert reply.code == ResponseCode.TOPIC_NOT_EXIST
    assert reply.remark == "No topic route info in name server for the topic: orders"


def test_a_client_with_binary_headers_gets_binary_headers(harness: NameServerHarness) -> None:
    harness.register(A, topic("orders"))
    reply = harness.ask(
        RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"}, serializer=ROCKETMQ
    )
    assert [each.broker_name for each in reply.read(TopicRoute).broker_datas] == ["a"]


def test_the_cluster_table_has_every_broker_and_address(harness: NameServerHarness) -> None:
    for broker in (A, SLAVE, B):
        harness.register(broker, topic("orders"))
    reply = harness.ask(RequestCode.GET_BROKER_CLUSTER_INFO).json()
    assert reply["clusterAddrTable"] == {"c": ["a", "b"]}
    assert reply["brokerAddrTable"]["a"]["brokerAddrs"] == {"0": A.address, "1": SLAVE.address}
    assert reply["brokerAddrTable"]["b"]["cluster"] == "c"


def test_all_topics_and_those_of_a_cluster(harness: NameServerHarness) -> None:
    harness.register(A, topic("orders"), topic("stock"))
    everything = harness.ask(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    assert everything.json() == {"topicList": ["orders", "stock"]}
    of_cluster = harness.ask(RequestCode.GET_TOPICS_BY_CLUSTER, {"cluster": "c"})
    assert of_cluster.json() == {"topicList": ["orders", "stock"]}
    assert (
        harness.ask(RequestCode.GET_TOPICS_BY_CLUSTER, {"cluster": "x"}).json()["topicList"] == []
    )


def test_system_topics_are_named_like_clusters_and_brokers(harness: NameServerHarness) -> None:
    assert harness.ask(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS).json() == {"topicList": []}
    harness.register(A, topic("orders"))
    reply = harness.ask(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS).read(TopicList)
    assert (reply.topic_list, reply.broker_addr) == (["a", "c"], A.address)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (RequestCode.GET_UNIT_TOPIC_LIST, ["both", "unit"]),
        (RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST, ["both", "subscribed"]),
        (RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST, ["subscribed"]),
    ],
)
def test_topics_by_their_unit_flags(
    harness: NameServerHarness, code: RequestCode, found: list[str]
) -> None:
    flags = {"plain": 0, "unit": 1, "subscribed": 2, "both": 3}
    harness.register(A, *(topic(name, flag=flag) for name, flag in flags.items()))
    assert harness.ask(code).json()["topicList"] == found


def test_members_of_a_broker_group(harness: NameServerHarness) -> None:
    for broker in (A, SLAVE):
        harness.register(broker, topic("orders"))
    asked = headers.GetBrokerMemberGroup(cluster_name="c", broker_name="a")
    assert harness.ask(RequestCode.GET_BROKER_MEMBER_GROUP, asked).json() == {
        "brokerMemberGroup": {
            "cluster": "c",
            "brokerName": "a",
            "brokerAddrs": {"0": A.address, "1": SLAVE.address},
        }
    }
    nobody = headers.GetBrokerMemberGroup(cluster_name="c", broker_name="x")
    reply = harness.ask(RequestCode.GET_BROKER_MEMBER_GROUP, nobody).json()
    assert reply["brokerMemberGroup"]["brokerAddrs"] == {}


# --- registration ------------------------------------------------------------------------------


def test_the_response_to_a_slave_names_its_master(harness: NameServerHarness) -> None:
    assert harness.register(A, topic("orders")).fields == {}
    assert harness.register(SLAVE, topic("orders")).fields == {
        "haServerAddr": A.ha_address,
        "masterAddr": A.address,
    }


def test_a_body_with_a_wrong_crc_is_refused(harness: NameServerHarness) -> None:
    asked = registration_request(A, [topic("orders")], version())
    reply = harness.ask(asked.code, asked.fields, asked.body + b" ")
    assert (reply.code, reply.remark) == (1, "bodyCrc32 is not the CRC of the body")
    assert harness.server.routes.broker_count == 0


def test_a_crc_of_zero_is_not_checked(harness: NameServerHarness) -> None:
    asked = registration_request(A, [topic("orders")], version())
    fields = headers.RegisterBroker(
        broker_name="a", broker_addr=A.address, cluster_name="c", broker_id=0
    )
    assert harness.ask(asked.code, fields, asked.body).code == 0
    assert harness.server.routes.topics() == ["orders"]


def test_a_registration_without_a_body_has_no_topics(harness: NameServerHarness) -> None:
    fields = headers.RegisterBroker(
        broker_name="a", broker_addr=A.address, cluster_name="c", broker_id=0
    )
    assert harness.ask(RequestCode.REGISTER_BROKER, fields).code == 0
    assert harness.server.routes.clusters() == {"c": ["a"]}


def test_a_broker_before_3_0_11_sends_topics_without_wrapper(harness: NameServerHarness) -> None:
    body = encode_body(TopicConfigs(topic_config_table={"orders": topic("orders")}))
    fields = registration_request(A, [], version()).fields
    old = {"brokerName": "a", "brokerAddr": "x:1", "clusterName": "c", "brokerId": "0"}
    assert harness.ask(RequestCode.REGISTER_BROKER, old, body, version=36).code == 0
    assert harness.server.routes.topics() == ["orders"]
    assert harness.ask(RequestCode.REGISTER_BROKER, fields, body, version=37).code == 1  # its CRC


@pytest.mark.parametrize("said", ["true", "false"])
def test_a_packed_body_is_read_whatever_the_header_says(
    harness: NameServerHarness, said: str
) -> None:
    pieces = [b'{"counter":3,"stateVersion":0,"timestamp":5}', b"orders 4 2 6 SINGLE_TAG {}", b"[]"]
    sized = [struct.pack(">i", len(piece)) + piece for piece in pieces]
    body = zlib.compress(sized[0] + struct.pack(">i", 1) + sized[1] + sized[2], 9)
    fields = {
        "brokerName": "a",
        "brokerAddr": A.address,
        "clusterName": "c",
        "brokerId": "0",
        "compressed": said,
        "bodyCrc32": str(zlib.crc32(body) & 0x7FFFFFFF),
    }
    reply = harness.ask(RequestCode.REGISTER_BROKER, fields, body)
    assert reply.code == 0, reply.remark
    [queues] = route_of(harness, "orders").queue_datas
    assert (queues.read_queue_nums, queues.write_queue_nums) == (4, 2)


def test_a_zone_is_shown_in_routes(harness: NameServerHarness) -> None:
    fields = {"brokerName": "a", "brokerAddr": "x:1", "clusterName": "c", "brokerId": "0"}
    asked = registration_request(A, [topic("orders")], version())
    harness.ask(asked.code, fields | {"__ZONE_NAME": "z1"}, asked.body)
    assert route_of(harness, "orders").broker_datas[0].zone_name == "z1"


def test_what_a_5_5_broker_sends_beside_its_topics_is_skipped(harness: NameServerHarness) -> None:
    body = (
        b'{"filterServerList":[],"topicConfigSerializeWrapper":{"dataVersion":{"counter":2,'
        b'"stateVersion":0,"timestamp":17},"mappingDataVersion":{"counter":0,"stateVersion":0,'
        b'"timestamp":17},"topicConfigTable":{"orders":{"attributes":{},"order":false,"perm":6,'
        b'"readQueueNums":4,"topicFilterType":"SINGLE_TAG","topicName":"orders","topicSysFlag":0,'
        b'"writeQueueNums":4}},"topicQueueMappingDetailMap":{},"topicQueueMappingInfoMap":'
        b'{"x":{"bname":"a","currIdMap":{0:0},"epoch":1,"topic":"x","totalQueues":1}}}}'
    )
    fields = {"brokerName": "a", "brokerAddr": "x:1", "clusterName": "c", "brokerId": "0"}
    assert harness.ask(RequestCode.REGISTER_BROKER, fields, body).code == 0
    assert harness.server.routes.topics() == ["orders"]


def test_a_broker_that_unregisters_is_removed(harness: NameServerHarness) -> None:
    harness.register(A, topic("orders"))
    assert harness.make(unregistration_request(A)).code == 0
    assert harness.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"}).code == 17
    assert harness.make(unregistration_request(A)).code == 0


def test_a_data_version_is_compared_and_returned(harness: NameServerHarness) -> None:
    reply = harness.make(data_version_request(A, version(1)))
    assert (reply.fields, reply.body) == ({"changed": "true"}, b"")
    harness.register(A, topic("orders"), counter=1)
    reply = harness.make(data_version_request(A, version(1)))
    assert (reply.fields, reply.read(DataVersion)) == ({"changed": "false"}, version(1))
    reply = harness.make(data_version_request(A, version(2)))
    assert (reply.fields, reply.read(DataVersion)) == ({"changed": "true"}, version(1))


@pytest.mark.parametrize("how", ["heartbeat", "data version"])
def test_both_kinds_of_heartbeat_keep_a_broker(harness: NameServerHarness, how: str) -> None:
    harness.register(A, topic("orders"))
    harness.now_ms = NOW + 100_000
    if how == "heartbeat":
        beat = headers.BrokerHeartbeat(cluster_name="c", broker_addr=A.address, broker_name="a")
        assert harness.ask(RequestCode.BROKER_HEARTBEAT, beat).code == 0
    else:
        harness.make(data_version_request(A, version()))
    assert harness.server.tick(now_ms=NOW + 200_000) == []
    assert harness.server.tick(now_ms=NOW + 220_001) == [harness.line]


def test_a_broker_sets_its_own_time_limit(harness: NameServerHarness) -> None:
    fields = {"brokerName": "a", "brokerAddr": "x:1", "clusterName": "c", "brokerId": "0"}
    harness.ask(RequestCode.REGISTER_BROKER, fields | {"heartbeatTimeoutMillis": "1000"})
    assert harness.server.tick(now_ms=NOW + 1_000) == []
    assert harness.server.tick(now_ms=NOW + 1_001) == [harness.line]


def test_a_channel_with_two_expired_brokers_is_closed_once(harness: NameServerHarness) -> None:
    harness.register(A, topic("orders"))
    harness.register(B, topic("orders"))
    assert harness.server.tick(now_ms=NOW + 120_001) == [harness.line]


def test_closing_a_channel_removes_its_brokers(harness: NameServerHarness) -> None:
    harness.register(A, topic("orders"))
    assert harness.server.channel_closed("another line") == []
    assert harness.server.channel_closed(harness.line) == [A.address]
    assert harness.server.routes.topics() == []


def test_a_one_way_registration_counts_and_gets_no_response(harness: NameServerHarness) -> None:
    assert harness.post(registration_request(A, [topic("orders")], version())) == b""
    assert harness.server.routes.topics() == ["orders"]


def test_a_single_topic_is_registered_by_its_route(harness: NameServerHarness) -> None:
    harness.register(A, topic("orders"))
    body = encode_body(route_of(harness, "orders"))
    assert harness.ask(RequestCode.REGISTER_TOPIC_IN_NAMESRV, {"topic": "stock"}, body).code == 0
    assert route_of(harness, "stock") == route_of(harness, "orders")


# --- operators ---------------------------------------------------------------------------------


def test_a_topic_is_deleted_everywhere_or_in_one_cluster(harness: NameServerHarness) -> None:
    harness.register(A, topic("orders"), topic("stock"))
    fields = headers.DeleteTopicInNamesrv(topic="orders", cluster_name="elsewhere")
    assert harness.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, fields).code == 0
    assert harness.server.routes.topics() == ["orders", "stock"]
    assert harness.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, {"topic": "orders"}).code == 0
    fields = headers.DeleteTopicInNamesrv(topic="stock", cluster_name="")
    assert harness.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, fields).code == 0
    assert harness.server.routes.topics() == []


def test_write_permission_is_wiped_and_added_with_a_count(harness: NameServerHarness) -> None:
    harness.register(A, topic("orders"), topic("stock"))
    wiped = harness.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "a"})
    assert wiped.fields == {"wipeTopicCount": "2"}
    assert route_of(harness, "orders").queue_datas[0].perm == 4
    added = harness.ask(RequestCode.ADD_WRITE_PERM_OF_BROKER, {"brokerName": "a"})
    assert added.fields == {"addTopicCount": "2"}
    assert route_of(harness, "orders").queue_datas[0].perm == 6


def test_settings_are_put_read_listed_and_deleted(harness: NameServerHarness) -> None:
    key = {"namespace": "n", "key": "k"}
    assert harness.ask(RequestCode.GET_KV_CONFIG, key).code == ResponseCode.QUERY_NOT_FOUND
    assert harness.ask(RequestCode.PUT_KV_CONFIG, key | {"value": "v"}).code == 0
    assert harness.ask(RequestCode.GET_KV_CONFIG, key).fields == {"value": "v"}
    listed = harness.ask(RequestCode.GET_KVLIST_BY_NAMESPACE, {"namespace": "n"})
    assert listed.json() == {"table": {"k": "v"}}
    assert harness.ask(RequestCode.DELETE_KV_CONFIG, key).code == 0
    assert harness.ask(RequestCode.DELETE_KV_CONFIG, key).code == 0
    listed = harness.ask(RequestCode.GET_KVLIST_BY_NAMESPACE, {"namespace": "n"})
    assert listed.code == ResponseCode.QUERY_NOT_FOUND


def test_an_ordered_topic_is_part_of_registrations_and_routes(harness: NameServerHarness) -> None:
    assert harness.register(A, topic("orders"), topic("stock")).body == b""
    put = {"namespace": "ORDER_TOPIC_CONFIG", "key": "orders", "value": "a:4;b:4"}
    harness.ask(RequestCode.PUT_KV_CONFIG, put)
    assert harness.register(A, topic("orders")).json() == {"table": {"orders": "a:4;b:4"}}
    assert route_of(harness, "orders").order_topic_conf == "a:4;b:4"
    assert route_of(harness, "stock").order_topic_conf is None


def test_the_configuration_is_shown_and_not_changed() -> None:
    harness = NameServerHarness(
        NameServer(config={"listenPort": "9876", "bindAddress": "127.0.0.1"})
    )
    shown = harness.ask(RequestCode.GET_NAMESRV_CONFIG)
    assert shown.body == b"bindAddress=127.0.0.1\nlistenPort=9876\n"
    reply = harness.ask(RequestCode.UPDATE_NAMESRV_CONFIG, body=b"listenPort=1\n")
    assert reply.code == ResponseCode.NO_PERMISSION
    assert "cannot be changed over the network" in reply.remark


@pytest.mark.parametrize("code", [10, 34, 37, 9_999])
def test_a_request_that_is_not_for_name_servers_gets_code_3(
    harness: NameServerHarness, code: int
) -> None:
    fields = {
        "producerGroup": "g",
        "topic": "t",
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": "4",
        "queueId": "0",
        "sysFlag": "0",
        "bornTimestamp": "0",
        "flag": "0",
        "tranStateTableOffset": "0",
        "commitLogOffset": "0",
        "commitOrRollback": "8",
    }
    assert harness.ask(code, fields).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


@pytest.mark.slow
def test_a_response_too_long_for_a_frame_becomes_an_error(harness: NameServerHarness) -> None:
    names = tuple(topic(f"{'n' * 500}{each}") for each in range(33_500))
    many = BrokerRegistration(cluster="c", name="a", broker_id=0, address="x:1", topics=names)
    harness.server.routes.register(many, harness.line, now_ms=NOW)
    reply = harness.ask(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    assert reply.code == ResponseCode.SYSTEM_ERROR
    assert "the response cannot be sent" in reply.remark


def test_counters_show_brokers_topics_and_refused_requests(harness: NameServerHarness) -> None:
    harness.register(A, topic("orders"))
    harness.register(SLAVE, topic("orders"))
    harness.ask(RequestCode.PUT_KV_CONFIG, {"namespace": "n", "key": "k", "value": "v"})
    harness.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "none"})
    assert harness.server.counters() == NamesrvCounters(
        clusters=1, brokers=1, addresses=2, topics=1, settings=1, refused=1, expired=0
    )
    harness.server.tick(now_ms=NOW + 120_001)
    assert harness.server.counters().expired == 2
