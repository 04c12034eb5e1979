"""Malformed requests: the server responds or closes that connection, and serves all others.

Every known request code is sent with each field missing, of another type, negative, huge, empty or
malicious, and with garbage bodies. Each request is followed by a harmless probe on the same
connection; the response to the probe shows that the request was read. At the end the files of the
store are checked.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.requests import REQUESTS
from tests.interop.remoting import loads
from tests.support.brokers import WAIT_S, Server

pytestmark = pytest.mark.slow

PROBE = 105  # get a route: a name server returns it, a broker responds that it has no such request
WITHOUT_RESPONSE = {RequestCode.END_TRANSACTION}  # an UNKNOWN verdict gets no response
LATE_RESPONSES = {
    RequestCode.DELETE_TOPIC_IN_BROKER,  # waits until no checkpoint writes to the files
    RequestCode.PREPARE_BACKUP,  # waits for a flush if a record was appended just now
    RequestCode.PUT_KV_CONFIG,  # waits until the file is written
    RequestCode.DELETE_KV_CONFIG,
}
MISSING = object()
ODD_TEXTS = (
    *("", "abc", "-1", "-2147483649", str(2**31), str(2**31 - 1), str(2**63 - 1), str(2**64)),
    *("../../x", "/etc/passwd", "..", "%RETRY%../x", "a\0b", "x" * 100_000, "1e9", "nan"),
    *("\u202e\u2603\U0001d11e", "a\x01b\x02c", "SCHEDULE_TOPIC_XXXX", "*", "\r\n"),
)
ODD_VALUES: tuple[Any, ...] = (
    *(MISSING, None, True, -1, 0, 2**31, 2**63, -(2**63) - 1, 2**70, 1.5, 1e300),
    *([], {}, [[[]]], {"a": {"b": 1}}),
)
GARBAGE = (
    *(b"", b"\0", b"\0" * 1000, b"\xff" * 1000, b"{", b"[]", b"null", b"7", b'"x"', b"{}"),
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b'{"clientID":"c","consumerDataSet":[{"groupName":"../../x","subscriptionDataSet":[{}]}]}',
    b'{"clientID":"","producerDataSet":[{"groupName":""}],"consumerDataSet":[{"groupName":""}]}',
    b'{"clientID":"c","consumerDataSet":[{"groupName":"g","messageModel":99,"consumeType":-1}]}',
    b'{"clientID":"c","heartbeatFingerprint":99999999999999999999}',
    b'{"consumerGroup":"g","clientId":"c","mqSet":[{"topic":"\\u0000","brokerName":"","queueId":-1}]}',
    b'{"consumerGroup":"g","clientId":"c","mqSet":[{"topic":"t","queueId":2147483648}]}',
    b'{"groupName":"\\ud800"}',
    b'{"groupName":"gg","retryMaxTimes":-99999999999999999999,"attributes":{"a":[]}}',
    json.dumps({"groupName": "g" * 100_000}).encode(),
    struct.pack(">iiiii", 2**31 - 1, 0, 0, 0, 2**31 - 1),
    struct.pack(">iiiii", 22, 0, 0, 0, -1) + b"\0\0",
)


class RawConnection:
    """A connection that can send any bytes. A probe shows how far the server has read."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=WAIT_S)
        self._received = b""
        self._opaque = itertools.count(1)

    def close(self) -> None:
        self.socket.close()

    def encode(self, header: dict[str, Any], body: bytes = b"") -> bytes:
        return frame(header, body)

    def decode(self, header: bytes) -> dict[str, Any]:
        return loads(header.decode())

    def next_response(self) -> dict[str, Any] | None:
        """Return the header of the next frame, or None if the server closed the connection."""
        while True:
            size = int.from_bytes(self._received[:4], "big") + 4
            if len(self._received) >= max(4, size):
                whole, self._received = self._received[:size], self._received[size:]
                return self.decode(whole[8 : 8 + int.from_bytes(whole[5:8], "big")])
            try:
                chunk = self.socket.recv(1 << 20)
            except ConnectionError:
                return None
            if not chunk:
                return None
            self._received += chunk

    def request(self, code: int, ext_fields: object, body: bytes = b"") -> Outcome:
        """Send a request and a probe, and return the outcome of the request."""
        opaque = next(self._opaque)
        data = self.encode({"code": code, "opaque": opaque, "extFields": ext_fields}, body)
        # The response to a send comes when the turn ends, which is after the response to a probe
        # of the same turn. A second probe is read in a later turn.
        for _ in range(100_000 if code in LATE_RESPONSES else 2):
            probe_opaque = next(self._opaque)
            fields = {"topic": "none"}
            data += self.encode({"code": PROBE, "opaque": probe_opaque, "extFields": fields})
            try:
                self.socket.sendall(data)
            except ConnectionError:
                return Outcome(None, "closed")
            data, outcome = b"", self._outcome_before_probe(opaque, probe_opaque)
            if outcome is not None:
                return outcome
        return Outcome(None, "no response")

    def _outcome_before_probe(self, opaque: int, probe_opaque: int) -> Outcome | None:
        """Read up to the response to the probe. Returns None if the request had no response."""
        outcome: Outcome | None = None
        while (response := self.next_response()) is not None:
            if response["flag"] & 1 and response["opaque"] == opaque:
                outcome = Outcome(response["code"], response.get("remark") or "")
            elif response["flag"] & 1 and response["opaque"] == probe_opaque:
                return outcome
        return Outcome(None, "closed")


class Outcome(NamedTuple):
    """A response; `code` is None if there was none, and `remark` says why."""

    code: int | None
    remark: str


def frame(header: dict[str, Any], body: bytes = b"", *, serializer: int = 0) -> bytes:
    text = json.dumps({"flag": 0, "version": 401, "language": "JAVA", **header}).encode()
    head = bytes([serializer]) + len(text).to_bytes(3, "big")
    return (4 + len(text) + len(body)).to_bytes(4, "big") + head + text + body


def valid_fields(code: int) -> dict[str, Any]:
    """Return fields with which the request is well-formed."""
    texts = {"topic": "hostile", "b": "hostile", "c": "TBW102", "defaultTopic": "TBW102", "i": ""}
    texts |= {"d": "4", "defaultTopicQueueNums": "4", "properties": "", "perm": "6"}
    texts |= {"readQueueNums": "4", "writeQueueNums": "4"}
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(REQUESTS[code].request):
        name, kind = field.encode_name, str(field.type)
        if "bool" in kind:
            fields[name] = "false"
        elif "int" in kind.lower():
            fields[name] = texts.get(name, "0")
        else:
            fields[name] = texts.get(name, "hostile-group")
    return fields


def malformed_fields(code: int) -> Iterator[dict[str, Any]]:
    """Yield valid fields, then variants with one malformed field, then with all of them."""
    good = valid_fields(code)
    yield good
    yield {}
    for name, value in itertools.product(good, (*ODD_TEXTS, *ODD_VALUES)):
        changed = {**good, name: value}
        if value is MISSING:
            del changed[name]
        yield changed
    for value in ODD_TEXTS:
        yield dict.fromkeys(good, value)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("hostile")) as server:
        yield server
        assert_still_works(server)
    server.assert_clean()
    assert_no_other_files(server)


@pytest.fixture(autouse=True)
def topic_and_group(server: Server) -> None:
    """Create the topic and the group that requests name; an earlier test may have changed them."""
    with server.client() as client:
        client.create_topic("hostile")
        client.create_group("hostile-group")


def assert_still_works(server: Server) -> None:
    assert server.is_alive, server.errors
    with server.client() as client, server.namesrv_client() as name_server:
        client.create_topic("good")
        sent = client.send("good", b"still here", {"KEYS": "k"})
        assert client.view_by_id(sent.message_id).body == b"still here"
        assert client.pull_all("good", 0)[-1].body == b"still here"
        client.send("good", b"later", {"TIMER_DELAY_MS": "50"}, queue_id=1)
        name_server.expect(105, {"topic": "TBW102"}, allowed=(0, 17))


def assert_no_other_files(server: Server) -> None:
    """Check that no name from a request became a path outside of the store."""
    assert {path.name for path in server.directory.iterdir()} == {
        *("broker.conf", "data", "serve.err")
    }
    expected = {
        "commitlog",
        "consumequeue",
        "index",
        "config",
        "checkpoint",
        "lock",
        "abort",
        "namesrv",
    }
    names = {path.name for path in server.data.iterdir()}
    assert {name for name in names - expected if not name.startswith("escrowmq")} == set()


Address = Callable[[Server], str]
PORTS: dict[str, Address] = {
    "broker": lambda server: server.address,
    "namesrv": lambda server: server.namesrv_address,
}


def assert_all_have_responses(
    address: str,
    code: int,
    requests: Iterator[tuple[Any, bytes]],
    connection_class: type[RawConnection] = RawConnection,
) -> None:
    """Send requests, given as fields and body. Each must get a response that is not an internal
    error, or its connection must be closed."""
    connection = connection_class(address)
    failures: list[str] = []
    try:
        for fields, body in requests:
            outcome = connection.request(code, fields, body)
            if outcome.remark == "closed":
                connection.close()
                connection = connection_class(address)
                continue
            is_silent = outcome.code is None and code not in WITHOUT_RESPONSE
            if is_silent or "internal error" in outcome.remark:
                failures.append(f"{outcome.remark}: {str(fields)[:300]} {body[:80]!r}")
    finally:
        connection.close()
    assert not failures, f"{len(failures)} requests failed\n" + "\n".join(failures[:10])


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("code", sorted(REQUESTS), ids=lambda code: RequestCode(code).name)
def test_malformed_fields_get_a_response(server: Server, code: int, port: str) -> None:
    assert_all_have_responses(
        PORTS[port](server), code, ((fields, b"") for fields in malformed_fields(code))
    )
    assert server.is_alive


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("code", sorted(REQUESTS), ids=lambda code: RequestCode(code).name)
def test_garbage_bodies_get_a_response(server: Server, code: int, port: str) -> None:
    good = valid_fields(code)
    field_variants: list[dict[str, Any]] = [good]
    if "m" in good:  # the body of a send is also decoded as a batch
        field_variants.append({**good, "m": "true"})
    requests = ((fields, body) for fields in field_variants for body in GARBAGE)
    assert_all_have_responses(PORTS[port](server), code, requests)
    assert server.is_alive


@pytest.mark.parametrize("code", [0, -1, 3, 999, 99_999, 2**31 - 1])
def test_an_unknown_request_code_is_refused_as_not_supported(server: Server, code: int) -> None:
    connection = RawConnection(server.address)
    assert connection.request(code, {}).code == ResponseCode.REQUEST_CODE_NOT_SUPPORTED
    connection.close()


@pytest.mark.parametrize("fields", [None, [], "x", 7, {"": ""}, {"a" * 10_000: "b"}])
def test_extension_fields_that_are_not_an_object_are_refused(
    server: Server, fields: object
) -> None:
    connection = RawConnection(server.address)
    assert connection.request(310, fields).code != 0
    connection.close()


# --- frames --------------------------------------------------------------------------------------

GOOD = frame({"code": 30, "opaque": 1, "extFields": {"topic": "hostile", "queueId": "0"}})
BAD_FRAMES = {
    "a length of 0": b"\0\0\0\0" + GOOD,
    "a length of 3": b"\0\0\0\3abc" + GOOD,
    "a negative length": b"\xff\xff\xff\xff" + GOOD,
    "a length of 2 GiB": b"\x7f\xff\xff\xff" + GOOD,
    "a length just over the limit": (16 * 1024 * 1024 + 5).to_bytes(4, "big") + GOOD,
    "a header longer than its frame": b"\0\0\0\x08\0\0\0\x64abcd" + GOOD,
    "a header of 16 MiB": b"\0\0\0\x08\0\xff\xff\xffabcd" + GOOD,
    "no header": b"\0\0\0\x04\0\0\0\0" + GOOD,
    "serializer 2": frame({"code": 30, "opaque": 1}, serializer=2) + GOOD,
    "serializer 255": frame({"code": 30, "opaque": 1}, serializer=255) + GOOD,
    "an invalid packed header": b"\0\0\0\x0c\x01\0\0\x08abcdefgh" + GOOD,
    "a header that is not JSON": b"\0\0\0\x08\0\0\0\x04{{{{" + GOOD,
    "a header that is not an object": b"\0\0\0\x06\0\0\0\x02[]" + GOOD,
    "a header that is not UTF-8": b"\0\0\0\x08\0\0\0\x04\xff\xfe\xfd\xfc" + GOOD,
    "a header without a code": frame({"opaque": 1}) + GOOD,
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a TLS client": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 600,
}


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_bad_frame_closes_its_connection_and_no_other(
    server: Server, name: str, port: str
) -> None:
    bad, good = RawConnection(PORTS[port](server)), RawConnection(PORTS[port](server))
    bad.socket.sendall(BAD_FRAMES[name])
    with contextlib.suppress(OSError):  # the server may have closed the connection already
        bad.socket.shutdown(socket.SHUT_WR)
    responses = list(iter(bad.next_response, None))  # ends only when the connection is closed
    assert all(response["flag"] & 1 for response in responses)
    assert good.request(PROBE, {"topic": "x"}).code is not None
    bad.close()
    good.close()


def test_a_connection_closed_within_a_frame_stores_nothing(server: Server) -> None:
    header = {"code": 310, "opaque": 1, "extFields": {**valid_fields(310), "b": "cut"}}
    complete = frame(header, b"never complete")
    for length in range(0, len(complete), 7):
        connection = RawConnection(server.address)
        connection.socket.sendall(complete[:length])
        connection.close()
    with server.client() as client:
        assert client.max_offset("cut", 0) == 0


def test_a_frame_sent_byte_by_byte_gets_a_response(server: Server) -> None:
    connection = RawConnection(server.address)
    connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in GOOD:
        connection.socket.sendall(bytes([byte]))
    response = connection.next_response()
    assert response is not None
    assert response["code"] == 0
    connection.close()


def test_incomplete_frames_do_not_hold_up_other_connections(server: Server) -> None:
    incomplete = [RawConnection(server.address) for _ in range(50)]
    for number, connection in enumerate(incomplete):
        connection.socket.sendall(GOOD[: number + 1])
    with server.client() as client:
        for number in range(50):
            client.send("good", b"%d" % number)
    for number, connection in enumerate(incomplete):
        connection.socket.sendall(GOOD[number + 1 :])
        response = connection.next_response()
        assert response is not None
        assert response["code"] == 0
        connection.close()


def test_a_client_that_reads_no_responses_does_not_hold_up_others(server: Server) -> None:
    """It requests 60 times 250 KiB, which is far more than all buffers hold."""
    with server.client() as client:
        client.create_topic("long")
        for _ in range(4):
            client.send("long", b"x" * 65_000)
        not_reading = RawConnection(server.address)
        fields = {
            "consumerGroup": "hostile-group",
            "topic": "long",
            "queueId": "0",
            "queueOffset": "0",
            "maxMsgNums": "32",
            "sysFlag": "4",
            "subscription": "*",
        }
        pull = frame({"code": 11, "opaque": 5, "extFields": fields})
        not_reading.socket.sendall(pull * 60)
        for number in range(20):
            client.send("good", b"%d" % number)
        responses = [not_reading.next_response() for _ in range(60)]
        assert [response and response["code"] for response in responses] == [0] * 60
        not_reading.close()


def test_responses_without_a_request_are_ignored(server: Server) -> None:
    connection = RawConnection(server.address)
    stray = {"code": 0, "opaque": 77, "flag": 1, "extFields": {}}
    connection.socket.sendall(frame(stray) * 100 + GOOD)
    response = connection.next_response()
    assert response is not None
    assert response["opaque"] == 1
    connection.close()


def test_a_broker_restarts_after_malformed_requests(tmp_path: Path) -> None:
    """What malformed requests leave in the configuration files can be read at the next start."""
    with Server(tmp_path) as server:
        with server.client() as client:
            client.create_topic("hostile")
            client.create_group("hostile-group")
        for code in (RequestCode.UPDATE_AND_CREATE_TOPIC, RequestCode.UPDATE_CONSUMER_OFFSET):
            assert_all_have_responses(
                server.address, code, ((fields, b"") for fields in malformed_fields(code))
            )
        for code in (
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
            RequestCode.HEART_BEAT,
        ):
            assert_all_have_responses(server.address, code, (({}, body) for body in GARBAGE))
        server.restart()
        assert_still_works(server)
    server.assert_clean()
    assert_no_other_files(server)
