"""The list of commands, their help texts, and the lazy import of commands."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import click
import pytest
from click.testing import CliRunner

import escrowmq.cli.commands
from escrowmq.cli.main import COMMAND_NAMES, cli, main
from escrowmq.remoting.codes import ResponseCode
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import encode_response
from tests.support.scripted_server import ScriptedServer


def test_every_module_with_a_command_of_its_name_is_listed() -> None:
    names = []
    for module in pkgutil.iter_modules(escrowmq.cli.commands.__path__):
        command = getattr(import_module(f"escrowmq.cli.commands.{module.name}"), module.name, None)
        if isinstance(command, click.Command):
            names.append(module.name)
    assert sorted(names) == sorted(COMMAND_NAMES)


def all_commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command and sub-command with its full name."""

    def walk(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
        yield path, command
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                child = command.get_command(context, name)
                assert child is not None
                yield from walk(f"{path} {name}", child)

    yield from walk("escrowmq", cli)


def test_every_command_and_every_option_has_a_help_text() -> None:
    missing = [path for path, command in all_commands() if not command.help]
    missing += [
        f"{path} {param.opts[0]}"
        for path, command in all_commands()
        for param in command.params
        if isinstance(param, click.Option) and not param.hidden and not param.help
    ]
    assert missing == []


def test_help_texts_are_sentences() -> None:
    """A sentence begins with a capital letter and ends with a full stop, before any [default]."""
    texts = [(path, (command.help or "").split("\n\n")[0]) for path, command in all_commands()]
    texts += [
        (f"{path} {param.opts[0]}", (param.help or "").split("  [")[0])
        for path, command in all_commands()
        for param in command.params
        if isinstance(param, click.Option) and not param.hidden
    ]
    wrong = [(path, text) for path, text in texts if not text[:1].isupper() or text[-1:] != "."]
    assert wrong == []


def test_a_command_does_not_import_the_others() -> None:
    program = (
        "import sys; from escrowmq.cli.main import cli\n"
        "try: cli(['config', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted(name for name in sys.modules if name.startswith('escrowmq.cli.')))"
    )
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    imported = process.stdout.decode().splitlines()[-1]
    assert "escrowmq.cli.commands.config" in imported
    assert not [
        name for name in COMMAND_NAMES if name != "config" and f"commands.{name}'" in imported
    ]


def test_a_misspelt_command_gets_a_suggestion() -> None:
    result = CliRunner().invoke(cli, ["serv"])
    assert result.exit_code == 2
    assert "Did you mean 'serve'?" in result.output


def test_a_refused_command_prints_the_remark_of_the_server(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def respond(request: Request[Any]) -> bytes:
        return encode_response(request, code=ResponseCode.NO_PERMISSION, remark="a wrong signature")

    with ScriptedServer(respond) as server:
        monkeypatch.setattr(sys, "argv", ["escrowmq", "broker", "list", "-n", server.address])
        with pytest.raises(SystemExit) as exit_info:
            main()
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "escrowmq: a wrong signature\n"
