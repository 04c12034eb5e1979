"""We decode captured frames of clients and real brokers correctly, and encode the same bytes.

Headers are compared with those of a JSON parser that shares no code with `escrowmq.remoting`.
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
from tests.interop.fixtures import single_frame
from tests.interop.remoting import loads
from tests.interop.stores import as_record, split_records

EXCHANGES = [
    (version, name) for version in fixtures.VERSIONS for name in fixtures.exchanges(version)
]
UNSUPPORTED = 9_999
# Responses with these codes have the fields of a success; others have none, or different ones.
CODES_WITH_FIELDS = (0, 19, 20, 21)

every_exchange = pytest.mark.parametrize(
    ("version", "name"), EXCHANGES, ids=[f"{version}-{name}" for version, name in EXCHANGES]
)
every_version = pytest.mark.parametrize("version", fixtures.VERSIONS)


def exchange_frames(version: str, name: str) -> tuple[Frame, Frame]:
    request, response = fixtures.exchange(version, name)
    return single_frame(request), single_frame(response)


def json_header(header: bytes) -> dict[str, Any]:
    """Return the fields of a JSON header, without those that have a default value."""
    fields = loads(header.decode())
    fields.pop("serializeTypeCurrentRPC", None)  # only Java writes it, and the frame has it too
    return {name: value for name, value in fields.items() if value not in (None, {}, "")}


def commands(version: str, name: str) -> tuple[Command, Command]:
    request, response = exchange_frames(version, name)
    return decode_command(JSON, request.header), decode_command(JSON, response.header)


# --- frames and headers ------------------------------------------------------------------------


def test_exchanges_of_every_version_are_captured() -> None:
    assert {version for version, _ in EXCHANGES} == set(fixtures.VERSIONS)
    assert len(EXCHANGES) > 50


@every_exchange
def test_frames_are_decoded_wherever_the_stream_is_split(version: str, name: str) -> None:
    stream = b"".join(fixtures.exchange(version, name))
    decoder, frames = FrameDecoder(Frame), []
    for start in range(0, len(stream), 7):
        decoder.receive(stream[start : start + 7])
        frames += list(decoder.frames())
    assert frames == list(exchange_frames(version, name))
    encoded = [encode_frame(frame.serializer, frame.header, frame.body) for frame in frames]
    assert b"".join(encoded) == stream


@every_exchange
def test_headers_are_decoded_like_json_and_encoded_again(version: str, name: str) -> None:
    for frame in exchange_frames(version, name):
        command = decode_command(frame.serializer, frame.header)
        expected = json_header(frame.header)
        assert command.language.name == expected["language"]
        assert command.code == expected["code"]
        assert (command.opaque, command.flag) == (expected["opaque"], expected["flag"])
        assert command.remark == expected.get("remark", "")
        assert command.ext_fields == expected.get("extFields", {})
        assert json_header(encode_command(command)) == expected


@every_exchange
def test_headers_survive_the_rocketmq_encoding(version: str, name: str) -> None:
    for command in commands(version, name):
        assert decode_command(ROCKETMQ, encode_command(command, ROCKETMQ)) == command


@every_exchange
def test_a_response_has_the_opaque_number_of_its_request(version: str, name: str) -> None:
    request, response = commands(version, name)
    assert not request.is_response
    assert response.is_response
    assert response.opaque == request.opaque


# --- typed fields ------------------------------------------------------------------------------


@every_exchange
def test_typed_request_headers_have_every_field(version: str, name: str) -> None:
    request, response = commands(version, name)
    if request.code == UNSUPPORTED:
        with pytest.raises(UnknownRequest) as refused:
            header_types(request.code)
        assert refused.value.code == response.code
        return
    kind = header_types(request.code).request
    typed = decode_header(kind, request.ext_fields)
    encoded = encode_header(typed)
    assert {name: encoded[name] for name in request.ext_fields} == request.ext_fields
    assert decode_header(kind, encoded) == typed  # any additional field has its default value


@every_exchange
def test_the_fast_path_decodes_the_same_request_head(version: str, name: str) -> None:
    frame, _ = exchange_frames(version, name)
    if name != "unsupported":
        assert decode_request_head(frame.header) == request_head_from_command(
            decode_command(JSON, frame.header)
        )


@every_exchange
def test_typed_response_headers_have_every_field(version: str, name: str) -> None:
    request, response = commands(version, name)
    if response.code in CODES_WITH_FIELDS:
        kind = header_types(request.code).response
        assert encode_header(decode_header(kind, response.ext_fields)) == response.ext_fields


@pytest.mark.parametrize("name", ["send", "send.half", "send.delayed"])
@every_version
def test_our_response_to_a_send_equals_that_of_the_broker(version: str, name: str) -> None:
    frame, theirs = exchange_frames(version, name)
    head = decode_request_head(frame.header)
    assert head is not None
    expected = json_header(theirs.header)["extFields"]
    message_id = expected["msgId"]
    host, log_offset = bytes.fromhex(message_id[:16]), int(message_id[16:], 16)
    assert host[:4] == encode_host("127.0.0.1", 0)[:4]
    ours = SendResponseEncoder(store_host=host).encode(
        Request(head, frame.body, JSON),
        log_offset=log_offset,
        queue_id=int(expected["queueId"]),
        queue_offset=int(expected["queueOffset"]),
        transaction_id=expected.get("transactionId"),
    )
    assert json_header(single_frame(ours).header)["extFields"] == expected


# --- bodies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pull.found", "query_message", "view_message"])
@every_version
def test_records_in_responses_are_decoded(version: str, name: str) -> None:
    _, response = exchange_frames(version, name)
    for data in split_records(bytes(response.body)):
        theirs = records.decode_record(data)
        assert as_record(decode_record(data, 0, LogOffset(theirs.log_offset))) == theirs


@every_version
def test_a_heartbeat_is_decoded_and_encoded(version: str) -> None:
    request, _ = exchange_frames(version, "heartbeat")
    body = decode_body(Heartbeat, request.body)
    assert body.client_id == "127.0.0.1@interop"
    assert [entry.group_name for entry in body.producer_data_set] == ["interop-producers"]
    assert loads(encode_body(body).decode()).items() >= loads(str(request.body, "utf-8")).items()


@pytest.mark.parametrize("name", ["route", "route.old_client"])
@every_version
def test_a_route_is_decoded_from_strict_and_from_lenient_json(version: str, name: str) -> None:
    request, response = exchange_frames(version, name)
    assert decode_command(JSON, request.header).code == RequestCode.GET_ROUTEINFO_BY_TOPIC
    is_strict = b'"brokerAddrs":{"0":"' in bytes(response.body)
    assert is_strict == (name == "route")

    route = decode_body(TopicRoute, response.body)
    [broker], [queues] = route.broker_datas, route.queue_datas
    assert (broker.broker_name, broker.cluster) == ("broker-a", "DefaultCluster")
    assert broker.broker_addrs.keys() == {0}
    assert broker.broker_addrs[0].startswith("127.0.0.1:")
    assert broker.enable_acting_master is (False if version == "5.5.0" else None)
    assert (queues.broker_name, queues.perm) == ("broker-a", 6)
    assert (queues.read_queue_nums, queues.write_queue_nums) == (4, 4)
    assert loads(encode_body(route).decode()) == loads(str(response.body, "utf-8"))
