"""`escrowmq completion SHELL`: what makes the shell complete commands and names."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

_PROGRAM_NAME: Final = "escrowmq"
_COMPLETE_VARIABLE: Final = "_ESCROWMQ_COMPLETE"


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print a script that completes commands, topics, groups and brokers.

    \b
    bash   eval "$(escrowmq completion bash)"     in ~/.bashrc
    zsh    eval "$(escrowmq completion zsh)"      in ~/.zshrc
    fish   escrowmq completion fish > ~/.config/fish/completions/escrowmq.fish

    Names come from the name server of -n, or of $NAMESRV_ADDR; if it does not answer within a
    second, there are none.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    root = context.find_root().command
    click.echo(kind(root, {}, _PROGRAM_NAME, _COMPLETE_VARIABLE).source())
