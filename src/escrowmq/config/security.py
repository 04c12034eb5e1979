"""Settings of TLS and of access control.

Those with dots are RocketMQ's system properties, which it reads from its command line or from
tls.properties; here they are settings like any other.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from escrowmq.config.groups import _Group, _setting, _yes_no
from escrowmq.config.kinds import Credentials, FileOrNone, Hidden, OneOf
from escrowmq.errors import ConfigError
from escrowmq.secret import Secret


def _file(conf: str, what: str) -> Any:
    return _setting(None, FileOrNone(), conf, "", what)


class TlsMode(enum.Enum):
    DISABLED = "DISABLED"
    PERMISSIVE = "PERMISSIVE"
    ENFORCING = "ENFORCING"


class ClientAuth(enum.Enum):
    NONE = "NONE"
    OPTIONAL = "OPTIONAL"
    REQUIRE = "REQUIRE"


@dataclass(frozen=True, slots=True, kw_only=True)
class SecurityConfig(_Group):
    """Who may talk to this server, and who can listen in."""

    acl_enabled: bool = _yes_no(
        False, "aclEnable", "Whether requests must be signed by an account that may make them."
    )
    authentication_enabled: bool = _yes_no(
        False, "authenticationEnabled", "RocketMQ 5's word for it: either of the three says yes."
    )
    authorization_enabled: bool = _yes_no(
        False, "authorizationEnabled", "The third: a signature and a permission go together here."
    )
    acl_file: Path | None = _file(  # noqa: RUF009  # it is a field()
        "escrowAclFile",
        "The accounts: plain_acl.yml, or users and policies. It is read again when it changes.",
    )
    inner_credentials: Secret = _setting(  # noqa: RUF009  # it is a field()
        Secret(""),
        Credentials(),
        "innerClientAuthenticationCredentials",
        "",
        "The account by which the broker registers with other name servers.",
    )
    insecure: bool = _yes_no(
        False, "escrowInsecure", "Whether others than this machine are served without aclEnable."
    )
    tls_mode: TlsMode = _setting(  # noqa: RUF009  # it is a field()
        TlsMode.PERMISSIVE,
        OneOf(TlsMode),
        "tls.server.mode",
        "",
        "Whether TLS is refused, possible on the same ports, or the only way in.",
    )
    tls_cert: Path | None = _file(  # noqa: RUF009  # it is a field()
        "tls.server.certPath",
        "The server's certificate and its chain, in PEM; without it there is no TLS.",
    )
    tls_key: Path | None = _file(  # noqa: RUF009  # it is a field()
        "tls.server.keyPath", "The certificate's private key, in PEM."
    )
    tls_key_password: Secret = _setting(  # noqa: RUF009  # it is a field()
        Secret(""), Hidden(), "tls.server.keyPassword", "", "The password of that key."
    )
    tls_client_auth: ClientAuth = _setting(  # noqa: RUF009  # it is a field()
        ClientAuth.NONE,
        OneOf(ClientAuth),
        "tls.server.need.client.auth",
        "",
        "Whether clients must show a certificate.",
    )
    tls_trust: Path | None = _file(  # noqa: RUF009  # it is a field()
        "tls.server.trustCertPath", "Whose certificates of clients are believed, in PEM."
    )
    tls_outgoing: bool = _yes_no(
        False, "tls.enable", "Whether the broker speaks TLS to the name servers of namesrvAddr."
    )
    tls_outgoing_trust: Path | None = _file(  # noqa: RUF009  # it is a field()
        "tls.client.trustCertPath",
        "Whose certificates of name servers are believed; if empty, the system's.",
    )
    tls_outgoing_cert: Path | None = _file(  # noqa: RUF009  # it is a field()
        "tls.client.certPath", "The certificate that is shown to them."
    )
    tls_outgoing_key: Path | None = _file(  # noqa: RUF009  # it is a field()
        "tls.client.keyPath", "Its private key."
    )

    def __post_init__(self) -> None:
        _Group.__post_init__(self)
        if self.checks_access and self.acl_file is None:
            raise ConfigError("aclEnable=true: escrowAclFile must name the file of the accounts")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("tls.server.certPath and tls.server.keyPath belong together")
        if self.tls_mode is TlsMode.ENFORCING and self.tls_cert is None:
            raise ConfigError("tls.server.mode=ENFORCING: tls.server.certPath must name a file")
        if self.tls_client_auth is not ClientAuth.NONE and self.tls_trust is None:
            raise ConfigError(
                f"tls.server.need.client.auth={self.tls_client_auth.value}: "
                "tls.server.trustCertPath must say whom to believe"
            )

    @property
    def checks_access(self) -> bool:
        return self.acl_enabled or self.authentication_enabled or self.authorization_enabled

    @property
    def has_tls(self) -> bool:
        return self.tls_mode is not TlsMode.DISABLED and self.tls_cert is not None
