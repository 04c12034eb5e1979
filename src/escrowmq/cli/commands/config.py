"""`escrowmq config`: every setting, its value, and where that came from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import click

from escrowmq.cli.output import ignore_broken_pipe
from escrowmq.config import SETTINGS, ResolvedConfig, ResolvedSetting, load_config
from escrowmq.config.properties_file import write_property


@click.command()
@click.option(
    "-c", "file", metavar="FILE", type=click.Path(path_type=Path), help="broker.conf or TOML."
)
@click.option("--changed", is_flag=True, help="Only what is not at its default.")
@click.option("--json", "in_json", is_flag=True, help="One JSON object instead of text.")
@click.option("--example", is_flag=True, help="Print a file with every setting instead.")
def config(file: Path | None, changed: bool, in_json: bool, example: bool) -> None:
    """Print every setting, its value and where that came from.

    Later sources win: defaults, the file, ESCROWMQ_… variables. A setting that only RocketMQ has
    is a warning; one that nobody has is an error, with exit code 2.
    """
    with ignore_broken_pipe():
        if example:
            for line in example_lines():
                click.echo(line)
            return
        resolved = load_config(file, os.environ)
        print_warnings(resolved)
        entries = [entry for entry in resolved.entries() if entry.is_changed or not changed]
        if in_json:
            click.echo(json.dumps({"settings": [setting_json(entry) for entry in entries]}))
        else:
            for line in setting_lines(entries):
                click.echo(line)


def print_warnings(resolved: ResolvedConfig) -> None:
    for warning in resolved.warnings:
        click.echo(f"escrowmq: warning: {warning}", err=True)


def setting_lines(entries: Iterable[ResolvedSetting]) -> Iterator[str]:
    for group, members in groupby(entries, lambda entry: entry.setting.group):
        yield f"[{group}]"
        for entry in members:
            value = f"{entry.text} {entry.setting.unit}".rstrip()
            yield f"{f'{entry.setting.key} = {value}':<60}  ({entry.origin})"
            yield f"    {entry.setting.help}"
        yield ""


def setting_json(entry: ResolvedSetting) -> dict[str, object]:
    """Numbers and truth as such, the rest as a file spells it."""
    setting = entry.setting
    return {
        "key": setting.key,
        "name": setting.name,
        "group": setting.group,
        "value": entry.value if isinstance(entry.value, int) else entry.text,
        "unit": setting.unit,
        "source": entry.origin.source.value,
        "place": entry.origin.location,
        "environment": setting.environment_variable,
        "help": setting.help,
    }


def example_lines() -> Iterator[str]:
    yield "# Every setting of EscrowMQ at its default. Take away a # to change one."
    yield "# Names are RocketMQ's, but for those that begin with escrow."
    for group, members in groupby(SETTINGS, lambda setting: setting.group):
        yield ""
        yield f"# --- {group} ---"
        for setting in members:
            unit = f" [{setting.unit}]" if setting.unit else ""
            yield ""
            yield f"# {setting.help}{unit}"
            yield f"# Allowed: {setting.type.allowed}."
            yield f"#{write_property(setting.key, setting.type.format(setting.default))}"
