"""A remoting client that signs its requests and can use TLS, and certificates for it.

The signature is computed here from its specification, independent of the code under test.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import ssl
import struct
from collections.abc import Mapping
from pathlib import Path

import trustme

from tests.interop.remoting import Client, java_text


def signature(secret: str, fields: Mapping[str, str], body: bytes) -> str:
    values = "".join(fields[name] for name in sorted(fields) if name != "Signature")
    digest = hmac.new(secret.encode(), values.encode() + body, hashlib.sha1).digest()
    return base64.b64encode(digest).decode()


class SignedClient(Client):
    """A client with an account. An empty key sends unsigned requests."""

    def __init__(
        self,
        address: str,
        key: str = "",
        secret: str = "",
        *,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 20.0,
        source_host: str = "",
    ) -> None:
        super().__init__(address, timeout_s=timeout_s, source_host=source_host)
        self.key, self.secret = key, secret
        if tls is not None:
            host = address.rsplit(":", 1)[0]
            self.socket = tls.wrap_socket(self.socket, server_hostname=host)

    def __enter__(self) -> SignedClient:
        return self

    def signed(self, fields: Mapping[str, str], body: bytes) -> dict[str, str]:
        """Return the fields with the access key and the signature."""
        if not self.key:
            return dict(fields)
        signed_fields = {**fields, "AccessKey": self.key}
        return {**signed_fields, "Signature": signature(self.secret, signed_fields, body)}

    def send_request(
        self, code: int, ext_fields: Mapping[str, object] | None, body: bytes, *, flag: int
    ) -> int:
        texts = {name: java_text(value) for name, value in (ext_fields or {}).items()}
        return super().send_request(code, self.signed(texts, body), body, flag=flag)

    def send_raw(self, code: int, fields: Mapping[str, str], body: bytes = b"") -> None:
        """Send exactly these fields and add no signature."""
        super().send_request(code, fields, body, flag=0)

    def send_binary(self, code: int, fields: Mapping[str, object], body: bytes = b"") -> None:
        """Send a signed request with a ROCKETMQ header. Read its code by `next_response_code`."""
        signed = self.signed({name: java_text(value) for name, value in fields.items()}, body)
        block = b"".join(
            struct.pack(">h", len(name))
            + name.encode()
            + struct.pack(">i", len(text.encode()))
            + text.encode()
            for name, text in signed.items()
            if text
        )
        header = struct.pack(">hbhiiii", code, 3, 401, 77, 0, 0, len(block)) + block
        length = 4 + len(header) + len(body)
        self.socket.sendall(struct.pack(">II", length, 1 << 24 | len(header)) + header + body)

    def next_response_code(self) -> int:
        """Return the code of the next response, whose header is JSON or ROCKETMQ."""
        frame = self._read(int.from_bytes(self._read(4), "big"))
        if frame[0] == 1:
            return int.from_bytes(frame[4:6], "big")
        header = json.loads(frame[4 : 4 + int.from_bytes(frame[1:4], "big")])
        return int(header["code"])


class Certificates:
    """A CA, certificates that it issued to a server and a client, and one of an untrusted CA."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self.authority = trustme.CA()
        self.ca = directory / "ca.pem"
        self.authority.cert_pem.write_to_path(str(self.ca))
        self.cert, self.key = directory / "server.pem", directory / "server.key"
        self.issue()
        self.client_pem = directory / "client.pem"
        self.authority.issue_cert(
            "client@example.org"
        ).private_key_and_cert_chain_pem.write_to_path(str(self.client_pem))
        self.untrusted_pem = directory / "stranger.pem"
        untrusted = trustme.CA().issue_cert("stranger@example.org")
        untrusted.private_key_and_cert_chain_pem.write_to_path(str(self.untrusted_pem))

    def issue(self, *names: str) -> None:
        """Replace the certificate of the server by a new one for these host names."""
        server = self.authority.issue_cert(*(names or ("127.0.0.1", "localhost")))
        server.private_key_pem.write_to_path(str(self.key))
        server.cert_chain_pems[0].write_to_path(str(self.cert))

    def conf(self, mode: str = "enforcing") -> dict[str, object]:
        return {
            "tls.server.mode": mode,
            "tls.server.certPath": self.cert,
            "tls.server.keyPath": self.key,
        }

    def client(self, certificate: Path | None = None) -> ssl.SSLContext:
        """Return the context of a client that trusts the CA and may present a certificate."""
        context = ssl.create_default_context(cafile=str(self.ca))
        if certificate is not None:
            context.load_cert_chain(certificate)
        return context
