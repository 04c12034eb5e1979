"""Authentication: requests with invalid signatures, sent over the network."""

from __future__ import annotations

import json
import struct

import pytest

from tests.support.acl_broker import ADMIN, NO_PERMISSION, WRITER, send_fields
from tests.support.brokers import Server
from tests.support.signing import SignedClient, signature

FIELDS = send_fields("orders")
WITH_KEY = {**FIELDS, "AccessKey": WRITER[0]}
SIGNED = {**WITH_KEY, "Signature": signature(WRITER[1], WITH_KEY, b"x")}
ATTACKS: dict[str, tuple[dict[str, str], bytes]] = {
    "neither a key nor a signature": (FIELDS, b"x"),
    "a key without a signature": (WITH_KEY, b"x"),
    "a signature without a key": ({**FIELDS, "Signature": "abc"}, b"x"),
    "an empty signature": ({**WITH_KEY, "Signature": ""}, b"x"),
    "another secret": ({**WITH_KEY, "Signature": signature("wrong-secret", WITH_KEY, b"x")}, b"x"),
    "another body": (SIGNED, b"y"),
    "another topic": ({**SIGNED, "b": "others"}, b"x"),
    "an additional field": ({**SIGNED, "zzz": "1"}, b"x"),
    "the key of another account": ({**SIGNED, "AccessKey": ADMIN[0]}, b"x"),
    "an unknown key": (
        {**FIELDS, "AccessKey": "unknown-key", "Signature": signature("any-secret", FIELDS, b"")},
        b"x",
    ),
    "a signature that is not base64": ({**WITH_KEY, "Signature": "\u0000ü\ud7ff"}, b"x"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_invalid_signature_is_refused(served: Server, admin: SignedClient, attack: str) -> None:
    fields, body = ATTACKS[attack]
    ends = [admin.max_offset(topic, 0) for topic in ("orders", "others")]
    with SignedClient(served.address) as client:
        client.send_raw(310, fields, body)
        assert client.next_response_code() == NO_PERMISSION
    assert [admin.max_offset(topic, 0) for topic in ("orders", "others")] == ends


def test_a_valid_signature_is_accepted_in_every_encoding(
    served: Server, admin: SignedClient
) -> None:
    end = admin.max_offset("orders", 0)
    with SignedClient(served.address, *WRITER) as client:
        client.send("orders", b"json")
        client.send_binary(310, send_fields("orders"), b"binary")
        assert client.next_response_code() == 0
        # C++ clients send numbers and booleans, not texts.
        signed = client.signed(send_fields("orders"), b"c++")
        fields = {**signed, "d": 4, "e": 0, "k": False}
        header = {"opaque": 1, "code": 310, "flag": 0, "extFields": fields}
        encoded = json.dumps(header).encode()
        length = 4 + len(encoded) + 3
        client.socket.sendall(struct.pack(">II", length, len(encoded)) + encoded + b"c++")
        assert client.next_response_code() == 0
    assert admin.max_offset("orders", 0) == end + 3


def test_an_unknown_key_and_a_wrong_secret_get_the_same_remark(served: Server) -> None:
    """Otherwise a client could find out which keys exist."""
    with SignedClient(served.address, "unknown-key", "any-secret-1") as client:
        remark = client.request(310, send_fields("orders"), b"x").remark
    with SignedClient(served.address, WRITER[0], "any-secret-1") as client:
        assert client.request(310, send_fields("orders"), b"x").remark == remark


def test_an_account_needs_no_signature_from_its_trusted_address(served: Server) -> None:
    """As in RocketMQ, the access key alone is enough there."""
    with SignedClient(served.address) as client:
        client.send_raw(30, {"topic": "others", "queueId": "0", "AccessKey": "trusted-key"})
        assert client.next_response_code() == 0
