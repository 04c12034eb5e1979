"""`escrowmq doctor`: what is wrong with this installation, and how to mend it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import click

from escrowmq.cli.access import access_options
from escrowmq.cli.commands.doctor_checks import (
    CheckLevel,
    CheckResult,
    check_cluster,
    check_directory,
    check_lines,
    check_ports,
    check_python,
    check_settings,
    problem,
)
from escrowmq.cli.options import json_option
from escrowmq.cli.output import ignore_broken_pipe
from escrowmq.config import Config, load_config
from escrowmq.config.setting_types import WILDCARD_ADDRESSES
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
@json_option
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
    seen = list(_run_checks(file, data, namesrv, local))
    shown = [one for one in seen if not quiet or one.level is not CheckLevel.OK]
    with ignore_broken_pipe():
        if in_json:
            click.echo(json.dumps([one.as_json() for one in shown]))
        else:
            for line in check_lines(shown):
                click.echo(line)
    context.exit(1 if any(one.level is CheckLevel.PROBLEM for one in seen) else 0)


def _run_checks(
    file: Path | None, data: str | None, namesrv: str | None, local: bool
) -> Iterator[CheckResult]:
    yield from check_python()
    flags = {} if data is None else {"--data": data}
    config: Config | None = None
    try:
        resolved = load_config(file, os.environ, flags)
    except ConfigError as error:
        yield problem(
            "settings",
            str(error),
            "mend that line; escrowmq config --example has every setting and what it may be",
        )
    else:
        config = resolved.config
        yield from check_settings(resolved)
        is_running = False
        for checkup, runs in check_directory(config):
            is_running = is_running or runs
            yield checkup
        yield from check_ports(config, is_running=is_running)
    if not local:
        yield from check_cluster(namesrv or _default_namesrv(config))


def _default_namesrv(config: Config | None) -> str:
    if config is None:
        return "127.0.0.1:9876"
    if config.broker.namesrv_addresses:
        return ";".join(config.broker.namesrv_addresses)
    host = config.network.bind_address
    return f"{'127.0.0.1' if host in WILDCARD_ADDRESSES else host}:{config.namesrv.namesrv_port}"
