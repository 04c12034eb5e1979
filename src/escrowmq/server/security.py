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
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from escrowmq.auth.acl import Action, Kind, Need, PlainAccount, Rules, read_rules
from escrowmq.auth.signature import Signer
from escrowmq.auth.validator import Guard
from escrowmq.config import ClientAuth, Config, SecurityConfig
from escrowmq.config.loading import is_loopback
from escrowmq.config.setting_types import read_credentials
from escrowmq.errors import AccessRulesBroken, ConfigError
from escrowmq.remoting.codes import RequestCode
from escrowmq.remoting.requests import Request
from escrowmq.secret import Secret

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


log = logging.getLogger(__name__)

HANDSHAKE_FIRST_BYTE: Final = 0x16
HANDSHAKE_S: Final = 10.0
ACCEPTED_AT_ONCE: Final = 100
PAUSE_S: Final = 0.2  # if the process has no files left


class Door:
    """`context` is asked for every connection: certificates change. `has_room`: for one more."""

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        context: Callable[[], ssl.SSLContext],
        *,
        enforcing: bool,
        silent_max_s: float,
        has_room: Callable[[int], bool],
    ) -> None:
        self._make = make
        self._context = context
        self._enforcing = enforcing
        # A plain client may be silent for a while; where only TLS is served, a handshake is due.
        self._silent_max_s = min(silent_max_s, HANDSHAKE_S) if enforcing else silent_max_s
        self._has_room = has_room
        self._loop = asyncio.get_running_loop()
        self._bound: socket.socket | None = None
        self._entering: set[asyncio.Task[None]] = set()
        self.refused = 0  # handshakes that failed, and plain connections where TLS is wanted

    def open(self, bound: socket.socket) -> None:
        self._bound = bound
        self._loop.add_reader(bound.fileno(), self._accept)

    def close(self) -> None:
        if self._bound is not None:
            self._loop.remove_reader(self._bound.fileno())
            self._bound.close()
            self._bound = None
        for task in self._entering:
            task.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            if self._bound is None:
                return
            try:
                accepted, _ = self._bound.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.warning("a connection could not be accepted: %s", error)
                self._loop.remove_reader(self._bound.fileno())
                self._loop.call_later(PAUSE_S, self._accept_again)
                return
            if not self._has_room(len(self._entering)):
                accepted.close()
                continue
            accepted.setblocking(False)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            task = self._loop.create_task(self._enter(accepted))
            self._entering.add(task)
            task.add_done_callback(self._entering.discard)

    def _accept_again(self) -> None:
        if self._bound is not None:
            self._loop.add_reader(self._bound.fileno(), self._accept)

    async def _enter(self, accepted: socket.socket) -> None:
        first: int | None = None
        try:
            async with asyncio.timeout(self._silent_max_s):
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
            await self._shake_hands(accepted)
        elif self._enforcing:
            self._refuse(accepted, "this port speaks TLS alone")
        else:
            with contextlib.suppress(OSError):  # gone again
                await self._loop.connect_accepted_socket(self._make, accepted)

    async def _shake_hands(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._make, accepted, ssl=self._context(), ssl_handshake_timeout=HANDSHAKE_S
            )
        except OSError as error:  # ssl.SSLError is one; the loop has closed the socket
            self.refused += 1
            log.info("no TLS with a client: %s", getattr(error, "reason", None) or error)

    def _refuse(self, accepted: socket.socket, why: str) -> None:
        self.refused += 1
        log.info("connection closed at the door: %s", why)
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


LOOK_S: Final = 1.0

_Mark = tuple[tuple[int, int, int], ...]


class Watch:
    """`renew` reads the files, or raises AccessRulesBroken: then what was read before still holds,
    and it is said once."""

    def __init__(self, what: str, files: Sequence[Path], renew: Callable[[], None]) -> None:
        self._what = what
        self._files = files
        self._renew = renew
        self._seen = self._mark()
        self.renewed = 0
        self.failed = 0
        self.is_broken = False

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        mark = self._mark()
        if mark == self._seen:
            return
        self._seen = mark
        try:
            self._renew()
        except AccessRulesBroken as error:
            self.failed += 1
            self.is_broken = True
            log.error("%s changed and cannot be used, the old stay: %s", self._what, error)
        else:
            self.renewed += 1
            self.is_broken = False
            log.info("%s read again", self._what)

    def _mark(self) -> _Mark:
        return tuple(map(_mark_of, self._files))


def _mark_of(file: Path) -> tuple[int, int, int]:
    try:
        found = os.stat(file)
    except OSError:
        return 0, 0, 0
    return found.st_mtime_ns, found.st_size, found.st_ino


FILE_BYTES_MAX: Final = 16 << 20
_OWN_KEY_BYTES: Final = 32

# What clients ask a name server: any account may. The rest changes what they are told.
_LOOKED_UP: Final = frozenset(
    (
        RequestCode.GET_ROUTEINFO_BY_TOPIC,
        RequestCode.GET_BROKER_CLUSTER_INFO,
        RequestCode.GET_BROKER_MEMBER_GROUP,
        RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
        RequestCode.GET_TOPICS_BY_CLUSTER,
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS,
        RequestCode.GET_UNIT_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_TOPIC_LIST,
        RequestCode.GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST,
        RequestCode.GET_KV_CONFIG,
        RequestCode.GET_KVLIST_BY_NAMESPACE,
        RequestCode.QUERY_DATA_VERSION,
    )
)


OwnAccount = tuple[str, Secret]  # access key and secret key


class Access:
    """Made once for all ports of a process. `guard` and `tls` are None where they are off."""

    def __init__(self, config: Config, own: OwnAccount | None = None) -> None:
        """`own`: the brokers' account, if they and their name server are several processes."""
        security = config.security
        self._cluster = config.broker.cluster_name
        self.guard: Guard | None = None
        self.tls: Tls | None = None
        self.watches: list[Watch] = []
        self._own: Signer | None = None
        if security.checks_access:
            assert security.acl_file is not None
            self._guard_by(security.acl_file, own or new_account())
        if security.has_tls:
            self.tls = tls = Tls(security)
            files = (security.tls_cert, security.tls_key, security.tls_trust)
            given = [file for file in files if file is not None]
            self.watches.append(Watch("the certificates", given, tls.renew))

    def _guard_by(self, file: Path, own: OwnAccount) -> None:
        guard = self.guard = Guard(rules_of(file))
        # The broker of this process needs an account towards its own name server, and no file
        # should have to know about it.
        key, secret = own
        guard.add_own(PlainAccount(access_key=key, secret_key=secret, is_admin=True))
        self._own = Signer(key, secret, Secret(""))
        watch = Watch(f"the accounts of {file}", [file], lambda: guard.renew(rules_of(file)))
        self.watches.append(watch)

    @property
    def own_signer(self) -> Signer | None:
        return self._own

    def needs_at_name_server(self, request: Request[Any]) -> Iterable[Need]:
        if request.head.code in _LOOKED_UP:
            return ()
        return (Need(Kind.CLUSTER, self._cluster, Action.UPDATE),)

    def may_see_metrics(self, access_key: str, secret_key: str, host: str) -> bool:
        if self.guard is None:
            return True
        need = Need(Kind.CLUSTER, self._cluster, Action.GET)
        return self.guard.allows(access_key, secret_key, need, host)


def new_account() -> OwnAccount:
    """Known to nobody but who is told."""
    key = f"escrowmq-own-{secrets.token_hex(8)}"
    return key, Secret(secrets.token_hex(_OWN_KEY_BYTES))


def rules_of(file: Path) -> Rules:
    """Raises AccessRulesBroken, which names the file and what is wrong with it."""
    try:
        with file.open("rb") as opened:
            content = opened.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            raise AccessRulesBroken(f"over {FILE_BYTES_MAX} bytes")
        return read_rules(content.decode("utf-8-sig"))
    except OSError as error:
        raise AccessRulesBroken(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise AccessRulesBroken(f"{file}: is not UTF-8") from None
    except AccessRulesBroken as error:
        raise AccessRulesBroken(f"{file}: {error}") from None


def inner_account(config: Config) -> OwnAccount | None:
    """The one of the settings."""
    told = config.security.inner_credentials
    return read_credentials(told) if told else None


def outgoing_signer(config: Config) -> Signer | None:
    """By which the broker registers with the name servers of others."""
    account = inner_account(config)
    return None if account is None else Signer(*account, Secret(""))


def refuse_open_doors(config: Config) -> None:
    """Raises ConfigError: to serve others than this machine, they must be asked who they are."""
    if config.security.checks_access or config.security.insecure:
        return
    listened = {"bindAddress": config.network.bind_address}
    if config.metrics.is_on and config.metrics.metrics_address:
        listened["metricsPromExporterHost"] = config.metrics.metrics_address
    for name, address in listened.items():
        if not is_loopback(address):
            raise ConfigError(
                f"{name}={address} lets every machine that reaches it read, write and decide: "
                "set aclEnable=true and escrowAclFile (docs/security.md), "
                "or say --insecure if that is meant"
            )
