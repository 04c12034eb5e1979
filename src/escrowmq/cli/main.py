"""`escrowmq`: put the command groups together and turn errors into one line and an exit code.

0  as it should be
1  looked, and found damage or a problem
2  could not do what was asked
"""

from __future__ import annotations

import sys

import click

from escrowmq.cli.broker import broker
from escrowmq.cli.completion import completion
from escrowmq.cli.config import config
from escrowmq.cli.doctor import doctor
from escrowmq.cli.group import group
from escrowmq.cli.message import message
from escrowmq.cli.pipeline import pipeline
from escrowmq.cli.serve import serve
from escrowmq.cli.store import store
from escrowmq.cli.topic import topic
from escrowmq.cli.transaction import transaction
from escrowmq.errors import EscrowError


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="escrowmq", prog_name="escrowmq")
def cli() -> None:
    """Transactional messages that commit together with your database."""


cli.add_command(broker)
cli.add_command(completion)
cli.add_command(config)
cli.add_command(doctor)
cli.add_command(group)
cli.add_command(message)
cli.add_command(pipeline)
cli.add_command(serve)
cli.add_command(store)
cli.add_command(topic)
cli.add_command(transaction)


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
