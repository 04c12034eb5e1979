"""Settings that take effect without a restart: SIGHUP reads the sources again, and `online.py`
changes single ones for an operator.

What may change while the server runs is in LIVE. Another setting that has changed is named in the
log and stays as it was until the next start. A file that cannot be read changes nothing.

Settings of a broker that runs: show them, and change those that need no restart.

A change is written to the file that the broker was started with, if that is a broker.conf, and is
then there after a restart too, unless a flag or the environment says otherwise. A broker that was
started without one forgets it when it stops. Either everything in a request is done, or nothing.

Log lines: text for people, or one JSON object per line for whatever gathers them.

Our own lines are made of `name=%s` pairs, and in JSON each such pair is a field of its own:

    log.info("store open directory=%s begin=%d", ...)
    {"time": ..., "level": "INFO", "logger": ..., "message": ..., "directory": ..., "begin": ...}
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
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from escrowmq.config import SETTINGS, Config, Origin, ResolvedConfig, Setting, Source
from escrowmq.config.loading import BY_CONF, ignored_key_warning
from escrowmq.config.properties_file import read_properties, write_property
from escrowmq.config.settings import LogConfig, LogFormat
from escrowmq.errors import ConfigError
from escrowmq.parsing import did_you_mean, format_timestamp

log = logging.getLogger(__name__)

LIVE_SETTINGS: Final = frozenset(
    {
        "escrowLogLevel",
        "escrowLogFormat",
        "escrowConnectionsMax",
        "escrowInFlightBytesMax",
        "escrowConnectionInFlightBytesMax",
        "escrowUnflushedBytesMax",
        "escrowConnectionSendsMax",
        "escrowConnectionSendBytesMax",
        "escrowTopicSendsMax",
        "escrowTopicSendBytesMax",
        "longPollingEnable",
        "shortPollingTimeMills",
        "maxTransferCountOnMessageInMemory",
        "maxTransferBytesOnMessageInMemory",
        "enablePropertyFilter",
        "fileReservedTime",
        "deleteWhen",
        "diskMaxUsedSpaceRatio",
        "diskSpaceCleanForciblyRatio",
        "diskSpaceWarningLevelRatio",
        "autoCreateTopicEnable",
        "autoCreateSubscriptionGroup",
        "brokerPermission",
        "maxMessageSize",
        "rejectTransactionMessage",
        "transactionTimeOut",
        "transactionCheckMax",
        "transactionCheckInterval",
        "escrowCheckBackoffPercent",
        "escrowTimeOuts",
        "escrowCheckIntervals",
        "escrowOpenMax",
        "escrowOpenPerGroupMax",
        "escrowOpenBytesMax",
        "escrowOpenBytesPerGroupMax",
    }
)


class LiveConfig:
    """`reread` gives what the sources say now; None if they cannot be asked again."""

    def __init__(self, config: Config, resolve: Callable[[], ResolvedConfig] | None = None) -> None:
        self.config = config
        self._resolve = resolve
        self._listeners: list[Callable[[Config], None]] = []

    def add_listener(self, listener: Callable[[Config], None]) -> None:
        """Called with what holds from now on, after each change."""
        self._listeners.append(listener)

    def reload(self) -> None:
        if self._resolve is None:
            return
        try:
            said = self._resolve().config
        except ConfigError as error:
            log.error("configuration not read, nothing has changed: %s", error)
            return
        config, changed = self._merge(said)
        if not changed:
            log.info("configuration read again, nothing to change")
            return
        self.apply(config)

    def apply(self, config: Config) -> None:
        """It holds from now on, for everybody who lives by it."""
        self.config = config
        for apply in self._listeners:
            apply(config)

    def _merge(self, new_config: Config) -> tuple[Config, bool]:
        merged, changed = self.config, False
        for setting in SETTINGS:
            group = getattr(merged, setting.group)
            before, now = (
                getattr(g, setting.name) for g in (group, getattr(new_config, setting.group))
            )
            if before == now:
                continue
            old, new = setting.kind.format(before), setting.kind.format(now)
            if setting.conf not in LIVE_SETTINGS:
                log.warning("%s stays %s: %s needs a restart", setting.conf, old, new)
                continue
            log.warning("%s is %s from now on, was %s", setting.conf, new, old)
            merged = replace(merged, **{setting.group: replace(group, **{setting.name: now})})
            changed = True
        return merged, changed


class RuntimeSettings:
    """`origins`: where each setting came from when the broker was started."""

    def __init__(
        self, live_config: LiveConfig, origins: Mapping[str, Origin], file: Path | None
    ) -> None:
        self._live_config = live_config
        self._origins = origins
        self._file = file

    def text(self) -> str:
        lines = (
            write_property(one.conf, _setting_text(self._live_config.config, one))
            for one in SETTINGS
        )
        return "".join(f"{line}\n" for line in sorted(lines))

    def change(self, text: str) -> None:
        wanted = {found.key: found.value.strip() for found in read_properties(text)}
        asked = [(_find_setting(key), value) for key, value in wanted.items()]
        changed = [
            one for one in asked if _setting_text(self._live_config.config, one[0]) != one[1]
        ]
        config = self._live_config.config
        for setting, value in changed:
            if setting.conf not in LIVE_SETTINGS:
                raise ConfigError(
                    f"{setting.conf} cannot change while the broker runs: "
                    "put it into its file and restart it"
                )
            config = _with_setting(config, setting, value)
        if not changed:
            return
        self._write({setting.conf: _setting_text(config, setting) for setting, _ in changed})
        self._live_config.apply(config)

    def _write(self, changes: dict[str, str]) -> None:
        told = ", ".join(f"{key}={value}" for key, value in changes.items())
        if self._file is None or self._file.suffix == ".toml":
            why = "there is no file" if self._file is None else f"{self._file} is no broker.conf"
            log.warning("settings changed until the next start (%s): %s", why, told)
            return
        try:
            with_changes = update_properties(self._file.read_text("utf-8"), changes)
            _replace_file(self._file, with_changes)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"nothing was changed: {self._file}: {error}") from error
        log.warning("settings changed, also in %s: %s", self._file, told)
        for key in changes:
            if self._origins[key].source in (Source.ENVIRONMENT, Source.FLAG):
                log.warning("at the next start %s wins over it: %s", self._origins[key], key)


def update_properties(text: str, changes: dict[str, str]) -> str:
    """A broker.conf with these values: where a key stood, its line; else at the end."""
    lines = text.splitlines(keepends=True)
    left = dict(changes)
    # From the end, so that the numbers of the lines before stay true.
    for found in reversed(list(read_properties(text))):
        if found.key not in changes:
            continue
        begin = end = found.line - 1
        while end + 1 < len(lines) and _is_continued(lines[end]):
            end += 1
        value = left.pop(found.key, None)  # of one that is set twice, the last counts
        lines[begin : end + 1] = [] if value is None else [f"{write_property(found.key, value)}\n"]
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    return "".join(lines + [f"{write_property(key, value)}\n" for key, value in left.items()])


def _is_continued(line: str) -> bool:
    line = line.rstrip("\r\n")
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _replace_file(file: Path, text: str) -> None:
    """Whole or not at all, and readable by whom it was before."""
    beside = file.with_name(f".{file.name}.new")
    try:
        with beside.open("w", encoding="utf-8") as written:
            os.fchmod(written.fileno(), file.stat().st_mode & 0o7777)
            written.write(text)
            written.flush()
            os.fsync(written.fileno())
        beside.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


def _find_setting(key: str) -> Setting:
    setting = BY_CONF.get(key)
    if setting is None:
        raise ConfigError(
            ignored_key_warning(key)
            or f"there is no setting {key[:100]!r}{did_you_mean(key, BY_CONF)}"
        )
    return setting


def _with_setting(config: Config, setting: Setting, text: str) -> Config:
    try:
        value = setting.kind.parse(text)
    except ValueError as error:
        raise ConfigError(f"{setting.conf}={text[:100]!r}: {error}") from None
    group = dataclasses.replace(getattr(config, setting.group), **{setting.name: value})
    changes: dict[str, Any] = {setting.group: group}
    return dataclasses.replace(config, **changes)


def _setting_text(config: Config, setting: Setting) -> str:
    return setting.kind.format(getattr(getattr(config, setting.group), setting.name))


_SPECIFIER: Final = re.compile(r"(?:\b(\w+)=)?%(?:%|[-+ #0]*\d*(?:\.\d+)?([sdrfgx]))")
_RESERVED_FIELDS: Final = frozenset(("time", "level", "broker", "logger", "message", "exception"))


class JsonFormatter(logging.Formatter):
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
        return json.dumps(line, ensure_ascii=False, default=str)


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
    """Also again, with other settings. Lines of many brokers in one place say which they are of."""
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format is LogFormat.JSON:
        handler.setFormatter(JsonFormatter(broker))
    else:
        who = f"{broker.replace('%', '%%')} " if is_supervised else ""
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname)s {who}%(name)s %(message)s")
        )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.value)
