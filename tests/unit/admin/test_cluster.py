"""Lookup of brokers, routes and topics, and requests to all brokers, with scripted servers."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.admin.cluster import BrokerAddress, Cluster
from escrowmq.client.sync_connection import SyncConnection
from escrowmq.errors import NoRoute, NotSent, OutcomeUnknown, RequestRefused
from escrowmq.remoting.bodies import (
    BrokerRoute,
    ClusterInfo,
    QueueRoute,
    TopicList,
    TopicRoute,
    encode_body,
)
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_response
from tests.support.scripted_server import Respond, ScriptedServer

UNREACHABLE = "127.0.0.1:1"


def broker(name: str, **addresses: str) -> BrokerRoute:
    """Return a broker. `m` is the address of its master, `r1` that of its first replica."""
    broker_ids = {"m": 0, "r1": 1}
    return BrokerRoute(
        cluster="c",
        broker_name=name,
        broker_addrs={broker_ids[role]: address for role, address in addresses.items()},
    )


def name_server(*brokers: BrokerRoute, topics: tuple[str, ...] = ("orders",)) -> Respond:
    """Return the script of a name server with these brokers, each of which has all topics."""

    def respond(request: Request[Any]) -> bytes:
        code = request.head.code
        if code == RequestCode.GET_BROKER_CLUSTER_INFO:
            table = {entry.broker_name: entry for entry in brokers}
            return encode_response(request, body=encode_body(ClusterInfo(broker_addr_table=table)))
        if code == RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER:
            return encode_response(request, body=encode_body(TopicList(topic_list=list(topics))))
        if request.head.fields.topic not in topics:
            return encode_response(request, code=ResponseCode.TOPIC_NOT_EXIST, remark="none")
        queues = [
            QueueRoute(broker_name=entry.broker_name, read_queue_nums=2, write_queue_nums=1, perm=6)
            for entry in brokers
        ]
        route = TopicRoute(queue_datas=queues, broker_datas=list(brokers))
        return encode_response(request, body=encode_body(route))

    return respond


def runtime_code(connection: SyncConnection) -> int:
    return connection.call(RequestCode.GET_BROKER_RUNTIME_INFO).code


def test_brokers_are_the_masters_sorted_by_name() -> None:
    respond = name_server(broker("b", m="h:2"), broker("a", m="h:1"), broker("c", r1="h:3"))
    with ScriptedServer(respond) as server, Cluster(server.address) as cluster:
        assert cluster.brokers() == [BrokerAddress("a", "h:1"), BrokerAddress("b", "h:2")]


@pytest.mark.parametrize("separator", [";", ",", " ; "])
def test_the_next_name_server_is_used_if_one_fails(separator: str) -> None:
    with ScriptedServer(name_server(broker("a", m="h:1"))) as server:
        servers = f"{UNREACHABLE}{separator}{server.address}"
        with Cluster(servers) as cluster:
            assert [entry.name for entry in cluster.brokers()] == ["a"]
            assert cluster.topics() == ["orders"]


def test_the_next_name_server_is_used_if_one_has_no_broker() -> None:
    with (
        ScriptedServer(name_server()) as empty,
        ScriptedServer(name_server(broker("a", m="h:1"))) as server,
        Cluster([empty.address, server.address]) as cluster,
    ):
        assert [entry.name for entry in cluster.brokers()] == ["a"]


def test_the_error_has_the_reason_of_every_name_server_if_none_has_a_broker() -> None:
    with ScriptedServer(name_server()) as empty, Cluster([UNREACHABLE, empty.address]) as cluster:
        with pytest.raises(NotSent) as refused:
            cluster.brokers()
        assert f"{UNREACHABLE} cannot be reached" in str(refused.value)
        assert f"{empty.address} knows no broker" in str(refused.value)


def test_a_refusal_of_the_name_server_is_raised_and_not_reported_as_unreachable() -> None:
    def respond(request: Request[Any]) -> bytes:
        return encode_response(request, code=ResponseCode.NO_PERMISSION, remark="a wrong signature")

    with ScriptedServer(respond) as server, Cluster(server.address) as cluster:
        with pytest.raises(RequestRefused, match="a wrong signature") as refused:
            cluster.info()
        assert refused.value.code == ResponseCode.NO_PERMISSION


def test_one_broker_is_selected_by_name() -> None:
    respond = name_server(broker("a", m="h:1"), broker("b", m="h:2"))
    with ScriptedServer(respond) as server:
        with Cluster(server.address, broker="b") as cluster:
            assert cluster.brokers() == [BrokerAddress("b", "h:2")]
        with (
            Cluster(server.address, broker="x") as cluster,
            pytest.raises(NotSent, match="no broker is named 'x'"),
        ):
            cluster.brokers()


def test_one_broker_is_selected_by_address_without_a_name_server() -> None:
    with Cluster(UNREACHABLE, broker="h:1") as cluster:
        assert cluster.brokers() == [BrokerAddress("h:1", "h:1")]


def test_a_route_lists_readable_and_writable_queues_of_masters() -> None:
    respond = name_server(broker("a", m="h:1"), broker("b", r1="h:3"))
    with ScriptedServer(respond) as server, Cluster(server.address) as cluster:
        route = cluster.route("orders")
        assert [(queue.broker, queue.queue_id) for queue in route.readable_queues] == [
            ("a", 0),
            ("a", 1),
        ]
        assert [queue.queue_id for queue in route.writable_queues] == [0]
        with_replicas = cluster.route("orders", include_replicas=True)
        assert [queue.broker for queue in with_replicas.readable_queues] == ["a", "a", "b", "b"]
        assert with_replicas.reader_addresses == {"a": "h:1", "b": "h:3"}
        assert [queue.broker for queue in with_replicas.writable_queues] == ["a"]
        assert with_replicas.broker_addresses == {"a": "h:1"}


def test_an_unknown_topic_has_no_route() -> None:
    with (
        ScriptedServer(name_server()) as server,
        Cluster(server.address) as cluster,
        pytest.raises(NoRoute, match="missing-topic"),
    ):
        cluster.route("missing-topic")


def test_a_broker_that_fails_does_not_hide_the_responses_of_the_others() -> None:
    with ScriptedServer(lambda request: encode_response(request)) as healthy:
        respond = name_server(broker("a", m=UNREACHABLE), broker("b", m=healthy.address))
        with ScriptedServer(respond) as server, Cluster(server.address) as cluster:
            for _ in range(2):  # a repeated failure is listed once
                responses = cluster.ask_all(runtime_code)
            assert [(entry.name, code) for entry, code in responses] == [("b", 0)]
            [failure] = cluster.failures
            assert failure.broker.name == "a"
            assert str(failure).startswith(f"{UNREACHABLE} cannot be reached")
            with pytest.raises(OutcomeUnknown, match="nothing was changed"):
                cluster.require_all_answered()


def test_a_refusal_with_an_ignored_code_is_no_failure() -> None:
    def respond(request: Request[Any]) -> bytes:
        return encode_response(request, code=ResponseCode.QUERY_NOT_FOUND, remark="none")

    with ScriptedServer(respond) as server, Cluster("", broker=server.address) as cluster:
        assert cluster.ask_all(runtime_code, ignored_codes=[ResponseCode.QUERY_NOT_FOUND]) == []
        assert cluster.failures == []
        assert cluster.ask_all(runtime_code) == []
        [failure] = cluster.failures
        assert isinstance(failure.error, RequestRefused)
        assert str(failure) == f"{server.address}: none"


def test_connections_are_reused_and_replaced_when_they_are_closed() -> None:
    with (
        ScriptedServer(lambda request: encode_response(request)) as server,
        Cluster("", broker=server.address) as cluster,
    ):
        cluster.ask_all(runtime_code)
        cluster.ask_all(runtime_code)
        assert server.connection_count == 1
        server.disconnect_all()
        assert len(cluster.ask_all(runtime_code)) == 1
        assert (server.connection_count, cluster.failures) == (2, [])
