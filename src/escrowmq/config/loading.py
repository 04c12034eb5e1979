"""Where values come from: a file, the environment, flags. Text, and the place it was read at.

Every setting, by each of its names. Made from the dataclasses of the groups.

Bring the sources together: default, then file, then environment, then flags; the last wins.
"""

from __future__ import annotations

import difflib
import enum
import ipaddress
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from escrowmq.config import settings as groups
from escrowmq.config.properties_file import read_properties
from escrowmq.config.rocketmq_keys import FORMER_KEYS, ROCKETMQ_KEYS
from escrowmq.config.setting_types import WILDCARDS, Hidden, Kind
from escrowmq.config.settings import (
    BrokerConfig,
    BrokerRole,
    ConsumeConfig,
    DelayConfig,
    LogConfig,
    MetricsConfig,
    MetricsExporter,
    NamesrvConfig,
    NetworkConfig,
    OverloadConfig,
    SecurityConfig,
    StoreConfig,
    TransactionConfig,
)
from escrowmq.errors import ConfigError

ENVIRONMENT_PREFIX: Final = "ESCROWMQ_"
_OURS: Final = "escrow"
_WORDS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    group: str
    name: str  # in Python and TOML
    conf: str  # in RocketMQ's files and TOML
    kind: Kind
    default: object
    unit: str
    help: str

    @property
    def environment(self) -> str:
        """`listenPort` is ESCROWMQ_LISTEN_PORT, `escrowNamesrvPort` ESCROWMQ_NAMESRV_PORT."""
        words = _WORDS.sub("_", self.conf.removeprefix(_OURS)).replace(".", "_")
        return f"{ENVIRONMENT_PREFIX}{words.upper()}"

    @property
    def is_ours(self) -> bool:
        return self.conf.startswith(_OURS)


GROUPS: Final = {
    "broker": groups.BrokerConfig,
    "network": groups.NetworkConfig,
    "store": groups.StoreConfig,
    "consume": groups.ConsumeConfig,
    "delay": groups.DelayConfig,
    "transaction": TransactionConfig,
    "namesrv": groups.NamesrvConfig,
    "metrics": groups.MetricsConfig,
    "security": SecurityConfig,
    "log": LogConfig,
    "overload": OverloadConfig,
}

SETTINGS: Final = tuple(
    Setting(group=group, name=item.name, default=item.default, **item.metadata)
    for group, members in GROUPS.items()
    for item in fields(members)
)
BY_CONF: Final = {setting.conf: setting for setting in SETTINGS}
BY_NAME: Final = {setting.name: setting for setting in SETTINGS}
BY_ENVIRONMENT: Final = {setting.environment: setting for setting in SETTINGS}

# What a file asks for in vain with these is worth more words than "ignored".
_IN_VAIN: Final = {
    **dict.fromkeys(
        ("enableDLegerCommitLog", "enableControllerMode", "inSyncReplicas", "haListenPort"),
        "; nothing is replicated",
    ),
    "storePathCommitLog": "; the log is under storePathRootDir",
}


def ignored(key: str) -> str | None:
    """What to say of a key that RocketMQ has, or once had, and we do not; None of any other."""
    if key in BY_CONF:
        return None
    if key in FORMER_KEYS:
        return (
            f"{key} is ignored, as RocketMQ 4.9 and 5 ignore it{nearest(key, BY_CONF, cutoff=0.9)}"
        )
    if key in ROCKETMQ_KEYS:
        what = f"{key} is a setting of RocketMQ that EscrowMQ does not have; it is ignored"
        return what + _IN_VAIN.get(key, "")
    return None


def nearest(key: str, known: Iterable[str], *, cutoff: float = 0.7) -> str:
    """`; did you mean …?`, or nothing. Upper and lower case are the same here."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(key.lower()[:100], by_lower, n=1, cutoff=cutoff)
    return f"; did you mean {by_lower[near[0]]}?" if near else ""


FILE_BYTES_MAX: Final = 1 << 20
FLAGS: Final = {
    "--data": ("storePathRootDir",),
    "--host": ("bindAddress", "brokerIP1"),
    "--port": ("listenPort",),
    "--namesrv-port": ("escrowNamesrvPort",),
    "--metrics-port": ("metricsPromExporterPort",),
    "--insecure": ("escrowInsecure",),
    "--log-level": ("escrowLogLevel",),
    "--log-format": ("escrowLogFormat",),
}
# Of clients and commands: no settings of a server.
CLIENT_VARIABLES: Final = frozenset(
    f"{ENVIRONMENT_PREFIX}{name}"
    for name in (
        *("ACCESS_KEY", "SECRET_KEY", "SECURITY_TOKEN", "CREDENTIALS"),
        *("TLS", "TLS_CA"),
    )
)
_TOML_HEADER: Final = re.compile(r"\s*\[\s*([\w-]+)\s*\]")
_TOML_KEY: Final = re.compile(r"""\s*["']?([\w-]+)["']?\s*=""")


class Source(enum.Enum):
    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"
    FOLLOWS = "follows"  # from another setting


@dataclass(frozen=True, slots=True)
class Origin:
    source: Source
    place: str  # broker.conf:3, ESCROWMQ_LISTEN_PORT, --port

    def __str__(self) -> str:
        return self.place


@dataclass(frozen=True, slots=True)
class Given:
    setting: Setting
    text: str
    origin: Origin


@dataclass(slots=True)
class Reading:
    """What one source gave, and what there is to say about it."""

    given: list[Given] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, setting: Setting, text: str, origin: Origin) -> None:
        for before in self.given:
            if before.setting is setting:
                again = f"{origin}: {setting.conf} is set a second time"
                self.warnings.append(f"{again}; {before.origin} does not count")
        self.given.append(Given(setting, text, origin))


# --- files ---------------------------------------------------------------------------------------


def read_file(path: Path) -> Reading:
    text = _text_of(path)
    return _read_toml(path, text) if path.suffix == ".toml" else _read_conf(path, text)


def _text_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read: {why}") from error
    if len(content) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: over {FILE_BYTES_MAX} bytes; this is no configuration")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")  # as Java reads it


def _read_conf(path: Path, text: str) -> Reading:
    reading = Reading()
    try:
        properties = list(read_properties(text))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    for found in properties:
        origin = Origin(Source.FILE, f"{path}:{found.line}")
        if setting := BY_CONF.get(found.key):
            reading.add(setting, found.value, origin)
        else:
            reading.warnings.append(_unknown(found.key, origin, BY_CONF))
    return reading


def _unknown(key: str, origin: Origin, known: Mapping[str, Setting]) -> str:
    """A warning, if RocketMQ has it; if nobody has, it is a mistake that would go unnoticed."""
    if warning := ignored(key):
        return f"{origin}: {warning}"
    near = nearest(key, known) or nearest(key, ROCKETMQ_KEYS)
    raise ConfigError(f"{origin}: there is no setting {key!r}{near}")


def _read_toml(path: Path, text: str) -> Reading:
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    lines = _toml_lines(text)
    reading = Reading()
    for table, key, value in _toml_items(path, content):
        line = lines.get((table, key))
        origin = Origin(Source.FILE, f"{path}:{line}" if line else f"{path}")
        setting = BY_CONF.get(key) or BY_NAME.get(key)
        if setting is None:
            reading.warnings.append(_unknown(key, origin, BY_CONF | BY_NAME))
        elif table not in ("", setting.group):
            raise ConfigError(f"{origin}: {key} belongs into [{setting.group}], not [{table}]")
        else:
            reading.add(setting, _toml_text(setting, value, origin), origin)
    return reading


def _toml_items(path: Path, content: dict[str, Any]) -> Iterator[tuple[str, str, object]]:
    for key, value in content.items():
        if not isinstance(value, dict):
            yield "", key, value
        elif key in GROUPS:
            yield from ((key, inner, item) for inner, item in value.items())
        else:
            tables = ", ".join(f"[{name}]" for name in GROUPS)
            raise ConfigError(f"{path}: there is no table [{key!r}]; there are {tables}")


def _toml_text(setting: Setting, value: object, origin: Origin) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str() | int() | float():
            return f"{value}"
        case list() if setting.kind.separator and all(type(part) in (str, int) for part in value):
            return setting.kind.separator.join(map(str, value))
    raise ConfigError(f"{origin}: {setting.conf} must be {setting.kind.allowed}")


def _toml_lines(text: str) -> dict[tuple[str, str], int]:
    """Where keys stand, for messages: the parser does not tell. Plain lines only."""
    found: dict[tuple[str, str], int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _TOML_HEADER.match(line):
            table = header[1]
        elif key := _TOML_KEY.match(line):
            found.setdefault((table, key[1]), number)
    return found


# --- environment and flags -----------------------------------------------------------------------


def read_environment(environment: Mapping[str, str]) -> Reading:
    """An empty variable is one that is not set. One that nobody knows is no error: a platform may
    make such names by itself, as Kubernetes does for a service that is called escrowmq."""
    reading = Reading()
    for name, text in sorted(environment.items()):
        if not name.startswith(ENVIRONMENT_PREFIX) or not text or name in CLIENT_VARIABLES:
            continue
        if setting := BY_ENVIRONMENT.get(name):
            reading.add(setting, text, Origin(Source.ENVIRONMENT, name))
        else:
            near = nearest(name, BY_ENVIRONMENT, cutoff=0.9)
            reading.warnings.append(f"{name} is no setting of EscrowMQ; it is ignored{near}")
    return reading


def read_flags(flags: Mapping[str, str]) -> Reading:
    reading = Reading()
    for flag, text in flags.items():
        for conf in FLAGS[flag]:
            # Listening everywhere does not say which address clients should use.
            if conf != "brokerIP1" or text not in WILDCARDS:
                reading.add(BY_CONF[conf], text, Origin(Source.FLAG, flag))
    return reading


_DEFAULT: Final = Origin(Source.DEFAULT, "default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Each part of the server is given its group, not the whole."""

    broker: BrokerConfig = field(default_factory=BrokerConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    consume: ConsumeConfig = field(default_factory=ConsumeConfig)
    delay: DelayConfig = field(default_factory=DelayConfig)
    transaction: TransactionConfig = field(default_factory=TransactionConfig)
    namesrv: NamesrvConfig = field(default_factory=NamesrvConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    log: LogConfig = field(default_factory=LogConfig)
    overload: OverloadConfig = field(default_factory=OverloadConfig)

    @classmethod
    def resolve(
        cls,
        file: Path | None = None,
        environment: Mapping[str, str] | None = None,
        flags: Mapping[str, str] | None = None,
    ) -> Resolved:
        """ConfigError names the key, the value, where it stands and what is allowed."""
        readings = [
            read_file(file) if file is not None else Reading(),
            read_environment(environment or {}),
            read_flags(flags or {}),
        ]
        values = _Values()
        for reading in readings:
            for given in reading.given:
                values.take(given)
        values.let_addresses_follow()
        values.let_exporter_follow()
        warnings = [warning for reading in readings for warning in reading.warnings]
        return Resolved(
            config=values.config(),
            origins=values.origins,
            warnings=(*warnings, *values.warnings()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    config: Config
    origins: Mapping[str, Origin]  # by RocketMQ's name
    warnings: tuple[str, ...]

    def entries(self) -> Iterator[Entry]:
        for setting in SETTINGS:
            value = getattr(getattr(self.config, setting.group), setting.name)
            yield Entry(setting=setting, value=value, origin=self.origins[setting.conf])


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    setting: Setting
    value: object
    origin: Origin

    @property
    def text(self) -> str:
        """As a file spells it."""
        return self.setting.kind.show(self.value)

    @property
    def is_changed(self) -> bool:
        return self.origin.source is not Source.DEFAULT


class _Values:
    """What is known so far; every source replaces what an earlier one said."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {setting.conf: setting.default for setting in SETTINGS}
        self.origins = dict.fromkeys(self._values, _DEFAULT)

    def take(self, given: Given) -> None:
        setting, text = given.setting, given.text.strip()
        try:
            value = setting.kind.parse(text)
        except ValueError as error:
            told = "***" if isinstance(setting.kind, Hidden) else repr(text)
            raise ConfigError(f"{given.origin}: {setting.conf}={told}: {error}") from None
        self._values[setting.conf] = value
        self.origins[setting.conf] = given.origin

    def let_addresses_follow(self) -> None:
        """Who says one address and not the other should still be heard.

        RocketMQ listens everywhere and guesses its own address. We are on loopback until a source
        names an address, and then the one that nobody named goes with it.
        """
        bind, told = self._values["bindAddress"], self._values["brokerIP1"]
        bind_open = self.origins["bindAddress"].source is Source.DEFAULT
        told_open = self.origins["brokerIP1"].source is Source.DEFAULT
        if bind_open and not told_open and not is_loopback(told):
            self._follow("bindAddress", "::" if ":" in told else "0.0.0.0", "brokerIP1")
        elif told_open and not bind_open:
            self._follow("brokerIP1", "" if bind in WILDCARDS else bind, "bindAddress")

    def let_exporter_follow(self) -> None:
        """Who asks for a port on the command line wants it to be served, whatever a file says."""
        if self.origins["metricsPromExporterPort"].source is Source.FLAG:
            self._follow("metricsExporterType", MetricsExporter.PROM, "metricsPromExporterPort")

    def _follow(self, conf: str, value: object, other: str) -> None:
        self._values[conf] = value
        self.origins[conf] = Origin(Source.FOLLOWS, f"follows {other}")

    def warnings(self) -> Iterator[str]:
        if self._values["brokerRole"] is BrokerRole.SYNC_MASTER:
            where = self.origins["brokerRole"]
            yield f"{where}: brokerRole=SYNC_MASTER waits for no one: nothing is replicated"

    def config(self) -> Config:
        return Config(
            broker=BrokerConfig(**self._of("broker")),
            network=NetworkConfig(**self._of("network")),
            store=StoreConfig(**self._of("store")),
            consume=ConsumeConfig(**self._of("consume")),
            delay=DelayConfig(**self._of("delay")),
            transaction=TransactionConfig(**self._of("transaction")),
            namesrv=NamesrvConfig(**self._of("namesrv")),
            metrics=MetricsConfig(**self._of("metrics")),
            security=SecurityConfig(**self._of("security")),
            log=LogConfig(**self._of("log")),
            overload=OverloadConfig(**self._of("overload")),
        )

    def _of(self, group: str) -> dict[str, Any]:
        return {
            BY_CONF[conf].name: value
            for conf, value in self._values.items()
            if BY_CONF[conf].group == group
        }


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
