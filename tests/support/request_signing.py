"""Accounts for the comparison of both paths, and requests that they sign, well or badly."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from escrowmq.auth.strong_signature import StrongSigner
from escrowmq.remoting.command import Command
from escrowmq.secret import Secret
from tests.support.signing import signature
from tests.support.stores import NOW_MS

Fields = dict[str, str]

PRODUCER = "producer-key", "producer-secret"  # may do everything that plain requests need
ORDERS_ONLY = "orders-key", "orders-secret"
HERE_ONLY = "here-only", "here-secret"  # from the first host of the connections
DISABLED = "disabled-user", "disabled-secret"
DELETED = "deleted-key", "deleted-secret"

_PLAIN_ACCOUNTS = """
accounts:
- {accessKey: producer-key, secretKey: %s, topicPerms: [T=%s, orders=PUB], defaultGroupPerm: SUB%s}
- {accessKey: orders-key, secretKey: orders-secret, topicPerms: [orders=PUB]}
"""
_USERS = """
users:
- {username: here-only, password: here-secret}
- {username: disabled-user, password: disabled-secret, userStatus: disable}
acls:
- subject: User:here-only
  policies:
  - entries:
    - {resource: "Topic:*", actions: Pub, decision: Allow, sourceIps: 127.0.0.1}
"""
RULES = _PLAIN_ACCOUNTS % ("producer-secret", "PUB|SUB", "") + _USERS
OTHER_RULES = {
    "another secret": _PLAIN_ACCOUNTS % ("another-secret", "PUB|SUB", "") + _USERS,
    "a permission less": _PLAIN_ACCOUNTS % ("producer-secret", "SUB", "") + _USERS,
    "users deleted": _PLAIN_ACCOUNTS % ("producer-secret", "PUB", ""),
    "all deleted": "accounts: []",
    "a trusted host": RULES + "globalWhiteRemoteAddresses: [127.0.0.1]\n",
    "an account with a trusted host": _PLAIN_ACCOUNTS
    % ("producer-secret", "PUB", ", whiteRemoteAddress: 10.0.0.7"),
}


class RequestSigner:
    """Signs for PRODUCER. While `is_odd`, some requests have other accounts or bad signatures."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.is_odd = False
        self._strong_signer = StrongSigner(
            PRODUCER[0], Secret(PRODUCER[1]), Secret(""), session="s1", now_ms=lambda: NOW_MS
        )

    def __call__(self, fields: Fields, body: bytes) -> Fields:
        if not self.is_odd or self._random.random() < 0.5:
            return sign(PRODUCER, fields, body)
        makers: list[Callable[[Fields, bytes], Fields]] = [
            lambda fields, body: fields,
            lambda fields, body: sign(ORDERS_ONLY, fields, body),
            lambda fields, body: sign(HERE_ONLY, fields, body),
            lambda fields, body: sign(DISABLED, fields, body),
            lambda fields, body: sign(DELETED, fields, body),
            lambda fields, body: sign((PRODUCER[0], ORDERS_ONLY[1]), fields, body),
            lambda fields, body: sign(PRODUCER, fields, body + b"x"),
            lambda fields, body: sign(PRODUCER, {**fields, "SecurityToken": "token"}, body),
            lambda fields, body: {**sign(PRODUCER, fields, body), "SecurityToken": "not signed"},
            lambda fields, body: {**sign(PRODUCER, fields, body), "_UNIQUE_KEY_QUERY": "true"},
            lambda fields, body: {**sign(PRODUCER, fields, body), "AccessKey": ORDERS_ONLY[0]},
            lambda fields, body: {**fields, "AccessKey": PRODUCER[0]},
            lambda fields, body: {**fields, "Signature": sign(PRODUCER, fields, body)["Signature"]},
            self._moved,
            self._damaged,
            self._strong,
        ]
        return self._random.choice(makers)(fields, body)

    def _moved(self, fields: Fields, body: bytes) -> Fields:
        """Move text from one field to the next, which this signature does not notice."""
        signed = sign(PRODUCER, fields, body)
        if "a" in signed:
            signed |= {"AccessKey": PRODUCER[0] + signed["a"][:1], "a": signed["a"][1:]}
        return signed

    def _damaged(self, fields: Fields, body: bytes) -> Fields:
        """Return a signature that is nearly right."""
        signed = sign(PRODUCER, fields, body)
        text = signed["Signature"]
        # The last letter has two bits that mean nothing: a decoder may ignore them.
        alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
        last = alphabet[alphabet.index(text[-2]) | 1]
        variants = [text[:-2] + last + "=", text[:-1], text + "=", "A" + text, text.swapcase(), ""]
        return {**signed, "Signature": self._random.choice(variants)}

    def _strong(self, fields: Fields, body: bytes) -> Fields:
        # It covers code, flag and number of the request, which are not known here: it is wrong.
        return self._strong_signer(Command(code=310, opaque=0, ext_fields=fields), body)


def sign(account: tuple[str, str], fields: Fields, body: bytes) -> Fields:
    signed = {**fields, "AccessKey": account[0]}
    return {**signed, "Signature": signature(account[1], signed, body)}
