"""Every request of the name server, sent and received as frames."""

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
from tests.support.fake_peers import FakePeer
from tests.support.namesrv_requests import (
    NOW_MS,
    SLAVE,
    A,
    B,
    NameServerHarness,
    data_version,
    data_version_request,
    topic_config,
)


@pytest.fixture
def harness() -> NameServerHarness:
    return NameServerHarness()


def route_of(harness: NameServerHarness, name: str) -> TopicRoute:
    response = harness.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, headers.GetRoute(topic=name))
    assert response.code == ResponseCode.SUCCESS, response.remark
    return response.read(TopicRoute)


# --- routes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("client_version", [0, 317, 400, 401, 479])
def test_a_route_is_strict_json_for_clients_of_any_version(
    harness: NameServerHarness, client_version: int
) -> None:
    harness.register(A, topic_config("orders"))
    response = harness.call(
        RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"}, version=client_version
    )
    assert response.json() == {
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
    response = harness.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"})
    assert response.code == ResponseCode.TOPIC_NOT_EXIST
    assert response.remark == "No topic route info in name server for the topic: orders"


def test_a_client_with_binary_headers_gets_binary_headers(harness: NameServerHarness) -> None:
    harness.register(A, topic_config("orders"))
    response = harness.call(
        RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"}, serializer=ROCKETMQ
    )
    [broker] = response.read(TopicRoute).broker_datas
    assert broker.broker_name == "a"


def test_the_cluster_table_has_every_broker_and_address(harness: NameServerHarness) -> None:
    for broker in (A, SLAVE, B):
        harness.register(broker, topic_config("orders"))
    response = harness.call(RequestCode.GET_BROKER_CLUSTER_INFO).json()
    assert response["clusterAddrTable"] == {"c": ["a", "b"]}
    assert response["brokerAddrTable"]["a"]["brokerAddrs"] == {"0": A.address, "1": SLAVE.address}
    assert response["brokerAddrTable"]["b"]["cluster"] == "c"


def test_all_topics_and_those_of_a_cluster_are_listed(harness: NameServerHarness) -> None:
    harness.register(A, topic_config("orders"), topic_config("stock"))
    all_topics = harness.call(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    assert all_topics.json() == {"topicList": ["orders", "stock"]}
    of_cluster = harness.call(RequestCode.GET_TOPICS_BY_CLUSTER, {"cluster": "c"})
    assert of_cluster.json() == {"topicList": ["orders", "stock"]}
    of_unknown = harness.call(RequestCode.GET_TOPICS_BY_CLUSTER, {"cluster": "x"})
    assert of_unknown.json()["topicList"] == []


def test_system_topics_have_the_names_of_clusters_and_brokers(harness: NameServerHarness) -> None:
    assert harness.call(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS).json() == {"topicList": []}
    harness.register(A, topic_config("orders"))
    response = harness.call(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS).read(TopicList)
    assert (response.topic_list, response.broker_addr) == (["a", "c"], A.address)


@pytest.mark.parametrize(
    ("code", "topics"),
    [
        (RequestCode.GET_UNIT_TOPIC_LIST, ["both", "unit"]),
        (RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST, ["both", "subscribed"]),
        (RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST, ["subscribed"]),
    ],
)
def test_topics_are_listed_by_their_unit_flags(
    harness: NameServerHarness, code: RequestCode, topics: list[str]
) -> None:
    flags = {"plain": 0, "unit": 1, "subscribed": 2, "both": 3}
    harness.register(A, *(topic_config(name, flag=flag) for name, flag in flags.items()))
    assert harness.call(code).json()["topicList"] == topics


def test_the_members_of_a_broker_group_are_listed(harness: NameServerHarness) -> None:
    for broker in (A, SLAVE):
        harness.register(broker, topic_config("orders"))
    fields = headers.GetBrokerMemberGroup(cluster_name="c", broker_name="a")
    assert harness.call(RequestCode.GET_BROKER_MEMBER_GROUP, fields).json() == {
        "brokerMemberGroup": {
            "cluster": "c",
            "brokerName": "a",
            "brokerAddrs": {"0": A.address, "1": SLAVE.address},
        }
    }
    unknown = headers.GetBrokerMemberGroup(cluster_name="c", broker_name="x")
    response = harness.call(RequestCode.GET_BROKER_MEMBER_GROUP, unknown).json()
    assert response["brokerMemberGroup"]["brokerAddrs"] == {}


# --- registration ------------------------------------------------------------------------------


def test_the_response_to_a_slave_names_its_master(harness: NameServerHarness) -> None:
    assert harness.register(A, topic_config("orders")).fields == {}
    assert harness.register(SLAVE, topic_config("orders")).fields == {
        "haServerAddr": A.ha_address,
        "masterAddr": A.address,
    }


def test_a_body_with_a_wrong_crc_is_refused(harness: NameServerHarness) -> None:
    request = registration_request(A, [topic_config("orders")], data_version())
    response = harness.call(request.code, request.fields, request.body + b" ")
    assert (response.code, response.remark) == (1, "bodyCrc32 is not the CRC of the body")
    assert harness.server.routes.broker_count == 0


def test_a_crc_of_zero_is_not_checked(harness: NameServerHarness) -> None:
    request = registration_request(A, [topic_config("orders")], data_version())
    fields = headers.RegisterBroker(
        broker_name="a", broker_addr=A.address, cluster_name="c", broker_id=0
    )
    assert harness.call(request.code, fields, request.body).code == 0
    assert harness.server.routes.topics() == ["orders"]


def test_a_registration_without_a_body_has_no_topics(harness: NameServerHarness) -> None:
    fields = headers.RegisterBroker(
        broker_name="a", broker_addr=A.address, cluster_name="c", broker_id=0
    )
    assert harness.call(RequestCode.REGISTER_BROKER, fields).code == 0
    assert harness.server.routes.clusters() == {"c": ["a"]}


def test_a_broker_before_3_0_11_sends_topics_without_wrapper(harness: NameServerHarness) -> None:
    body = encode_body(TopicConfigs(topic_config_table={"orders": topic_config("orders")}))
    fields = registration_request(A, [], data_version()).fields
    old = {"brokerName": "a", "brokerAddr": "x:1", "clusterName": "c", "brokerId": "0"}
    assert harness.call(RequestCode.REGISTER_BROKER, old, body, version=36).code == 0
    assert harness.server.routes.topics() == ["orders"]
    # The CRC in `fields` is that of another body, and only newer versions check it.
    assert harness.call(RequestCode.REGISTER_BROKER, fields, body, version=37).code == 1


@pytest.mark.parametrize("compressed", ["true", "false"])
def test_a_packed_body_is_recognised_whatever_the_header_says(
    harness: NameServerHarness, compressed: str
) -> None:
    pieces = [b'{"counter":3,"stateVersion":0,"timestamp":5}', b"orders 4 2 6 SINGLE_TAG {}", b"[]"]
    sized = [struct.pack(">i", len(piece)) + piece for piece in pieces]
    body = zlib.compress(sized[0] + struct.pack(">i", 1) + sized[1] + sized[2], 9)
    fields = {
        "brokerName": "a",
        "brokerAddr": A.address,
        "clusterName": "c",
        "brokerId": "0",
        "compressed": compressed,
        "bodyCrc32": str(zlib.crc32(body) & 0x7FFFFFFF),
    }
    response = harness.call(RequestCode.REGISTER_BROKER, fields, body)
    assert response.code == 0, response.remark
    [queues] = route_of(harness, "orders").queue_datas
    assert (queues.read_queue_nums, queues.write_queue_nums) == (4, 2)


def test_a_zone_is_shown_in_routes(harness: NameServerHarness) -> None:
    fields = {"brokerName": "a", "brokerAddr": "x:1", "clusterName": "c", "brokerId": "0"}
    request = registration_request(A, [topic_config("orders")], data_version())
    harness.call(request.code, fields | {"__ZONE_NAME": "z1"}, request.body)
    assert route_of(harness, "orders").broker_datas[0].zone_name == "z1"


def test_fields_that_only_a_5_5_broker_sends_are_ignored(harness: NameServerHarness) -> None:
    body = (
        b'{"filterServerList":[],"topicConfigSerializeWrapper":{"dataVersion":{"counter":2,'
        b'"stateVersion":0,"timestamp":17},"mappingDataVersion":{"counter":0,"stateVersion":0,'
        b'"timestamp":17},"topicConfigTable":{"orders":{"attributes":{},"order":false,"perm":6,'
        b'"readQueueNums":4,"topicFilterType":"SINGLE_TAG","topicName":"orders","topicSysFlag":0,'
        b'"writeQueueNums":4}},"topicQueueMappingDetailMap":{},"topicQueueMappingInfoMap":'
        b'{"x":{"bname":"a","currIdMap":{0:0},"epoch":1,"topic":"x","totalQueues":1}}}}'
    )
    fields = {"brokerName": "a", "brokerAddr": "x:1", "clusterName": "c", "brokerId": "0"}
    assert harness.call(RequestCode.REGISTER_BROKER, fields, body).code == 0
    assert harness.server.routes.topics() == ["orders"]


def test_a_broker_that_unregisters_is_removed(harness: NameServerHarness) -> None:
    harness.register(A, topic_config("orders"))
    assert harness.call_registration(unregistration_request(A)).code == 0
    assert harness.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"}).code == 17
    assert harness.call_registration(unregistration_request(A)).code == 0


def test_a_data_version_is_compared_and_returned(harness: NameServerHarness) -> None:
    response = harness.call_registration(data_version_request(A, data_version(1)))
    assert (response.fields, response.body) == ({"changed": "true"}, b"")
    harness.register(A, topic_config("orders"), counter=1)
    response = harness.call_registration(data_version_request(A, data_version(1)))
    assert (response.fields, response.read(DataVersion)) == ({"changed": "false"}, data_version(1))
    response = harness.call_registration(data_version_request(A, data_version(2)))
    assert (response.fields, response.read(DataVersion)) == ({"changed": "true"}, data_version(1))


@pytest.mark.parametrize("kind", ["heartbeat", "data version"])
def test_both_kinds_of_heartbeat_restart_the_timeout(harness: NameServerHarness, kind: str) -> None:
    harness.register(A, topic_config("orders"))
    harness.now_ms = NOW_MS + 100_000
    if kind == "heartbeat":
        fields = headers.BrokerHeartbeat(cluster_name="c", broker_addr=A.address, broker_name="a")
        assert harness.call(RequestCode.BROKER_HEARTBEAT, fields).code == 0
    else:
        harness.call_registration(data_version_request(A, data_version()))
    assert harness.server.tick(now_ms=NOW_MS + 200_000) == []
    assert harness.server.tick(now_ms=NOW_MS + 220_001) == [harness.connection]


def test_a_broker_can_set_its_own_heartbeat_timeout(harness: NameServerHarness) -> None:
    fields = {"brokerName": "a", "brokerAddr": "x:1", "clusterName": "c", "brokerId": "0"}
    harness.call(RequestCode.REGISTER_BROKER, fields | {"heartbeatTimeoutMillis": "1000"})
    assert harness.server.tick(now_ms=NOW_MS + 1_000) == []
    assert harness.server.tick(now_ms=NOW_MS + 1_001) == [harness.connection]


def test_a_channel_with_two_expired_brokers_is_closed_once(harness: NameServerHarness) -> None:
    harness.register(A, topic_config("orders"))
    harness.register(B, topic_config("orders"))
    assert harness.server.tick(now_ms=NOW_MS + 120_001) == [harness.connection]


def test_closing_a_channel_removes_its_brokers(harness: NameServerHarness) -> None:
    harness.register(A, topic_config("orders"))
    assert harness.server.channel_closed(FakePeer("127.0.0.1:2")) == []
    assert harness.server.channel_closed(harness.connection) == [A.address]
    assert harness.server.routes.topics() == []


def test_a_one_way_registration_counts_and_gets_no_response(harness: NameServerHarness) -> None:
    registration = registration_request(A, [topic_config("orders")], data_version())
    assert harness.send_registration_oneway(registration) == b""
    assert harness.server.routes.topics() == ["orders"]


def test_a_single_topic_is_registered_by_its_route(harness: NameServerHarness) -> None:
    harness.register(A, topic_config("orders"))
    body = encode_body(route_of(harness, "orders"))
    assert harness.call(RequestCode.REGISTER_TOPIC_IN_NAMESRV, {"topic": "stock"}, body).code == 0
    assert route_of(harness, "stock") == route_of(harness, "orders")


# --- operators ---------------------------------------------------------------------------------


def test_a_topic_is_deleted_everywhere_or_in_one_cluster(harness: NameServerHarness) -> None:
    harness.register(A, topic_config("orders"), topic_config("stock"))
    fields = headers.DeleteTopicInNamesrv(topic="orders", cluster_name="another")
    assert harness.call(RequestCode.DELETE_TOPIC_IN_NAMESRV, fields).code == 0
    assert harness.server.routes.topics() == ["orders", "stock"]
    assert harness.call(RequestCode.DELETE_TOPIC_IN_NAMESRV, {"topic": "orders"}).code == 0
    fields = headers.DeleteTopicInNamesrv(topic="stock", cluster_name="")
    assert harness.call(RequestCode.DELETE_TOPIC_IN_NAMESRV, fields).code == 0
    assert harness.server.routes.topics() == []


def test_write_permission_is_wiped_and_added_with_a_count(harness: NameServerHarness) -> None:
    harness.register(A, topic_config("orders"), topic_config("stock"))
    wiped = harness.call(RequestCode.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "a"})
    assert wiped.fields == {"wipeTopicCount": "2"}
    assert route_of(harness, "orders").queue_datas[0].perm == 4
    added = harness.call(RequestCode.ADD_WRITE_PERM_OF_BROKER, {"brokerName": "a"})
    assert added.fields == {"addTopicCount": "2"}
    assert route_of(harness, "orders").queue_datas[0].perm == 6


def test_settings_are_put_read_listed_and_deleted(harness: NameServerHarness) -> None:
    key = {"namespace": "n", "key": "k"}
    assert harness.call(RequestCode.GET_KV_CONFIG, key).code == ResponseCode.QUERY_NOT_FOUND
    assert harness.call(RequestCode.PUT_KV_CONFIG, key | {"value": "v"}).code == 0
    assert harness.call(RequestCode.GET_KV_CONFIG, key).fields == {"value": "v"}
    listed = harness.call(RequestCode.GET_KVLIST_BY_NAMESPACE, {"namespace": "n"})
    assert listed.json() == {"table": {"k": "v"}}
    assert harness.call(RequestCode.DELETE_KV_CONFIG, key).code == 0
    assert harness.call(RequestCode.DELETE_KV_CONFIG, key).code == 0
    listed = harness.call(RequestCode.GET_KVLIST_BY_NAMESPACE, {"namespace": "n"})
    assert listed.code == ResponseCode.QUERY_NOT_FOUND


def test_an_ordered_topic_is_part_of_registrations_and_routes(harness: NameServerHarness) -> None:
    assert harness.register(A, topic_config("orders"), topic_config("stock")).body == b""
    put = {"namespace": "ORDER_TOPIC_CONFIG", "key": "orders", "value": "a:4;b:4"}
    harness.call(RequestCode.PUT_KV_CONFIG, put)
    assert harness.register(A, topic_config("orders")).json() == {"table": {"orders": "a:4;b:4"}}
    assert route_of(harness, "orders").order_topic_conf == "a:4;b:4"
    assert route_of(harness, "stock").order_topic_conf is None


def test_the_configuration_is_shown_and_not_changed() -> None:
    harness = NameServerHarness(
        NameServer(config={"listenPort": "9876", "bindAddress": "127.0.0.1"})
    )
    shown = harness.call(RequestCode.GET_NAMESRV_CONFIG)
    assert shown.body == b"bindAddress=127.0.0.1\nlistenPort=9876\n"
    response = harness.call(RequestCode.UPDATE_NAMESRV_CONFIG, body=b"listenPort=1\n")
    assert response.code == ResponseCode.NO_PERMISSION
    assert "cannot be changed over the network" in response.remark


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
    assert harness.call(code, fields).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


@pytest.mark.slow
def test_a_response_too_long_for_a_frame_becomes_an_error(harness: NameServerHarness) -> None:
    topics = tuple(topic_config(f"{'n' * 500}{number}") for number in range(33_500))
    broker = BrokerRegistration(cluster="c", name="a", broker_id=0, address="x:1", topics=topics)
    harness.server.routes.register(broker, harness.connection, now_ms=NOW_MS)
    response = harness.call(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    assert response.code == ResponseCode.SYSTEM_ERROR
    assert "the response cannot be sent" in response.remark


def test_counters_show_brokers_topics_and_refused_requests(harness: NameServerHarness) -> None:
    harness.register(A, topic_config("orders"))
    harness.register(SLAVE, topic_config("orders"))
    harness.call(RequestCode.PUT_KV_CONFIG, {"namespace": "n", "key": "k", "value": "v"})
    harness.call(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "none"})
    assert harness.server.counters() == NamesrvCounters(
        clusters=1, brokers=1, addresses=2, topics=1, settings=1, refused=1, expired=0
    )
    harness.server.tick(now_ms=NOW_MS + 120_001)
    assert harness.server.counters().expired == 2
