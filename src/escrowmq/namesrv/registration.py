"""What a broker sends to a name server, EscrowMQ's or RocketMQ's, and how it reads the responses.

    at the start, every 30 s, and when a topic changes    registration_request
    before a repeated registration, to save its body      data_version_request; register if changed
    at the end                                            unregistration_request

These are pure functions; `server/namesrv.py` has the connection and the timer.

RocketMQ's name server demands more than ours:
  - the first registration of a broker id must have at least two topics, or it is refused;
  - every change of a topic must change the data version, or it goes unnoticed;
  - the body must not be compressed.

Topics that a later registration leaves out stay registered, so it is enough to send what changed
together with the new data version. A name server that was restarted has lost everything: it
responds to `data_version_request` with `changed`, and all topics must be sent again.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from escrowmq.errors import RequestRefused
from escrowmq.message.topic_config import DataVersion, TopicConfig
from escrowmq.remoting import headers_admin as headers
from escrowmq.remoting.bodies import (
    KvTable,
    RegisterBrokerBody,
    TopicConfigs,
    decode_body,
    encode_body,
)
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.headers import H, Header, NoFields, decode_header


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerDescription:
    """The identity of a broker, as clients will see it."""

    cluster: str
    name: str
    address: str  # ip:port
    ha_address: str
    broker_id: int = 0
    heartbeat_timeout_ms: int | None = None  # None: the default of the name server, 120 s


@dataclass(frozen=True, slots=True)
class RegistrationRequest:
    """A request, with what `remoting.connection.Connection.call` takes."""

    code: int
    fields: Header
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class RegistrationResult:
    """The response to a registration.

    A slave gets the addresses of its master. `ordered_topics` are settings such as "a:4;b:4".
    """

    master_address: str | None = None
    master_ha_address: str | None = None
    ordered_topics: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DataVersionResult:
    has_changed: bool  # the name server has another version: register
    version: DataVersion | None  # None: the broker is not registered


def registration_request(
    broker: BrokerDescription, topics: Iterable[TopicConfig], version: DataVersion
) -> RegistrationRequest:
    """Return the request that registers a broker with these topics."""
    table = {topic.topic_name: topic for topic in topics}
    body = encode_body(
        RegisterBrokerBody(
            topic_config_serialize_wrapper=TopicConfigs(
                topic_config_table=table, data_version=version
            )
        )
    )
    fields = headers.RegisterBroker(
        broker_name=broker.name,
        broker_addr=broker.address,
        cluster_name=broker.cluster,
        ha_server_addr=broker.ha_address,
        broker_id=broker.broker_id,
        heartbeat_timeout_millis=broker.heartbeat_timeout_ms,
        enable_acting_master=False,
        compressed=False,
        body_crc32=zlib.crc32(body) & 0x7FFFFFFF,
    )
    return RegistrationRequest(RequestCode.REGISTER_BROKER, fields, body)


def unregistration_request(broker: BrokerDescription) -> RegistrationRequest:
    """Return the request that removes a broker at once."""
    return RegistrationRequest(RequestCode.UNREGISTER_BROKER, _identity(broker))


def data_version_request(broker: BrokerDescription, version: DataVersion) -> RegistrationRequest:
    """Return the request that asks whether a registration is necessary."""
    return RegistrationRequest(
        RequestCode.QUERY_DATA_VERSION, _identity(broker), encode_body(version)
    )


def parse_registration_response(response: Command, body: bytes | memoryview) -> RegistrationResult:
    """Return the content of the response to a registration.

    Raises RequestRefused if it was refused, InvalidField or BrokenBody if it cannot be decoded.
    """
    fields = _parse_fields(headers.RegisterBrokerResponse, response)
    ordered = decode_body(KvTable, body).table if body else {}
    return RegistrationResult(fields.master_addr, fields.ha_server_addr, ordered)


def parse_data_version_response(response: Command, body: bytes | memoryview) -> DataVersionResult:
    """Return the content of the response. Raises as `parse_registration_response` does."""
    fields = _parse_fields(headers.QueryDataVersionResponse, response)
    return DataVersionResult(fields.changed, decode_body(DataVersion, body) if body else None)


def parse_unregistration_response(response: Command) -> None:
    """Raise RequestRefused if the request was refused."""
    _parse_fields(NoFields, response)


def _parse_fields(header_type: type[H], response: Command) -> H:
    if response.code != ResponseCode.SUCCESS:
        raise RequestRefused(response.code, response.remark)
    return decode_header(header_type, response.ext_fields)


def _identity(broker: BrokerDescription) -> headers.BrokerIdentity:
    return headers.BrokerIdentity(
        broker_name=broker.name,
        broker_addr=broker.address,
        cluster_name=broker.cluster,
        broker_id=broker.broker_id,
    )
