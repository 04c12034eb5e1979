"""Where values come from: a file, the environment, flags. Text, and the place it was read at.

Every setting, by each of its names. Made from the dataclasses of the groups.

Bring the sources together: default, then file, then environment, then flags; the last wins.
"""

from __future__ import annotations

import enum
import ipaddress
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from escrowmq.config import settings as groups
from escrowmq.config.properties_file import read_properties
from escrowmq.config.rocketmq_keys import OBSOLETE_KEYS, ROCKETMQ_KEYS
from escrowmq.config.setting_types import WILDCARD_ADDRESSES, SecretText, SettingType
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
from escrowmq.parsing import did_you_mean

ENVIRONMENT_PREFIX: Final = "ESCROWMQ_"
_OWN_PREFIX: Final = "escrow"
_WORDS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    group: str
    name: str  # in Python and TOML
    conf: str  # in RocketMQ's files and TOML
    kind: SettingType
    default: object
    unit: str
    help: str

    @property
    def environment_variable(self) -> str:
        """`listenPort` is ESCROWMQ_LISTEN_PORT, `escrowNamesrvPort` ESCROWMQ_NAMESRV_PORT."""
        words = _WORDS.sub("_", self.conf.removeprefix(_OWN_PREFIX)).replace(".", "_")
        return f"{ENVIRONMENT_PREFIX}{words.upper()}"

    @property
    def is_escrowmq_only(self) -> bool:
        return self.conf.startswith(_OWN_PREFIX)


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
BY_ENVIRONMENT: Final = {setting.environment_variable: setting for setting in SETTINGS}

# What a file asks for in vain with these is worth more words than "ignored".
_EXTRA_WARNINGS: Final = {
    **dict.fromkeys(
        ("enableDLegerCommitLog", "enableControllerMode", "inSyncReplicas", "haListenPort"),
        "; nothing is replicated",
    ),
    "storePathCommitLog": "; the log is under storePathRootDir",
}


def ignored_key_warning(key: str) -> str | None:
    """What to say of a key that RocketMQ has, or once had, and we do not; None of any other."""
    if key in BY_CONF:
        return None
    if key in OBSOLETE_KEYS:
        return (
            f"{key} is ignored, as RocketMQ 4.9 and 5 ignore "
            f"it{did_you_mean(key, BY_CONF, cutoff=0.9)}"
        )
    if key in ROCKETMQ_KEYS:
        what = f"{key} is a setting of RocketMQ that EscrowMQ does not have; it is ignored"
        return what + _EXTRA_WARNINGS.get(key, "")
    return None


CONFIG_FILE_BYTES_MAX: Final = 1 << 20
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
    location: str  # broker.conf:3, ESCROWMQ_LISTEN_PORT, --port

    def __str__(self) -> str:
        return self.location


@dataclass(frozen=True, slots=True)
class GivenValue:
    setting: Setting
    text: str
    origin: Origin


@dataclass(slots=True)
class SourceValues:
    """What one source gave, and what there is to say about it."""

    values: list[GivenValue] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, setting: Setting, text: str, origin: Origin) -> None:
        for before in self.values:
            if before.setting is setting:
                again = f"{origin}: {setting.conf} is set a second time"
                self.warnings.append(f"{again}; {before.origin} does not count")
        self.values.append(GivenValue(setting, text, origin))


# --- files ---------------------------------------------------------------------------------------


def read_config_file(path: Path) -> SourceValues:
    text = _read_text(path)
    return _read_toml(path, text) if path.suffix == ".toml" else _read_conf(path, text)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(CONFIG_FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read: {why}") from error
    if len(content) > CONFIG_FILE_BYTES_MAX:
        raise ConfigError(f"{path}: over {CONFIG_FILE_BYTES_MAX} bytes; this is no configuration")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")  # as Java reads it


def _read_conf(path: Path, text: str) -> SourceValues:
    reading = SourceValues()
    try:
        properties = list(read_properties(text))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    for found in properties:
        origin = Origin(Source.FILE, f"{path}:{found.line}")
        if setting := BY_CONF.get(found.key):
            reading.add(setting, found.value, origin)
        else:
            reading.warnings.append(_unknown_key_warning(found.key, origin, BY_CONF))
    return reading


def _unknown_key_warning(key: str, origin: Origin, settings: Mapping[str, Setting]) -> str:
    """A warning, if RocketMQ has it; if nobody has, it is a mistake that would go unnoticed."""
    if warning := ignored_key_warning(key):
        return f"{origin}: {warning}"
    near = did_you_mean(key, settings) or did_you_mean(key, ROCKETMQ_KEYS)
    raise ConfigError(f"{origin}: there is no setting {key!r}{near}")


def _read_toml(path: Path, text: str) -> SourceValues:
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    lines = _toml_lines(text)
    reading = SourceValues()
    for table, key, value in _toml_items(path, content):
        line = lines.get((table, key))
        origin = Origin(Source.FILE, f"{path}:{line}" if line else f"{path}")
        setting = BY_CONF.get(key) or BY_NAME.get(key)
        if setting is None:
            reading.warnings.append(_unknown_key_warning(key, origin, BY_CONF | BY_NAME))
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


def read_environment(environment: Mapping[str, str]) -> SourceValues:
    """An empty variable is one that is not set. One that nobody knows is no error: a platform may
    make such names by itself, as Kubernetes does for a service that is called escrowmq."""
    reading = SourceValues()
    for name, text in sorted(environment.items()):
        if not name.startswith(ENVIRONMENT_PREFIX) or not text or name in CLIENT_VARIABLES:
            continue
        if setting := BY_ENVIRONMENT.get(name):
            reading.add(setting, text, Origin(Source.ENVIRONMENT, name))
        else:
            near = did_you_mean(name, BY_ENVIRONMENT, cutoff=0.9)
            reading.warnings.append(f"{name} is no setting of EscrowMQ; it is ignored{near}")
    return reading


def read_flags(flags: Mapping[str, str]) -> SourceValues:
    reading = SourceValues()
    for flag, text in flags.items():
        for conf in FLAGS[flag]:
            # Listening everywhere does not say which address clients should use.
            if conf != "brokerIP1" or text not in WILDCARD_ADDRESSES:
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
    ) -> ResolvedConfig:
        """ConfigError names the key, the value, where it stands and what is allowed."""
        readings = [
            read_config_file(file) if file is not None else SourceValues(),
            read_environment(environment or {}),
            read_flags(flags or {}),
        ]
        values = _ValueTable()
        for reading in readings:
            for given in reading.values:
                values.set_value(given)
        values.derive_addresses()
        values.derive_exporter()
        warnings = [warning for reading in readings for warning in reading.warnings]
        return ResolvedConfig(
            config=values.config(),
            origins=values.origins,
            warnings=(*warnings, *values.warnings()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    config: Config
    origins: Mapping[str, Origin]  # by RocketMQ's name
    warnings: tuple[str, ...]

    def entries(self) -> Iterator[ResolvedSetting]:
        for setting in SETTINGS:
            value = getattr(getattr(self.config, setting.group), setting.name)
            yield ResolvedSetting(setting=setting, value=value, origin=self.origins[setting.conf])


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSetting:
    setting: Setting
    value: object
    origin: Origin

    @property
    def text(self) -> str:
        """As a file spells it."""
        return self.setting.kind.format(self.value)

    @property
    def is_changed(self) -> bool:
        return self.origin.source is not Source.DEFAULT


class _ValueTable:
    """What is known so far; every source replaces what an earlier one said."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {setting.conf: setting.default for setting in SETTINGS}
        self.origins = dict.fromkeys(self._values, _DEFAULT)

    def set_value(self, given: GivenValue) -> None:
        setting, text = given.setting, given.text.strip()
        try:
            value = setting.kind.parse(text)
        except ValueError as error:
            told = "***" if isinstance(setting.kind, SecretText) else repr(text)
            raise ConfigError(f"{given.origin}: {setting.conf}={told}: {error}") from None
        self._values[setting.conf] = value
        self.origins[setting.conf] = given.origin

    def derive_addresses(self) -> None:
        """Who says one address and not the other should still be heard.

        RocketMQ listens everywhere and guesses its own address. We are on loopback until a source
        names an address, and then the one that nobody named goes with it.
        """
        bind, told = self._values["bindAddress"], self._values["brokerIP1"]
        bind_open = self.origins["bindAddress"].source is Source.DEFAULT
        told_open = self.origins["brokerIP1"].source is Source.DEFAULT
        if bind_open and not told_open and not is_loopback(told):
            self._derive("bindAddress", "::" if ":" in told else "0.0.0.0", "brokerIP1")
        elif told_open and not bind_open:
            self._derive("brokerIP1", "" if bind in WILDCARD_ADDRESSES else bind, "bindAddress")

    def derive_exporter(self) -> None:
        """Who asks for a port on the command line wants it to be served, whatever a file says."""
        if self.origins["metricsPromExporterPort"].source is Source.FLAG:
            self._derive("metricsExporterType", MetricsExporter.PROM, "metricsPromExporterPort")

    def _derive(self, conf: str, value: object, source_conf: str) -> None:
        self._values[conf] = value
        self.origins[conf] = Origin(Source.FOLLOWS, f"follows {source_conf}")

    def warnings(self) -> Iterator[str]:
        if self._values["brokerRole"] is BrokerRole.SYNC_MASTER:
            where = self.origins["brokerRole"]
            yield f"{where}: brokerRole=SYNC_MASTER waits for no one: nothing is replicated"

    def config(self) -> Config:
        return Config(
            broker=BrokerConfig(**self._group_values("broker")),
            network=NetworkConfig(**self._group_values("network")),
            store=StoreConfig(**self._group_values("store")),
            consume=ConsumeConfig(**self._group_values("consume")),
            delay=DelayConfig(**self._group_values("delay")),
            transaction=TransactionConfig(**self._group_values("transaction")),
            namesrv=NamesrvConfig(**self._group_values("namesrv")),
            metrics=MetricsConfig(**self._group_values("metrics")),
            security=SecurityConfig(**self._group_values("security")),
            log=LogConfig(**self._group_values("log")),
            overload=OverloadConfig(**self._group_values("overload")),
        )

    def _group_values(self, group: str) -> dict[str, Any]:
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
