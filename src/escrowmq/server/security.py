"""Security of a server: TLS on its ports, access control, and the files of both.

    AccessControl     the validator and the TLS context that all ports of a process share
    TlsDetector       plain and TLS connections on one port, told apart by the first byte
    FileWatcher       reloads accounts and certificates when their files change

A broker that listens on an address other than loopback must have accounts, unless the operator
allows it to run without them: `require_auth_or_loopback()`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from escrowmq.auth.acl import (
    AccessRules,
    Action,
    Permission,
    PlainAccount,
    ResourceType,
    parse_rules,
)
from escrowmq.auth.validator import AccessValidator
from escrowmq.client.access import Access
from escrowmq.clock import SystemClock
from escrowmq.config import ClientAuth, Config, SecurityConfig
from escrowmq.config.loading import is_loopback
from escrowmq.config.setting_types import read_credentials
from escrowmq.errors import ConfigError, InvalidAccessRules
from escrowmq.remoting.connection import SignFunction
from escrowmq.remoting.foreign_protocols import (
    FOREIGN_BYTES,
    TLS_REQUIRED_ALERT,
    foreign_protocol,
)
from escrowmq.secret import Secret
from escrowmq.server.tasks import sleep_to_multiple
from escrowmq.server.tls_connection import TlsConnection

log = logging.getLogger(__name__)

# --- access control ------------------------------------------------------------------------------

ACL_FILE_BYTES_MAX: Final = 16 << 20
_OWN_KEY_BYTES: Final = 32

InternalAccount = tuple[str, Secret]  # access key and secret key


class AccessControl:
    """Access control and TLS of all ports of a process.

    `validator` and `tls` are None if they are switched off.
    """

    def __init__(self, config: Config, internal_account: InternalAccount | None = None) -> None:
        """`internal_account` is needed if brokers and name server run in different processes.

        Without it a random account is created.
        """
        security = config.security
        self._cluster = config.broker.cluster_name
        self.validator: AccessValidator | None = None
        self.tls: TlsContext | None = None
        self.watchers: list[FileWatcher] = []
        self._internal_signer: SignFunction | None = None
        if security.is_acl_on:
            assert security.acl_file is not None
            self._enable_acl(
                security.acl_file,
                internal_account or new_internal_account(),
                strong_signature_only=security.strong_signature_only,
            )
        if security.has_tls:
            self.tls = tls = TlsContext(security)
            files = (security.tls_cert, security.tls_key, security.tls_trust)
            paths = [path for path in files if path is not None]
            self.watchers.append(FileWatcher("certificates", paths, tls.reload))

    def _enable_acl(
        self, file: Path, internal_account: InternalAccount, *, strong_signature_only: bool
    ) -> None:
        validator = self.validator = AccessValidator(
            load_acl_file(file),
            strong_signature_only=strong_signature_only,
            started_ms=SystemClock().now_ms(),
        )
        # With this account, which is in no file, the broker registers with the name server of its
        # own process.
        key, secret = internal_account
        account = PlainAccount(access_key=key, secret_key=secret, is_admin=True)
        validator.add_internal_account(account)
        self._internal_signer = _make_signer(internal_account, is_strong=strong_signature_only)
        self.watchers.append(
            FileWatcher(
                f"accounts of {file}",
                [file],
                lambda: validator.replace_rules(load_acl_file(file)),
            )
        )

    @property
    def internal_signer(self) -> SignFunction | None:
        return self._internal_signer

    def administrator_permissions(self) -> tuple[Permission, ...]:
        """Return the permissions that only an administrator of the cluster has."""
        return (Permission(ResourceType.CLUSTER, self._cluster, Action.UPDATE),)

    def can_see_metrics(self, access_key: str, secret_key: str, host: str) -> bool:
        if self.validator is None:
            return True
        permission = Permission(ResourceType.CLUSTER, self._cluster, Action.GET)
        return self.validator.is_allowed_with_secret(access_key, secret_key, permission, host)


def new_internal_account() -> InternalAccount:
    """Return a random account for the processes of one server."""
    key = f"escrowmq-own-{secrets.token_hex(8)}"
    return key, Secret(secrets.token_hex(_OWN_KEY_BYTES))


def load_acl_file(file: Path) -> AccessRules:
    """Read an ACL file. Raises InvalidAccessRules, which names the file and the problem."""
    try:
        with file.open("rb") as opened:
            content = opened.read(ACL_FILE_BYTES_MAX + 1)
        if len(content) > ACL_FILE_BYTES_MAX:
            raise InvalidAccessRules(f"larger than {ACL_FILE_BYTES_MAX} bytes, the limit")
        return parse_rules(content.decode("utf-8-sig"))
    except OSError as error:
        raise InvalidAccessRules(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidAccessRules(f"{file}: is not UTF-8") from None
    except InvalidAccessRules as error:
        raise InvalidAccessRules(f"{file}: {error}") from None


def configured_internal_account(config: Config) -> InternalAccount | None:
    """Return the account in innerClientAuthenticationCredentials, or None."""
    credentials = config.security.inner_credentials
    return read_credentials(credentials) if credentials else None


def outgoing_signer(config: Config) -> SignFunction | None:
    """Return the signer for registrations with name servers of other processes, or None."""
    account = configured_internal_account(config)
    if account is None:
        return None
    return _make_signer(account, is_strong=config.security.strong_signature_only)


def _make_signer(account: InternalAccount, *, is_strong: bool) -> SignFunction | None:
    key, secret = account
    return Access(key, secret, strong_signature=is_strong).signer()


def require_auth_or_loopback(config: Config) -> None:
    """Raise ConfigError if other machines could connect without an account."""
    if config.security.is_acl_on or config.security.insecure:
        return
    addresses = {"bindAddress": config.network.bind_address}
    if config.metrics.is_enabled and config.metrics.metrics_address:
        addresses["metricsPromExporterHost"] = config.metrics.metrics_address
    for name, address in addresses.items():
        if not is_loopback(address):
            raise ConfigError(
                f"{name}={address} allows every machine on the network to read and write messages: "
                "set aclEnable=true and escrowAclFile (docs/security.md), "
                "or use --insecure to allow it"
            )


# --- TLS contexts --------------------------------------------------------------------------------

_VERIFY_MODES = {
    ClientAuth.NONE: ssl.CERT_NONE,
    ClientAuth.OPTIONAL: ssl.CERT_OPTIONAL,
    ClientAuth.REQUIRE: ssl.CERT_REQUIRED,
}


class TlsContext:
    """The TLS context of new connections. Open connections keep the one they began with."""

    def __init__(self, config: SecurityConfig) -> None:
        self._config = config
        self.ssl_context = server_context(config)

    def reload(self) -> None:
        """Read the certificates again. Raises InvalidAccessRules; then the old ones stay."""
        self.ssl_context = server_context(self._config)


def server_context(config: SecurityConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    try:
        _load_certificate(context, config)
        context.verify_mode = _VERIFY_MODES[config.tls_client_auth]
        if config.tls_trust is not None:
            context.load_verify_locations(config.tls_trust)
            # The broker presents this certificate to the name server of the same process.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.load_verify_locations(config.tls_cert)
    except (OSError, ssl.SSLError) as error:
        raise _certificate_error(error) from None
    return context


def own_namesrv_context(config: SecurityConfig) -> ssl.SSLContext:
    """Return the context for connections to the name server of this process.

    It trusts only the certificate of this process.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate may have any name; only our own is trusted
    try:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(config.tls_cert)
        _load_certificate(context, config)
    except (OSError, ssl.SSLError) as error:
        raise _certificate_error(error) from None
    return context


def client_context(config: SecurityConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(
            cafile=None if config.tls_outgoing_trust is None else str(config.tls_outgoing_trust)
        )
        if config.tls_outgoing_cert is not None:
            context.load_cert_chain(config.tls_outgoing_cert, config.tls_outgoing_key)
    except (OSError, ssl.SSLError) as error:
        raise _certificate_error(error) from None
    return context


def _load_certificate(context: ssl.SSLContext, config: SecurityConfig) -> None:
    assert config.tls_cert is not None
    # Even if there is no password it must be a callable: otherwise OpenSSL asks on the terminal.
    context.load_cert_chain(
        config.tls_cert, config.tls_key, password=lambda: config.tls_key_password.reveal()
    )


def _certificate_error(error: OSError) -> InvalidAccessRules:
    name = f"{error.filename}: " if error.filename else ""
    return InvalidAccessRules(
        f"certificate or key: {name}{error.strerror or error}; "
        "check tls.server.certPath, keyPath, keyPassword and trustCertPath"
    )


# --- TLS detection -------------------------------------------------------------------------------

HANDSHAKE_FIRST_BYTE: Final = 0x16
HANDSHAKE_TIMEOUT_S: Final = 10.0
ACCEPT_BATCH_MAX: Final = 100
ACCEPT_RETRY_S: Final = 0.2  # after an error such as too many open files
UNREAD_BYTES_MAX: Final = 64 * 1024


class TlsDetector:
    """Plain and TLS connections on one port, as in RocketMQ.

    A TLS handshake begins with the byte 0x16. A plain connection begins with the length of a frame,
    whose first byte is 0 or 1. The first byte is peeked at, and the socket is then handed to the
    protocol, directly or through TLS. A client that sends nothing or stalls in the handshake is
    disconnected after a timeout, and counts as a connection until then. When `pending_max` clients
    are that far, the oldest is disconnected for a new one: it is the most likely to stall.

    `get_context` is called for every connection, because certificates change. `has_capacity` is
    called with the host of a new connection and the number of those that are still being detected.
    """

    def __init__(
        self,
        new_protocol: Callable[[], asyncio.Protocol],
        get_context: Callable[[], ssl.SSLContext],
        *,
        is_enforcing: bool,
        idle_max_s: float,
        has_capacity: Callable[[str, int], bool],
        pending_max: int,
    ) -> None:
        self._new_protocol = new_protocol
        self._get_context = get_context
        self._is_enforcing = is_enforcing
        # A plain client may stay silent for a while, but a TLS client begins with a handshake.
        self._idle_max_s = min(idle_max_s, HANDSHAKE_TIMEOUT_S) if is_enforcing else idle_max_s
        self._has_capacity = has_capacity
        self._pending_max = pending_max
        self._loop = asyncio.get_running_loop()
        self._listening_socket: socket.socket | None = None
        self._pending: dict[asyncio.Task[None], None] = {}  # the oldest first
        self.refused = 0  # failed handshakes, and plain connections where TLS is required

    def listen(self, listening_socket: socket.socket) -> None:
        self._listening_socket = listening_socket
        self._loop.add_reader(listening_socket.fileno(), self._accept)

    def close(self) -> None:
        if self._listening_socket is not None:
            self._loop.remove_reader(self._listening_socket.fileno())
            self._listening_socket.close()
            self._listening_socket = None
        for task in self._pending:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPT_BATCH_MAX):
            if self._listening_socket is None:
                return
            try:
                accepted, address = self._listening_socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("connection not accepted, retrying in %s s: %s", ACCEPT_RETRY_S, error)
                self._loop.remove_reader(self._listening_socket.fileno())
                self._loop.call_later(ACCEPT_RETRY_S, self._accept_again)
                return
            if not self._has_capacity(str(address[0]), len(self._pending)):
                accepted.close()
                continue
            if len(self._pending) >= self._pending_max:
                self._disconnect_oldest()
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._detect(accepted))
            self._pending[task] = None
            task.add_done_callback(self._forget_pending)

    def _disconnect_oldest(self) -> None:
        task = next(iter(self._pending))
        del self._pending[task]
        self.refused += 1
        task.cancel()

    def _forget_pending(self, task: asyncio.Task[None]) -> None:
        self._pending.pop(task, None)

    def _accept_again(self) -> None:
        if self._listening_socket is not None:
            self._loop.add_reader(self._listening_socket.fileno(), self._accept)

    async def _detect(self, accepted: socket.socket) -> None:
        first = b""
        try:
            async with asyncio.timeout(self._idle_max_s):
                first = await self._first_bytes(accepted)
        except (OSError, TimeoutError) as error:
            self._refuse(accepted, str(error) or "nothing received in time")
            return
        except asyncio.CancelledError:
            accepted.close()
            raise
        if not first:
            accepted.close()
        elif first[0] == HANDSHAKE_FIRST_BYTE:
            await self._start_tls(accepted)
        elif self._is_enforcing:
            self._refuse_plain(accepted, first)
        else:
            with contextlib.suppress(OSError):  # the client has gone
                await self._loop.connect_accepted_socket(self._new_protocol, accepted)

    async def _start_tls(self, accepted: socket.socket) -> None:
        peer = _peer_name(accepted)
        connection = TlsConnection(self._new_protocol, self._get_context())
        try:
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_S):
                transport, _ = await self._loop.connect_accepted_socket(
                    lambda: connection, accepted
                )
                try:
                    await connection.handshake
                except asyncio.CancelledError:  # by the timeout too
                    transport.abort()
                    raise
        except OSError as error:  # ssl.SSLError is one, and so is TimeoutError
            self.refused += 1
            reason = getattr(error, "reason", None) or str(error) or "not done in time"
            log.info("TLS handshake failed peer=%s: %s", peer, reason)

    def _refuse_plain(self, accepted: socket.socket, first: bytes) -> None:
        """Refuse a client without TLS, and tell it so: ours shows it to its user."""
        protocol = foreign_protocol(first) or "RocketMQ's remoting protocol without TLS"
        with contextlib.suppress(OSError):
            accepted.send(TLS_REQUIRED_ALERT)
            accepted.recv(UNREAD_BYTES_MAX)  # unread bytes would reset the connection
        self._refuse(accepted, f"this port requires TLS, and this looks like {protocol}")

    def _refuse(self, accepted: socket.socket, reason: str) -> None:
        self.refused += 1
        log.info("connection refused peer=%s: %s", _peer_name(accepted), reason)
        accepted.close()

    async def _first_bytes(self, accepted: socket.socket) -> bytes:
        """Return the first bytes without consuming them; empty if the client closes before."""
        readable = asyncio.Event()
        self._loop.add_reader(accepted.fileno(), readable.set)
        try:
            while True:
                await readable.wait()
                with contextlib.suppress(BlockingIOError, InterruptedError):
                    return accepted.recv(FOREIGN_BYTES, socket.MSG_PEEK)
                readable.clear()
        finally:
            self._loop.remove_reader(accepted.fileno())


def _peer_name(accepted: socket.socket) -> str:
    try:
        address = accepted.getpeername()
    except OSError:  # the client has gone
        return "?"
    return f"{address[0]}:{address[1]}"


# --- watched files -------------------------------------------------------------------------------

WATCH_INTERVAL_S: Final = 1.0

_FileStamps = tuple[tuple[int, int, int], ...]


class FileWatcher:
    """Call `reload` when one of the files changes.

    If it raises InvalidAccessRules, the old content stays in force; this is logged once per change.
    """

    def __init__(self, description: str, files: Sequence[Path], reload: Callable[[], None]) -> None:
        self._description = description
        self._files = files
        self._reload = reload
        self._last_stamps = self._stamps()
        self.reload_count = 0
        self.failure_count = 0
        self.is_broken = False

    async def run(self) -> None:
        while True:
            await sleep_to_multiple(WATCH_INTERVAL_S)
            self.reload_if_changed()

    def reload_if_changed(self) -> None:
        stamps = self._stamps()
        if stamps == self._last_stamps:
            return
        self._last_stamps = stamps
        try:
            self._reload()
        except InvalidAccessRules as error:
            self.failure_count += 1
            self.is_broken = True
            log.error("%s not reloaded, the old content stays: %s", self._description, error)
        else:
            self.reload_count += 1
            self.is_broken = False
            log.info("%s reloaded", self._description)

    def _stamps(self) -> _FileStamps:
        return tuple(map(_stamp, self._files))


def _stamp(file: Path) -> tuple[int, int, int]:
    try:
        status = os.stat(file)
    except OSError:
        return 0, 0, 0
    return status.st_mtime_ns, status.st_size, status.st_ino
