"""Malformed requests, as in test_hostile_clients.py, with RocketMQ's binary header encoding.

    code 2 | language 1 | version 2 | opaque 4 | flag 4 | remark length 4 | remark
    | fields length 4 | fields: key length 2 | key | value length 4 | value

A value can be any bytes, and a length can be wrong. Each request gets a response or its connection
is closed; other connections are served, and the store is clean at the end.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.requests import REQUESTS
from tests.e2e.broker.test_hostile_clients import (
    MISSING,
    ODD_TEXTS,
    PORTS,
    PROBE,
    RawConnection,
    assert_all_have_responses,
    assert_no_other_files,
    assert_still_works,
    valid_fields,
)
from tests.support.brokers import Server

pytestmark = pytest.mark.slow

ROCKETMQ_SERIALIZER = 1
FIXED = struct.Struct(">hbhii")
CODES = sorted(code for code in REQUESTS if code < 1 << 15)  # the header has two bytes for it
MUTATIONS = 60  # for each request code
ODD_BYTES = (
    *(text.encode() for text in ODD_TEXTS),
    *(b"\0", b"\xff\xfe\xfd", b"\xed\xa0\x80", b"\xf0\x9d", b"\0\0\0\x01"),
)


def with_length(data: bytes, length_bytes: int, *, length: int | None = None) -> bytes:
    """Return the data after a length field, which has the right length or the given one."""
    length = len(data) if length is None else length
    return length.to_bytes(length_bytes, "big", signed=length < 0) + data


def as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def packed_frame(header: bytes, body: bytes = b"") -> bytes:
    head = bytes([ROCKETMQ_SERIALIZER]) + len(header).to_bytes(3, "big")
    return (4 + len(header) + len(body)).to_bytes(4, "big") + head + header + body


def packed(header: dict[str, Any]) -> bytes:
    fields = b"".join(
        with_length(as_bytes(name), 2) + with_length(as_bytes(value), 4)
        for name, value in header["extFields"].items()
    )
    fixed = FIXED.pack(header["code"], 0, 401, header["opaque"], header.get("flag", 0))
    return fixed + with_length(b"", 4) + with_length(fields, 4)


class PackedConnection(RawConnection):
    """A connection that sends and receives headers in the binary encoding."""

    def encode(self, header: dict[str, Any], body: bytes = b"") -> bytes:
        return packed_frame(packed(header), body)

    def decode(self, header: bytes) -> dict[str, Any]:
        code, _, _, opaque, flag = FIXED.unpack_from(header)
        remark_bytes = int.from_bytes(header[FIXED.size : FIXED.size + 4], "big")
        remark = header[FIXED.size + 4 : FIXED.size + 4 + remark_bytes]
        return {"code": code, "opaque": opaque, "flag": flag, "remark": remark.decode()}

    def is_open_after(self, data: bytes) -> bool:
        """Send the data and a probe. Returns whether the probe got a response; if not, the server
        has closed the connection."""
        probe = {"code": PROBE, "opaque": 1 << 30, "extFields": {"topic": "none"}}
        try:
            self.socket.sendall(data + self.encode(probe))
        except ConnectionError:
            return False
        while (response := self.next_response()) is not None:
            if response["opaque"] == 1 << 30 and response["flag"] & 1:
                return True
        return False


def malformed_fields(code: int) -> Iterator[dict[Any, Any]]:
    """Yield valid fields, then variants with one malformed field, then with all of them."""
    good: dict[Any, Any] = valid_fields(code)
    yield good
    yield {}
    yield {**good, b"\xff\xfe": "a key that is not UTF-8"}
    yield {**good, "k" * 32_767: "v"}
    yield {**good, "huge": b"x" * 4_000_000}
    for name, value in itertools.product(good, (MISSING, *ODD_BYTES)):
        changed = {**good, name: value}
        if value is MISSING:
            del changed[name]
        yield changed
    for value in ODD_BYTES:
        yield dict.fromkeys(good, value)


def bad_headers() -> dict[str, bytes]:
    """Return headers that each have one wrong length, by a description."""
    good = packed({"code": 30, "opaque": 1, "extFields": {"topic": "hostile", "queueId": "0"}})
    fixed, topic = good[: FIXED.size], with_length(b"topic", 2)
    lengths = (-1, -(2**31), 2**31 - 1, 1, 1000)
    headers = {f"truncated to {end} bytes": good[:end] for end in range(1, len(good))}
    headers["longer than its length"] = good + b"\0"
    for length in lengths:
        headers[f"a remark length of {length}"] = fixed + with_length(b"", 4, length=length)
        headers[f"a fields length of {length}"] = (
            fixed + with_length(b"", 4) + with_length(b"", 4, length=length)
        )
        value = topic + with_length(b"", 4, length=length)
        headers[f"a value length of {length}"] = fixed + with_length(b"", 4) + with_length(value, 4)
    for length in (-1, -(2**15), 2**15 - 1):
        key = with_length(b"", 2, length=length)
        headers[f"a key length of {length}"] = fixed + with_length(b"", 4) + with_length(key, 4)
    return headers


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("hostile-packed")) as server:
        yield server
        assert_still_works(server)
    server.assert_clean()
    assert_no_other_files(server)
    assert "Traceback" not in server.errors


@pytest.fixture(autouse=True)
def topic_and_group(served: Server) -> None:
    with served.client() as client:
        client.create_topic("hostile")
        client.create_group("hostile-group")


def test_well_formed_requests_succeed(served: Server) -> None:
    """If they did not, the other tests would only see the encoding itself refused."""
    connection = PackedConnection(served.address)
    assert connection.request(30, {"topic": "hostile", "queueId": "0"}).code == 0
    assert connection.request(310, valid_fields(310), b"body").code == 0
    connection.close()


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("code", CODES, ids=lambda code: RequestCode(code).name)
def test_malformed_fields_get_a_response(served: Server, code: int, port: str) -> None:
    requests = ((fields, b"") for fields in malformed_fields(code))
    assert_all_have_responses(PORTS[port](served), code, requests, PackedConnection)
    assert served.is_alive


def test_a_header_with_a_wrong_length_closes_its_connection_and_no_other(served: Server) -> None:
    good = PackedConnection(served.address)
    for description, header in bad_headers().items():
        bad = PackedConnection(served.address)
        assert not bad.is_open_after(packed_frame(header)), description
        bad.close()
        assert good.request(PROBE, {"topic": "x"}).code is not None, description
    good.close()


def test_a_request_with_a_duplicate_field_gets_a_response(served: Server) -> None:
    topic = with_length(b"topic", 2) + with_length(b"hostile", 4)
    queue = with_length(b"queueId", 2) + with_length(b"0", 4)
    fixed = FIXED.pack(30, 0, 401, 7, 0) + with_length(b"", 4)
    connection = PackedConnection(served.address)
    connection.socket.sendall(packed_frame(fixed + with_length(topic + queue + topic, 4)))
    response = connection.next_response()
    assert response is not None
    assert (response["code"], response["opaque"]) == (0, 7)
    connection.close()


@pytest.mark.parametrize("code", CODES, ids=lambda code: RequestCode(code).name)
def test_after_a_mutated_request_the_connection_works_or_is_closed(
    served: Server, code: int
) -> None:
    """Up to four bytes of a valid header are replaced. Any code may result, so no response is
    expected; but the next request must be read correctly."""
    rng = Random(code)
    connection = PackedConnection(served.address)
    for number in range(MUTATIONS):
        header = bytearray(
            packed({"code": code, "opaque": number, "extFields": valid_fields(code)})
        )
        for _ in range(rng.randint(1, 4)):
            header[rng.randrange(len(header))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x2F))
        body = rng.randbytes(rng.choice((0, 9, 200)))
        if not connection.is_open_after(packed_frame(bytes(header), body)):
            connection.close()
            connection = PackedConnection(served.address)
    connection.close()
    assert served.is_alive, served.errors
