"""TLS contexts from files, made anew when the files change."""

from __future__ import annotations

import ssl

from escrowmq.config import ClientAuth, SecurityConfig
from escrowmq.errors import AccessRulesBroken

_AUTH = {
    ClientAuth.NONE: ssl.CERT_NONE,
    ClientAuth.OPTIONAL: ssl.CERT_OPTIONAL,
    ClientAuth.REQUIRE: ssl.CERT_REQUIRED,
}


class Tls:
    """What a new connection is served with; those that are open keep what they have."""

    def __init__(self, config: SecurityConfig) -> None:
        self._config = config
        self.context = server_context(config)

    def renew(self) -> None:
        """Raises AccessRulesBroken; then it is as it was."""
        self.context = server_context(self._config)


def server_context(config: SecurityConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        _show(context, config)
        context.verify_mode = _AUTH[config.tls_client_auth]
        if config.tls_trust is not None:
            context.load_verify_locations(config.tls_trust)
            # A broker and a name server of one process have one certificate between them.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.load_verify_locations(config.tls_cert)
    except (OSError, ssl.SSLError) as error:
        raise _unreadable(error) from None
    return context


def context_to_own(config: SecurityConfig) -> ssl.SSLContext:
    """To the name server of this very process: it shows the certificate that we have ourselves."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate may be for any name; the key is our own
    try:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(config.tls_cert)
        _show(context, config)
    except (OSError, ssl.SSLError) as error:
        raise _unreadable(error) from None
    return context


def context_to_others(config: SecurityConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(
            cafile=None if config.tls_outgoing_trust is None else str(config.tls_outgoing_trust)
        )
        if config.tls_outgoing_cert is not None:
            context.load_cert_chain(config.tls_outgoing_cert, config.tls_outgoing_key)
    except (OSError, ssl.SSLError) as error:
        raise _unreadable(error) from None
    return context


def _show(context: ssl.SSLContext, config: SecurityConfig) -> None:
    assert config.tls_cert is not None
    # A password that is asked for and not there must not be asked of a terminal.
    context.load_cert_chain(
        config.tls_cert, config.tls_key, password=lambda: config.tls_key_password.reveal()
    )


def _unreadable(error: OSError) -> AccessRulesBroken:
    name = f"{error.filename}: " if error.filename else ""
    return AccessRulesBroken(
        f"certificate or key: {name}{error.strerror or error}; "
        "look at tls.server.certPath, keyPath, keyPassword and trustCertPath"
    )
