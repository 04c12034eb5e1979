"""How a client shows who it is, and keeps others from listening in."""

from __future__ import annotations

import ssl
from dataclasses import dataclass

from escrowmq.auth.signature import Signer
from escrowmq.remoting.connection import SignFunction
from escrowmq.secret import Secret


@dataclass(frozen=True, slots=True)
class Access:
    """Of every connection of a client, to name servers and brokers.

        Access(access_key="billing", secret_key="...", tls=True)

    `tls`: True believes the certificates that the system believes; an SSLContext says otherwise,
    and can show one of its own. `security_token` comes with keys that somebody lends out.
    """

    access_key: str = ""
    secret_key: str | Secret = ""
    security_token: str | Secret = ""
    tls: ssl.SSLContext | bool = False

    def __post_init__(self) -> None:
        for name in ("secret_key", "security_token"):
            value = getattr(self, name)
            if isinstance(value, str):  # not shown by a repr, or by the locals of a traceback
                object.__setattr__(self, name, Secret(value))
        if bool(self.access_key) != bool(self.secret_key):
            raise ValueError("an access key and its secret key belong together")

    def signer(self) -> SignFunction | None:
        """What signs the requests of a connection; None if they are not to be signed."""
        if not self.access_key:
            return None
        assert isinstance(self.secret_key, Secret)
        assert isinstance(self.security_token, Secret)
        return Signer(self.access_key, self.secret_key, self.security_token)

    def ssl_context(self) -> ssl.SSLContext | None:
        if isinstance(self.tls, ssl.SSLContext):
            return self.tls
        return ssl.create_default_context() if self.tls else None


NO_ACCESS = Access()
