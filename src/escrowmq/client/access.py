"""Credentials and TLS of a client."""

from __future__ import annotations

import secrets
import ssl
from dataclasses import dataclass

from escrowmq.auth.signature import Signer
from escrowmq.auth.strong_signature import StrongSigner
from escrowmq.clock import SystemClock
from escrowmq.errors import ConfigError
from escrowmq.remoting.connection import SignFunction
from escrowmq.secret import Secret


@dataclass(frozen=True, slots=True)
class Access:
    """The account and the TLS settings of every connection of a client.

        Access(access_key="billing", secret_key="...", tls=True, ca_file="/etc/ssl/broker-ca.pem")

    `access_key` and `secret_key` sign each request as RocketMQ's ACL expects it; both are empty
    for a cluster without accounts. `security_token` belongs to temporary keys. The secrets do not
    appear in the repr. `strong_signature=True` signs with EscrowMQ's own signature, which covers
    the whole request and cannot be replayed; RocketMQ's servers do not know it.

    `tls=True` encrypts the connections. The server's certificate must be signed by an authority
    in `ca_file`, or by one that the system trusts if `ca_file` is empty; `verify_server=False`
    accepts any certificate. `cert_file` and `key_file` are the client's own certificate and key.
    All files are PEM. They are read when a client is created, so an Access can be pickled
    and used on another machine that has the same files. An `ssl.SSLContext` as `tls`
    replaces all of this, and such an Access cannot be pickled.

    Raises ValueError if one of the two keys is missing, or if files are given without `tls`.
    """

    access_key: str = ""
    secret_key: str | Secret = ""
    security_token: str | Secret = ""
    tls: ssl.SSLContext | bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    verify_server: bool = True
    strong_signature: bool = False

    def __post_init__(self) -> None:
        # A Secret hides its text in a repr and in the local variables of a traceback.
        for name in ("secret_key", "security_token"):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, Secret(value))
        if bool(self.access_key) != bool(self.secret_key):
            raise ValueError("access_key and secret_key belong together: give both or none")
        if self.strong_signature and not self.access_key:
            raise ValueError("strong_signature needs access_key and secret_key")
        if (self.ca_file or self.cert_file) and self.tls is not True:
            raise ValueError("ca_file and cert_file need tls=True")
        if self.key_file and not self.cert_file:
            raise ValueError("key_file needs cert_file, the certificate of that key")

    def signer(self) -> SignFunction | None:
        """Return the function that signs the requests of a connection; None without an account.

        Every connection needs one of its own: a strong signature numbers the requests.
        """
        if not self.access_key:
            return None
        assert isinstance(self.secret_key, Secret)  # __post_init__ converted both
        assert isinstance(self.security_token, Secret)
        if self.strong_signature:
            return StrongSigner(
                self.access_key,
                self.secret_key,
                self.security_token,
                session=secrets.token_hex(16),
                now_ms=SystemClock().now_ms,
            )
        return Signer(self.access_key, self.secret_key, self.security_token)

    def ssl_context(self) -> ssl.SSLContext | None:
        """Return the TLS context of a connection; None without TLS. Reads the files.

        Raises ConfigError if a file is missing or is no certificate or key.
        """
        if isinstance(self.tls, ssl.SSLContext):
            return self.tls
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file or None)
            if not self.verify_server:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if self.cert_file:
                context.load_cert_chain(self.cert_file, self.key_file or None)
        except OSError as error:  # ssl.SSLError is one too
            files = ", ".join(filter(None, (self.ca_file, self.cert_file, self.key_file)))
            raise ConfigError(f"cannot use the TLS files {files}: {error}") from error
        return context


NO_ACCESS = Access()
