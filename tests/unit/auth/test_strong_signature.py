"""EscrowMQ's own signature: it covers the whole request, and a request is accepted once."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.auth.acl import parse_rules
from escrowmq.auth.signature import Signer
from escrowmq.auth.strong_signature import (
    AGE_MAX_MS,
    SESSIONS_MAX,
    SIGNATURE,
    WINDOW,
    ReplayGuard,
    SignedAt,
    StrongSigner,
    has_valid_strong_signature,
    parse_signed_at,
)
from escrowmq.auth.validator import AccessValidator
from escrowmq.errors import AccessRefused
from escrowmq.remoting.codes import FLAG_ONEWAY, JSON, ROCKETMQ, Language, RequestCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.connection import Connection, SignFunction
from escrowmq.remoting.headers import SendMessageV2
from escrowmq.remoting.requests import Request
from escrowmq.secret import Secret

NOW_MS: Final = 1_700_000_000_000
KEY, SECRET = "billing", "0123456789"
RULES: Final = parse_rules(f"accounts: [{{accessKey: {KEY}, secretKey: '{SECRET}'}}]")
ADDRESS: Final = "10.0.0.7:4711"
FIELDS: Final = st.dictionaries(
    st.text(min_size=1, max_size=8), st.text(max_size=8), max_size=4
).map(
    lambda fields: {name: value for name, value in fields.items() if not name.startswith("Escrow")}
)


def strong_signer(
    *, secret: str = SECRET, session: str = "s1", now_ms: int = NOW_MS
) -> SignFunction:
    return StrongSigner(
        KEY, Secret(secret), Secret("token"), session=session, now_ms=lambda: now_ms
    )


def received(
    sign: SignFunction, code: int = RequestCode.SEND_MESSAGE_V2, serializer: int = JSON
) -> Request[Any]:
    """Return a request as a server receives it."""
    fields = SendMessageV2(producer_group="g", topic="orders", queue_id=0, properties="größer\x01")
    receiver = Connection(keep_headers=True)
    receiver.receive(
        Connection(serializer=serializer, sign=sign).send_oneway(code, fields, b"body")
    )
    [request] = receiver.events()
    assert isinstance(request, Request)
    return request


def check(validator: AccessValidator, request: Request[Any], now_ms: int = NOW_MS) -> str:
    """Return the remark of a refusal; an empty text if the request is allowed."""
    try:
        validator.check(request, ADDRESS, lambda _: (), now_ms=now_ms)
    except AccessRefused as error:
        return error.remark
    return ""


@given(FIELDS, st.binary(max_size=20), st.text(max_size=8), st.data())
def test_every_change_of_a_request_is_noticed(
    fields: dict[str, str], body: bytes, remark: str, data: st.DataObject
) -> None:
    command = Command(code=37, opaque=5, flag=FLAG_ONEWAY, remark=remark, ext_fields=fields)
    signed = msgspec.structs.replace(command, ext_fields=strong_signer()(command, body))
    assert has_valid_strong_signature(signed, memoryview(body), SECRET.encode())
    assert not has_valid_strong_signature(signed, body, b"another secret")
    changes: dict[str, Any] = {
        "code": 12,
        "opaque": 6,
        "flag": 0,
        "version": 1,
        "language": Language.JAVA,
        "remark": remark + "x",
    }
    name = data.draw(st.sampled_from([*changes, "field", "new field", "move", "body"]))
    if name in changes:
        changed = msgspec.structs.replace(signed, **{name: changes[name]})
        assert not has_valid_strong_signature(changed, body, SECRET.encode())
    elif name == "body":
        assert not has_valid_strong_signature(signed, body + b"x", SECRET.encode())
    else:
        other = dict(signed.ext_fields)
        field = data.draw(st.sampled_from(sorted(other)))
        if name == "field":
            other[field] += "x"
        elif name == "new field":
            other["new"] = other.get("new", "") + "x"
        else:  # RocketMQ's signature does not notice text that moves to another field
            other["AccessKey"], other["zzz"] = other["AccessKey"][:-1], other["AccessKey"][-1:]
        changed = msgspec.structs.replace(signed, ext_fields=other)
        assert not has_valid_strong_signature(changed, body, SECRET.encode())


@pytest.mark.parametrize("serializer", [JSON, ROCKETMQ])
def test_a_request_is_accepted_once(serializer: int) -> None:
    validator = AccessValidator(RULES)
    sign = strong_signer()
    first, second = received(sign, serializer=serializer), received(sign, serializer=serializer)
    assert check(validator, second) == ""
    assert check(validator, first) == "", "the order of handling does not matter"
    for request in (first, second):
        assert "was sent before" in check(validator, request)
    assert check(validator, received(strong_signer(session="s2"))) == ""


def test_a_request_with_another_code_is_refused() -> None:
    request = received(strong_signer())
    raw_header = request.raw_header.replace(b'"code":310', b'"code":320')
    assert raw_header != request.raw_header
    changed = msgspec.structs.replace(request, raw_header=raw_header)
    assert "signature is wrong" in check(AccessValidator(RULES), changed)


@pytest.mark.parametrize("sent_ms", [NOW_MS - AGE_MAX_MS - 1, NOW_MS + AGE_MAX_MS + 1])
def test_an_old_request_and_one_from_the_future_are_refused(sent_ms: int) -> None:
    remark = check(AccessValidator(RULES), received(strong_signer(now_ms=sent_ms)))
    assert "clocks" in remark


def test_a_request_from_before_the_start_is_refused() -> None:
    request = received(strong_signer(now_ms=NOW_MS - 1))
    assert check(AccessValidator(RULES, started_ms=NOW_MS - 1), request) == ""
    assert "too old" in check(AccessValidator(RULES, started_ms=NOW_MS), request)


def test_a_refused_request_does_not_use_up_its_number() -> None:
    validator = AccessValidator(RULES)
    forged = received(strong_signer(secret="guessed"))
    assert "signature is wrong" in check(validator, forged)
    assert check(validator, received(strong_signer())) == ""


def test_a_server_may_accept_only_strong_signatures() -> None:
    weak = received(Signer(KEY, Secret(SECRET), Secret("")))
    assert check(AccessValidator(RULES), weak) == ""
    validator = AccessValidator(RULES, strong_signature_only=True)
    assert "strong" in check(validator, weak)
    assert check(validator, received(strong_signer())) == ""


def test_an_invalid_strong_signature_is_not_replaced_by_a_valid_weak_one() -> None:
    def sign(command: Command, body: bytes | memoryview) -> dict[str, str]:
        fields = {**command.ext_fields, SIGNATURE: "forged"}
        weak = Signer(KEY, Secret(SECRET), Secret(""))
        return weak(msgspec.structs.replace(command, ext_fields=fields), body)

    assert "signature is wrong" in check(AccessValidator(RULES), received(sign))


@pytest.mark.parametrize(
    "text", ["", "1", "2,1,s,1", "1,x,s,1", "1,1,,1", "1,1,s,-1", "1,1,s", f"1,{'9' * 40},s,1"]
)
def test_a_malformed_time_is_not_read(text: str) -> None:
    assert parse_signed_at(text) is None


@given(st.lists(st.integers(0, 3 * WINDOW), max_size=60))
def test_the_guard_accepts_each_recent_number_once(numbers: list[int]) -> None:
    guard = ReplayGuard()
    accepted: set[int] = set()
    for number in numbers:
        is_recent = number > max(accepted, default=0) - WINDOW
        expected = number not in accepted and is_recent and number > 0
        is_accepted = guard.accept("k", SignedAt(NOW_MS, "s", number), NOW_MS)
        if number > 0:
            assert is_accepted == expected
        if is_accepted:
            accepted.add(number)


def test_the_guard_remembers_a_bounded_number_of_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("escrowmq.auth.strong_signature.SESSIONS_MAX", 10)
    assert SESSIONS_MAX > 10
    guard = ReplayGuard()
    for number in range(25):
        assert guard.accept("k", SignedAt(NOW_MS, f"s{number}", 1), NOW_MS + number)
        assert len(guard) <= 10
    assert not guard.accept("k", SignedAt(NOW_MS, "s24", 1), NOW_MS)
