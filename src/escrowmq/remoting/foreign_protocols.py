"""Recognise other protocols by their first bytes, for the error that ends such a connection.

A wrong port or a wrong client is a common mistake, and "the frame has 1347569952 bytes" explains it
to few. Nothing here can be the beginning of a valid frame of the remoting protocol.
"""

from __future__ import annotations

import re
from typing import Final

FOREIGN_BYTES: Final = 64  # enough of the beginning of a stream to recognise a protocol

_HTTP2 = "HTTP/2, as gRPC uses it (a RocketMQ 5 gRPC client, or the port of a RocketMQ proxy)"
_PREFIXES: Final = (
    (re.compile(rb"PRI \* HTTP/2"), _HTTP2),
    # A SETTINGS frame, with which an HTTP/2 server begins: its length, type 4, flags 0, stream 0.
    # In the remoting protocol it would be a frame without a header.
    (re.compile(rb"\x00\x00.\x04\x00\x00\x00\x00\x00", re.DOTALL), _HTTP2),
    (re.compile(rb"(GET|POST|PUT|HEAD|DELETE|OPTIONS|PATCH|CONNECT) \S+|HTTP/1"), "HTTP/1"),
    # A record of TLS: a handshake or an alert, and the version 3.
    (re.compile(rb"[\x15\x16]\x03[\x00-\x04]"), "TLS"),
    (re.compile(rb"SSH-"), "SSH"),
    (re.compile(rb"AMQP"), "AMQP (a RabbitMQ client)"),
    # The first request of a Kafka client: length, ApiVersions (18), its version 0 to 9.
    (re.compile(rb"\x00\x00..\x00\x12\x00[\x00-\x09]", re.DOTALL), "Kafka's protocol"),
)


def foreign_protocol(first_bytes: bytes | bytearray | memoryview) -> str:
    """Return which protocol the first bytes of a stream look like; empty if it is none of these."""
    beginning = bytes(first_bytes[:FOREIGN_BYTES])
    return next((name for prefix, name in _PREFIXES if prefix.match(beginning)), "")


# What a server that requires TLS sends to a client without it: a fatal alert, protocol_version.
TLS_REQUIRED_ALERT: Final = bytes((21, 3, 3, 0, 2, 2, 70))
