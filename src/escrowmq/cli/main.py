"""`escrowmq`: the entry point. Loads the command, turns errors into one line and an exit code.

Exit codes of all commands:

0    success
1    a check found damage or a problem
2    the command failed, or could not do all of its work
130  the user answered "no" to a confirmation
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Final

import click
from click.shell_completion import get_completion_class

from escrowmq.errors import EscrowError

# A command is an attribute of the module of the same name in `escrowmq.cli.commands`.
COMMAND_NAMES: Final = (
    "broker",
    "config",
    "doctor",
    "group",
    "message",
    "pipeline",
    "serve",
    "store",
    "topic",
    "transaction",
    "worker",
)


class LazyCommandGroup(click.Group):
    """Import the module of a command when it is used.

    Importing all of them takes as long as a broker takes to start.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*COMMAND_NAMES, *super().list_commands(ctx)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMAND_NAMES:
            return _load_command(cmd_name)
        command = super().get_command(ctx, cmd_name)
        if command is None:
            # click compares the wrong name with the commands that it has, for "Did you mean …?"
            for name in COMMAND_NAMES:
                self.add_command(_load_command(name))
        return command


def _load_command(name: str) -> click.Command:
    command: click.Command = getattr(import_module(f"escrowmq.cli.commands.{name}"), name)
    return command


@click.group(cls=LazyCommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="escrowmq", prog_name="escrowmq")
def cli() -> None:
    """Run and operate EscrowMQ: messages that commit together with your database."""


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that completes commands, topics, groups and brokers.

    \b
    bash   eval "$(escrowmq completion bash)"     in ~/.bashrc
    zsh    eval "$(escrowmq completion zsh)"      in ~/.zshrc
    fish   escrowmq completion fish > ~/.config/fish/completions/escrowmq.fish

    Names come from the name server given with -n or $NAMESRV_ADDR. If it does not respond within
    a second, no names are completed.
    """
    completion_class = get_completion_class(shell)
    assert completion_class is not None
    root = context.find_root().command
    click.echo(completion_class(root, {}, "escrowmq", "_ESCROWMQ_COMPLETE").source())


def main() -> None:
    try:
        code = cli.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except click.Abort:
        code = 130
    except EscrowError as error:
        # Imported here because they bring rich and sockets along, and most commands do not fail.
        from escrowmq.admin.cluster import error_text
        from escrowmq.cli.output import printable

        click.echo(f"escrowmq: {printable(error_text(error))}", err=True)
        code = 2
    sys.exit(code)


if __name__ == "__main__":
    main()
