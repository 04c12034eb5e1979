"""The same ill will as in test_broker_hostile.py, in RocketMQ's other header encoding.

    code 2 | language 1 | version 2 | opaque 4 | flag 4 | remark length 4 | remark
    | fields length 4 | fields: key length 2 | key | value length 4 | value

Values there are any bytes, and every length is somebody's word. What is asked like this is
answered or its line is closed; the broker goes on, and its store is clean.
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
    HARMLESS,
    MISSING,
    ODD_TEXTS,
    PORTS,
    Line,
    ask_all,
    assert_at_home,
    plausible,
    works_as_before,
)
from tests.support.brokers import Server

pytestmark = pytest.mark.slow

ROCKETMQ = 1
FIXED = struct.Struct(">hbhii")
CODES = sorted(code for code in REQUESTS if code < 1 << 15)  # of others the header has no room
MUTANTS = 60  # of each request
ODD_BYTES = (
    *(text.encode() for text in ODD_TEXTS),
    *(b"\0", b"\xff\xfe\xfd", b"\xed\xa0\x80", b"\xf0\x9d", b"\0\0\0\x01"),
)


def sized(data: bytes, length_bytes: int, *, said: int | None = None) -> bytes:
    """With its length before it, or with another."""
    length = len(data) if said is None else said
    return length.to_bytes(length_bytes, "big", signed=length < 0) + data


def as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def in_frame(header: bytes, body: bytes = b"") -> bytes:
    head = bytes([ROCKETMQ]) + len(header).to_bytes(3, "big")
    return (4 + len(header) + len(body)).to_bytes(4, "big") + head + header + body


def packed(header: dict[str, Any]) -> bytes:
    fields = b"".join(
        sized(as_bytes(name), 2) + sized(as_bytes(value), 4)
        for name, value in header["extFields"].items()
    )
    fixed = FIXED.pack(header["code"], 0, 401, header["opaque"], header.get("flag", 0))
    return fixed + sized(b"", 4) + sized(fields, 4)


class PackedLine(Line):
    """Speaks the other encoding, and is answered in it."""

    def encode(self, header: dict[str, Any], body: bytes = b"") -> bytes:
        return in_frame(packed(header), body)

    def decode(self, header: bytes) -> dict[str, Any]:
        code, _, _, opaque, flag = FIXED.unpack_from(header)
        remark_bytes = int.from_bytes(header[FIXED.size : FIXED.size + 4], "big")
        remark = header[FIXED.size + 4 : FIXED.size + 4 + remark_bytes]
        return {"code": code, "opaque": opaque, "flag": flag, "remark": remark.decode()}

    def is_in_step(self, data: bytes) -> bool:
        """Behind this, whatever it is, a harmless request is answered; or the line is closed."""
        harmless = {"code": HARMLESS, "opaque": 1 << 30, "extFields": {"topic": "none"}}
        try:
            self.socket.sendall(data + self.encode(harmless))
        except ConnectionError:
            return False
        while (answer := self.next_answer()) is not None:
            if answer["opaque"] == 1 << 30 and answer["flag"] & 1:
                return True
        return False


def with_odd_fields(code: int) -> Iterator[dict[Any, Any]]:
    good: dict[Any, Any] = plausible(code)
    yield good
    yield {}
    yield {**good, b"\xff\xfe": "a key that is no text"}
    yield {**good, "k" * 32_767: "v"}
    yield {**good, "huge": b"x" * 4_000_000}
    for name, value in itertools.product(good, (MISSING, *ODD_BYTES)):
        changed = {**good, name: value}
        if value is MISSING:
            del changed[name]
        yield changed
    for value in ODD_BYTES:  # all at once
        yield dict.fromkeys(good, value)


def bad_headers() -> dict[str, bytes]:
    """Headers whose lengths lie, one way each."""
    good = packed({"code": 30, "opaque": 1, "extFields": {"topic": "hostile", "queueId": "0"}})
    fixed, topic = good[: FIXED.size], sized(b"topic", 2)
    lengths = (-1, -(2**31), 2**31 - 1, 1, 1000)
    found = {f"cut after {end} bytes": good[:end] for end in range(1, len(good))}
    found["longer than it says"] = good + b"\0"
    for length in lengths:
        found[f"a remark of {length}"] = fixed + sized(b"", 4, said=length)
        found[f"fields of {length}"] = fixed + sized(b"", 4) + sized(b"", 4, said=length)
        value = topic + sized(b"", 4, said=length)
        found[f"a value of {length}"] = fixed + sized(b"", 4) + sized(value, 4)
    for length in (-1, -(2**15), 2**15 - 1):
        key = sized(b"", 2, said=length)
        found[f"a key of {length}"] = fixed + sized(b"", 4) + sized(key, 4)
    return found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("hostile-packed")) as server:
        yield server
        works_as_before(server)
    server.assert_clean()
    assert_at_home(server)
    assert "Traceback" not in server.errors


@pytest.fixture(autouse=True)
def as_expected(served: Server) -> None:
    with served.client() as client:
        client.create_topic("hostile")
        client.create_group("hostile-group")


def test_the_encoding_is_understood(served: Server) -> None:
    """Else all that follows would be refused at the door."""
    line = PackedLine(served.address)
    assert line.ask(30, {"topic": "hostile", "queueId": "0"}).code == 0
    assert line.ask(310, plausible(310), b"body").code == 0
    line.close()


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("code", CODES, ids=lambda code: RequestCode(code).name)
def test_odd_fields_are_answered(served: Server, code: int, port: str) -> None:
    asked = ((fields, b"") for fields in with_odd_fields(code))
    ask_all(PORTS[port](served), code, asked, PackedLine)
    assert served.is_alive


def test_every_length_that_lies_closes_its_line_and_no_other(served: Server) -> None:
    good = PackedLine(served.address)
    for what, header in bad_headers().items():
        bad = PackedLine(served.address)
        assert not bad.is_in_step(in_frame(header)), what
        bad.close()
        assert good.ask(HARMLESS, {"topic": "x"}).code is not None, what
    good.close()


def test_a_field_that_is_there_twice_is_answered(served: Server) -> None:
    twice = sized(b"topic", 2) + sized(b"hostile", 4)
    queue = sized(b"queueId", 2) + sized(b"0", 4)
    fixed = FIXED.pack(30, 0, 401, 7, 0) + sized(b"", 4)
    line = PackedLine(served.address)
    line.socket.sendall(in_frame(fixed + sized(twice + queue + twice, 4)))
    answer = line.next_answer()
    assert answer is not None
    assert (answer["code"], answer["opaque"]) == (0, 7)
    line.close()


@pytest.mark.parametrize("code", CODES, ids=lambda code: RequestCode(code).name)
def test_mutants_leave_the_line_in_step_or_closed(served: Server, code: int) -> None:
    """Any bytes of a good header become others; nobody knows what is asked then."""
    rng = Random(code)
    line = PackedLine(served.address)
    for number in range(MUTANTS):
        header = bytearray(packed({"code": code, "opaque": number, "extFields": plausible(code)}))
        for _ in range(rng.randint(1, 4)):
            header[rng.randrange(len(header))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, 0x2F))
        if not line.is_in_step(in_frame(bytes(header), rng.randbytes(rng.choice((0, 9, 200))))):
            line.close()
            line = PackedLine(served.address)
    line.close()
    assert served.is_alive, served.errors
