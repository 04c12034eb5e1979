"""`escrowmq broker …`: which brokers there are, how they are, what they do, how they are set."""

from __future__ import annotations

import json
from functools import partial
from typing import Final

import click

from escrowmq.cli.brokers import Brokers, end
from escrowmq.cli.complete import broker_names
from escrowmq.cli.figures import settings
from escrowmq.cli.machines import found_brokers, shown_broker
from escrowmq.cli.options import careful, confirm, watch, where
from escrowmq.cli.output import reader_may_leave
from escrowmq.cli.record import printable
from escrowmq.cli.top import Top
from escrowmq.cli.watch import View, looking, pause
from escrowmq.cli.watch import show as show_again
from escrowmq.config.properties import write_property
from escrowmq.wire.codes import RequestCode

HIDDEN: Final = "***"  # what brokers say instead of a secret


@click.group()
def broker() -> None:
    """Which brokers there are, how they are, what they do, and their settings."""


@broker.command("list")
@looking
def list_(view: View) -> None:
    """List the brokers, what they do, and how full their disks are."""
    view.show(found_brokers)


@broker.command()
@click.argument("name", metavar="[BROKER]", required=False, shell_complete=broker_names)
@watch
@where
@click.pass_context
def show(
    context: click.Context,
    name: str | None,
    every_s: float | None,
    namesrv: str,
    broker: str | None,
    in_json: bool,
) -> None:
    """Print all figures of a broker, by RocketMQ's names. BROKER is a name or an address."""
    brokers = Brokers(namesrv, name or broker)
    found = partial(shown_broker, brokers)
    show_again(context, brokers, found, in_json=in_json, every_s=every_s)


@broker.command()
@click.option(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to count.",
)
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="So many times, then end.")
@click.option("--rows", type=click.IntRange(min=1), default=10, show_default=True, metavar="N")
@where
@click.pass_context
def top(
    context: click.Context,
    every_s: float,
    count: int | None,
    rows: int,
    namesrv: str,
    broker: str | None,
    in_json: bool,
) -> None:
    """Watch what brokers, topics and groups do now, the busiest first, until Ctrl-C.

    Rates are counted between two looks. With --json each look is one line.
    """
    brokers = Brokers(namesrv, broker)
    live = Top(brokers, rows_max=rows)
    try:
        live.look()
        pause(every_s)
    except KeyboardInterrupt:
        context.exit(0)
    show_again(context, brokers, live.found, in_json=in_json, every_s=every_s, count=count)


# --- settings ------------------------------------------------------------------------------------


@broker.group()
def config() -> None:
    """The settings of running brokers; those of a file: escrowmq config."""


@config.command("get")
@click.argument("keys", nargs=-1, metavar="[KEY]...")
@where
@click.pass_context
def get(
    context: click.Context, keys: tuple[str, ...], namesrv: str, broker: str | None, in_json: bool
) -> None:
    """Print settings of running brokers: all of them, or these."""
    brokers = Brokers(namesrv, broker)
    found = {place.name: values for place, values in brokers.ask(settings)}
    known = {key for values in found.values() for key in values}
    unknown = [key for key in keys if key not in known]
    if unknown and found:
        raise click.UsageError(
            f"there is no setting {', '.join(unknown)}: escrowmq broker config get shows all"
        )
    wanted = {
        name: {key: value for key, value in values.items() if not keys or key in keys}
        for name, values in found.items()
    }
    with reader_may_leave():
        if in_json:
            click.echo(json.dumps(wanted))
        else:
            for name, values in wanted.items():
                for key, value in sorted(values.items()):
                    click.echo(f"{printable(name)}  {key}={printable(value)}")
    end(context, brokers)


@config.command("set")
@click.argument("pairs", nargs=-1, required=True, metavar="KEY=VALUE...")
@careful
@where
@click.pass_context
def set_(
    context: click.Context,
    pairs: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    namesrv: str,
    broker: str | None,
    in_json: bool,
) -> None:
    """Change settings of running brokers, of all of them unless --broker says which.

    A broker that was started with -c FILE writes them there; others forget them when they stop.
    """
    wanted = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key.strip() or not equals:
            raise click.UsageError(f"{pair!r} is not KEY=VALUE")
        wanted[key.strip()] = value
    brokers = Brokers(namesrv, broker)
    before = brokers.ask(settings)
    brokers.must_have_answered()
    for place, values in before:
        for key, value in wanted.items():
            shown = HIDDEN if values.get(key) == HIDDEN else value
            text = f"{place.name}  {key}: {values.get(key, '-')} -> {shown}"
            click.echo(printable(text), err=not dry_run)
    if dry_run:
        context.exit(0)
    confirm("Change these settings?", yes=yes)
    body = "".join(f"{write_property(key, value)}\n" for key, value in wanted.items()).encode()
    done = brokers.ask(lambda caller: caller.call(RequestCode.UPDATE_BROKER_CONFIG, None, body))
    with reader_may_leave():
        for place, _ in done:
            content = {"broker": place.name, "changed": list(wanted)}
            click.echo(json.dumps(content) if in_json else f"{place.name}  changed")
    end(context, brokers)
