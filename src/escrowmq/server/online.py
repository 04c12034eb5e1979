"""Settings of a broker that runs: show them, and change those that need no restart.

A change is written to the file that the broker was started with, if that is a broker.conf, and is
then there after a restart too, unless a flag or the environment says otherwise. A broker that was
started without one forgets it when it stops. Either everything in a request is done, or nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from escrowmq.config import SETTINGS, Config, Origin, Setting, Source
from escrowmq.config.catalogue import BY_CONF, ignored, nearest
from escrowmq.config.properties import read_properties, write_property
from escrowmq.errors import ConfigError
from escrowmq.server.live import LIVE, LiveSettings

log = logging.getLogger(__name__)


class OnlineSettings:
    """`origins`: where each setting came from when the broker was started."""

    def __init__(
        self, live: LiveSettings, origins: Mapping[str, Origin], file: Path | None
    ) -> None:
        self._live = live
        self._origins = origins
        self._file = file

    def text(self) -> str:
        lines = (write_property(one.conf, _shown(self._live.config, one)) for one in SETTINGS)
        return "".join(f"{line}\n" for line in sorted(lines))

    def change(self, text: str) -> None:
        wanted = {found.key: found.value.strip() for found in read_properties(text)}
        asked = [(_known(key), value) for key, value in wanted.items()]
        changed = [one for one in asked if _shown(self._live.config, one[0]) != one[1]]
        config = self._live.config
        for setting, value in changed:
            if setting.conf not in LIVE:
                raise ConfigError(
                    f"{setting.conf} cannot change while the broker runs: "
                    "put it into its file and restart it"
                )
            config = _with(config, setting, value)
        if not changed:
            return
        self._write({setting.conf: _shown(config, setting) for setting, _ in changed})
        self._live.change(config)

    def _write(self, changed: dict[str, str]) -> None:
        told = ", ".join(f"{key}={value}" for key, value in changed.items())
        if self._file is None or self._file.suffix == ".toml":
            why = "there is no file" if self._file is None else f"{self._file} is no broker.conf"
            log.warning("settings changed until the next start (%s): %s", why, told)
            return
        try:
            with_changes = changed_lines(self._file.read_text("utf-8"), changed)
            _replace(self._file, with_changes)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"nothing was changed: {self._file}: {error}") from error
        log.warning("settings changed, also in %s: %s", self._file, told)
        for key in changed:
            if self._origins[key].source in (Source.ENVIRONMENT, Source.FLAG):
                log.warning("at the next start %s wins over it: %s", self._origins[key], key)


def changed_lines(text: str, changed: dict[str, str]) -> str:
    """A broker.conf with these values: where a key stood, its line; else at the end."""
    lines = text.splitlines(keepends=True)
    left = dict(changed)
    # From the end, so that the numbers of the lines before stay true.
    for found in reversed(list(read_properties(text))):
        if found.key not in changed:
            continue
        begin = end = found.line - 1
        while end + 1 < len(lines) and _goes_on(lines[end]):
            end += 1
        value = left.pop(found.key, None)  # of one that is set twice, the last counts
        lines[begin : end + 1] = [] if value is None else [f"{write_property(found.key, value)}\n"]
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    return "".join(lines + [f"{write_property(key, value)}\n" for key, value in left.items()])


def _goes_on(line: str) -> bool:
    line = line.rstrip("\r\n")
    return (len(line) - len(line.rstrip("\\"))) % 2 == 1


def _replace(file: Path, text: str) -> None:
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


def _known(key: str) -> Setting:
    setting = BY_CONF.get(key)
    if setting is None:
        raise ConfigError(
            ignored(key) or f"there is no setting {key[:100]!r}{nearest(key, BY_CONF)}"
        )
    return setting


def _with(config: Config, setting: Setting, text: str) -> Config:
    try:
        value = setting.kind.parse(text)
    except ValueError as error:
        raise ConfigError(f"{setting.conf}={text[:100]!r}: {error}") from None
    group = dataclasses.replace(getattr(config, setting.group), **{setting.name: value})
    changes: dict[str, Any] = {setting.group: group}
    return dataclasses.replace(config, **changes)


def _shown(config: Config, setting: Setting) -> str:
    return setting.kind.show(getattr(getattr(config, setting.group), setting.name))
