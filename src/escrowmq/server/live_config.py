"""Settings that change while the server runs, and the log, whose settings are among them.

    SIGHUP ─→ LiveConfig.reload() ────────────────┐ Config
    UPDATE_BROKER_CONFIG ─→ RuntimeSettings.change() ─→ LiveConfig.apply() ─→ listeners

Only settings that are declared `live` change. `reload()` reports other changed settings in the log
and keeps their old values until the next start; `change()` refuses them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from escrowmq.config import SETTINGS, Config, Origin, ResolvedConfig, Setting, Source
from escrowmq.config.loading import BY_KEY, ignored_key_warning
from escrowmq.config.properties_file import is_continued, read_properties, write_property
from escrowmq.config.settings import LogConfig, LogFormat
from escrowmq.errors import ConfigError
from escrowmq.parsing import did_you_mean, format_timestamp

log = logging.getLogger(__name__)


class LiveConfig:
    """The configuration in force, and the parts that follow its changes.

    `resolve` reads the sources again; without it, `reload()` does nothing.
    """

    def __init__(self, config: Config, resolve: Callable[[], ResolvedConfig] | None = None) -> None:
        self.config = config
        self._resolve = resolve
        self._listeners: list[Callable[[Config], None]] = []

    def add_listener(self, listener: Callable[[Config], None]) -> None:
        """Call `listener` with the new configuration after each change."""
        self._listeners.append(listener)

    def reload(self) -> None:
        """Read the sources again and apply what is live. An invalid file changes nothing."""
        if self._resolve is None:
            return
        try:
            new_config = self._resolve().config
        except ConfigError as error:
            log.error("configuration not reloaded, nothing has changed: %s", error)
            return
        config = self._with_live_changes(new_config)
        if config is self.config:
            log.info("configuration reloaded, nothing to change")
            return
        self.apply(config)

    def apply(self, config: Config) -> None:
        self.config = config
        for listener in self._listeners:
            listener(config)

    def _with_live_changes(self, new_config: Config) -> Config:
        config = self.config
        for setting in SETTINGS:
            value = setting.value_in(new_config)
            if setting.value_in(config) == value:
                continue
            old_text, new_text = setting.text_in(config), setting.text_in(new_config)
            if not setting.is_live:
                log.warning(
                    "%s is still %s: the new value %s needs a restart",
                    setting.key,
                    old_text,
                    new_text,
                )
                continue
            log.warning("%s changed from %s to %s", setting.key, old_text, new_text)
            config = _with_value(config, setting, value)
        return config


class RuntimeSettings:
    """Show and change the settings of a running broker, for operators.

    A change is also written into the broker.conf that the broker was started with, so that it
    survives a restart. Without such a file it is lost when the broker stops. `origins` tells where
    each setting came from: a flag or a variable will win over the file at the next start.
    """

    def __init__(
        self, live_config: LiveConfig, origins: Mapping[str, Origin], file: Path | None
    ) -> None:
        self._live_config = live_config
        self._origins = origins
        self._file = file

    def text(self) -> str:
        """Return all settings as lines of a broker.conf, sorted by key."""
        config = self._live_config.config
        lines = (write_property(setting.key, setting.text_in(config)) for setting in SETTINGS)
        return "".join(f"{line}\n" for line in sorted(lines))

    def change(self, text: str) -> None:
        """Apply lines of a broker.conf, all of them or none.

        Raises ConfigError for an unknown key, an invalid value, a setting that is not live, and a
        file that cannot be written.
        """
        new_texts = {entry.key: entry.value.strip() for entry in read_properties(text)}
        config, changes = self._live_config.config, dict[str, str]()
        for key, new_text in new_texts.items():
            setting = _find_setting(key)
            if setting.text_in(config) == new_text:
                continue
            if not setting.is_live:
                raise ConfigError(
                    f"{key} cannot change while the broker runs: "
                    "change it in the broker's configuration file and restart"
                )
            config = _with_text(config, setting, new_text)
            changes[key] = setting.text_in(config)
        if changes:
            self._save(changes)
            self._live_config.apply(config)

    def _save(self, changes: dict[str, str]) -> None:
        summary = ", ".join(f"{key}={value}" for key, value in changes.items())
        if self._file is None or self._file.suffix == ".toml":
            reason = "no file" if self._file is None else f"{self._file} is not a broker.conf"
            log.warning("settings changed until the next start (%s): %s", reason, summary)
            return
        try:
            text = update_properties(self._file.read_text("utf-8"), changes)
            _replace_file(self._file, text)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"nothing was changed: {self._file}: {error}") from error
        log.warning("settings changed, also in %s: %s", self._file, summary)
        for key in changes:
            origin = self._origins[key]
            if origin.source in (Source.ENVIRONMENT, Source.FLAG):
                log.warning("%s will override the file at the next start: %s", origin, key)


def _find_setting(key: str) -> Setting:
    setting = BY_KEY.get(key)
    if setting is None:
        raise ConfigError(
            ignored_key_warning(key)
            or f"there is no setting {key[:100]!r}{did_you_mean(key, BY_KEY)}"
        )
    return setting


def _with_text(config: Config, setting: Setting, text: str) -> Config:
    try:
        value = setting.type.parse(text)
    except ValueError as error:
        raise ConfigError(f"{setting.key}={text[:100]!r}: {error}") from None
    return _with_value(config, setting, value)


def _with_value(config: Config, setting: Setting, value: object) -> Config:
    group = dataclasses.replace(getattr(config, setting.group), **{setting.name: value})
    changes: dict[str, Any] = {setting.group: group}
    return dataclasses.replace(config, **changes)


# --- the file ------------------------------------------------------------------------------------


def update_properties(text: str, changes: dict[str, str]) -> str:
    """Return a broker.conf with new values: in the line of the key, or else at the end."""
    lines = text.splitlines(keepends=True)
    remaining = dict(changes)
    # Backwards, so that the numbers of earlier lines stay valid.
    for entry in reversed(list(read_properties(text))):
        if entry.key not in changes:
            continue
        first = last = entry.line - 1
        while last + 1 < len(lines) and is_continued(lines[last].rstrip("\r\n")):
            last += 1
        # The last line of a repeated key is the one that counts; earlier ones are removed.
        value = remaining.pop(entry.key, None)
        new_lines = [] if value is None else [f"{write_property(entry.key, value)}\n"]
        lines[first : last + 1] = new_lines
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    lines += [f"{write_property(key, value)}\n" for key, value in remaining.items()]
    return "".join(lines)


def _replace_file(path: Path, text: str) -> None:
    """Replace the file atomically and durably, with the permissions that it had."""
    new_path = path.with_name(f".{path.name}.new")
    try:
        with new_path.open("w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), path.stat().st_mode & 0o7777)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        new_path.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new_path.unlink()
        raise


# --- the log -------------------------------------------------------------------------------------

_SPECIFIER: Final = re.compile(r"(?:\b(\w+)=)?%(?:%|[-+ #0]*\d*(?:\.\d+)?([sdrfgx]))")
_RESERVED_FIELDS: Final = frozenset(("time", "level", "broker", "logger", "message", "exception"))


# What a reader of the log may take for the end of a line, and what a terminal may obey.
_CONTROL_CHARACTERS: Final = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029]")


class TextFormatter(logging.Formatter):
    """One line of text per event; the lines of a traceback follow, each behind a bar.

    Clients choose names that are logged. Control characters in them are escaped, so that no client
    can write a line that looks like one of ours.
    """

    def __init__(self, prefix: str = "") -> None:
        super().__init__(f"%(asctime)s %(levelname)s {prefix}%(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the base class's
        return _escape_control_characters(super().formatMessage(record))

    def formatException(self, exc_info: Any) -> str:  # noqa: N802  # the base class's
        return _behind_bars(super().formatException(exc_info))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802  # the base class's
        return _behind_bars(super().formatStack(stack_info))


def _behind_bars(text: str) -> str:
    return "\n".join(f"  | {_escape_control_characters(line)}" for line in text.split("\n"))


def _escape_control_characters(text: str) -> str:
    return _CONTROL_CHARACTERS.sub(lambda match: repr(match[0])[1:-1], text)


class JsonFormatter(logging.Formatter):
    """One JSON object per line; each `name=%s` pair of a message is also a field.

    log.info("store open directory=%s begin=%d", ...)
    {"time": ..., "level": "INFO", "logger": ..., "message": ..., "directory": ..., "begin": ...}
    """

    def __init__(self, broker: str) -> None:
        super().__init__()
        self._broker = broker

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": format_timestamp(int(record.created * 1000)),
            "level": record.levelname,
            "broker": self._broker,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # JSON leaves some characters as they are that end a line for other readers.
        return _CONTROL_CHARACTERS.sub(
            lambda match: f"\\u{ord(match[0]):04x}",
            json.dumps(line, ensure_ascii=False, default=str),
        )


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    if not isinstance(record.args, tuple) or not isinstance(record.msg, str):
        return {}
    names = [match[1] for match in _SPECIFIER.finditer(record.msg) if match[2]]
    return {
        name: value if isinstance(value, int | float | bool) else str(value)
        for name, value in zip(names, record.args, strict=False)
        if name and name not in _RESERVED_FIELDS
    }


def configure_logging(config: LogConfig, broker: str, *, is_supervised: bool = False) -> None:
    """Write the log to standard error; may be called again with other settings.

    Supervised brokers share one standard error, so their lines carry the broker's name.
    """
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format is LogFormat.JSON:
        handler.setFormatter(JsonFormatter(broker))
    else:
        prefix = f"{broker.replace('%', '%%')} " if is_supervised else ""
        handler.setFormatter(TextFormatter(prefix))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.value)
