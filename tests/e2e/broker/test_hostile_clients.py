"""Whatever is sent to it, a server answers or closes that line, and goes on as before.

Every request code we know is asked with every field missing, of another type, negative, huge, empty
or ill meant, and with bodies that are garbage. Behind each request comes a harmless one on the same
line, which shows that the first was read. At the end the store is looked through.
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

from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.requests import REQUESTS
from tests.interop.remoting import loads
from tests.support.brokers import WAIT_S, Server

pytestmark = pytest.mark.slow

HARMLESS = 105  # a route: a name server answers it, a broker says that it does not know it
MAY_STAY_SILENT = {RequestCode.END_TRANSACTION}  # an unknown verdict is never answered
MAY_BE_LATE = {
    RequestCode.DELETE_TOPIC_IN_BROKER,  # it waits until nobody writes to the files
    RequestCode.PREPARE_BACKUP,  # it waits for a flush, if something was appended just now
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


class Line:
    """Sends any bytes; knows a harmless request by which it sees how far the server has come."""

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

    def next_answer(self) -> dict[str, Any] | None:
        """None: the server has closed the line."""
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

    def ask(self, code: int, ext_fields: object, body: bytes = b"") -> Outcome:
        """Sends are answered when their turn ends, so after the harmless request beside them."""
        asked = next(self._opaque)
        asking = self.encode({"code": code, "opaque": asked, "extFields": ext_fields}, body)
        for _ in range(100_000 if code in MAY_BE_LATE else 2):
            harmless = next(self._opaque)
            fields = {"topic": "none"}
            asking += self.encode({"code": HARMLESS, "opaque": harmless, "extFields": fields})
            try:
                self.socket.sendall(asking)
            except ConnectionError:
                return Outcome(None, "closed")
            asking, outcome = b"", self._outcome(asked, harmless)
            if outcome is not None:
                return outcome
        return Outcome(None, "no answer")

    def _outcome(self, asked: int, harmless: int) -> Outcome | None:
        """None: the harmless request was answered, the other one was not."""
        found: Outcome | None = None
        while (answer := self.next_answer()) is not None:
            if answer["flag"] & 1 and answer["opaque"] == asked:
                found = Outcome(answer["code"], answer.get("remark") or "")
            elif answer["flag"] & 1 and answer["opaque"] == harmless:
                return found
        return Outcome(None, "closed")


class Outcome(NamedTuple):
    code: int | None
    remark: str


def frame(header: dict[str, Any], body: bytes = b"", *, serializer: int = 0) -> bytes:
    text = json.dumps({"flag": 0, "version": 401, "language": "JAVA", **header}).encode()
    head = bytes([serializer]) + len(text).to_bytes(3, "big")
    return (4 + len(text) + len(body)).to_bytes(4, "big") + head + text + body


def plausible(code: int) -> dict[str, Any]:
    """Fields with which the request could be meant well."""
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


def with_odd_fields(code: int) -> Iterator[dict[str, Any]]:
    good = plausible(code)
    yield good
    yield {}
    for name, value in itertools.product(good, (*ODD_TEXTS, *ODD_VALUES)):
        changed = {**good, name: value}
        if value is MISSING:
            del changed[name]
        yield changed
    for value in ODD_TEXTS:  # all at once
        yield dict.fromkeys(good, value)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("hostile")) as server:
        yield server
        works_as_before(server)
    server.assert_clean()
    assert_at_home(server)


@pytest.fixture(autouse=True)
def as_expected(served: Server) -> None:
    """A topic and a group that requests can be about, whatever the test before did to them."""
    with served.client() as client:
        client.create_topic("hostile")
        client.create_group("hostile-group")


def works_as_before(served: Server) -> None:
    assert served.is_alive, served.errors
    with served.client() as client, served.namesrv_client() as names:
        client.create_topic("good")
        sent = client.send("good", b"still here", {"KEYS": "k"})
        assert client.view_by_id(sent.message_id).body == b"still here"
        assert client.pull_all("good", 0)[-1].body == b"still here"
        client.send("good", b"later", {"TIMER_DELAY_MS": "50"}, queue_id=1)
        names.expect(105, {"topic": "TBW102"}, allowed=(0, 17))


def assert_at_home(served: Server) -> None:
    """No name that came over the wire became a path outside of the store."""
    assert {path.name for path in served.directory.iterdir()} == {
        *("broker.conf", "data", "serve.err")
    }
    known = {
        "commitlog",
        "consumequeue",
        "index",
        "config",
        "checkpoint",
        "lock",
        "abort",
        "namesrv",
    }
    found = {path.name for path in served.data.iterdir()}
    assert {name for name in found - known if not name.startswith("escrowmq")} == set()


Address = Callable[[Server], str]
PORTS: dict[str, Address] = {
    "broker": lambda served: served.address,
    "namesrv": lambda served: served.namesrv_address,
}


def ask_all(
    address: str, code: int, asked: Iterator[tuple[Any, bytes]], kind: type[Line] = Line
) -> None:
    """Each is answered, or its line is closed. An answer must not be that we have a bug."""
    line = kind(address)
    wrong: list[str] = []
    try:
        for fields, body in asked:
            outcome = line.ask(code, fields, body)
            said = f"{outcome.remark}: {str(fields)[:300]} {body[:80]!r}"
            if outcome.remark == "closed":
                line.close()
                line = kind(address)
                continue
            silent = outcome.code is None and code not in MAY_STAY_SILENT
            if silent or "internal error" in outcome.remark:
                wrong.append(said)
    finally:
        line.close()
    assert not wrong, f"{len(wrong)} of them\n" + "\n".join(wrong[:10])


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("code", sorted(REQUESTS), ids=lambda code: RequestCode(code).name)
def test_odd_fields_are_answered(served: Server, code: int, port: str) -> None:
    ask_all(PORTS[port](served), code, ((fields, b"") for fields in with_odd_fields(code)))
    assert served.is_alive


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("code", sorted(REQUESTS), ids=lambda code: RequestCode(code).name)
def test_garbage_bodies_are_answered(served: Server, code: int, port: str) -> None:
    good = plausible(code)
    fields: list[dict[str, Any]] = [good]
    if "m" in good:
        fields.append({**good, "m": "true"})
    asked = ((each, body) for each in fields for body in GARBAGE)
    ask_all(PORTS[port](served), code, asked)
    assert served.is_alive


@pytest.mark.parametrize("code", [0, -1, 3, 999, 99_999, 2**31 - 1])
def test_a_code_that_nobody_knows_is_answered_with_3(served: Server, code: int) -> None:
    line = Line(served.address)
    assert line.ask(code, {}).code == 3
    line.close()


@pytest.mark.parametrize("fields", [None, [], "x", 7, {"": ""}, {"a" * 10_000: "b"}])
def test_fields_that_are_no_table_do_no_harm(served: Server, fields: object) -> None:
    line = Line(served.address)
    assert line.ask(310, fields).code != 0
    line.close()


# --- frames --------------------------------------------------------------------------------------

GOOD = frame({"code": 30, "opaque": 1, "extFields": {"topic": "hostile", "queueId": "0"}})
BAD_FRAMES = {
    "a length of 0": b"\0\0\0\0" + GOOD,
    "a length of 3": b"\0\0\0\3abc" + GOOD,
    "a negative length": b"\xff\xff\xff\xff" + GOOD,
    "a length of 2 GiB": b"\x7f\xff\xff\xff" + GOOD,
    "just over the limit": (16 * 1024 * 1024 + 5).to_bytes(4, "big") + GOOD,
    "a header longer than its frame": b"\0\0\0\x08\0\0\0\x64abcd" + GOOD,
    "a header of 16 MiB": b"\0\0\0\x08\0\xff\xff\xffabcd" + GOOD,
    "no header": b"\0\0\0\x04\0\0\0\0" + GOOD,
    "serializer 2": frame({"code": 30, "opaque": 1}, serializer=2) + GOOD,
    "serializer 255": frame({"code": 30, "opaque": 1}, serializer=255) + GOOD,
    "a packed header that is none": b"\0\0\0\x0c\x01\0\0\x08abcdefgh" + GOOD,
    "a header that is no JSON": b"\0\0\0\x08\0\0\0\x04{{{{" + GOOD,
    "a header that is no object": b"\0\0\0\x06\0\0\0\x02[]" + GOOD,
    "a header that is no text": b"\0\0\0\x08\0\0\0\x04\xff\xfe\xfd\xfc" + GOOD,
    "a header without a code": frame({"opaque": 1}) + GOOD,
    "a web browser": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a TLS client": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 600,
}


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("what", BAD_FRAMES)
def test_a_bad_frame_closes_its_line_and_no_other(served: Server, what: str, port: str) -> None:
    bad, good = Line(PORTS[port](served)), Line(PORTS[port](served))
    bad.socket.sendall(BAD_FRAMES[what])
    with contextlib.suppress(OSError):  # closed before we could say that this was all
        bad.socket.shutdown(socket.SHUT_WR)
    answers = list(iter(bad.next_answer, None))  # ends only when the line is closed
    assert all(answer["flag"] & 1 for answer in answers)
    assert good.ask(HARMLESS, {"topic": "x"}).code is not None
    bad.close()
    good.close()


def test_a_frame_cut_anywhere_and_then_closed_does_no_harm(served: Server) -> None:
    header = {"code": 310, "opaque": 1, "extFields": {**plausible(310), "b": "cut"}}
    whole = frame(header, b"never complete")
    for cut in range(0, len(whole), 7):
        line = Line(served.address)
        line.socket.sendall(whole[:cut])
        line.close()
    with served.client() as client:
        assert client.max_offset("cut", 0) == 0


def test_a_frame_that_comes_byte_by_byte_is_answered(served: Server) -> None:
    line = Line(served.address)
    line.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for byte in GOOD:
        line.socket.sendall(bytes([byte]))
    answer = line.next_answer()
    assert answer is not None
    assert answer["code"] == 0
    line.close()


def test_half_a_frame_and_then_silence_holds_nobody_up(served: Server) -> None:
    silent = [Line(served.address) for _ in range(50)]
    for number, line in enumerate(silent):
        line.socket.sendall(GOOD[: number + 1])
    with served.client() as client:
        for number in range(50):
            client.send("good", b"%d" % number)
    for number, line in enumerate(silent):
        line.socket.sendall(GOOD[number + 1 :])
        answer = line.next_answer()
        assert answer is not None
        assert answer["code"] == 0
        line.close()


def test_a_line_that_reads_no_answers_holds_nobody_up(served: Server) -> None:
    """It asks for far more than any buffer holds; asked are 60 times 250 KiB."""
    with served.client() as client:
        client.create_topic("long")
        for _ in range(4):
            client.send("long", b"x" * 65_000)
        deaf = Line(served.address)
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
        deaf.socket.sendall(pull * 60)
        for number in range(20):
            client.send("good", b"%d" % number)
        codes = {answer["code"] for _ in range(60) if (answer := deaf.next_answer())}
        assert codes == {0}  # once it reads, all of them come
        deaf.close()


def test_answers_that_nobody_asked_for_are_passed_over(served: Server) -> None:
    line = Line(served.address)
    stray = {"code": 0, "opaque": 77, "flag": 1, "extFields": {}}
    line.socket.sendall(frame(stray) * 100 + GOOD)
    answer = line.next_answer()
    assert answer is not None
    assert answer["opaque"] == 1
    line.close()


def test_a_hostile_load_is_all_in_one_process_that_restarts(tmp_path: Path) -> None:
    """What the oddest requests left in the configuration files can be read again."""
    with Server(tmp_path) as served:
        with served.client() as client:
            client.create_topic("hostile")
            client.create_group("hostile-group")
        for code in (RequestCode.UPDATE_AND_CREATE_TOPIC, RequestCode.UPDATE_CONSUMER_OFFSET):
            ask_all(served.address, code, ((fields, b"") for fields in with_odd_fields(code)))
        groups = RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP
        ask_all(served.address, groups, (({}, body) for body in GARBAGE))
        ask_all(served.address, RequestCode.HEART_BEAT, (({}, body) for body in GARBAGE))
        served.restart()
        works_as_before(served)
    served.assert_clean()
    assert_at_home(served)
