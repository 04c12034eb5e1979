"""Where values come from: a file, the environment, flags. Text, and the place it was read at."""

from __future__ import annotations

import enum
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from escrowmq.config.catalogue import (
    BY_CONF,
    BY_ENVIRONMENT,
    BY_NAME,
    ENVIRONMENT_PREFIX,
    GROUPS,
    Setting,
    ignored,
    nearest,
)
from escrowmq.config.kinds import WILDCARDS
from escrowmq.config.properties import read_properties
from escrowmq.errors import ConfigError
from escrowmq.rocketmq_keys import ROCKETMQ_KEYS

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
