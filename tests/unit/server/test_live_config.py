"""Reloading the configuration: which settings change, and when listeners are called."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from escrowmq.config import Config, ResolvedConfig, load_config
from escrowmq.server.live_config import LiveConfig


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    return tmp_path / "broker.conf"


def load_live(conf: Path) -> tuple[LiveConfig, list[Config]]:
    """Load a file. Return the live configuration, and a list to which changes are appended."""

    def read() -> ResolvedConfig:
        return load_config(conf)

    changes: list[Config] = []
    live = LiveConfig(read().config, read)
    live.add_listener(changes.append)
    return live, changes


def test_only_live_settings_change(conf: Path, caplog: pytest.LogCaptureFixture) -> None:
    conf.write_text("fileReservedTime=48\nlistenPort=20000\n")
    live, changes = load_live(conf)
    conf.write_text("fileReservedTime=24\nlistenPort=20001\n")
    live.reload()
    [config] = changes
    assert config is live.config
    assert (config.store.reserved_hours, config.network.listen_port) == (24, 20000)
    assert "fileReservedTime changed from 48 to 24" in caplog.text
    assert "listenPort is still 20000: the new value 20001 needs a restart" in caplog.text


@pytest.mark.parametrize("content", ["fileReservedTime=x\n", "unknownSetting=1\n"])
def test_an_invalid_file_changes_nothing(
    conf: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    conf.write_text("fileReservedTime=48\n")
    live, changes = load_live(conf)
    conf.write_text(content)
    live.reload()
    assert not changes
    assert "nothing has changed" in caplog.text


def test_listeners_are_not_called_without_a_change(
    conf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    conf.write_text("")
    live, changes = load_live(conf)
    with caplog.at_level(logging.INFO):
        live.reload()
    assert not changes
    assert "nothing to change" in caplog.text
