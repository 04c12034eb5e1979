"""Authentication: signatures, attacked over the network."""

from __future__ import annotations

import json
import struct

import pytest

from tests.support.acl_broker import ADMIN, NO_PERMISSION, WRITER, send_fields
from tests.support.brokers import Server
from tests.support.signing import SignedClient, signature

FIELDS = send_fields("orders")
GOOD = {**FIELDS, "AccessKey": WRITER[0]}
ATTACKS: dict[str, tuple[dict[str, str], bytes]] = {
    "nothing is signed": (FIELDS, b"x"),
    "a key without a signature": (GOOD, b"x"),
    "a signature without a key": ({**FIELDS, "Signature": "abc"}, b"x"),
    "an empty signature": ({**GOOD, "Signature": ""}, b"x"),
    "another secret": ({**GOOD, "Signature": signature("wrong-secret", GOOD, b"x")}, b"x"),
    "another body": ({**GOOD, "Signature": signature(WRITER[1], GOOD, b"x")}, b"y"),
    "another topic": (
        {**GOOD, "Signature": signature(WRITER[1], GOOD, b"x"), "b": "others"},
        b"x",
    ),
    "a field more": (
        {**GOOD, "Signature": signature(WRITER[1], GOOD, b"x"), "zzz": "1"},
        b"x",
    ),
    "somebody else's key": (
        {**GOOD, "Signature": signature(WRITER[1], GOOD, b"x"), "AccessKey": ADMIN[0]},
        b"x",
    ),
    "an unknown key": (
        {**FIELDS, "AccessKey": "nobody-key", "Signature": signature("nobody-secret", FIELDS, b"")},
        b"x",
    ),
    "not even text": ({**GOOD, "Signature": "\u0000ü\ud7ff"}, b"x"),
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
        # Numbers and booleans as such, as C++ clients have them.
        signed = client.signed(send_fields("orders"), b"c++")
        loose = {**signed, "d": 4, "e": 0, "k": False}
        header = {"opaque": 1, "code": 310, "flag": 0, "extFields": loose}
        encoded = json.dumps(header).encode()
        length = 4 + len(encoded) + 3
        client.socket.sendall(struct.pack(">II", length, len(encoded)) + encoded + b"c++")
        assert client.next_response_code() == 0
    assert admin.max_offset("orders", 0) == end + 3


def test_the_text_is_the_same_for_a_wrong_key_and_a_wrong_secret(served: Server) -> None:
    with SignedClient(served.address, "nobody-key", "whatever-1") as client:
        unknown = client.request(310, send_fields("orders"), b"x").remark
    with SignedClient(served.address, WRITER[0], "whatever-1") as client:
        assert client.request(310, send_fields("orders"), b"x").remark == unknown


def test_an_account_is_trusted_from_its_address(served: Server) -> None:
    """As in RocketMQ, the access key alone is enough there."""
    with SignedClient(served.address) as client:
        client.send_raw(30, {"topic": "others", "queueId": "0", "AccessKey": "trusted-key"})
        assert client.next_response_code() == 0
