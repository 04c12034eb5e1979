"""Access control of a server: the guard, its file, and whether the doors may be open at all."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from escrowmq.access.files import read_rules
from escrowmq.access.guard import Guard
from escrowmq.access.rules import Action, Kind, Need, PlainAccount, Rules
from escrowmq.access.signature import Signer
from escrowmq.config import Config
from escrowmq.config.kinds import read_credentials
from escrowmq.config.resolve import is_loopback
from escrowmq.errors import AccessRulesBroken, ConfigError
from escrowmq.secret import Secret
from escrowmq.server.tls import Tls
from escrowmq.server.watch import Watch
from escrowmq.wire.codes import RequestCode
from escrowmq.wire.fastpath import Request

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
