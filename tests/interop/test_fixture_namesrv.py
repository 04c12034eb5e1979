"""Answers of real name servers: ours has the same shape, and ours is asked with the same bytes."""

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
from escrowmq.remoting.frame import Frame, FrameDecoder
from escrowmq.remoting.requests import Request
from tests.interop import fixtures
from tests.interop.remoting import loads

every_version = pytest.mark.parametrize("version", fixtures.VERSIONS)
every_route = pytest.mark.parametrize("name", ["route", "route.old_client"])


def one_frame(data: bytes) -> Frame:
    reader = FrameDecoder(Frame)
    reader.receive(data)
    [frame] = reader.frames()
    return frame


def theirs(version: str, name: str) -> tuple[Command, str]:
    frame = one_frame(fixtures.exchange(version, name)[1])
    return decode_command(JSON, frame.header), str(frame.body, "utf-8")


def ours(version: str, name: str) -> tuple[Command, str]:
    """Our answer to the request they were asked, from a name server that knows the same."""
    server = NameServer()
    told = theirs(version, name)[1] or theirs(version, "route")[1]
    known = decode_body(TopicRoute, told.encode())
    [broker], [queues] = known.broker_datas, known.queue_datas
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
    server.routes.register(registration, None, now_ms=0)
    line = Connection()
    line.receive(fixtures.exchange(version, name)[0])
    [request] = line.events()
    assert isinstance(request, Request)
    frame = one_frame(server.handle(request, None, now_ms=0))
    return decode_command(JSON, frame.header), str(frame.body, "utf-8")


def without_acting_master(route: dict[str, Any]) -> dict[str, Any]:
    """4.x does not know it; we say it to everybody, as 5.x does."""
    for broker in route["brokerDatas"]:
        broker.pop("enableActingMaster", None)
    return route


@every_route
@every_version
def test_our_route_has_the_keys_and_values_of_theirs(version: str, name: str) -> None:
    their_head, their_body = theirs(version, name)
    our_head, our_body = ours(version, name)
    assert our_head.code == their_head.code == 0
    assert our_head.ext_fields == their_head.ext_fields
    their_route, our_route = loads(their_body), loads(our_body)
    if version == "5.5.0":
        assert our_route == their_route
    assert without_acting_master(our_route) == without_acting_master(their_route)


@every_version
def test_our_answer_about_an_unknown_topic_begins_like_theirs(version: str) -> None:
    their_head, _ = theirs(version, "route.unknown_topic")
    our_head, our_body = ours(version, "route.unknown_topic")
    assert our_head.code == their_head.code == 17
    assert their_head.remark.startswith(our_head.remark)
    assert our_body == ""
