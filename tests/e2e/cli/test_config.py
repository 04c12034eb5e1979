"""`escrowmq config`, and the settings that `escrowmq serve` refuses, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from escrowmq.config import SETTINGS
from tests.support.brokers import COMMAND

pytestmark = pytest.mark.slow


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command; the only ESCROWMQ_ variables in its environment are the given ones."""
    others = {name: text for name, text in os.environ.items() if not name.startswith("ESCROWMQ_")}
    return subprocess.run(
        [COMMAND, *arguments],
        env=others | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_every_setting_is_printed_with_its_origin(tmp_path: Path) -> None:
    conf = tmp_path / "broker.conf"
    conf.write_text("brokerName=orders\nsendMessageThreadPoolNums=16\n")
    result = run("config", "-c", conf, ESCROWMQ_LISTEN_PORT="10921")
    assert result.returncode == 0
    assert all(f"{setting.key} = " in result.stdout for setting in SETTINGS)
    lines = {line.split(" = ")[0]: " ".join(line.split()) for line in result.stdout.splitlines()}
    assert lines["brokerName"] == f"brokerName = orders ({conf}:1)"
    assert lines["listenPort"] == "listenPort = 10921 (ESCROWMQ_LISTEN_PORT)"
    assert lines["fileReservedTime"] == "fileReservedTime = 72 hours (default)"
    assert result.stderr == (
        f"escrowmq: warning: {conf}:2: sendMessageThreadPoolNums is a setting of RocketMQ that "
        "EscrowMQ does not have; ignored\n"
    )


def test_changed_settings_are_printed_as_json() -> None:
    result = run("config", "--changed", "--json", ESCROWMQ_LISTEN_PORT="10921")
    assert (result.returncode, result.stderr) == (0, "")
    (setting,) = json.loads(result.stdout)["settings"]
    assert setting == {
        "key": "listenPort",
        "name": "listen_port",
        "group": "network",
        "value": 10921,
        "unit": "",
        "source": "environment",
        "place": "ESCROWMQ_LISTEN_PORT",
        "environment": "ESCROWMQ_LISTEN_PORT",
        "help": "Port of the broker; 0 takes any free port.",
    }
    assert len(json.loads(run("config", "--json").stdout)["settings"]) == len(SETTINGS)


def test_the_example_file_changes_no_setting(tmp_path: Path) -> None:
    conf = tmp_path / "broker.conf"
    conf.write_text(run("config", "--example").stdout)
    result = run("config", "-c", conf, "--changed")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.parametrize("command", ["config", "serve"])
def test_an_unknown_setting_is_refused_with_one_line_and_exit_code_2(
    tmp_path: Path, command: str
) -> None:
    conf = tmp_path / "broker.conf"
    conf.write_text("listenPrt=1\n")
    result = run(command, "-c", conf)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"escrowmq: {conf}:1: there is no setting 'listenPrt'; did you mean listenPort?\n"
    )


def test_an_option_out_of_range_is_refused() -> None:
    result = run("serve", "--port", "70000")
    assert result.returncode == 2
    assert result.stderr == (
        "escrowmq: --port: listenPort='70000': must be a whole number from 0 to 65535\n"
    )


def test_serve_has_the_options_that_scripts_use() -> None:
    result = run("serve", "--help")
    for option in (
        "-c",
        "--data",
        "--host",
        "--port",
        "--namesrv-port",
        "--role [all|broker|namesrv]",
    ):
        assert f"  {option} " in result.stdout


def test_python_m_escrowmq_is_the_same_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "escrowmq", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, run("--version").stdout)
