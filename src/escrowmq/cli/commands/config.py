"""`escrowmq config`: show every setting, its value and its origin."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

import click

from escrowmq.cli.options import config_file_option
from escrowmq.cli.output import ignore_broken_pipe, print_json, print_lines
from escrowmq.config import SETTINGS, ResolvedConfig, ResolvedSetting, load_config
from escrowmq.config.properties_file import write_property


@click.command()
@config_file_option
@click.option("--changed", is_flag=True, help="Only settings that differ from their defaults.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
@click.option("--example", is_flag=True, help="Print an example file with every setting.")
def config(config_file: Path | None, changed: bool, as_json: bool, example: bool) -> None:
    """Print every setting with its value and its origin.

    ESCROWMQ_… variables override the file, and the file overrides the defaults. A setting that
    only RocketMQ has is reported as a warning. An unknown setting is an error with exit code 2.
    """
    with ignore_broken_pipe():
        if example:
            print_lines(example_lines())
            return
        resolved = load_config(config_file, os.environ)
        print_warnings(resolved)
        entries = [entry for entry in resolved.entries() if entry.is_changed or not changed]
        if as_json:
            print_json({"settings": [setting_json(entry) for entry in entries]})
        else:
            print_lines(setting_lines(entries))


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
    """Return numbers and booleans as JSON has them, every other value as a file spells it."""
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
    """Yield a configuration file with every setting, commented out."""
    yield "# Every setting of EscrowMQ with its default. Remove a # to change a setting."
    yield "# The names are RocketMQ's, except for those that begin with escrow."
    for group, members in groupby(SETTINGS, lambda setting: setting.group):
        yield ""
        yield f"# --- {group} ---"
        for setting in members:
            unit = f" [{setting.unit}]" if setting.unit else ""
            yield ""
            yield f"# {setting.help}{unit}"
            yield f"# Allowed: {setting.type.allowed}."
            yield f"#{write_property(setting.key, setting.type.format(setting.default))}"
