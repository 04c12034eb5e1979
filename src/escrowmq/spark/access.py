"""Who we are to a cluster: access key and TLS. The one place where the source's lines get them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass

from escrowmq.errors import BadOption
from escrowmq.spark import options
from escrowmq.spark.options import Chosen


@dataclass(frozen=True)
class Access:
    access_key: str = ""
    secret_key: str = ""
    security_token: str = ""
    tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    verify: bool = True
    timeout_s: float = 30.0

    def signed(self, fields: Mapping[str, str], body: bytes) -> dict[str, str]:
        """The fields of a request, and what proves that they are ours: HMAC-SHA1 over the values
        in the order of their names, then the body."""
        if not self.access_key:
            return dict(fields)
        told = {**fields, "AccessKey": self.access_key}
        if self.security_token:
            told["SecurityToken"] = self.security_token
        content = "".join(told[name] for name in sorted(told)).encode() + body
        digest = hmac.new(self.secret_key.encode(), content, hashlib.sha1).digest()
        return {**told, "Signature": base64.b64encode(digest).decode()}

    def wrapped(self, line: socket.socket, host: str) -> socket.socket:
        if not self.tls:
            return line
        context = ssl.create_default_context(cafile=self.ca_file or None)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.cert_file:
            context.load_cert_chain(self.cert_file, self.key_file or None)
        return context.wrap_socket(line, server_hostname=host)


def access_of(chosen: Chosen) -> Access:
    """Raises BadOption."""
    access_key, secret_key = chosen[options.ACCESS_KEY], chosen[options.SECRET_KEY]
    if bool(access_key) != bool(secret_key):
        raise BadOption("accessKey and secretKey go together: one of them is missing")
    return Access(
        access_key=access_key,
        secret_key=secret_key,
        security_token=chosen[options.SECURITY_TOKEN],
        tls=chosen[options.TLS],
        ca_file=chosen[options.TLS_CA],
        cert_file=chosen[options.TLS_CERT],
        key_file=chosen[options.TLS_KEY],
        verify=chosen[options.TLS_VERIFY],
        timeout_s=chosen[options.TIMEOUT_MS] / 1000,
    )
