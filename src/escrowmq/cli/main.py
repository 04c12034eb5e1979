"""`escrowmq`: put the command groups together and turn errors into one line and an exit code.

0  as it should be
1  looked, and found damage or a problem
2  could not do what was asked
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Final

import click

from escrowmq.errors import EscrowError

COMMAND_NAMES: Final = (
    "broker",
    "completion",
    "config",
    "doctor",
    "group",
    "message",
    "pipeline",
    "serve",
    "store",
    "topic",
    "transaction",
)


class LazyCommandGroup(click.Group):
    """Each is a module of its name, imported when it is wanted: all of them together take as long
    as a broker takes to start."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMAND_NAMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMAND_NAMES:
            return _load_command(cmd_name)
        for name in COMMAND_NAMES:  # so that click can say which of them was meant
            self.add_command(_load_command(name))
        return None


def _load_command(name: str) -> click.Command:
    command: click.Command = getattr(import_module(f"escrowmq.cli.commands.{name}"), name)
    return command


@click.group(cls=LazyCommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="escrowmq", prog_name="escrowmq")
def cli() -> None:
    """Transactional messages that commit together with your database."""


def main() -> None:
    try:
        code = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:
        code = 130
    except EscrowError as error:
        click.echo(f"escrowmq: {error}", err=True)
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
