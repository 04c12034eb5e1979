"""Our name server responds to captured requests like the real name servers did."""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.message.topic_config import TopicConfig
from escrowmq.namesrv.name_server import NameServer
from escrowmq.namesrv.route_table import BrokerRegistration
from escrowmq.remoting.bodies import TopicRoute, decode_body
from escrowmq.remoting.codes import JSON
from escrowmq.remoting.command import Command, decode_command
from escrowmq.remoting.connection import Connection
from escrowmq.remoting.requests import Request
from tests.interop import fixtures
from tests.interop.fixtures import single_frame
from tests.interop.remoting import loads
from tests.support.fake_peers import FakePeer

every_version = pytest.mark.parametrize("version", fixtures.VERSIONS)
every_route = pytest.mark.parametrize("name", ["route", "route.old_client"])


def captured_response(version: str, name: str) -> tuple[Command, str]:
    """Return the header and the body of a captured response."""
    _, response = fixtures.exchange(version, name)
    return _decode(response)


def _decode(response: bytes) -> tuple[Command, str]:
    frame = single_frame(response)
    return decode_command(JSON, frame.header), str(frame.body, "utf-8")


def our_response(version: str, name: str) -> tuple[Command, str]:
    """Return our response to the captured request, from a name server with the same route."""
    server = NameServer()
    _, captured_body = captured_response(version, name)
    if not captured_body:  # the response about an unknown topic
        _, captured_body = captured_response(version, "route")
    route = decode_body(TopicRoute, captured_body.encode())
    [broker], [queues] = route.broker_datas, route.queue_datas
    orders = TopicConfig(
        topic_name="orders",
        read_queue_nums=queues.read_queue_nums,
        write_queue_nums=queues.write_queue_nums,
        perm=queues.perm,
    )
    registration = BrokerRegistration(
        cluster=broker.cluster or "",
        name=broker.broker_name,
        broker_id=0,
        address=broker.broker_addrs[0],
        topics=(orders,),
    )
    server.routes.register(registration, FakePeer("127.0.0.1:1"), now_ms=0)
    connection = Connection()
    connection.receive(fixtures.exchange(version, name)[0])
    [request] = connection.events()
    assert isinstance(request, Request)
    return _decode(server.handle(request, FakePeer("127.0.0.1:1"), now_ms=0))


def without_acting_master(route: dict[str, Any]) -> dict[str, Any]:
    """Return the route without a field that 4.9.7 lacks; we always send it, like 5.5.0."""
    for broker in route["brokerDatas"]:
        broker.pop("enableActingMaster", None)
    return route


@every_route
@every_version
def test_our_route_equals_that_of_the_name_server(version: str, name: str) -> None:
    their_header, their_body = captured_response(version, name)
    our_header, our_body = our_response(version, name)
    assert our_header.code == their_header.code == 0
    assert our_header.ext_fields == their_header.ext_fields
    their_route, our_route = loads(their_body), loads(our_body)
    if version == "5.5.0":
        assert our_route == their_route
    assert without_acting_master(our_route) == without_acting_master(their_route)


@every_version
def test_our_remark_about_an_unknown_topic_is_the_start_of_theirs(version: str) -> None:
    their_header, _ = captured_response(version, "route.unknown_topic")
    our_header, our_body = our_response(version, "route.unknown_topic")
    assert our_header.code == their_header.code == 17
    assert our_header.remark
    assert their_header.remark.startswith(our_header.remark)
    assert our_body == ""
