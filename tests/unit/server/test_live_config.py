"""Reloading the configuration: what changes, what stays, which listeners are called."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from escrowmq.config import Config, ResolvedConfig, load_config
from escrowmq.server.live_config import LiveConfig


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    return tmp_path / "broker.conf"


def live_of(conf: Path) -> tuple[LiveConfig, list[Config]]:
    def read() -> ResolvedConfig:
        return load_config(conf)

    told: list[Config] = []
    live = LiveConfig(read().config, read)
    live.add_listener(told.append)
    return live, told


def test_only_live_settings_change(conf: Path, caplog: pytest.LogCaptureFixture) -> None:
    conf.write_text("fileReservedTime=48\nlistenPort=20000\n")
    live, told = live_of(conf)
    conf.write_text("fileReservedTime=24\nlistenPort=20001\n")
    live.reload()
    [config] = told
    assert config is live.config
    assert (config.store.reserved_hours, config.network.listen_port) == (24, 20000)
    assert "fileReservedTime changed from 48 to 24" in caplog.text
    assert "listenPort is still 20000: the new value 20001 needs a restart" in caplog.text


@pytest.mark.parametrize("content", ["fileReservedTime=x\n", "nobody=1\n"])
def test_an_invalid_file_changes_nothing(
    conf: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    conf.write_text("fileReservedTime=48\n")
    live, told = live_of(conf)
    conf.write_text(content)
    live.reload()
    assert not told
    assert "nothing has changed" in caplog.text


def test_listeners_are_not_called_without_a_change(
    conf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    conf.write_text("")
    live, told = live_of(conf)
    with caplog.at_level(logging.INFO):
        live.reload()
    assert not told
    assert "nothing to change" in caplog.text
