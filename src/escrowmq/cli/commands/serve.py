"""`escrowmq serve`: combine flags, environment and file, and start the server."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import click

from escrowmq.cli.commands.config import print_warnings
from escrowmq.cli.options import config_file_option
from escrowmq.config import ResolvedConfig, Source, load_config
from escrowmq.errors import StoreError


@click.command()
@config_file_option
@click.option("--data", metavar="DIR", help="Directory for messages.  [./escrowmq-data]")
@click.option("--host", metavar="ADDR", help="Address to listen on and to announce.  [127.0.0.1]")
@click.option("--port", metavar="N", help="Port of the broker.  [10911]")
@click.option("--namesrv-port", metavar="N", help="Port of the name server.  [9876]")
@click.option(
    "--metrics-port", metavar="N", help="HTTP port for /metrics and /health.  [0: disabled]"
)
@click.option("--log-level", metavar="LEVEL", help="DEBUG, INFO, WARNING or ERROR.  [INFO]")
@click.option("--log-format", metavar="text|json", help="Format of the log.  [text]")
@click.option("--insecure", is_flag=True, help="Serve other machines without accounts.")
@click.option(
    "--role",
    type=click.Choice(["all", "broker", "namesrv"]),
    default="all",
    show_default=True,
    help="What to start.",
)
@click.option(
    "--brokers",
    "broker_count",
    metavar="N",
    type=click.IntRange(1, 64),
    help="Run N brokers as one cluster, each in its own process, to use several cores.",
)
@click.option("--metrics-socket", type=int, hidden=True)
@click.option("--own-namesrv", hidden=True)
@click.pass_context
def serve(
    context: click.Context,
    config_file: Path | None,
    data: str | None,
    host: str | None,
    port: str | None,
    namesrv_port: str | None,
    metrics_port: str | None,
    insecure: bool,
    log_level: str | None,
    log_format: str | None,
    role: str,
    broker_count: int | None,
    metrics_socket: int | None,
    own_namesrv: str | None,
) -> None:
    """Run a broker and a name server, one of them, or several brokers.

    Flags override ESCROWMQ_… variables, and these override the file. `escrowmq config` shows the
    result of the variables and the file.
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

    def reload_config() -> ResolvedConfig:
        return load_config(config_file, os.environ, given)

    resolved = reload_config()
    print_warnings(resolved)
    for warning in role_warnings(resolved, role):
        click.echo(f"escrowmq: warning: {warning}", err=True)
    if broker_count is not None:
        context.exit(_run_supervisor(resolved, role, broker_count, reload_config))

    # Imported here because other commands need no event loop.
    from escrowmq.server.serve import report_start_error, run
    from escrowmq.server.supervisor import check_single_broker_store

    directory = resolved.config.store.root_dir
    try:
        if role != "namesrv":
            check_single_broker_store(directory)
    except StoreError as error:
        context.exit(report_start_error(error, directory))
    context.exit(run(resolved, role, config_file, reload_config, metrics_socket, own_namesrv))


def _run_supervisor(
    resolved: ResolvedConfig,
    role: str,
    broker_count: int,
    reload_config: Callable[[], ResolvedConfig],
) -> int:
    from escrowmq.server.supervisor import supervise

    if role == "namesrv":
        raise click.UsageError("--brokers needs --role all or --role broker")
    return supervise(resolved.config, role, broker_count, sys.argv[1:], reload_config)


def role_warnings(resolved: ResolvedConfig, role: str) -> list[str]:
    """Warn about listenPort in a file for a name server: RocketMQ's means another port there."""
    port = resolved.origins["listenPort"]
    namesrv_port = resolved.origins["escrowNamesrvPort"]
    is_port_set = port.source is not Source.DEFAULT
    if role != "namesrv" or not is_port_set or namesrv_port.source is not Source.DEFAULT:
        return []
    return [f"{port}: listenPort is the port of the broker; the name server has escrowNamesrvPort"]
