"""The files in deploy/ use existing flags and settings, and do not run as root."""

from __future__ import annotations

import json
import re
from pathlib import Path

import click

from escrowmq.cli.commands.serve import serve
from escrowmq.config.loading import BY_ENVIRONMENT

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
UNIT = (DEPLOY / "escrowmq.service").read_text()


def flags_of_serve() -> set[str]:
    return {
        flag for option in serve.params if isinstance(option, click.Option) for flag in option.opts
    }


def test_the_commands_use_existing_flags() -> None:
    [unit_arguments] = re.findall(r"^ExecStart=\S+/escrowmq serve (.*)$", UNIT, re.MULTILINE)
    [docker_arguments] = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    arguments = [*unit_arguments.split(), *json.loads(docker_arguments)]
    flags = {argument for argument in arguments if argument.startswith("-")}
    assert flags
    assert flags <= flags_of_serve()


def test_the_variables_are_settings() -> None:
    variables = set(re.findall(r"\bESCROWMQ_[A-Z_0-9]+(?==)", DOCKERFILE))
    assert variables
    assert variables <= set(BY_ENVIRONMENT)


def test_both_files_explain_how_to_serve_other_machines_with_accounts() -> None:
    """A server refuses to listen on other addresses without accounts."""
    for text, names in (
        (DOCKERFILE, ("ESCROWMQ_ACL_ENABLE=true", "ESCROWMQ_ACL_FILE=", "ESCROWMQ_INSECURE=true")),
        (UNIT, ("aclEnable=true", "escrowAclFile=", "escrowInsecure=true")),
    ):
        for name in names:
            assert name in text


def test_the_health_check_is_a_valid_program() -> None:
    [command] = re.findall(r"^    CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    python, _, program = json.loads(command)
    assert python == "python"
    compile(program, "HEALTHCHECK", "exec")


def test_nothing_runs_as_root() -> None:
    users = re.findall(r"^USER (\w+)$", DOCKERFILE, re.MULTILINE)
    assert users == ["escrowmq"]
    for line in (
        "User=escrowmq",
        "NoNewPrivileges=yes",
        "ProtectSystem=strict",
        "CapabilityBoundingSet=",
        "LimitNOFILE=65536",
        "ExecReload=/bin/kill -HUP $MAINPID",
    ):
        assert line in UNIT.splitlines()
    assert "STOPSIGNAL SIGTERM" in DOCKERFILE
    assert "HEALTHCHECK" in DOCKERFILE


def test_the_health_check_uses_the_port_that_the_command_opens() -> None:
    [command] = re.findall(r"^CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    arguments = json.loads(command)
    port = arguments[arguments.index("--metrics-port") + 1]
    assert f"http://127.0.0.1:{port}/health/ready" in DOCKERFILE
