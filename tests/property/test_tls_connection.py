"""TLS of a connection: whatever the cuts and the sizes, the protocol gets what the client wrote.

Damaged and truncated streams give it a beginning of that, whole records only, and close the
connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.server.tls_connection import PASSED_BYTES_MAX, RECORD_BYTES_MAX, TlsConnection
from tests.support.fake_transport import FakeTransport
from tests.support.signing import Certificates
from tests.support.tls_pair import RecordingProtocol, TlsPair

VERSIONS = (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)

# Around the sizes at which something changes: one record, and one portion for OpenSSL.
sizes = st.one_of(
    st.integers(0, 100),
    st.integers(RECORD_BYTES_MAX - 2, RECORD_BYTES_MAX + 2),
    st.integers(PASSED_BYTES_MAX - 100, PASSED_BYTES_MAX + 100),
    st.integers(0, 200_000),
)
messages = st.lists(sizes, min_size=1, max_size=5).map(
    lambda lengths: [bytes([65 + number]) * length for number, length in enumerate(lengths)]
)
versions = st.sampled_from(VERSIONS)


@pytest.fixture(scope="module")
def contexts(
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[ssl.TLSVersion, tuple[ssl.SSLContext, ssl.SSLContext]]:
    """Contexts of a server and a client for each version."""
    certificates = Certificates(tmp_path_factory.mktemp("certificates"))
    by_version = {}
    for version in VERSIONS:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(certificates.cert, certificates.key)
        client = certificates.client()
        client.minimum_version = client.maximum_version = version
        by_version[version] = server, client
    return by_version


Contexts = dict[ssl.TLSVersion, tuple[ssl.SSLContext, ssl.SSLContext]]


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


def cut_at(data: bytes, places: list[int]) -> list[bytes]:
    """Cut the data at these places, modulo its length."""
    borders = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[begin:end] for begin, end in pairwise(borders) if begin < end]


places = st.lists(st.integers(0, 1 << 30), max_size=12)


@given(version=versions, messages=messages, places=places)
def test_the_protocol_receives_what_the_client_writes_however_it_is_cut(
    contexts: Contexts,
    loop: asyncio.Runner,
    version: ssl.TLSVersion,
    messages: list[bytes],
    places: list[int],
) -> None:
    async def run() -> None:
        pair = TlsPair(*contexts[version])
        pair.shake_hands(lambda flight: cut_at(flight, places))
        await pair.connection.handshake
        for piece in cut_at(b"".join(map(pair.encrypted, messages)), places):
            pair.connection.data_received(piece)
        assert pair.protocol.received == b"".join(messages)
        assert pair.protocol.events == ["made"]
        assert not pair.socket.is_closing()

    loop.run(run())


@given(version=versions, messages=messages, in_one=st.booleans())
def test_the_client_reads_what_the_protocol_writes_and_then_an_orderly_end(
    contexts: Contexts,
    loop: asyncio.Runner,
    version: ssl.TLSVersion,
    messages: list[bytes],
    in_one: bool,
) -> None:
    async def run() -> None:
        pair = TlsPair(*contexts[version])
        pair.shake_hands()
        if in_one:
            pair.connection.writelines(messages)
        else:
            for message in messages:
                pair.connection.write(message)
        pair.connection.close()
        pair.connection.write(b"too late")
        assert pair.read_all() == b"".join(messages)
        assert pair.socket.is_closing()

    loop.run(run())


@given(
    version=versions,
    messages=messages,
    places=places,
    place=st.integers(0, 1 << 30),
    damage=st.one_of(st.integers(0, 7), st.binary(min_size=1, max_size=100)),
)
def test_a_damaged_stream_gives_a_beginning_and_closes_the_connection(
    contexts: Contexts,
    loop: asyncio.Runner,
    version: ssl.TLSVersion,
    messages: list[bytes],
    places: list[int],
    place: int,
    damage: int | bytes,
) -> None:
    """Flip a bit, or insert bytes."""

    async def run() -> None:
        pair = TlsPair(*contexts[version])
        pair.shake_hands()
        stream = bytearray(b"".join(map(pair.encrypted, [*messages, b"the last"])))
        at = place % len(stream)
        if isinstance(damage, int):
            stream[at] ^= 1 << damage
        else:
            stream[at:at] = damage
        for piece in cut_at(bytes(stream), places):
            if not pair.socket.is_closing():
                pair.connection.data_received(piece)
        if not pair.socket.is_closing():  # it waits for the rest of a record that never comes
            pair.connection.eof_received()
        assert pair.socket.is_closing()
        assert (b"".join(messages) + b"the last").startswith(pair.protocol.received)
        assert len(pair.protocol.received) < len(b"".join(messages)) + len(b"the last")

    loop.run(run())


@given(version=versions, messages=messages, place=st.integers(0, 1 << 30), has_notify=st.booleans())
def test_a_client_that_ends_its_stream_is_disconnected_in_order(
    contexts: Contexts,
    loop: asyncio.Runner,
    version: ssl.TLSVersion,
    messages: list[bytes],
    place: int,
    has_notify: bool,
) -> None:
    """With a close_notify, or truncated anywhere."""

    async def run() -> None:
        pair = TlsPair(*contexts[version])
        pair.shake_hands()
        stream = b"".join(map(pair.encrypted, messages))
        if has_notify:
            notify = pair.close_notify()
            pair.connection.data_received(stream + notify + b"what comes behind it is not read")
            assert pair.protocol.received == b"".join(messages)
        else:
            pair.connection.data_received(stream[: place % (len(stream) + 1)])
            pair.connection.eof_received()
            assert b"".join(messages).startswith(pair.protocol.received)
        assert pair.protocol.events == ["made", "eof"]
        assert pair.socket.is_closing()
        if not has_notify:  # a client of OpenSSL that has ended its stream itself reads no more
            assert pair.read_all() == b""

    loop.run(run())


@given(
    stream=st.one_of(
        st.binary(max_size=600),
        st.binary(max_size=600).map(lambda rest: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc" + rest),
        st.integers(0, 70_000).map(lambda length: b"\x16\x03\x01" + b"\xff" * length),
    ),
    places=places,
)
def test_a_handshake_of_garbage_makes_no_protocol(
    contexts: Contexts, loop: asyncio.Runner, stream: bytes, places: list[int]
) -> None:
    async def run() -> None:
        protocol, socket = RecordingProtocol(), FakeTransport(4_711)
        server, _ = contexts[ssl.TLSVersion.TLSv1_3]
        connection = TlsConnection(lambda: protocol, server)
        connection.connection_made(socket)
        for piece in cut_at(stream, places):
            if not socket.is_closing():
                connection.data_received(piece)
        connection.eof_received()
        connection.connection_lost(None)
        assert socket.is_closing()
        assert protocol.events == []
        with pytest.raises(OSError, match=r"."):
            await connection.handshake

    loop.run(run())
