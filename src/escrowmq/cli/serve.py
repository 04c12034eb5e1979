"""`escrowmq serve`: put flags, environment and file together, and start the server."""

from __future__ import annotations

import os
from pathlib import Path

import click

from escrowmq.cli.config import warn
from escrowmq.config import Config, Resolved, Source


@click.command()
@click.option(
    "-c", "file", metavar="FILE", type=click.Path(path_type=Path), help="broker.conf or TOML."
)
@click.option("--data", metavar="DIR", help="Where messages are kept.  [./escrowmq-data]")
@click.option("--host", metavar="ADDR", help="Listen there, and tell clients so.  [127.0.0.1]")
@click.option("--port", metavar="N", help="The broker's port.  [10911]")
@click.option("--namesrv-port", metavar="N", help="The name server's port.  [9876]")
@click.option(
    "--metrics-port", metavar="N", help="Serve /metrics and /health there.  [0, which is nowhere]"
)
@click.option(
    "--role",
    type=click.Choice(["all", "broker", "namesrv"]),
    default="all",
    show_default=True,
    help="What to start.",
)
@click.pass_context
def serve(
    context: click.Context,
    file: Path | None,
    data: str | None,
    host: str | None,
    port: str | None,
    namesrv_port: str | None,
    metrics_port: str | None,
    role: str,
) -> None:
    """Run a broker and a name server, or one of them.

    Flags win over ESCROWMQ_… variables, and these over the file; `escrowmq config` shows what comes
    of the latter two.
    """
    flags = {
        "--data": data,
        "--host": host,
        "--port": port,
        "--namesrv-port": namesrv_port,
        "--metrics-port": metrics_port,
    }
    given = {flag: text for flag, text in flags.items() if text is not None}
    resolved = Config.resolve(file, os.environ, given)
    warn(resolved)
    for warning in role_warnings(resolved, role):
        click.echo(f"escrowmq: warning: {warning}", err=True)

    from escrowmq.server.serve import run  # not before: other commands need no event loop

    context.exit(run(resolved, role, file))


def role_warnings(resolved: Resolved, role: str) -> list[str]:
    """RocketMQ's name server has a file of its own, in which listenPort is its port."""
    port, own = resolved.origins["listenPort"], resolved.origins["escrowNamesrvPort"]
    if role != "namesrv" or port.source is Source.DEFAULT or own.source is not Source.DEFAULT:
        return []
    return [f"{port}: listenPort is the broker's; the name server's is escrowNamesrvPort"]
