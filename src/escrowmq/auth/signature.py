"""RocketMQ's signature of a request.

    content    the values of all extFields but Signature, in the order of their names; then the body
    Signature  Base64(HMAC-SHA1(secret key, content))

The values stand together without a mark between them, and nothing in them says when: whoever can
read a line can send a request of it again. TLS is what keeps it from being read.
"""

from __future__ import annotations

import hmac
from binascii import b2a_base64
from collections.abc import Mapping
from typing import Final

from escrowmq.secret import Secret

ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"
SECURITY_TOKEN: Final = "SecurityToken"
# Some clients of RocketMQ add it after they have signed, and its brokers leave it out.
_UNIQUE_KEY_QUERY: Final = "_UNIQUE_KEY_QUERY"


def signed_content(ext_fields: Mapping[str, str], body: bytes | memoryview) -> bytes:
    """`ext_fields` without the signature."""
    values = "".join([ext_fields[name] for name in sorted(ext_fields)])
    return b"".join((values.encode(), body))


def compute_signature(content: bytes, secret_key: bytes) -> bytes:
    return b2a_base64(hmac.digest(secret_key, content, "sha1"), newline=False)


def has_valid_signature(
    ext_fields: Mapping[str, str], body: bytes | memoryview, secret_key: bytes
) -> bool:
    """Whether the request carries the signature that this key gives it."""
    signed = dict(ext_fields)
    told = signed.pop(SIGNATURE, "").encode()
    if hmac.compare_digest(told, compute_signature(signed_content(signed, body), secret_key)):
        return True
    if signed.pop(_UNIQUE_KEY_QUERY, None) is None:
        return False
    return hmac.compare_digest(told, compute_signature(signed_content(signed, body), secret_key))


class Signer:
    """Signs what one account sends."""

    def __init__(self, access_key: str, secret_key: Secret, security_token: Secret) -> None:
        self._access_key = access_key
        self._secret_key = secret_key.reveal().encode()
        self._security_token = security_token.reveal()

    def __call__(self, ext_fields: dict[str, str], body: bytes | memoryview) -> dict[str, str]:
        signed = {**ext_fields, ACCESS_KEY: self._access_key}
        if self._security_token:
            signed[SECURITY_TOKEN] = self._security_token
        signed.pop(SIGNATURE, None)
        made = compute_signature(signed_content(signed, body), self._secret_key)
        return {**signed, SIGNATURE: made.decode()}
