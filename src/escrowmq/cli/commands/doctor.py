"""`escrowmq doctor`: find what is wrong with this installation and its cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

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
from escrowmq.cli.options import (
    DEFAULT_NAMESRV,
    access_options,
    config_file_option,
    json_option,
    open_cluster,
)
from escrowmq.cli.output import ignore_broken_pipe, print_json, print_lines
from escrowmq.config import Config, load_config
from escrowmq.config.setting_types import WILDCARD_ADDRESSES
from escrowmq.errors import ConfigError

_TIMEOUT_S: Final = 5.0


@click.command()
@config_file_option
@click.option("--data", metavar="DIR", help="Data directory.  [from the configuration]")
@click.option(
    *("-n", "--namesrv"),
    envvar="NAMESRV_ADDR",
    show_envvar=True,
    metavar="ADDR",
    help="Name servers of the cluster.  [from the configuration]",
)
@click.option("--local", is_flag=True, help="Check only this machine; connect to no server.")
@click.option("--quiet", is_flag=True, help="Print only warnings and problems.")
@json_option
@access_options
@click.pass_context
def doctor(
    context: click.Context,
    config_file: Path | None,
    data: str | None,
    namesrv: str | None,
    local: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Find what is wrong with this installation, and say how to fix it.

    Checks Python, the configuration, the ports and the data directory of this machine, then the
    name servers, their brokers, disks, clocks, transactions and consumer groups. Changes nothing.

    Exit code 0: no problems, perhaps warnings. 1: there is a problem.
    """
    results = list(_run_checks(config_file, data, namesrv, local))
    shown = [result for result in results if not quiet or result.level is not CheckLevel.OK]
    with ignore_broken_pipe():
        if as_json:
            print_json([result.as_json() for result in shown])
        else:
            print_lines(check_lines(shown))
    context.exit(1 if any(result.level is CheckLevel.PROBLEM for result in results) else 0)


def _run_checks(
    config_file: Path | None, data: str | None, namesrv: str | None, local: bool
) -> Iterator[CheckResult]:
    yield from check_python()
    flags = {} if data is None else {"--data": data}
    config: Config | None = None
    try:
        resolved = load_config(config_file, os.environ, flags)
    except ConfigError as error:
        yield problem(
            "settings",
            str(error),
            "correct the setting; `escrowmq config --example` lists all and their values",
        )
    else:
        config = resolved.config
        yield from check_settings(resolved)
        is_running = False
        for result, shows_broker in check_directory(config):
            is_running = is_running or shows_broker
            yield result
        yield from check_ports(config, is_running=is_running)
    if not local:
        servers = namesrv or _default_namesrv(config)
        yield from check_cluster(open_cluster(servers, timeout_s=_TIMEOUT_S))


def _default_namesrv(config: Config | None) -> str:
    if config is None:
        return DEFAULT_NAMESRV
    if config.broker.namesrv_addresses:
        return ";".join(config.broker.namesrv_addresses)
    host = config.network.bind_address
    return f"{'127.0.0.1' if host in WILDCARD_ADDRESSES else host}:{config.namesrv.namesrv_port}"
