"""`escrowmq serve`: put flags, environment and file together, and start the server."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import click

from escrowmq.cli.commands.config import print_warnings
from escrowmq.config import ResolvedConfig, Source, load_config


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
@click.option("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR.  [INFO]")
@click.option("--log-format", metavar="text|json", help="What log lines look like.  [text]")
@click.option(
    "--insecure", is_flag=True, help="Serve others than this machine without asking who they are."
)
@click.option(
    "--role",
    type=click.Choice(["all", "broker", "namesrv"]),
    default="all",
    show_default=True,
    help="What to start.",
)
@click.option(
    "--brokers",
    metavar="N",
    type=click.IntRange(1, 64),
    help="So many brokers, a process each, as one cluster; for more than one core.",
)
@click.option("--metrics-socket", type=int, hidden=True)
@click.option("--own-namesrv", hidden=True)
@click.pass_context
def serve(
    context: click.Context,
    file: Path | None,
    data: str | None,
    host: str | None,
    port: str | None,
    namesrv_port: str | None,
    metrics_port: str | None,
    insecure: bool,
    log_level: str | None,
    log_format: str | None,
    role: str,
    brokers: int | None,
    metrics_socket: int | None,
    own_namesrv: str | None,
) -> None:
    """Run a broker and a name server, or one of them, or many brokers.

    Flags win over ESCROWMQ_… variables, and these over the file; `escrowmq config` shows what comes
    of the latter two.
    """
    flags = {
        "--data": data,
        "--host": host,
        "--port": port,
        "--namesrv-port": namesrv_port,
        "--metrics-port": metrics_port,
        "--insecure": "true" if insecure else None,
        "--log-level": log_level,
        "--log-format": log_format,
    }
    given = {flag: text for flag, text in flags.items() if text is not None}

    def reread() -> ResolvedConfig:
        return load_config(file, os.environ, given)

    resolved = reread()
    print_warnings(resolved)
    for warning in role_warnings(resolved, role):
        click.echo(f"escrowmq: warning: {warning}", err=True)
    if brokers is not None:
        context.exit(_run_supervisor(resolved, role, brokers, reread))

    # Not before: other commands need no event loop.
    from escrowmq.server.serve import run
    from escrowmq.server.supervisor import check_single_broker_store

    if role != "namesrv":
        check_single_broker_store(resolved.config.store.root_dir)
    context.exit(run(resolved, role, file, reread, metrics_socket, own_namesrv))


def _run_supervisor(
    resolved: ResolvedConfig,
    role: str,
    broker_count: int,
    reload_config: Callable[[], ResolvedConfig],
) -> int:
    from escrowmq.server.supervisor import supervise

    if role == "namesrv":
        raise click.UsageError("--brokers goes with --role all or broker, not namesrv")
    return supervise(resolved.config, role, broker_count, sys.argv[1:], reload_config)


def role_warnings(resolved: ResolvedConfig, role: str) -> list[str]:
    """RocketMQ's name server has a file of its own, in which listenPort is its port."""
    port, own = resolved.origins["listenPort"], resolved.origins["escrowNamesrvPort"]
    if role != "namesrv" or port.source is Source.DEFAULT or own.source is not Source.DEFAULT:
        return []
    return [f"{port}: listenPort is the broker's; the name server's is escrowNamesrvPort"]
