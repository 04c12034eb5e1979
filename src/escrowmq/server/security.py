"""TLS contexts from files, made anew when the files change.

Plain and TLS on one port: the first byte tells, as in RocketMQ.

    0x16    a TLS handshake          anything else    the length of a frame; none is that long

A connection is looked at before it is anybody's: its first byte is read and left where it is, then
the socket goes on as it is, or behind TLS. Who says nothing, or stops in the middle of a handshake,
has a deadline, and his place is counted; nobody waits for him.

Files that are read again when they change.

Access control of a server: the guard, its file, and whether the doors may be open at all.
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
from escrowmq.auth.signature import Signer
from escrowmq.auth.validator import AccessValidator
from escrowmq.config import ClientAuth, Config, SecurityConfig
from escrowmq.config.loading import is_loopback
from escrowmq.config.setting_types import read_credentials
from escrowmq.errors import ConfigError, InvalidAccessRules
from escrowmq.secret import Secret

_VERIFY_MODES = {
    ClientAuth.NONE: ssl.CERT_NONE,
    ClientAuth.OPTIONAL: ssl.CERT_OPTIONAL,
    ClientAuth.REQUIRE: ssl.CERT_REQUIRED,
}


class TlsContext:
    """What a new connection is served with; those that are open keep what they have."""

    def __init__(self, config: SecurityConfig) -> None:
        self._config = config
        self.ssl_context = server_context(config)

    def reload(self) -> None:
        """Raises AccessRulesBroken; then it is as it was."""
        self.ssl_context = server_context(self._config)


def server_context(config: SecurityConfig) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        _load_certificate(context, config)
        context.verify_mode = _VERIFY_MODES[config.tls_client_auth]
        if config.tls_trust is not None:
            context.load_verify_locations(config.tls_trust)
            # A broker and a name server of one process have one certificate between them.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            context.load_verify_locations(config.tls_cert)
    except (OSError, ssl.SSLError) as error:
        raise _certificate_error(error) from None
    return context


def own_namesrv_context(config: SecurityConfig) -> ssl.SSLContext:
    """To the name server of this very process: it shows the certificate that we have ourselves."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate may be for any name; the key is our own
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
    # A password that is asked for and not there must not be asked of a terminal.
    context.load_cert_chain(
        config.tls_cert, config.tls_key, password=lambda: config.tls_key_password.reveal()
    )


def _certificate_error(error: OSError) -> InvalidAccessRules:
    name = f"{error.filename}: " if error.filename else ""
    return InvalidAccessRules(
        f"certificate or key: {name}{error.strerror or error}; "
        "look at tls.server.certPath, keyPath, keyPassword and trustCertPath"
    )


log = logging.getLogger(__name__)

HANDSHAKE_FIRST_BYTE: Final = 0x16
HANDSHAKE_TIMEOUT_S: Final = 10.0
ACCEPT_BATCH_MAX: Final = 100
ACCEPT_RETRY_S: Final = 0.2  # if the process has no files left


class TlsDetector:
    """`context` is asked for every connection: certificates change. `has_room`: for one more."""

    def __init__(
        self,
        new_protocol: Callable[[], asyncio.Protocol],
        get_context: Callable[[], ssl.SSLContext],
        *,
        is_enforcing: bool,
        idle_max_s: float,
        has_capacity: Callable[[int], bool],
    ) -> None:
        self._new_protocol = new_protocol
        self._get_context = get_context
        self._is_enforcing = is_enforcing
        # A plain client may be silent for a while; where only TLS is served, a handshake is due.
        self._idle_max_s = min(idle_max_s, HANDSHAKE_TIMEOUT_S) if is_enforcing else idle_max_s
        self._has_capacity = has_capacity
        self._loop = asyncio.get_running_loop()
        self._listening_socket: socket.socket | None = None
        self._pending: set[asyncio.Task[None]] = set()
        self.refused = 0  # handshakes that failed, and plain connections where TLS is wanted

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
                accepted, _ = self._listening_socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("a connection could not be accepted: %s", error)
                self._loop.remove_reader(self._listening_socket.fileno())
                self._loop.call_later(ACCEPT_RETRY_S, self._accept_again)
                return
            if not self._has_capacity(len(self._pending)):
                accepted.close()
                continue
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._detect(accepted))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)

    def _accept_again(self) -> None:
        if self._listening_socket is not None:
            self._loop.add_reader(self._listening_socket.fileno(), self._accept)

    async def _detect(self, accepted: socket.socket) -> None:
        first: int | None = None
        try:
            async with asyncio.timeout(self._idle_max_s):
                first = await self._first_byte(accepted)
        except (OSError, TimeoutError) as error:
            self._refuse(accepted, str(error) or "nothing came in time")
            return
        except asyncio.CancelledError:
            accepted.close()
            raise
        if first is None:
            accepted.close()
        elif first == HANDSHAKE_FIRST_BYTE:
            await self._start_tls(accepted)
        elif self._is_enforcing:
            self._refuse(accepted, "this port speaks TLS alone")
        else:
            with contextlib.suppress(OSError):  # gone again
                await self._loop.connect_accepted_socket(self._new_protocol, accepted)

    async def _start_tls(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._new_protocol,
                accepted,
                ssl=self._get_context(),
                ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
            )
        except OSError as error:  # ssl.SSLError is one; the loop has closed the socket
            self.refused += 1
            log.info("no TLS with a client: %s", getattr(error, "reason", None) or error)

    def _refuse(self, accepted: socket.socket, reason: str) -> None:
        self.refused += 1
        log.info("connection closed at the door: %s", reason)
        accepted.close()

    async def _first_byte(self, accepted: socket.socket) -> int | None:
        """Without taking it; None if there is none to come."""
        readable = asyncio.Event()
        self._loop.add_reader(accepted.fileno(), readable.set)
        try:
            while True:
                await readable.wait()
                with contextlib.suppress(BlockingIOError, InterruptedError):
                    first = accepted.recv(1, socket.MSG_PEEK)
                    return first[0] if first else None
                readable.clear()
        finally:
            self._loop.remove_reader(accepted.fileno())


WATCH_INTERVAL_S: Final = 1.0

_FileStamps = tuple[tuple[int, int, int], ...]


class FileWatcher:
    """`renew` reads the files, or raises AccessRulesBroken: then what was read before still holds,
    and it is said once."""

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
            await asyncio.sleep(WATCH_INTERVAL_S)
            self.reload_if_changed()

    def reload_if_changed(self) -> None:
        mark = self._stamps()
        if mark == self._last_stamps:
            return
        self._last_stamps = mark
        try:
            self._reload()
        except InvalidAccessRules as error:
            self.failure_count += 1
            self.is_broken = True
            log.error("%s changed and cannot be used, the old stay: %s", self._description, error)
        else:
            self.reload_count += 1
            self.is_broken = False
            log.info("%s read again", self._description)

    def _stamps(self) -> _FileStamps:
        return tuple(map(_stamp, self._files))


def _stamp(file: Path) -> tuple[int, int, int]:
    try:
        found = os.stat(file)
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino


ACL_FILE_BYTES_MAX: Final = 16 << 20
_OWN_KEY_BYTES: Final = 32

InternalAccount = tuple[str, Secret]  # access key and secret key


class AccessControl:
    """Made once for all ports of a process. `guard` and `tls` are None where they are off."""

    def __init__(self, config: Config, internal_account: InternalAccount | None = None) -> None:
        """`own`: the brokers' account, if they and their name server are several processes."""
        security = config.security
        self._cluster = config.broker.cluster_name
        self.validator: AccessValidator | None = None
        self.tls: TlsContext | None = None
        self.watchers: list[FileWatcher] = []
        self._internal_signer: Signer | None = None
        if security.is_acl_on:
            assert security.acl_file is not None
            self._enable_acl(security.acl_file, internal_account or new_internal_account())
        if security.has_tls:
            self.tls = tls = TlsContext(security)
            files = (security.tls_cert, security.tls_key, security.tls_trust)
            given = [file for file in files if file is not None]
            self.watchers.append(FileWatcher("the certificates", given, tls.reload))

    def _enable_acl(self, file: Path, internal_account: InternalAccount) -> None:
        guard = self.validator = AccessValidator(load_acl_file(file))
        # The broker of this process needs an account towards its own name server, and no file
        # should have to know about it.
        key, secret = internal_account
        guard.add_internal_account(PlainAccount(access_key=key, secret_key=secret, is_admin=True))
        self._internal_signer = Signer(key, secret, Secret(""))
        watch = FileWatcher(
            f"the accounts of {file}", [file], lambda: guard.replace_rules(load_acl_file(file))
        )
        self.watchers.append(watch)

    @property
    def internal_signer(self) -> Signer | None:
        return self._internal_signer

    def administrator_permissions(self) -> tuple[Permission, ...]:
        """Return the permissions that only an administrator of the cluster has."""
        return (Permission(ResourceType.CLUSTER, self._cluster, Action.UPDATE),)

    def can_see_metrics(self, access_key: str, secret_key: str, host: str) -> bool:
        if self.validator is None:
            return True
        need = Permission(ResourceType.CLUSTER, self._cluster, Action.GET)
        return self.validator.is_allowed_with_secret(access_key, secret_key, need, host)


def new_internal_account() -> InternalAccount:
    """Known to nobody but who is told."""
    key = f"escrowmq-own-{secrets.token_hex(8)}"
    return key, Secret(secrets.token_hex(_OWN_KEY_BYTES))


def load_acl_file(file: Path) -> AccessRules:
    """Raises AccessRulesBroken, which names the file and what is wrong with it."""
    try:
        with file.open("rb") as opened:
            content = opened.read(ACL_FILE_BYTES_MAX + 1)
        if len(content) > ACL_FILE_BYTES_MAX:
            raise InvalidAccessRules(f"over {ACL_FILE_BYTES_MAX} bytes")
        return parse_rules(content.decode("utf-8-sig"))
    except OSError as error:
        raise InvalidAccessRules(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidAccessRules(f"{file}: is not UTF-8") from None
    except InvalidAccessRules as error:
        raise InvalidAccessRules(f"{file}: {error}") from None


def configured_internal_account(config: Config) -> InternalAccount | None:
    """The one of the settings."""
    told = config.security.inner_credentials
    return read_credentials(told) if told else None


def outgoing_signer(config: Config) -> Signer | None:
    """By which the broker registers with the name servers of others."""
    account = configured_internal_account(config)
    return None if account is None else Signer(*account, Secret(""))


def require_auth_or_loopback(config: Config) -> None:
    """Raises ConfigError: to serve others than this machine, they must be asked who they are."""
    if config.security.is_acl_on or config.security.insecure:
        return
    listened = {"bindAddress": config.network.bind_address}
    if config.metrics.is_enabled and config.metrics.metrics_address:
        listened["metricsPromExporterHost"] = config.metrics.metrics_address
    for name, address in listened.items():
        if not is_loopback(address):
            raise ConfigError(
                f"{name}={address} lets every machine that reaches it read, write and decide: "
                "set aclEnable=true and escrowAclFile (docs/security.md), "
                "or say --insecure if that is meant"
            )
