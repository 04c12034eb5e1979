"""Other protocols are recognised by their first bytes, and frames of our own never are."""

from __future__ import annotations

import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.remoting.codes import JSON, ROCKETMQ
from escrowmq.remoting.foreign_protocols import TLS_REQUIRED_ALERT, foreign_protocol
from escrowmq.remoting.frame import encode_frame


def tls_hello() -> bytes:
    """Return what a TLS client of Python sends first."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost")
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


@pytest.mark.parametrize(
    ("first_bytes", "protocol"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/2"),
        (bytes.fromhex("000012040000000000000300000064"), "HTTP/2"),
        (b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n", "HTTP/1"),
        (b"POST / HTTP/1.1\r\n\r\n", "HTTP/1"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "HTTP/1"),
        (tls_hello(), "TLS"),
        (TLS_REQUIRED_ALERT, "TLS"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH"),
        (b"AMQP\x00\x00\x09\x01", "AMQP"),
        (bytes.fromhex("0000002300120003000000010007") + b"librdkafka", "Kafka"),
        (b"", ""),
        (b"\x00", ""),
        (b"some other text", ""),
    ],
)
def test_a_protocol_is_recognised_by_its_first_bytes(first_bytes: bytes, protocol: str) -> None:
    name = foreign_protocol(first_bytes)
    assert name.startswith(protocol) if protocol else name == ""
    assert foreign_protocol(memoryview(first_bytes)) == name


@given(
    serializer=st.sampled_from([JSON, ROCKETMQ]),
    header=st.binary(min_size=1, max_size=40),
    body=st.binary(max_size=5_000),
)
def test_a_frame_of_our_own_is_never_another_protocol(
    serializer: int, header: bytes, body: bytes
) -> None:
    assert foreign_protocol(encode_frame(serializer, header, body)) == ""
