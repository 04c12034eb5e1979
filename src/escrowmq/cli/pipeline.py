"""`escrowmq pipeline …`: work on Spark over topics and transactions.

Spark is imported when a pipeline runs: the other commands do without it.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar

import click

from escrowmq.clock import Moment, moment_of
from escrowmq.pipeline.ledger_copies import FORMATS, PARQUET, settings_of
from escrowmq.pipeline.options import pairs, spark_settings
from escrowmq.pipeline.progress import reporting
from escrowmq.pipeline.reconcile_cli import reconcile
from escrowmq.pipeline.session import check_cluster, pipeline_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from escrowmq.pipeline.sources import Source

F = TypeVar("F", bound=Callable[..., Any])


@click.group
def pipeline() -> None:
    """Ledgers, archives, replays and reconciliation, on Spark."""


pipeline.add_command(reconcile)


# --- options -------------------------------------------------------------------------------------


def _time(context: click.Context, param: click.Parameter, value: str | None) -> Moment | None:
    if value is None:
        return None
    try:
        return moment_of(value)
    except ValueError:
        raise click.BadParameter(f"{value!r} is no time: 2024-05-01, 2024-05-01T13:00") from None


def _together(*options: Callable[[F], F]) -> Callable[[F], F]:
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


_NAMESRV_HELP = "Name servers, with `;` between them."
_namesrv = click.option("-n", "--namesrv", required=True, metavar="ADDR", help=_NAMESRV_HELP)
_spark = _together(
    click.option("--master", metavar="URL", help="Of Spark.  [default: local[*]]"),
    spark_settings,
    click.option("--json", "as_json", is_flag=True, help="Progress and result as lines of JSON."),
)
_reading = _together(
    click.option("--once/--follow", default=True, help="What is there now, or for ever."),
    click.option(
        *("--every", "every_s"),
        type=click.FloatRange(min=0.1),
        default=30.0,
        show_default=True,
        metavar="SECONDS",
        help="With --follow: between two rounds.",
    ),
    click.option(
        *("-o", "--option", "options"),
        multiple=True,
        callback=pairs,
        metavar="NAME=VALUE",
        help="An option of the Spark source: accessKey, tls, failOnDataLoss, …",
    ),
)


# --- commands ------------------------------------------------------------------------------------


@pipeline.command()
@click.option("-n", "--namesrv", metavar="ADDR", help=_NAMESRV_HELP)
@click.option(
    *("--path", "paths"),
    multiple=True,
    metavar="DIR",
    help="A broker's directory: read its files instead. More than once for several brokers.",
)
@click.option("--out", required=True, metavar="DIR", help="Where the ledger is kept.")
@click.option(
    *("--format", "table_format"),
    type=click.Choice(FORMATS),
    default=PARQUET,
    show_default=True,
    help="Also as a table of this kind, in DIR.",
)
@_reading
@_spark
def ledger(
    namesrv: str | None,
    paths: tuple[str, ...],
    out: str,
    table_format: str,
    once: bool,
    every_s: float,
    options: dict[str, str],
    master: str | None,
    conf: dict[str, str],
    as_json: bool,
) -> None:
    """One row for each transaction, as Parquet by day."""
    if (namesrv is None) == (not paths):
        raise click.UsageError("a ledger is made from a cluster (-n) or from files (--path)")
    if paths and not once:
        raise click.UsageError("files are read once: --follow needs -n")
    source = None if namesrv is None else _source(namesrv, options)
    conf = {**settings_of(table_format), **conf}
    with _running("ledger", master, conf, as_json, follows=not once) as (spark, report, stop):
        from escrowmq.pipeline.ledger_run import run_ledger

        done = run_ledger(
            spark,
            out,
            source=source,
            paths=paths,
            every_s=None if once else every_s,
            stop=stop,
            report=report,
            table_format=table_format,
        )
    days = f"{len(done.days)} {'day' if len(done.days) == 1 else 'days'}"
    _say(
        f"{done.records:,} records read; {days} built anew, {done.rows:,} transactions, in {out}",
        {"done": "ledger", "out": out, **asdict(done)},
        as_json,
    )


@pipeline.command()
@_namesrv
@click.option("--topic", "topics", required=True, multiple=True, help="More than once for several.")
@click.option("--out", required=True, metavar="DIR", help="Where the archive is kept.")
@click.option("--compact", is_flag=True, help="Put small parts together, however few they are.")
@_reading
@_spark
def archive(
    namesrv: str,
    topics: tuple[str, ...],
    out: str,
    compact: bool,
    once: bool,
    every_s: float,
    options: dict[str, str],
    master: str | None,
    conf: dict[str, str],
    as_json: bool,
) -> None:
    """Topics to Parquet by day and hour, each message once."""
    source = _source(namesrv, options)
    with _running("archive", master, conf, as_json, follows=not once) as (spark, report, stop):
        from escrowmq.pipeline.archive import run_archive

        done = run_archive(
            spark,
            out,
            source=source,
            topics=topics,
            every_s=None if once else every_s,
            compact=compact,
            stop=stop,
            report=report,
        )
    _say(
        f"{done.messages:,} messages archived in {out}",
        {"done": "archive", "out": out, **asdict(done)},
        as_json,
    )


@pipeline.command()
@click.option("--from", "archive_dir", required=True, metavar="DIR", help="An archive.")
@_namesrv
@click.option("--topic", required=True, help="Where the messages go.")
@click.option("--since", callback=_time, metavar="TIME", help="Stored then or later; UTC.")
@click.option("--until", callback=_time, metavar="TIME", help="Stored before that; UTC.")
@click.option("--where", default="", metavar="SQL", help="Spark SQL over columns: \"tags = 'a'\".")
@click.option("--rate", type=click.IntRange(min=1), help="At most so many messages a second.")
@click.option("--name", default="", help="The same name goes on, and sends nothing twice.")
@click.option("--at-least-once", is_flag=True, help="To Apache RocketMQ, which cannot do more.")
@_spark
def replay(
    archive_dir: str,
    namesrv: str,
    topic: str,
    since: Moment | None,
    until: Moment | None,
    where: str,
    rate: int | None,
    name: str,
    at_least_once: bool,
    master: str | None,
    conf: dict[str, str],
    as_json: bool,
) -> None:
    """An archive back into a topic, each message once."""
    check_cluster(namesrv, {})
    with _running("replay", master, conf, as_json) as (spark, report, _):
        from escrowmq.pipeline.replay import Wanted, run_replay

        wanted = Wanted(
            *(archive_dir, namesrv, topic, since, until, where, name),
            rate=rate or 0,
            at_least_once=at_least_once,
        )
        done = run_replay(spark, wanted, report=report)
    said = f"{done.messages:,} messages sent to {topic}, as replay {done.name}"
    if done.was_done:
        said = f"replay {done.name} was done before: nothing sent. To send again, give a new --name"
    _say(said, {"done": "replay", "topic": topic, **asdict(done)}, as_json)


# --- running -------------------------------------------------------------------------------------


def _source(servers: str, options: dict[str, str]) -> Source:
    check_cluster(servers, options)
    from escrowmq.pipeline.sources import Source

    return Source(servers, options)


@contextmanager
def _running(
    name: str, master: str | None, conf: dict[str, str], as_json: bool, *, follows: bool = False
) -> Iterator[tuple[SparkSession, Any, threading.Event]]:
    """Spark, where to report to, and what ends a pipeline that follows: SIGINT or SIGTERM."""
    stop = threading.Event()
    with reporting(as_json=as_json) as report:
        spark = pipeline_session(name, master, conf)
        for number in (signal.SIGINT, signal.SIGTERM) if follows else ():
            signal.signal(number, lambda *_: stop.set())
        try:
            yield spark, report, stop
        finally:
            spark.stop()


def _say(text: str, told: dict[str, Any], as_json: bool) -> None:
    click.echo(json.dumps(told) if as_json else text)
