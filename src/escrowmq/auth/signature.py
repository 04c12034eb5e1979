"""RocketMQ's signature of a request.

    content     the values of all extFields except Signature, sorted by name, then the body
    Signature   Base64(HMAC-SHA1(secret key, content))

The values are joined without a separator, and the content has neither the request code nor a time
nor a sequence number. An attacker who can read a connection can send a request again, or send it
with another code. Use TLS to keep connections from being read, or the signature of
`strong_signature.py`, which RocketMQ does not know.
"""

from __future__ import annotations

import hmac
from binascii import b2a_base64
from collections.abc import Mapping
from typing import Final

from escrowmq.remoting.command import Command
from escrowmq.secret import Secret

ACCESS_KEY: Final = "AccessKey"
SIGNATURE: Final = "Signature"
SECURITY_TOKEN: Final = "SecurityToken"
# Some RocketMQ clients add this field after signing, and RocketMQ's brokers leave it out.
_UNIQUE_KEY_QUERY: Final = "_UNIQUE_KEY_QUERY"


class Signer:
    """Sign the requests of one account."""

    def __init__(self, access_key: str, secret_key: Secret, security_token: Secret) -> None:
        self._access_key = access_key
        self._secret_key = secret_key.reveal().encode()
        self._security_token = security_token.reveal()

    def __call__(self, command: Command, body: bytes | memoryview) -> dict[str, str]:
        """Return the fields with the access key and the signature added."""
        signed = {**command.ext_fields, ACCESS_KEY: self._access_key}
        if self._security_token:
            signed[SECURITY_TOKEN] = self._security_token
        signed.pop(SIGNATURE, None)
        signature = compute_signature(signed_content(signed, body), self._secret_key)
        return {**signed, SIGNATURE: signature.decode()}


def has_valid_signature(
    ext_fields: Mapping[str, str], body: bytes | memoryview, secret_key: bytes
) -> bool:
    """Return whether the request carries the signature that this key produces."""
    signed = dict(ext_fields)
    signature = signed.pop(SIGNATURE, "").encode()
    if hmac.compare_digest(signature, compute_signature(signed_content(signed, body), secret_key)):
        return True
    if signed.pop(_UNIQUE_KEY_QUERY, None) is None:
        return False
    return hmac.compare_digest(
        signature, compute_signature(signed_content(signed, body), secret_key)
    )


def signed_content(ext_fields: Mapping[str, str], body: bytes | memoryview) -> bytes:
    """Return the bytes to sign. `ext_fields` must not contain the signature."""
    values = "".join([ext_fields[name] for name in sorted(ext_fields)])
    return b"".join((values.encode(), body))


def compute_signature(content: bytes, secret_key: bytes) -> bytes:
    return b2a_base64(hmac.digest(secret_key, content, "sha1"), newline=False)
