"""A name server that is called with encoded frames, and brokers to register with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from escrowmq.message.topic_config import DataVersion, TopicConfig
from escrowmq.namesrv.name_server import NameServer
from escrowmq.namesrv.registration import (
    BrokerDescription,
    RegistrationRequest,
    registration_request,
    unregistration_request,
)
from escrowmq.remoting import responses
from escrowmq.remoting.bodies import decode_body, encode_body
from escrowmq.remoting.codes import FLAG_ONEWAY, JSON, VERSION, RequestCode
from escrowmq.remoting.command import Command, decode_command, encode_command
from escrowmq.remoting.connection import Connection, InvalidRequest
from escrowmq.remoting.frame import Frame, FrameDecoder, encode_frame
from escrowmq.remoting.headers import Header, encode_header
from escrowmq.remoting.requests import Request
from tests.support.fake_peers import FakePeer

J = TypeVar("J", bound=msgspec.Struct)

NOW_MS = 1_700_000_000_000

A = BrokerDescription(cluster="c", name="a", address="10.0.0.1:10911", ha_address="10.0.0.1:10912")
B = BrokerDescription(cluster="c", name="b", address="10.0.0.2:10911", ha_address="10.0.0.2:10912")
SLAVE = BrokerDescription(
    cluster="c", name="a", address="10.0.0.3:10911", ha_address="10.0.0.3:10912", broker_id=1
)


def topic_config(name: str, queues: int = 4, *, perm: int = 6, flag: int = 0) -> TopicConfig:
    return TopicConfig(
        topic_name=name,
        read_queue_nums=queues,
        write_queue_nums=queues,
        perm=perm,
        topic_sys_flag=flag,
    )


def data_version(counter: int = 1, *, state: int = 0) -> DataVersion:
    return DataVersion(state_version=state, timestamp=NOW_MS, counter=counter)


def data_version_request(broker: BrokerDescription, version: DataVersion) -> RegistrationRequest:
    """Ask whether a registration is necessary, as RocketMQ's brokers do."""
    fields = unregistration_request(broker).fields
    return RegistrationRequest(RequestCode.QUERY_DATA_VERSION, fields, encode_body(version))


@dataclass(frozen=True)
class HarnessResponse:
    """A decoded response of a name server."""

    command: Command
    body: bytes

    @property
    def code(self) -> int:
        return self.command.code

    @property
    def remark(self) -> str:
        return self.command.remark

    @property
    def fields(self) -> dict[str, str]:
        return self.command.ext_fields

    def json(self) -> Any:
        """Decode the body by a parser that accepts only strict JSON."""
        return json.loads(self.body)

    def read(self, kind: type[J]) -> J:
        return decode_body(kind, self.body)


class NameServerHarness:
    """A name server that takes requests and returns responses as bytes, as on a socket."""

    def __init__(self, server: NameServer | None = None) -> None:
        self.server = server or NameServer()
        self.now_ms = NOW_MS
        self.connection = FakePeer("127.0.0.1:1")

    def send(
        self,
        code: int,
        fields: Header | dict[str, str] | None = None,
        body: bytes = b"",
        *,
        flag: int = 0,
        version: int = VERSION,
        serializer: int = JSON,
    ) -> bytes:
        """Send a request and return the encoded response."""
        ext = encode_header(fields) if isinstance(fields, Header) else fields or {}
        command = Command(code=code, opaque=7, flag=flag, version=version, ext_fields=ext)
        connection = Connection()
        connection.receive(encode_frame(serializer, encode_command(command, serializer), body))
        [event] = connection.events()
        match event:
            case Request():
                return self.server.handle(event, self.connection, now_ms=self.now_ms)
            case InvalidRequest(request=request, error=error):
                return responses.encode_error(request, error)
        raise AssertionError(event)

    def call(
        self,
        code: int,
        fields: Header | dict[str, str] | None = None,
        body: bytes = b"",
        *,
        version: int = VERSION,
        serializer: int = JSON,
    ) -> HarnessResponse:
        """Send a request and return the decoded response."""
        decoder = FrameDecoder(Frame)
        decoder.receive(self.send(code, fields, body, version=version, serializer=serializer))
        [frame] = decoder.frames()
        command = decode_command(frame.serializer, frame.header)
        assert command.is_response
        assert command.opaque == 7
        return HarnessResponse(command, bytes(frame.body))

    def call_registration(self, request: RegistrationRequest) -> HarnessResponse:
        return self.call(request.code, request.fields, request.body)

    def send_registration_oneway(self, request: RegistrationRequest) -> bytes:
        return self.send(request.code, request.fields, request.body, flag=FLAG_ONEWAY)

    def register(
        self, broker: BrokerDescription, *topics: TopicConfig, counter: int = 1, state: int = 0
    ) -> HarnessResponse:
        return self.call_registration(
            registration_request(broker, topics, data_version(counter, state=state))
        )


def visible_state(server: NameServer) -> object:
    """Return everything that requests can read from a name server, to compare it."""
    routes = server.routes
    return (
        routes.clusters(),
        routes.brokers(),
        {name: routes.route(name) for name in routes.topics()},
        routes.address_count,
        server.kv_config.dump(),
        server.kv_config.revision,
    )
