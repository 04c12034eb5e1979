"""Frames between a client and real brokers: we read them as they were meant, and write the same.

What a header says is judged by a JSON parser that shares no code with `escrowmq.wire`.
"""

from __future__ import annotations

from typing import Any

import pytest

from escrowmq.errors import UnknownRequest
from escrowmq.message.keys import encode_host
from escrowmq.message.record import LogOffset, decode_record
from escrowmq.remoting.bodies import Heartbeat, TopicRoute, decode_body, encode_body
from escrowmq.remoting.codes import JSON, ROCKETMQ, RequestCode
from escrowmq.remoting.command import Command, decode_command, encode_command
from escrowmq.remoting.frame import Frame, FrameDecoder, encode_frame
from escrowmq.remoting.headers import decode_header, encode_header
from escrowmq.remoting.requests import (
    Request,
    decode_request_head,
    header_types,
    request_head_from_command,
)
from escrowmq.remoting.responses import SendResponseEncoder
from tests.interop import fixtures, records
from tests.interop.remoting import loads
from tests.interop.stores import as_record, cut

EXCHANGES = [
    (version, name) for version in fixtures.VERSIONS for name in fixtures.exchanges(version)
]
UNSUPPORTED = 9_999
# Whose answers carry fields; the others have none, or none of the kind that a success has.
CODES_WITH_FIELDS = (0, 19, 20, 21)

every_exchange = pytest.mark.parametrize(
    ("version", "name"), EXCHANGES, ids=[f"{version}-{name}" for version, name in EXCHANGES]
)
every_version = pytest.mark.parametrize("version", fixtures.VERSIONS)


def one_frame(data: bytes) -> Frame:
    reader = FrameDecoder(Frame)
    reader.receive(data)
    [frame] = reader.frames()
    assert reader.buffered_bytes == 0
    return frame


def both(version: str, name: str) -> tuple[Frame, Frame]:
    request, answer = fixtures.exchange(version, name)
    return one_frame(request), one_frame(answer)


def told(header: bytes) -> dict[str, Any]:
    """What is in a JSON header, without what its absence says as well."""
    said = loads(header.decode())
    said.pop("serializeTypeCurrentRPC", None)  # Java's own note; the frame says it too
    return {name: value for name, value in said.items() if value not in (None, {}, "")}


def commands(version: str, name: str) -> tuple[Command, Command]:
    request, answer = both(version, name)
    return decode_command(JSON, request.header), decode_command(JSON, answer.header)


# --- frames and headers ------------------------------------------------------------------------


def test_there_is_something_to_read() -> None:
    assert {version for version, _ in EXCHANGES} == set(fixtures.VERSIONS)
    assert len(EXCHANGES) > 50


@every_exchange
def test_frames_are_cut_wherever_the_network_cuts_them(version: str, name: str) -> None:
    stream = b"".join(fixtures.exchange(version, name))
    reader, got = FrameDecoder(Frame), []
    for at in range(0, len(stream), 7):
        reader.receive(stream[at : at + 7])
        got += list(reader.frames())
    assert got == list(both(version, name))
    again = [encode_frame(frame.serializer, frame.header, frame.body) for frame in got]
    assert b"".join(again) == stream


@every_exchange
def test_headers_say_what_json_says_and_are_written_alike(version: str, name: str) -> None:
    for frame in both(version, name):
        command = decode_command(frame.serializer, frame.header)
        said = told(frame.header)
        assert command.language.name == said["language"]
        assert command.code == said["code"]
        assert (command.opaque, command.flag) == (said["opaque"], said["flag"])
        assert command.remark == said.get("remark", "")
        assert command.ext_fields == said.get("extFields", {})
        assert told(encode_command(command)) == said


@every_exchange
def test_headers_survive_the_other_encoding(version: str, name: str) -> None:
    for command in commands(version, name):
        assert decode_command(ROCKETMQ, encode_command(command, ROCKETMQ)) == command


@every_exchange
def test_an_answer_belongs_to_its_request(version: str, name: str) -> None:
    request, answer = commands(version, name)
    assert not request.is_response
    assert answer.is_response
    assert answer.opaque == request.opaque


# --- typed fields ------------------------------------------------------------------------------


@every_exchange
def test_typed_requests_hold_all_that_was_sent(version: str, name: str) -> None:
    request, answer = commands(version, name)
    if request.code == UNSUPPORTED:
        with pytest.raises(UnknownRequest) as refused:
            header_types(request.code)
        assert refused.value.code == answer.code
        return
    kind = header_types(request.code).request
    typed = decode_header(kind, request.ext_fields)
    written = encode_header(typed)
    assert {name: written[name] for name in request.ext_fields} == request.ext_fields
    assert decode_header(kind, written) == typed  # what was added are defaults


@every_exchange
def test_the_fast_path_reads_the_same(version: str, name: str) -> None:
    frame, _ = both(version, name)
    if name != "unsupported":
        assert decode_request_head(frame.header) == request_head_from_command(
            decode_command(JSON, frame.header)
        )


@every_exchange
def test_typed_answers_hold_all_that_was_answered(version: str, name: str) -> None:
    request, answer = commands(version, name)
    if answer.code in CODES_WITH_FIELDS:
        kind = header_types(request.code).response
        assert encode_header(decode_header(kind, answer.ext_fields)) == answer.ext_fields


@pytest.mark.parametrize("name", ["send", "send.half", "send.delayed"])
@every_version
def test_our_answer_to_a_send_is_the_brokers(version: str, name: str) -> None:
    frame, theirs = both(version, name)
    head = decode_request_head(frame.header)
    assert head is not None
    said = told(theirs.header)["extFields"]
    host, log_offset = bytes.fromhex(said["msgId"][:16]), int(said["msgId"][16:], 16)
    assert host[:4] == encode_host("127.0.0.1", 0)[:4]
    ours = SendResponseEncoder(store_host=host).encode(
        Request(head, frame.body, JSON),
        log_offset=log_offset,
        queue_id=int(said["queueId"]),
        queue_offset=int(said["queueOffset"]),
        transaction_id=said.get("transactionId"),
    )
    assert told(one_frame(ours).header)["extFields"] == said


# --- bodies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pull.found", "query_message", "view_message"])
@every_version
def test_records_in_answers_are_read(version: str, name: str) -> None:
    _, answer = both(version, name)
    for data in cut(bytes(answer.body)):
        theirs = records.decode_record(data)
        assert as_record(decode_record(data, 0, LogOffset(theirs.log_offset))) == theirs


@every_version
def test_a_heartbeat_is_read_and_written(version: str) -> None:
    request, _ = both(version, "heartbeat")
    body = decode_body(Heartbeat, request.body)
    assert body.client_id == "127.0.0.1@interop"
    assert [entry.group_name for entry in body.producer_data_set] == ["interop-producers"]
    assert loads(encode_body(body).decode()).items() >= loads(str(request.body, "utf-8")).items()


@pytest.mark.parametrize("name", ["route", "route.old_client"])
@every_version
def test_a_route_is_read_in_either_dialect(version: str, name: str) -> None:
    request, answer = both(version, name)
    assert decode_command(JSON, request.header).code == RequestCode.GET_ROUTEINFO_BY_TOPIC
    is_strict = b'"brokerAddrs":{"0":"' in bytes(answer.body)
    assert is_strict == (name == "route")

    route = decode_body(TopicRoute, answer.body)
    [broker], [queues] = route.broker_datas, route.queue_datas
    assert (broker.broker_name, broker.cluster) == ("broker-a", "DefaultCluster")
    assert broker.broker_addrs.keys() == {0}
    assert broker.broker_addrs[0].startswith("127.0.0.1:")
    assert broker.enable_acting_master is (False if version == "5.5.0" else None)
    assert (queues.broker_name, queues.perm) == ("broker-a", 6)
    assert (queues.read_queue_nums, queues.write_queue_nums) == (4, 4)
    assert loads(encode_body(route).decode()) == loads(str(answer.body, "utf-8"))
