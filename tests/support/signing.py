"""The small remoting client of `tests/interop`, with an account and with TLS; and certificates.

The signature is made here from its description, not by the code that is judged by it.
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
    made = hmac.new(secret.encode(), values.encode() + body, hashlib.sha1).digest()
    return base64.b64encode(made).decode()


class SignedClient(Client):
    """`tls`: the connection goes through it."""

    def __init__(
        self,
        address: str,
        key: str = "",
        secret: str = "",
        *,
        tls: ssl.SSLContext | None = None,
        timeout_s: float = 20.0,
    ) -> None:
        super().__init__(address, timeout_s=timeout_s)
        self.key, self.secret = key, secret
        if tls is not None:
            host = address.rsplit(":", 1)[0]
            self.socket = tls.wrap_socket(self.socket, server_hostname=host)

    def __enter__(self) -> SignedClient:
        return self

    def signed(self, fields: Mapping[str, str], body: bytes) -> dict[str, str]:
        if not self.key:
            return dict(fields)
        whole = {**fields, "AccessKey": self.key}
        return {**whole, "Signature": signature(self.secret, whole, body)}

    def send_request(
        self, code: int, ext_fields: Mapping[str, object] | None, body: bytes, *, flag: int
    ) -> int:
        texts = {name: java_text(value) for name, value in (ext_fields or {}).items()}
        return super().send_request(code, self.signed(texts, body), body, flag=flag)

    def send_raw(self, code: int, fields: Mapping[str, str], body: bytes = b"") -> None:
        """Exactly these fields, signed or not."""
        super().send_request(code, fields, body, flag=0)

    def send_binary(self, code: int, fields: Mapping[str, object], body: bytes = b"") -> None:
        """The same with a ROCKETMQ header, signed. Its answer cannot be read here."""
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

    def answer_code(self) -> int:
        """Of what comes next; works for both kinds of header."""
        rest = self._read(int.from_bytes(self._read(4), "big"))
        if rest[0] == 1:
            return int.from_bytes(rest[4:6], "big")
        header = json.loads(rest[4 : 4 + int.from_bytes(rest[1:4], "big")])
        return int(header["code"])


class Certificates:
    """An authority, a server it vouches for, and a client; and another that nobody knows."""

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
        self.stranger_pem = directory / "stranger.pem"
        stranger = trustme.CA().issue_cert("stranger@example.org")
        stranger.private_key_and_cert_chain_pem.write_to_path(str(self.stranger_pem))

    def issue(self, *names: str) -> None:
        """A new one for the server, in place of the old."""
        made = self.authority.issue_cert(*(names or ("127.0.0.1", "localhost")))
        made.private_key_pem.write_to_path(str(self.key))
        made.cert_chain_pems[0].write_to_path(str(self.cert))

    def conf(self, mode: str = "enforcing") -> dict[str, object]:
        return {
            "tls.server.mode": mode,
            "tls.server.certPath": self.cert,
            "tls.server.keyPath": self.key,
        }

    def client(self, shown: Path | None = None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=str(self.ca))
        if shown is not None:
            context.load_cert_chain(shown)
        return context
