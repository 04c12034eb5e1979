"""Signatures and the access validator: signed requests pass, changed requests do not."""

from __future__ import annotations

import base64
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from escrowmq.auth.acl import Action, AddressPatterns, Permission, ResourceType, parse_rules
from escrowmq.auth.signature import Signer, compute_signature, has_valid_signature, signed_content
from escrowmq.auth.validator import AccessValidator
from escrowmq.errors import AccessRefused, InvalidAccessRules
from escrowmq.remoting.codes import JSON, ROCKETMQ, RequestCode
from escrowmq.remoting.command import Command
from escrowmq.remoting.connection import Connection
from escrowmq.remoting.headers import SendMessageV2
from escrowmq.remoting.requests import Request
from escrowmq.secret import Secret
from tests.support.signing import signature

NAMES = st.text(min_size=1, max_size=10)
FIELDS = st.dictionaries(NAMES, st.text(max_size=20), max_size=8)
SECRETS = st.text(min_size=1, max_size=20)
KEY, SECRET = "billing", "0123456789"
RULES = parse_rules(
    f"accounts: [{{accessKey: {KEY}, secretKey: '{SECRET}', topicPerms: [orders=PUB]}}]"
)
WRITE_ORDERS = Permission(ResourceType.TOPIC, "orders", Action.PUB)


def command_with(fields: dict[str, str]) -> Command:
    return Command(code=RequestCode.SEND_MESSAGE_V2, opaque=1, ext_fields=fields)


def test_the_signature_equals_that_of_rocketmq() -> None:
    assert compute_signature(b"RocketMQ", b"12345678") == b"IUc8rrO/0gDch8CjObLQsW2rsiA="


@given(FIELDS, st.binary(max_size=50), SECRETS)
def test_a_signed_request_is_valid(fields: dict[str, str], body: bytes, secret: str) -> None:
    signed_fields = Signer("key", Secret(secret), Secret("token"))(command_with(fields), body)
    assert has_valid_signature(signed_fields, body, secret.encode())
    assert has_valid_signature(signed_fields, memoryview(body), secret.encode())
    assert signed_fields["Signature"] == signature(secret, signed_fields, body)


@given(FIELDS, st.binary(max_size=50), SECRETS, st.data())
def test_a_request_that_was_changed_after_signing_is_not_valid(
    fields: dict[str, str], body: bytes, secret: str, data: st.DataObject
) -> None:
    signed_fields = Signer("key", Secret(secret), Secret(""))(command_with(fields), body)
    changed_fields = dict(signed_fields)
    name = data.draw(st.sampled_from(sorted(changed_fields)))
    changed_fields[name] = data.draw(st.text(max_size=20))
    other_body = data.draw(st.sampled_from([body, body + b"x", body[1:]]))
    # The drawn values may be the old ones. A byte that moves between the fields and the body does
    # not change the signed content either.
    content = content_without_signature(signed_fields)
    other_content = content_without_signature(changed_fields)
    if (other_content, other_body) == (content, body):
        assert has_valid_signature(changed_fields, other_body, secret.encode()) == (
            changed_fields["Signature"] == signed_fields["Signature"]
        )
    elif other_content + other_body != content + body:
        assert not has_valid_signature(changed_fields, other_body, secret.encode())


def content_without_signature(fields: dict[str, str]) -> bytes:
    return signed_content({name: fields[name] for name in fields if name != "Signature"}, b"")


def signed_send(serializer: int, *, secret: str = SECRET, key: str = KEY) -> Request[SendMessageV2]:
    """Return a send request as a server receives it, with the header that was signed."""
    sign = Signer(key, Secret(secret), Secret(""))
    fields = SendMessageV2(producer_group="g", topic="orders", queue_id=0, properties="größer\x01")
    sender = Connection(serializer=serializer, sign=sign)
    receiver = Connection(keep_headers=True)
    receiver.receive(sender.send_oneway(RequestCode.SEND_MESSAGE_V2, fields, b"body"))
    [request] = receiver.events()
    assert isinstance(request, Request)
    return request


@pytest.mark.parametrize("serializer", [JSON, ROCKETMQ])
def test_both_header_encodings_are_validated(serializer: int) -> None:
    AccessValidator(RULES).check(
        signed_send(serializer), "10.0.0.1:1", lambda _: [WRITE_ORDERS], now_ms=0
    )


@pytest.mark.parametrize(
    ("request_", "permission"),
    [
        (signed_send(JSON, secret="wrong-secret"), WRITE_ORDERS),
        (signed_send(JSON, key="missing"), WRITE_ORDERS),
        (signed_send(JSON), WRITE_ORDERS._replace(name="others")),
        (signed_send(JSON), WRITE_ORDERS._replace(actions=Action.SUB)),
        (signed_send(JSON), Permission(ResourceType.CLUSTER, "DefaultCluster", Action.UPDATE)),
    ],
)
def test_a_refused_request_is_refused_again(
    request_: Request[SendMessageV2], permission: Permission
) -> None:
    validator = AccessValidator(RULES)
    for _ in range(2):  # a refusal must not be cached as a permission
        with pytest.raises(AccessRefused) as refusal:
            validator.check(request_, "10.0.0.1:1", lambda _: [permission], now_ms=0)
        assert refusal.value.code == 16
        assert SECRET not in refusal.value.remark


def test_permissions_are_not_looked_up_for_an_invalid_signature() -> None:
    def required(_: object) -> list[Permission]:
        raise AssertionError("permissions were looked up for an invalid signature")

    with pytest.raises(AccessRefused):
        AccessValidator(RULES).check(
            signed_send(JSON, secret="wrong-secret"), "10.0.0.1:1", required, now_ms=0
        )


def test_new_rules_apply_from_the_next_request_on() -> None:
    validator = AccessValidator(RULES)
    validator.check(signed_send(JSON), "10.0.0.1:1", lambda _: [WRITE_ORDERS], now_ms=0)
    validator.replace_rules(parse_rules(""))
    with pytest.raises(AccessRefused):
        validator.check(signed_send(JSON), "10.0.0.1:1", lambda _: [WRITE_ORDERS], now_ms=0)


@given(st.text(max_size=60))
def test_any_text_is_parsed_as_rules_or_refused(text: str) -> None:
    with contextlib.suppress(InvalidAccessRules):
        assert parse_rules(text).accounts is not None


@given(st.text(alphabet="0123456789abcdef.:*-{},/", max_size=20), st.ip_addresses())
def test_any_text_is_an_address_pattern_or_refused(text: str, address: object) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(str(address) in AddressPatterns([text]), bool)


@given(st.ip_addresses(v=4))
def test_an_address_matches_itself_and_its_network(address: object) -> None:
    text = str(address)
    prefix = text.rpartition(".")[0]
    for pattern in (text, f"{prefix}.*", f"{text}/24", f"{prefix}.0-255", "*"):
        assert text in AddressPatterns([pattern])


def test_another_encoding_of_the_signature_is_refused() -> None:
    # Signatures are compared as text, although Base64 decoders accept both forms.
    signed_fields = Signer(KEY, Secret(SECRET), Secret(""))(command_with({}), b"")
    other_fields = {**signed_fields, "Signature": signed_fields["Signature"].rstrip("=") + "\n="}
    assert base64.b64decode(signed_fields["Signature"])
    assert not has_valid_signature(other_fields, b"", SECRET.encode())
