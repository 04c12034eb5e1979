"""What a broker sends to a name server, EscrowMQ's or RocketMQ's.

    at the start, every 30 s, and when a topic changes    registration_request
    at the end                                            unregistration_request

These are pure functions; `server/namesrv.py` has the connection and the timer.

RocketMQ's name server demands more than ours:
  - the first registration of a broker id must have at least two topics, or it is refused;
  - every change of a topic must change the data version, or it goes unnoticed;
  - the body must not be compressed.

A name server that was restarted has lost everything, so every registration has all topics.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

from escrowmq.message.topic_config import DataVersion, TopicConfig
from escrowmq.remoting import headers_admin as headers
from escrowmq.remoting.bodies import RegisterBrokerBody, TopicConfigs, encode_body
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.headers import Header


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
    """A request, with what `call()` of a connection takes."""

    code: int
    fields: Header
    body: bytes = b""


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
    fields = headers.BrokerIdentity(
        broker_name=broker.name,
        broker_addr=broker.address,
        cluster_name=broker.cluster,
        broker_id=broker.broker_id,
    )
    return RegistrationRequest(RequestCode.UNREGISTER_BROKER, fields)
