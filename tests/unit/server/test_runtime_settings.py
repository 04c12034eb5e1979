"""Settings that an operator changes while the broker runs, and the files that keep them."""

from __future__ import annotations

from pathlib import Path

import pytest

from escrowmq.config import Config, load_config
from escrowmq.errors import ConfigError
from escrowmq.server.live_config import LiveConfig, RuntimeSettings, update_properties


def load_settings(file: Path | None = None) -> tuple[RuntimeSettings, list[Config]]:
    """Return the settings, and a list to which the configuration is appended after a change."""
    applied: list[Config] = []
    resolved = load_config(file)
    live = LiveConfig(resolved.config)
    live.add_listener(applied.append)
    return RuntimeSettings(live, resolved.origins, file), applied


def test_a_change_is_applied_shown_and_saved(tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_text("# a comment\nmaxMessageSize=5000\nbrokerName=b")
    settings, applied = load_settings(file)
    settings.change("maxMessageSize=6000\nescrowLogLevel=debug\n")
    assert applied[0].store.message_bytes_max == 6000
    assert "maxMessageSize=6000\n" in settings.text()
    assert file.read_text() == (
        "# a comment\nmaxMessageSize=6000\nbrokerName=b\nescrowLogLevel=DEBUG\n"
    )
    assert load_config(file).config == applied[0]
    assert [path.name for path in tmp_path.iterdir()] == ["broker.conf"]


def test_without_a_file_a_change_lasts_until_the_stop(caplog: pytest.LogCaptureFixture) -> None:
    settings, applied = load_settings()
    settings.change("transactionCheckMax=3")
    assert applied[0].transaction.checks_max == 3
    assert "until the next start" in caplog.text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("listenPort=1", "cannot change while the broker runs"),
        ("maxMesageSize=1", "did you mean maxMessageSize"),
        ("sendMessageThreadPoolNums=1", "EscrowMQ does not have"),
        ("maxMessageSize=-1", "must be"),
        ("maxMessageSize=99999999999999999999", "must be"),
        ("deleteWhen=25", "must be"),
        ("maxMessageSize=6000\nlistenPort=1", "cannot change"),
        ("a=\\u12", "hexadecimal"),
    ],
)
def test_an_invalid_change_is_refused_as_a_whole(text: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_text("maxMessageSize=5000\n")
    settings, applied = load_settings(file)
    with pytest.raises(ConfigError, match=reason):
        settings.change(text)
    assert not applied
    assert file.read_text() == "maxMessageSize=5000\n"


def test_an_unchanged_value_changes_nothing() -> None:
    settings, applied = load_settings()
    settings.change("listenPort=10911\nmaxMessageSize=4194304\n")
    settings.change("")
    assert not applied


def test_a_file_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "broker.conf"
    file.write_text("")
    settings, applied = load_settings(file)
    file.unlink()
    with pytest.raises(ConfigError, match="nothing was changed"):
        settings.change("maxMessageSize=6000")
    assert not applied


def test_continued_lines_and_repeated_keys_are_replaced() -> None:
    text = "a=1 \\\n  2\nb = x\na : 3\n"
    assert update_properties(text, {"a": "9"}) == "b = x\na=9\n"
    assert update_properties("", {"a": "9"}) == "a=9\n"
