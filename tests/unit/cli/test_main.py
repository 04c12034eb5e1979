"""The commands there are, and that only the one that runs is imported."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from importlib import import_module

import click
from click.testing import CliRunner

import escrowmq.cli.commands
from escrowmq.cli.main import COMMAND_NAMES, cli


def test_every_module_with_a_command_of_its_name_is_one() -> None:
    found = []
    for module in pkgutil.iter_modules(escrowmq.cli.commands.__path__):
        command = getattr(import_module(f"escrowmq.cli.commands.{module.name}"), module.name, None)
        if isinstance(command, click.Command):
            found.append(module.name)
    assert sorted(found) == sorted(COMMAND_NAMES)


def test_a_command_does_not_import_the_others() -> None:
    program = (
        "import sys; from escrowmq.cli.main import cli\n"
        "try: cli(['config', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(name for name in sys.modules if name.startswith('escrowmq.cli.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    imported = done.stdout.decode().splitlines()[-1]
    assert "escrowmq.cli.commands.config" in imported
    assert not [
        name for name in COMMAND_NAMES if name != "config" and f"commands.{name}'" in imported
    ]


def test_a_wrong_name_is_answered_with_the_one_that_was_meant() -> None:
    said = CliRunner().invoke(cli, ["serv"])
    assert said.exit_code == 2
    assert "Did you mean 'serve'?" in said.output
