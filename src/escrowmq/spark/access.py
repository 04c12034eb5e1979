"""Who we are to a cluster: access key and TLS. All lines of source and sink get them here."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from escrowmq.access.signature import Signer
from escrowmq.errors import BadOption, NotSent
from escrowmq.secret import Secret
from escrowmq.spark import options
from escrowmq.spark.options import Chosen


@dataclass(frozen=True)
class Access:
    access_key: str = ""
    secret_key: str = field(default="", repr=False)
    security_token: str = field(default="", repr=False)
    tls: bool = False
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    verify: bool = True
    timeout_s: float = 30.0  # for an answer

    def signed(self, fields: Mapping[str, str], body: bytes) -> dict[str, str]:
        """The fields of a request, and what proves that they are ours."""
        if not self.access_key:
            return dict(fields)
        return _signer(self)(dict(fields), body)

    def connect(self, address: str, timeout_s: float) -> socket.socket:
        """Raises NotSent."""
        host, _, port = address.rpartition(":")
        try:
            line = socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, ValueError) as error:
            raise NotSent(f"{address} cannot be reached: {error}") from error
        if not self.tls:
            return line
        try:
            return _context(self).wrap_socket(line, server_hostname=host.strip("[]"))
        except OSError as error:
            line.close()
            raise NotSent(f"{address} speaks no TLS that we trust: {error}") from error


@lru_cache(maxsize=16)
def _signer(access: Access) -> Signer:
    return Signer(access.access_key, Secret(access.secret_key), Secret(access.security_token))


@lru_cache(maxsize=16)
def _context(access: Access) -> ssl.SSLContext:
    """Raises BadOption: the files are read where the line is, in the driver and in every task."""
    try:
        context = ssl.create_default_context(cafile=access.ca_file or None)
        if not access.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if access.cert_file:
            context.load_cert_chain(access.cert_file, access.key_file or None)
    except OSError as error:
        files = ", ".join(filter(None, (access.ca_file, access.cert_file, access.key_file)))
        raise BadOption(
            f"tlsCa, tlsCert, tlsKey: {files} cannot be used on {socket.gethostname()}: {error}"
        ) from error
    return context


def access_of(chosen: Chosen) -> Access:
    """Raises BadOption."""
    access_key, secret_key = chosen[options.ACCESS_KEY], chosen[options.SECRET_KEY]
    if bool(access_key) != bool(secret_key):
        raise BadOption("accessKey and secretKey go together: one of them is missing")
    for option in (options.TLS_CA, options.TLS_CERT, options.TLS_KEY, options.TLS_VERIFY):
        if chosen.has(option) and not chosen[options.TLS]:
            raise BadOption(f"option {option.name} needs tls=true: nothing would be encrypted")
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
