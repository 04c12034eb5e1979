"""Load the configuration from a file, the environment and flags, with the origin of each value.

    file (broker.conf or TOML) ─┐
    environment (ESCROWMQ_…)   ─┼─→ SourceValues (text, origin) ─→ load_config() ─→ ResolvedConfig
    flags of `escrowmq serve`  ─┘

Later sources win: default, file, environment, flag. A key that only RocketMQ has is a warning; an
unknown key in a file is a ConfigError, because a misspelt setting would otherwise go unnoticed.
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

from escrowmq.config.properties_file import read_properties
from escrowmq.config.rocketmq_keys import OBSOLETE_KEYS, ROCKETMQ_KEYS
from escrowmq.config.setting_types import WILDCARD_ADDRESSES, SecretText, SettingType
from escrowmq.config.settings import GROUPS, BrokerRole, Config, MetricsExporter
from escrowmq.errors import ConfigError
from escrowmq.parsing import did_you_mean

ENVIRONMENT_PREFIX: Final = "ESCROWMQ_"
CONFIG_FILE_BYTES_MAX: Final = 1 << 20
_OWN_PREFIX: Final = "escrow"
_WORD_BOUNDARY: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

# --- every setting by each of its names ----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One declaration of settings.py, as loading and documentation need it."""

    group: str
    name: str  # field of the group, and key in TOML
    key: str  # in RocketMQ's files and in TOML
    type: SettingType
    default: object
    unit: str
    help: str
    is_live: bool  # takes effect without a restart

    @property
    def environment_variable(self) -> str:
        """`listenPort` is ESCROWMQ_LISTEN_PORT, `escrowNamesrvPort` is ESCROWMQ_NAMESRV_PORT."""
        words = _WORD_BOUNDARY.sub("_", self.key.removeprefix(_OWN_PREFIX)).replace(".", "_")
        return f"{ENVIRONMENT_PREFIX}{words.upper()}"

    @property
    def is_escrowmq_only(self) -> bool:
        return self.key.startswith(_OWN_PREFIX)

    def value_in(self, config: Config) -> Any:
        return getattr(getattr(config, self.group), self.name)

    def text_in(self, config: Config) -> str:
        """Return the value as a file spells it."""
        return self.type.format(self.value_in(config))


SETTINGS: Final = tuple(
    Setting(group=name, name=item.name, default=item.default, **item.metadata)
    for name, group in GROUPS.items()
    for item in fields(group)  # type: ignore[arg-type]  # every group is a dataclass
    if item.init
)
BY_KEY: Final = {setting.key: setting for setting in SETTINGS}
BY_NAME: Final = {setting.name: setting for setting in SETTINGS}
BY_ENVIRONMENT: Final = {setting.environment_variable: setting for setting in SETTINGS}

# --- load ----------------------------------------------------------------------------------------


class Source(enum.Enum):
    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"
    FOLLOWS = "follows"  # derived from another setting


@dataclass(frozen=True, slots=True)
class Origin:
    source: Source
    location: str  # broker.conf:3, ESCROWMQ_LISTEN_PORT, --port

    def __str__(self) -> str:
        return self.location


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSetting:
    setting: Setting
    value: object
    origin: Origin

    @property
    def text(self) -> str:
        """The value as a file spells it."""
        return self.setting.type.format(self.value)

    @property
    def is_changed(self) -> bool:
        return self.origin.source is not Source.DEFAULT


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    config: Config
    origins: Mapping[str, Origin]  # by key
    warnings: tuple[str, ...]

    def entries(self) -> Iterator[ResolvedSetting]:
        for setting in SETTINGS:
            value = setting.value_in(self.config)
            yield ResolvedSetting(setting=setting, value=value, origin=self.origins[setting.key])


def load_config(
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> ResolvedConfig:
    """Read all sources and check every value.

    Raises ConfigError, which names the key, the value, its origin and what is allowed.
    """
    sources = [
        read_config_file(file) if file is not None else SourceValues(),
        read_environment(environment or {}),
        read_flags(flags or {}),
    ]
    values = _ValueTable()
    for source in sources:
        for given in source.values:
            values.set_value(given)
    values.derive_addresses()
    values.derive_exporter()
    warnings = [warning for source in sources for warning in source.warnings]
    return ResolvedConfig(
        config=values.config(),
        origins=values.origins,
        warnings=(*warnings, *values.warnings()),
    )


@dataclass(frozen=True, slots=True)
class GivenValue:
    setting: Setting
    text: str
    origin: Origin


@dataclass(slots=True)
class SourceValues:
    """The values of one source in the order in which they were read, and the warnings."""

    values: list[GivenValue] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def add(self, setting: Setting, text: str, origin: Origin) -> None:
        for earlier in self.values:
            if earlier.setting is setting:
                self.warnings.append(
                    f"{origin}: {setting.key} is set a second time; {earlier.origin} has no effect"
                )
        self.values.append(GivenValue(setting, text, origin))


class _ValueTable:
    """The value of every setting so far; each source overwrites the values of earlier ones."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {setting.key: setting.default for setting in SETTINGS}
        self.origins = dict.fromkeys(self._values, Origin(Source.DEFAULT, "default"))

    def set_value(self, given: GivenValue) -> None:
        setting, text = given.setting, given.text.strip()
        try:
            value = setting.type.parse(text)
        except ValueError as error:
            shown = "***" if isinstance(setting.type, SecretText) else repr(text)
            raise ConfigError(f"{given.origin}: {setting.key}={shown}: {error}") from None
        self._values[setting.key] = value
        self.origins[setting.key] = given.origin

    def derive_addresses(self) -> None:
        """Derive bindAddress from brokerIP1, or the other way round, if only one is set.

        RocketMQ listens on all addresses and guesses which one to advertise. Our default for both
        is loopback, which does not fit an address of the network in the other setting.
        """
        bind, advertised = self._values["bindAddress"], self._values["brokerIP1"]
        is_bind_default = self.origins["bindAddress"].source is Source.DEFAULT
        is_advertised_default = self.origins["brokerIP1"].source is Source.DEFAULT
        if is_bind_default and not is_advertised_default and not is_loopback(advertised):
            self._derive("bindAddress", "::" if ":" in advertised else "0.0.0.0", "brokerIP1")
        elif is_advertised_default and not is_bind_default:
            self._derive("brokerIP1", "" if bind in WILDCARD_ADDRESSES else bind, "bindAddress")

    def derive_exporter(self) -> None:
        """Switch the exporter on if --metrics-port is given, whatever the file says."""
        if self.origins["metricsPromExporterPort"].source is Source.FLAG:
            self._derive("metricsExporterType", MetricsExporter.PROM, "metricsPromExporterPort")

    def _derive(self, key: str, value: object, from_key: str) -> None:
        self._values[key] = value
        self.origins[key] = Origin(Source.FOLLOWS, f"follows {from_key}")

    def warnings(self) -> Iterator[str]:
        if self._values["brokerRole"] is BrokerRole.SYNC_MASTER:
            origin = self.origins["brokerRole"]
            yield f"{origin}: brokerRole=SYNC_MASTER has no effect: there is no replication"

    def config(self) -> Config:
        values: dict[str, dict[str, Any]] = {name: {} for name in GROUPS}
        for key, value in self._values.items():
            setting = BY_KEY[key]
            values[setting.group][setting.name] = value
        groups: dict[str, Any] = {name: group(**values[name]) for name, group in GROUPS.items()}
        return Config(**groups)


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


# --- files ---------------------------------------------------------------------------------------

_TOML_HEADER: Final = re.compile(r"\s*\[\s*([\w-]+)\s*\]")
_TOML_KEY: Final = re.compile(r"""\s*["']?([\w-]+)["']?\s*=""")


def read_config_file(path: Path) -> SourceValues:
    """Read a TOML file if the name ends in .toml, otherwise a Java properties file."""
    text = _read_text(path)
    return _read_toml(path, text) if path.suffix == ".toml" else _read_conf(path, text)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(CONFIG_FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path}: cannot be read: {reason}") from error
    if len(content) > CONFIG_FILE_BYTES_MAX:
        raise ConfigError(f"{path}: larger than {CONFIG_FILE_BYTES_MAX} bytes, the limit")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")  # the encoding of Java's properties files


def _read_conf(path: Path, text: str) -> SourceValues:
    source = SourceValues()
    try:
        properties = list(read_properties(text))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    for entry in properties:
        origin = Origin(Source.FILE, f"{path}:{entry.line}")
        if setting := BY_KEY.get(entry.key):
            source.add(setting, entry.value, origin)
        else:
            source.warnings.append(_unknown_key_warning(entry.key, origin, BY_KEY))
    return source


def _read_toml(path: Path, text: str) -> SourceValues:
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
    lines = _toml_lines(text)
    source = SourceValues()
    for table, key, value in _toml_items(path, content):
        line = lines.get((table, key))
        origin = Origin(Source.FILE, f"{path}:{line}" if line else f"{path}")
        setting = BY_KEY.get(key) or BY_NAME.get(key)
        if setting is None:
            source.warnings.append(_unknown_key_warning(key, origin, BY_KEY | BY_NAME))
        elif table not in ("", setting.group):
            raise ConfigError(f"{origin}: {key} belongs in [{setting.group}], not [{table}]")
        else:
            source.add(setting, _toml_text(setting, value, origin), origin)
    return source


def _toml_items(path: Path, content: dict[str, Any]) -> Iterator[tuple[str, str, object]]:
    for key, value in content.items():
        if not isinstance(value, dict):
            yield "", key, value
        elif key in GROUPS:
            yield from ((key, inner_key, item) for inner_key, item in value.items())
        else:
            tables = ", ".join(f"[{name}]" for name in GROUPS)
            raise ConfigError(f"{path}: there is no table [{key!r}]; the tables are {tables}")


def _toml_text(setting: Setting, value: object, origin: Origin) -> str:
    """Return a TOML value in the spelling of broker.conf, so that one parser reads both."""
    separator = setting.type.separator
    match value:
        case bool():
            return "true" if value else "false"
        case str() | int() | float():
            return f"{value}"
        case list() if separator and all(type(part) in (str, int) for part in value):
            return separator.join(map(str, value))
    raise ConfigError(f"{origin}: {setting.key} must be {setting.type.allowed}")


def _toml_lines(text: str) -> dict[tuple[str, str], int]:
    """Return the line of each (table, key) for messages: tomllib does not report positions.

    Only plain `key = value` lines are recognised; other keys are reported without a line.
    """
    lines: dict[tuple[str, str], int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), 1):
        if header := _TOML_HEADER.match(line):
            table = header[1]
        elif key := _TOML_KEY.match(line):
            lines.setdefault((table, key[1]), number)
    return lines


# --- environment and flags -----------------------------------------------------------------------

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
# Variables that clients, commands and the loader of the native module read; they are not settings
# of a server.
CLIENT_VARIABLES: Final = frozenset(
    f"{ENVIRONMENT_PREFIX}{name}"
    for name in (
        *("ACCESS_KEY", "SECRET_KEY", "SECURITY_TOKEN", "CREDENTIALS"),
        *("TLS", "TLS_CA"),
        "NATIVE",
    )
)


def read_environment(environment: Mapping[str, str]) -> SourceValues:
    """Read the variables that begin with ESCROWMQ_; an empty one counts as not set.

    An unknown one is only a warning: platforms create such names by themselves, as Kubernetes does
    for a service that is called escrowmq.
    """
    source = SourceValues()
    for name, text in sorted(environment.items()):
        if not name.startswith(ENVIRONMENT_PREFIX) or not text or name in CLIENT_VARIABLES:
            continue
        if setting := BY_ENVIRONMENT.get(name):
            source.add(setting, text, Origin(Source.ENVIRONMENT, name))
        else:
            suggestion = did_you_mean(name, BY_ENVIRONMENT, cutoff=0.9)
            source.warnings.append(f"{name} is not a setting of EscrowMQ; ignored{suggestion}")
    return source


def read_flags(flags: Mapping[str, str]) -> SourceValues:
    source = SourceValues()
    for flag, text in flags.items():
        for key in FLAGS[flag]:
            # A wildcard address can be listened on, but clients cannot connect to it.
            if key != "brokerIP1" or text not in WILDCARD_ADDRESSES:
                source.add(BY_KEY[key], text, Origin(Source.FLAG, flag))
    return source


# --- keys that only RocketMQ has -----------------------------------------------------------------

# A user may rely on these, so the warning says what applies instead.
_EXTRA_WARNINGS: Final = {
    **dict.fromkeys(
        ("enableDLegerCommitLog", "enableControllerMode", "inSyncReplicas", "haListenPort"),
        "; there is no replication",
    ),
    "storePathCommitLog": "; the commit log is in storePathRootDir",
}


def ignored_key_warning(key: str) -> str | None:
    """Return the warning for a key of RocketMQ that EscrowMQ does not have; None for any other."""
    if key in BY_KEY:
        return None
    if key in OBSOLETE_KEYS:
        suggestion = did_you_mean(key, BY_KEY, cutoff=0.9)
        return f"{key} is ignored, as in RocketMQ 4.9 and 5{suggestion}"
    if key in ROCKETMQ_KEYS:
        extra = _EXTRA_WARNINGS.get(key, "")
        return f"{key} is a setting of RocketMQ that EscrowMQ does not have; ignored{extra}"
    return None


def _unknown_key_warning(key: str, origin: Origin, settings: Mapping[str, Setting]) -> str:
    """Return the warning for a key that only RocketMQ has; raise ConfigError for any other."""
    if warning := ignored_key_warning(key):
        return f"{origin}: {warning}"
    suggestion = did_you_mean(key, settings) or did_you_mean(key, ROCKETMQ_KEYS)
    raise ConfigError(f"{origin}: there is no setting {key!r}{suggestion}")
