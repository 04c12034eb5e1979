"""`escrowmq doctor`: what is wrong with this installation, and how to mend it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import click

from escrowmq.cli.access import access_options
from escrowmq.cli.commands.doctor_checks import (
    Checkup,
    Level,
    checkup_lines,
    examine_cluster,
    examine_directory,
    examine_ports,
    examine_python,
    examine_settings,
    problem,
)
from escrowmq.cli.options import JSON
from escrowmq.cli.output import reader_may_leave
from escrowmq.config import Config
from escrowmq.config.setting_types import WILDCARDS
from escrowmq.errors import ConfigError


@click.command()
@click.option(
    "-c", "file", metavar="FILE", type=click.Path(path_type=Path), help="broker.conf or TOML."
)
@click.option("--data", metavar="DIR", help="Where messages are kept.  [of the settings]")
@click.option(
    *("-n", "--namesrv"),
    envvar="NAMESRV_ADDR",
    metavar="ADDR",
    help="The name server.  [of the settings]",
)
@click.option("--local", is_flag=True, help="This machine alone: ask no server.")
@click.option("--quiet", is_flag=True, help="Only what is wrong.")
@JSON
@access_options
@click.pass_context
def doctor(
    context: click.Context,
    file: Path | None,
    data: str | None,
    namesrv: str | None,
    local: bool,
    quiet: bool,
    in_json: bool,
) -> None:
    """Say what is wrong with this installation, and how to mend it.

    Looks at Python and what is installed, the settings, ports and the data directory of this
    machine, then at the name server, its brokers, their disks, clocks, transactions and groups.
    Changes nothing.

    Exit code 0 if there is no problem (there may be warnings), 1 if there is one.
    """
    seen = list(_examined(file, data, namesrv, local))
    shown = [one for one in seen if not quiet or one.level is not Level.OK]
    with reader_may_leave():
        if in_json:
            click.echo(json.dumps([one.as_json() for one in shown]))
        else:
            for line in checkup_lines(shown):
                click.echo(line)
    context.exit(1 if any(one.level is Level.PROBLEM for one in seen) else 0)


def _examined(
    file: Path | None, data: str | None, namesrv: str | None, local: bool
) -> Iterator[Checkup]:
    yield from examine_python()
    flags = {} if data is None else {"--data": data}
    config: Config | None = None
    try:
        resolved = Config.resolve(file, os.environ, flags)
    except ConfigError as error:
        yield problem(
            "settings",
            str(error),
            "mend that line; escrowmq config --example has every setting and what it may be",
        )
    else:
        config = resolved.config
        yield from examine_settings(resolved)
        is_running = False
        for checkup, runs in examine_directory(config):
            is_running = is_running or runs
            yield checkup
        yield from examine_ports(config, is_running=is_running)
    if not local:
        yield from examine_cluster(namesrv or _own_namesrv(config))


def _own_namesrv(config: Config | None) -> str:
    if config is None:
        return "127.0.0.1:9876"
    if config.broker.namesrv_addresses:
        return ";".join(config.broker.namesrv_addresses)
    host = config.network.bind_address
    return f"{'127.0.0.1' if host in WILDCARDS else host}:{config.namesrv.namesrv_port}"
