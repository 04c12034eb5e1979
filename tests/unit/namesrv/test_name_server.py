"""Every request of the name server, sent as frames."""

from __future__ import annotations

import struct
import zlib

import pytest

from escrowmq.message.topic_config import DataVersion
from escrowmq.namesrv.name_server import NameServer, NamesrvCounters
from escrowmq.namesrv.registration import (
    data_version_request,
    registration_request,
    unregistration_request,
)
from escrowmq.namesrv.route_table import BrokerRegistration
from escrowmq.remoting import headers_admin as headers
from escrowmq.remoting.bodies import TopicConfigs, TopicList, TopicRoute, encode_body
from escrowmq.remoting.codes import ROCKETMQ, RequestCode, ResponseCode
from tests.support.namesrv_requests import NOW, SLAVE, A, B, Desk, topic, version


@pytest.fixture
def desk() -> Desk:
    return Desk()


def route_of(desk: Desk, name: str) -> TopicRoute:
    heard = desk.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, headers.GetRoute(topic=name))
    assert heard.code == ResponseCode.SUCCESS, heard.remark
    return heard.read(TopicRoute)


# --- routes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("client_version", [0, 317, 400, 401, 479])
def test_a_route_is_strict_json_whoever_asks(desk: Desk, client_version: int) -> None:
    desk.register(A, topic("orders"))
    heard = desk.ask(
        RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"}, version=client_version
    )
    assert heard.json() == {
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


def test_an_unknown_topic_gets_code_17(desk: Desk) -> None:
    heard = desk.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"})
    assert heard.code == ResponseCode.TOPIC_NOT_EXIST
    assert heard.remark == "No topic route info in name server for the topic: orders"


def test_a_client_with_binary_headers_gets_binary_headers(desk: Desk) -> None:
    desk.register(A, topic("orders"))
    heard = desk.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"}, serializer=ROCKETMQ)
    assert [each.broker_name for each in heard.read(TopicRoute).broker_datas] == ["a"]


def test_the_cluster_table_has_every_broker_and_address(desk: Desk) -> None:
    for broker in (A, SLAVE, B):
        desk.register(broker, topic("orders"))
    heard = desk.ask(RequestCode.GET_BROKER_CLUSTER_INFO).json()
    assert heard["clusterAddrTable"] == {"c": ["a", "b"]}
    assert heard["brokerAddrTable"]["a"]["brokerAddrs"] == {"0": A.address, "1": SLAVE.address}
    assert heard["brokerAddrTable"]["b"]["cluster"] == "c"


def test_all_topics_and_those_of_a_cluster(desk: Desk) -> None:
    desk.register(A, topic("orders"), topic("stock"))
    everything = desk.ask(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    assert everything.json() == {"topicList": ["orders", "stock"]}
    of_cluster = desk.ask(RequestCode.GET_TOPICS_BY_CLUSTER, {"cluster": "c"})
    assert of_cluster.json() == {"topicList": ["orders", "stock"]}
    assert desk.ask(RequestCode.GET_TOPICS_BY_CLUSTER, {"cluster": "x"}).json()["topicList"] == []


def test_system_topics_are_named_like_clusters_and_brokers(desk: Desk) -> None:
    assert desk.ask(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS).json() == {"topicList": []}
    desk.register(A, topic("orders"))
    heard = desk.ask(RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS).read(TopicList)
    assert (heard.topic_list, heard.broker_addr) == (["a", "c"], A.address)


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (RequestCode.GET_UNIT_TOPIC_LIST, ["both", "unit"]),
        (RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST, ["both", "subscribed"]),
        (RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST, ["subscribed"]),
    ],
)
def test_topics_by_their_unit_flags(desk: Desk, code: RequestCode, found: list[str]) -> None:
    flags = {"plain": 0, "unit": 1, "subscribed": 2, "both": 3}
    desk.register(A, *(topic(name, flag=flag) for name, flag in flags.items()))
    assert desk.ask(code).json()["topicList"] == found


def test_members_of_a_broker_group(desk: Desk) -> None:
    for broker in (A, SLAVE):
        desk.register(broker, topic("orders"))
    asked = headers.GetBrokerMemberGroup(cluster_name="c", broker_name="a")
    assert desk.ask(RequestCode.GET_BROKER_MEMBER_GROUP, asked).json() == {
        "brokerMemberGroup": {
            "cluster": "c",
            "brokerName": "a",
            "brokerAddrs": {"0": A.address, "1": SLAVE.address},
        }
    }
    nobody = headers.GetBrokerMemberGroup(cluster_name="c", broker_name="x")
    heard = desk.ask(RequestCode.GET_BROKER_MEMBER_GROUP, nobody).json()
    assert heard["brokerMemberGroup"]["brokerAddrs"] == {}


# --- registration ------------------------------------------------------------------------------


def test_the_response_to_a_slave_names_its_master(desk: Desk) -> None:
    assert desk.register(A, topic("orders")).fields == {}
    assert desk.register(SLAVE, topic("orders")).fields == {
        "haServerAddr": A.ha_address,
        "masterAddr": A.address,
    }


def test_a_body_with_a_wrong_crc_is_refused(desk: Desk) -> None:
    asked = registration_request(A, [topic("orders")], version())
    heard = desk.ask(asked.code, asked.fields, asked.body + b" ")
    assert (heard.code, heard.remark) == (1, "bodyCrc32 is not the CRC of the body")
    assert desk.server.routes.broker_count == 0


def test_a_crc_of_zero_is_not_checked(desk: Desk) -> None:
    asked = registration_request(A, [topic("orders")], version())
    fields = headers.RegisterBroker(
        broker_name="a", broker_addr=A.address, cluster_name="c", broker_id=0
    )
    assert desk.ask(asked.code, fields, asked.body).code == 0
    assert desk.server.routes.topics() == ["orders"]


def test_a_registration_without_a_body_has_no_topics(desk: Desk) -> None:
    fields = headers.RegisterBroker(
        broker_name="a", broker_addr=A.address, cluster_name="c", broker_id=0
    )
    assert desk.ask(RequestCode.REGISTER_BROKER, fields).code == 0
    assert desk.server.routes.clusters() == {"c": ["a"]}


def test_a_broker_before_3_0_11_sends_topics_without_wrapper(desk: Desk) -> None:
    body = encode_body(TopicConfigs(topic_config_table={"orders": topic("orders")}))
    fields = registration_request(A, [], version()).fields
    old = {"brokerName": "a", "brokerAddr": "x:1", "clusterName": "c", "brokerId": "0"}
    assert desk.ask(RequestCode.REGISTER_BROKER, old, body, version=36).code == 0
    assert desk.server.routes.topics() == ["orders"]
    assert desk.ask(RequestCode.REGISTER_BROKER, fields, body, version=37).code == 1  # its CRC


@pytest.mark.parametrize("said", ["true", "false"])
def test_a_packed_body_is_read_whatever_the_header_says(desk: Desk, said: str) -> None:
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
    heard = desk.ask(RequestCode.REGISTER_BROKER, fields, body)
    assert heard.code == 0, heard.remark
    [queues] = route_of(desk, "orders").queue_datas
    assert (queues.read_queue_nums, queues.write_queue_nums) == (4, 2)


def test_a_zone_is_shown_in_routes(desk: Desk) -> None:
    fields = {"brokerName": "a", "brokerAddr": "x:1", "clusterName": "c", "brokerId": "0"}
    asked = registration_request(A, [topic("orders")], version())
    desk.ask(asked.code, fields | {"__ZONE_NAME": "z1"}, asked.body)
    assert route_of(desk, "orders").broker_datas[0].zone_name == "z1"


def test_what_a_5_5_broker_sends_beside_its_topics_is_skipped(desk: Desk) -> None:
    body = (
        b'{"filterServerList":[],"topicConfigSerializeWrapper":{"dataVersion":{"counter":2,'
        b'"stateVersion":0,"timestamp":17},"mappingDataVersion":{"counter":0,"stateVersion":0,'
        b'"timestamp":17},"topicConfigTable":{"orders":{"attributes":{},"order":false,"perm":6,'
        b'"readQueueNums":4,"topicFilterType":"SINGLE_TAG","topicName":"orders","topicSysFlag":0,'
        b'"writeQueueNums":4}},"topicQueueMappingDetailMap":{},"topicQueueMappingInfoMap":'
        b'{"x":{"bname":"a","currIdMap":{0:0},"epoch":1,"topic":"x","totalQueues":1}}}}'
    )
    fields = {"brokerName": "a", "brokerAddr": "x:1", "clusterName": "c", "brokerId": "0"}
    assert desk.ask(RequestCode.REGISTER_BROKER, fields, body).code == 0
    assert desk.server.routes.topics() == ["orders"]


def test_a_broker_that_unregisters_is_removed(desk: Desk) -> None:
    desk.register(A, topic("orders"))
    assert desk.make(unregistration_request(A)).code == 0
    assert desk.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "orders"}).code == 17
    assert desk.make(unregistration_request(A)).code == 0


def test_a_data_version_is_compared_and_returned(desk: Desk) -> None:
    heard = desk.make(data_version_request(A, version(1)))
    assert (heard.fields, heard.body) == ({"changed": "true"}, b"")
    desk.register(A, topic("orders"), counter=1)
    heard = desk.make(data_version_request(A, version(1)))
    assert (heard.fields, heard.read(DataVersion)) == ({"changed": "false"}, version(1))
    heard = desk.make(data_version_request(A, version(2)))
    assert (heard.fields, heard.read(DataVersion)) == ({"changed": "true"}, version(1))


@pytest.mark.parametrize("how", ["heartbeat", "data version"])
def test_both_kinds_of_heartbeat_keep_a_broker(desk: Desk, how: str) -> None:
    desk.register(A, topic("orders"))
    desk.now_ms = NOW + 100_000
    if how == "heartbeat":
        beat = headers.BrokerHeartbeat(cluster_name="c", broker_addr=A.address, broker_name="a")
        assert desk.ask(RequestCode.BROKER_HEARTBEAT, beat).code == 0
    else:
        desk.make(data_version_request(A, version()))
    assert desk.server.tick(now_ms=NOW + 200_000) == []
    assert desk.server.tick(now_ms=NOW + 220_001) == [desk.line]


def test_a_broker_sets_its_own_time_limit(desk: Desk) -> None:
    fields = {"brokerName": "a", "brokerAddr": "x:1", "clusterName": "c", "brokerId": "0"}
    desk.ask(RequestCode.REGISTER_BROKER, fields | {"heartbeatTimeoutMillis": "1000"})
    assert desk.server.tick(now_ms=NOW + 1_000) == []
    assert desk.server.tick(now_ms=NOW + 1_001) == [desk.line]


def test_a_channel_with_two_expired_brokers_is_closed_once(desk: Desk) -> None:
    desk.register(A, topic("orders"))
    desk.register(B, topic("orders"))
    assert desk.server.tick(now_ms=NOW + 120_001) == [desk.line]


def test_closing_a_channel_removes_its_brokers(desk: Desk) -> None:
    desk.register(A, topic("orders"))
    assert desk.server.channel_closed("another line") == []
    assert desk.server.channel_closed(desk.line) == [A.address]
    assert desk.server.routes.topics() == []


def test_a_one_way_registration_counts_and_gets_no_response(desk: Desk) -> None:
    assert desk.post(registration_request(A, [topic("orders")], version())) == b""
    assert desk.server.routes.topics() == ["orders"]


def test_a_single_topic_is_registered_by_its_route(desk: Desk) -> None:
    desk.register(A, topic("orders"))
    body = encode_body(route_of(desk, "orders"))
    assert desk.ask(RequestCode.REGISTER_TOPIC_IN_NAMESRV, {"topic": "stock"}, body).code == 0
    assert route_of(desk, "stock") == route_of(desk, "orders")


# --- operators ---------------------------------------------------------------------------------


def test_a_topic_is_deleted_everywhere_or_in_one_cluster(desk: Desk) -> None:
    desk.register(A, topic("orders"), topic("stock"))
    fields = headers.DeleteTopicInNamesrv(topic="orders", cluster_name="elsewhere")
    assert desk.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, fields).code == 0
    assert desk.server.routes.topics() == ["orders", "stock"]
    assert desk.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, {"topic": "orders"}).code == 0
    fields = headers.DeleteTopicInNamesrv(topic="stock", cluster_name="")
    assert desk.ask(RequestCode.DELETE_TOPIC_IN_NAMESRV, fields).code == 0
    assert desk.server.routes.topics() == []


def test_write_permission_is_wiped_and_added_with_a_count(desk: Desk) -> None:
    desk.register(A, topic("orders"), topic("stock"))
    wiped = desk.ask(RequestCode.WIPE_WRITE_PERM_OF_BROKER, {"brokerName": "a"})
    assert wiped.fields == {"wipeTopicCount": "2"}
    assert route_of(desk, "orders").queue_datas[0].perm == 4
    added = desk.ask(RequestCode.ADD_WRITE_PERM_OF_BROKER, {"brokerName": "a"})
    assert added.fields == {"addTopicCount": "2"}
    assert route_of(desk, "orders").queue_datas[0].perm == 6


def test_settings_are_put_read_listed_and_deleted(desk: Desk) -> None:
    key = {"namespace": "n", "key": "k"}
    assert desk.ask(RequestCode.GET_KV_CONFIG, key).code == ResponseCode.QUERY_NOT_FOUND
    assert desk.ask(RequestCode.PUT_KV_CONFIG, key | {"value": "v"}).code == 0
    assert desk.ask(RequestCode.GET_KV_CONFIG, key).fields == {"value": "v"}
    listed = desk.ask(RequestCode.GET_KVLIST_BY_NAMESPACE, {"namespace": "n"})
    assert listed.json() == {"table": {"k": "v"}}
    assert desk.ask(RequestCode.DELETE_KV_CONFIG, key).code == 0
    assert desk.ask(RequestCode.DELETE_KV_CONFIG, key).code == 0
    listed = desk.ask(RequestCode.GET_KVLIST_BY_NAMESPACE, {"namespace": "n"})
    assert listed.code == ResponseCode.QUERY_NOT_FOUND


def test_an_ordered_topic_is_part_of_registrations_and_routes(desk: Desk) -> None:
    assert desk.register(A, topic("orders"), topic("stock")).body == b""
    put = {"namespace": "ORDER_TOPIC_CONFIG", "key": "orders", "value": "a:4;b:4"}
    desk.ask(RequestCode.PUT_KV_CONFIG, put)
    assert desk.register(A, topic("orders")).json() == {"table": {"orders": "a:4;b:4"}}
    assert route_of(desk, "orders").order_topic_conf == "a:4;b:4"
    assert route_of(desk, "stock").order_topic_conf is None


def test_the_configuration_is_shown_and_not_changed() -> None:
    desk = Desk(NameServer(config={"listenPort": "9876", "bindAddress": "127.0.0.1"}))
    shown = desk.ask(RequestCode.GET_NAMESRV_CONFIG)
    assert shown.body == b"bindAddress=127.0.0.1\nlistenPort=9876\n"
    heard = desk.ask(RequestCode.UPDATE_NAMESRV_CONFIG, body=b"listenPort=1\n")
    assert heard.code == ResponseCode.NO_PERMISSION
    assert "cannot be changed over the network" in heard.remark


@pytest.mark.parametrize("code", [10, 34, 37, 9_999])
def test_a_request_that_is_not_for_name_servers_gets_code_3(desk: Desk, code: int) -> None:
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
    assert desk.ask(code, fields).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED


@pytest.mark.slow
def test_a_response_too_long_for_a_frame_becomes_an_error(desk: Desk) -> None:
    names = tuple(topic(f"{'n' * 500}{each}") for each in range(33_500))
    many = BrokerRegistration(cluster="c", name="a", broker_id=0, address="x:1", topics=names)
    desk.server.routes.register(many, desk.line, now_ms=NOW)
    heard = desk.ask(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)
    assert heard.code == ResponseCode.SYSTEM_ERROR
    assert "the response cannot be sent" in heard.remark


def test_counters_show_brokers_topics_and_refused_requests(desk: Desk) -> None:
    desk.register(A, topic("orders"))
    desk.register(SLAVE, topic("orders"))
    desk.ask(RequestCode.PUT_KV_CONFIG, {"namespace": "n", "key": "k", "value": "v"})
    desk.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, {"topic": "none"})
    assert desk.server.counters() == NamesrvCounters(
        clusters=1, brokers=1, addresses=2, topics=1, settings=1, refused=1, expired=0
    )
    desk.server.tick(now_ms=NOW + 120_001)
    assert desk.server.counters().expired == 2
