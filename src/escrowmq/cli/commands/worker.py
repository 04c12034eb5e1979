"""`escrowmq worker`: run the handlers of an App."""

from __future__ import annotations

import logging
import sys
from typing import Final

import click

from escrowmq.app.worker import WorkerOptions, start_workers

_MAIN: Final = ("-c", "from escrowmq.cli.main import main; main()")
LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


@click.command()
@click.argument("target", metavar="MODULE:APP")
@click.option(
    "--processes",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of worker processes. One that dies is started again.",
)
@click.option("--reload", is_flag=True, help="Start again when a Python file here changes.")
@click.option(
    "--health-port",
    type=click.IntRange(0, 65_535),
    metavar="PORT",
    help="HTTP port for /health/live, /health/ready and /metrics.  [none]",
)
@click.option(
    "--health-host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDR",
    help="Address of the HTTP port.",
)
@click.option(
    "--shutdown-timeout-s",
    type=click.FloatRange(min=0),
    default=30.0,
    show_default=True,
    metavar="S",
    help="How long a stop waits for handlers that run.",
)
@click.option(
    "--log-level",
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
    default="INFO",
    show_default=True,
    help="What is logged to standard error.",
)
@click.option("--child", hidden=True, metavar="INDEX:FD")
@click.pass_context
def worker(
    context: click.Context,
    target: str,
    processes: int,
    reload: bool,
    health_port: int | None,
    health_host: str,
    shutdown_timeout_s: float,
    log_level: str,
    child: str | None,
) -> None:
    """Run the handlers of an App, such as bank.messages:app.

    SIGTERM and Ctrl-C finish the handlers that run and commit the offsets; Ctrl-C a second time
    ends at once.
    """
    logging.basicConfig(level=log_level.upper(), format=LOG_FORMAT, stream=sys.stderr)
    options = WorkerOptions.with_child(
        child,
        target=target,
        health_port=health_port,
        health_host=health_host,
        shutdown_timeout_s=shutdown_timeout_s,
    )
    command = (sys.executable, *_MAIN, *sys.argv[1:])
    context.exit(start_workers(command, options, processes=processes, reload=reload))
