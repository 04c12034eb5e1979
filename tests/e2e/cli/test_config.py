"""`escrowmq config` and the refusals of `escrowmq serve`, as a user runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from escrowmq.config import SETTINGS

pytestmark = pytest.mark.slow

COMMAND = Path(sys.executable).with_name("escrowmq")


def run(*arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    bare = {name: text for name, text in os.environ.items() if not name.startswith("ESCROWMQ_")}
    return subprocess.run(
        [COMMAND, *arguments],
        env=bare | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_every_setting_is_printed_with_where_it_came_from(tmp_path: Path) -> None:
    conf = tmp_path / "broker.conf"
    conf.write_text("brokerName=orders\nsendMessageThreadPoolNums=16\n")
    done = run("config", "-c", conf, ESCROWMQ_LISTEN_PORT="10921")
    assert done.returncode == 0
    assert all(f"{setting.key} = " in done.stdout for setting in SETTINGS)
    lines = {line.split(" = ")[0]: " ".join(line.split()) for line in done.stdout.splitlines()}
    assert lines["brokerName"] == f"brokerName = orders ({conf}:1)"
    assert lines["listenPort"] == "listenPort = 10921 (ESCROWMQ_LISTEN_PORT)"
    assert lines["fileReservedTime"] == "fileReservedTime = 72 hours (default)"
    assert done.stderr == (
        f"escrowmq: warning: {conf}:2: sendMessageThreadPoolNums is a setting of RocketMQ that "
        "EscrowMQ does not have; ignored\n"
    )


def test_what_changed_can_be_had_as_json() -> None:
    done = run("config", "--changed", "--json", ESCROWMQ_LISTEN_PORT="10921")
    assert (done.returncode, done.stderr) == (0, "")
    (setting,) = json.loads(done.stdout)["settings"]
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


def test_the_example_can_be_used_at_once(tmp_path: Path) -> None:
    conf = tmp_path / "broker.conf"
    conf.write_text(run("config", "--example").stdout)
    done = run("config", "-c", conf, "--changed")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("command", ["config", "serve"])
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path: Path, command: str) -> None:
    conf = tmp_path / "broker.conf"
    conf.write_text("listenPrt=1\n")
    done = run(command, "-c", conf)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"escrowmq: {conf}:1: there is no setting 'listenPrt'; did you mean listenPort?\n"
    )


def test_a_flag_out_of_range_is_refused() -> None:
    done = run("serve", "--port", "70000")
    assert done.returncode == 2
    assert done.stderr == (
        "escrowmq: --port: listenPort='70000': must be a whole number from 0 to 65535\n"
    )


def test_serve_has_the_flags_that_others_rely_on() -> None:
    done = run("serve", "--help")
    for flag in (
        "-c",
        "--data",
        "--host",
        "--port",
        "--namesrv-port",
        "--role [all|broker|namesrv]",
    ):
        assert f"  {flag} " in done.stdout


def test_the_package_runs_as_the_command_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "escrowmq", "--version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, run("--version").stdout)
