"""What a broker tells a name server, ours or Apache's, and what it hears back. Pure.

    at the start, every 30 s, and when a topic changes      register
    instead of every register but the first, if wanted      query_version, and register if changed
    at the end                                              unregister

What Apache's name server wants, beyond ours:
  - the first registration of a broker id has at least two topics, or it is refused;
  - every change of a topic moves the data version, or it goes unnoticed;
  - the body is not compressed.
Topics that a later registration leaves out are kept, so sending only what changed is enough, with
the new data version. A name server that restarted has forgotten everything: the answer to
`query_version` is then `changed`, and all topics are due.
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
    """Who we are, as clients will find us."""

    cluster: str
    name: str
    address: str  # ip:port
    ha_address: str
    broker_id: int = 0
    heartbeat_timeout_ms: int | None = None  # None: the name server's own, 120 s


@dataclass(frozen=True, slots=True)
class RegistrationRequest:
    """A request, as wire.Connection.call takes it."""

    code: int
    fields: Header
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class RegistrationResult:
    """A registration was. A slave is told of its master; ordered topics come as "a:4;b:4"."""

    master_address: str | None = None
    master_ha_address: str | None = None
    ordered_topics: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DataVersionResult:
    has_changed: bool  # ours is not what the name server knows: register
    version: DataVersion | None  # None: it does not know us


def registration_request(
    broker: BrokerDescription, topics: Iterable[TopicConfig], version: DataVersion
) -> RegistrationRequest:
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
    return RegistrationRequest(RequestCode.UNREGISTER_BROKER, _identity(broker))


def data_version_request(broker: BrokerDescription, version: DataVersion) -> RegistrationRequest:
    return RegistrationRequest(
        RequestCode.QUERY_DATA_VERSION, _identity(broker), encode_body(version)
    )


def parse_registration_response(response: Command, body: bytes | memoryview) -> RegistrationResult:
    """Raises RequestRefused if the answer is no, BadField or BrokenBody if it cannot be read."""
    fields = _parse_fields(headers.RegisterBrokerResponse, response)
    ordered = decode_body(KvTable, body).table if body else {}
    return RegistrationResult(fields.master_addr, fields.ha_server_addr, ordered)


def parse_data_version_response(response: Command, body: bytes | memoryview) -> DataVersionResult:
    """Raises as `read_registered` does."""
    fields = _parse_fields(headers.QueryDataVersionResponse, response)
    return DataVersionResult(fields.changed, decode_body(DataVersion, body) if body else None)


def parse_unregistration_response(response: Command) -> None:
    """Raises RequestRefused if the answer is no."""
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
