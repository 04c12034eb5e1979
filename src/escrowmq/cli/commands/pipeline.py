"""`escrowmq pipeline …`: work on Spark over topics and transactions.

Spark is imported when a pipeline runs: the other commands do without it.

Options that several pipelines have on the command line.

`escrowmq pipeline reconcile`: the nightly proof, with an exit code for schedulers.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from rich.console import Console
from rich.table import Table

from escrowmq.clock import SystemClock, Timestamp, epoch_ms
from escrowmq.errors import ReconcileFailed
from escrowmq.parsing import parse_duration_ms, parse_timestamp
from escrowmq.pipeline.job import check_cluster, pipeline_session, progress_output
from escrowmq.pipeline.ledger.table_formats import FORMATS, PARQUET, format_settings
from escrowmq.spark.session import check_pyspark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from escrowmq.pipeline.job import ClusterSource
    from escrowmq.pipeline.reconcile.job import ReconcileRequest, ReconcileResult, ReconcileSummary


def parse_pairs_option(
    context: click.Context, param: click.Parameter, value: Sequence[str]
) -> dict[str, str]:
    found = dict(one.partition("=")[::2] for one in value)
    for name, text in found.items():
        if not name or not text:
            raise click.BadParameter(f"NAME=VALUE is wanted, not {name!r}")
    return found


spark_conf_option = click.option(
    "--conf",
    multiple=True,
    callback=parse_pairs_option,
    metavar="NAME=VALUE",
    help="A setting of Spark, as spark.jars=driver.jar or spark.driver.memory=4g.",
)


TERMINAL_ROWS: Final = 20
REPORT_ROWS: Final = 500


class DurationParam(click.ParamType[int]):
    """30s, 15m, 72h, 7d."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, context: Any) -> int:
        try:
            return parse_duration_ms(str(value))
        except ValueError as error:
            self.fail(str(error), param, context)


class SinceParam(DurationParam):
    """A duration back from now, `all`, or a time (ISO 8601; UTC unless it has an offset).

    The value is in milliseconds since 1970, or negative: so many milliseconds before now.
    """

    name = "since"

    def convert(self, value: Any, param: click.Parameter | None, context: Any) -> int:
        if value == "all":
            return 0
        if re.match(r"\d{4}-", str(value)):
            try:
                return epoch_ms(parse_timestamp(value))
            except ValueError as error:
                self.fail(str(error), param, context)
        return -super().convert(value, param, context)


def _parse_consumers_option(_: Any, __: Any, values: tuple[str, ...]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for value in values:
        group, equals, topics = value.partition("=")
        if not (group and equals and topics):
            raise click.BadParameter(f"{value!r}: say GROUP=TOPIC or GROUP=TOPIC,TOPIC")
        found.setdefault(group, []).extend(topics.split(","))
    return found


@click.command()
@click.option("--ledger", required=True, help="What `pipeline ledger` wrote.")
@click.option("--database", "databases", multiple=True, required=True, help="SQLAlchemy or JDBC.")
@click.option("--sql", help="The senders' books: transaction_id, and perhaps amount and at_ms.")
@click.option("--receiver", "receivers", multiple=True, help="A database on the other side.")
@click.option("--receiver-sql", help="The receivers' books, with the same columns.")
@click.option("--only-sql", is_flag=True, help="Leave marker and inbox tables aside.")
@click.option("--amount", is_flag=True, help="Insist that both queries have amounts to compare.")
@click.option("--group", "groups", multiple=True, help="Producer groups; else those with markers.")
@click.option(
    "--consumer",
    "consumers",
    multiple=True,
    callback=_parse_consumers_option,
    metavar="GROUP=TOPIC[,TOPIC]",
    help="Who must have an effect; else what inboxes show.",
)
@click.option(
    "--since",
    type=SinceParam(),
    default="72h",
    show_default=True,
    help="A duration back from now, `all`, or a time (UTC unless it has an offset).",
)
@click.option(
    "--grace", type=DurationParam(), default="10m", show_default=True, help="Still under way."
)
@click.option("--open-limit", type=DurationParam(), default="1h", show_default=True)
@click.option("--report", type=click.Path(path_type=Path), help="An HTML file.")
@click.option("--out", help="All differences, as Parquet and CSV, in this directory.")
@click.option("--json", "as_json", is_flag=True, help="The summary, for machines.")
@click.option("--master", help="Where Spark runs; this machine unless given.")
@spark_conf_option
def reconcile(**options: Any) -> None:
    """Compare the ledger with the databases. Exit code 0: they agree, 1: they do not, 2: it could
    not be done."""
    if options["receiver_sql"] and not options["receivers"]:
        raise click.UsageError("--receiver-sql needs a --receiver to ask")
    if options["amount"] and not (options["sql"] and options["receiver_sql"]):
        raise click.UsageError("--amount compares --sql with --receiver-sql: give both")
    if options["only_sql"] and not (options["sql"] or options["receiver_sql"]):
        raise click.UsageError("--only-sql needs --sql or --receiver-sql")
    check_pyspark()
    if find_spec("sqlalchemy") is None:
        raise ReconcileFailed('sqlalchemy is not installed: pip install "escrowmq[spark,sql]"')
    from pyspark.sql import SparkSession

    from escrowmq.pipeline.reconcile.job import run_reconcile

    is_ours = SparkSession.getActiveSession() is None
    spark = pipeline_session("reconcile", options["master"], options["conf"])
    try:
        with run_reconcile(spark, _reconcile_request(options)) as result:
            if options["amount"] and set(result.summary.sums) != {"sent", "received"}:
                raise ReconcileFailed("--amount: a query has no column amount; name it with AS")
            print_result(result, as_json=options["as_json"])
            if options["out"]:
                write_differences(result.differences, options["out"])
            if options["report"]:
                write_report(result, options["report"])
                click.echo(f"report: {options['report']}", err=True)
            agree = result.summary.is_consistent
    finally:
        if is_ours:
            spark.stop()
    sys.exit(0 if agree else 1)


def _reconcile_request(options: dict[str, Any]) -> ReconcileRequest:
    from escrowmq.pipeline.reconcile.compare import ReconcileLimits
    from escrowmq.pipeline.reconcile.job import ReconcileRequest

    now_ms = SystemClock().now_ms()
    since_ms = options["since"]
    return ReconcileRequest(
        ledger=options["ledger"],
        databases=options["databases"],
        sql=options["sql"],
        receivers=options["receivers"],
        receiver_sql=options["receiver_sql"],
        groups=options["groups"],
        consumers=options["consumers"],
        use_tables=not options["only_sql"],
        limits=ReconcileLimits(
            now_ms,
            grace_ms=options["grace"],
            open_ms=options["open_limit"],
            since_ms=now_ms + since_ms if since_ms < 0 else since_ms,
        ),
    )


def print_result(result: ReconcileResult, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(result.summary.as_json()))
        return
    console = Console(highlight=False)
    console.print(summary_table(result.summary))
    if not result.summary.is_consistent:
        table = Table("kind", "transaction", "at", "detail", title=f"The first {TERMINAL_ROWS}")
        for row in result.head(TERMINAL_ROWS):
            table.add_row(row["kind"], row["transaction_id"], str(row["at"]), row["detail"])
        console.print(table)
    from escrowmq.pipeline.reconcile.report import verdict_text

    console.print(verdict_text(result.summary))


def summary_table(summary: ReconcileSummary) -> Table:
    from escrowmq.pipeline.reconcile.report import summary_rows

    table = Table("what", "how many")
    table.columns[1].justify = "right"
    for name, value in summary_rows(summary):
        table.add_row(name, value)
    table.add_section()
    for kind, count in summary.differences.items():
        table.add_row(kind.replace("_", " "), f"[{'red' if count else 'green'}]{count:,}[/]")
    return table


def write_differences(differences: DataFrame, directory: str) -> None:
    """From the executors; what an earlier run left there goes."""
    differences.write.mode("overwrite").parquet(f"{directory}/parquet")
    differences.write.mode("overwrite").option("header", "true").csv(f"{directory}/csv")


def write_report(result: ReconcileResult, path: Path, *, title: str = "Reconciliation") -> None:
    from escrowmq.pipeline.reconcile.report import render_html

    rows = [row.asDict() for row in result.head(REPORT_ROWS)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_html(result.summary, rows, title=title), encoding="utf-8")
    except OSError as error:
        raise ReconcileFailed(f"the report cannot be written: {error}") from error


F = TypeVar("F", bound=Callable[..., Any])


@click.group
def pipeline() -> None:
    """Ledgers, archives, replays and reconciliation, on Spark."""


pipeline.add_command(reconcile)


# --- options -------------------------------------------------------------------------------------


def _parse_time_option(
    context: click.Context, param: click.Parameter, value: str | None
) -> Timestamp | None:
    if value is None:
        return None
    try:
        return parse_timestamp(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _combine_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    return lambda command: reduce(lambda made, option: option(made), reversed(options), command)


_NAMESRV_HELP = "Name servers, host:port, separated by `;` or `,`."
_namesrv_option = click.option("-n", "--namesrv", required=True, metavar="ADDR", help=_NAMESRV_HELP)
_spark_options = _combine_options(
    click.option("--master", metavar="URL", help="Of Spark.  [default: local[*]]"),
    spark_conf_option,
    click.option("--json", "as_json", is_flag=True, help="Progress and result as lines of JSON."),
)
_stream_options = _combine_options(
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
        callback=parse_pairs_option,
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
@_stream_options
@_spark_options
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
    source = None if namesrv is None else _cluster_source(namesrv, options)
    conf = {**format_settings(table_format), **conf}
    with _pipeline_run("ledger", master, conf, as_json, is_following=not once) as (
        spark,
        report,
        stop,
    ):
        from escrowmq.pipeline.ledger.job import run_ledger

        done = run_ledger(
            spark,
            out,
            source=source,
            paths=paths,
            interval_s=None if once else every_s,
            stop=stop,
            on_progress=report,
            table_format=table_format,
        )
    days = f"{len(done.days)} {'day' if len(done.days) == 1 else 'days'}"
    _print_outcome(
        f"{done.records:,} records read; {days} built anew, {done.rows:,} transactions, in {out}",
        {"done": "ledger", "out": out, **asdict(done)},
        as_json,
    )


@pipeline.command()
@_namesrv_option
@click.option("--topic", "topics", required=True, multiple=True, help="More than once for several.")
@click.option("--out", required=True, metavar="DIR", help="Where the archive is kept.")
@click.option("--compact", is_flag=True, help="Put small parts together, however few they are.")
@_stream_options
@_spark_options
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
    source = _cluster_source(namesrv, options)
    with _pipeline_run("archive", master, conf, as_json, is_following=not once) as (
        spark,
        report,
        stop,
    ):
        from escrowmq.pipeline.archive import run_archive

        done = run_archive(
            spark,
            out,
            source=source,
            topics=topics,
            interval_s=None if once else every_s,
            compact=compact,
            stop=stop,
            on_progress=report,
        )
    _print_outcome(
        f"{done.messages:,} messages archived in {out}",
        {"done": "archive", "out": out, **asdict(done)},
        as_json,
    )


@pipeline.command()
@click.option("--from", "archive_dir", required=True, metavar="DIR", help="An archive.")
@_namesrv_option
@click.option("--topic", required=True, help="Where the messages go.")
@click.option(
    "--since", callback=_parse_time_option, metavar="TIME", help="Stored then or later; UTC."
)
@click.option(
    "--until", callback=_parse_time_option, metavar="TIME", help="Stored before that; UTC."
)
@click.option("--where", default="", metavar="SQL", help="Spark SQL over columns: \"tags = 'a'\".")
@click.option("--rate", type=click.IntRange(min=1), help="At most so many messages a second.")
@click.option("--name", default="", help="The same name goes on, and sends nothing twice.")
@click.option("--at-least-once", is_flag=True, help="To Apache RocketMQ, which cannot do more.")
@_spark_options
def replay(
    archive_dir: str,
    namesrv: str,
    topic: str,
    since: Timestamp | None,
    until: Timestamp | None,
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
    with _pipeline_run("replay", master, conf, as_json) as (spark, report, _):
        from escrowmq.pipeline.archive import ReplayRequest, run_replay

        wanted = ReplayRequest(
            *(archive_dir, namesrv, topic, since, until, where, name),
            rate=rate or 0,
            at_least_once=at_least_once,
        )
        done = run_replay(spark, wanted, on_progress=report)
    said = f"{done.messages:,} messages sent to {topic}, as replay {done.name}"
    if done.was_done:
        said = f"replay {done.name} was done before: nothing sent. To send again, give a new --name"
    _print_outcome(said, {"done": "replay", "topic": topic, **asdict(done)}, as_json)


# --- running -------------------------------------------------------------------------------------


def _cluster_source(servers: str, options: dict[str, str]) -> ClusterSource:
    check_cluster(servers, options)
    from escrowmq.pipeline.job import ClusterSource

    return ClusterSource(servers, options)


@contextmanager
def _pipeline_run(
    name: str,
    master: str | None,
    conf: dict[str, str],
    as_json: bool,
    *,
    is_following: bool = False,
) -> Iterator[tuple[SparkSession, Any, threading.Event]]:
    """Spark, where to report to, and what ends a pipeline that follows: SIGINT or SIGTERM."""
    stop = threading.Event()
    with progress_output(as_json=as_json) as report:
        spark = pipeline_session(name, master, conf)
        for number in (signal.SIGINT, signal.SIGTERM) if is_following else ():
            signal.signal(number, lambda *_: stop.set())
        try:
            yield spark, report, stop
        finally:
            spark.stop()


def _print_outcome(text: str, content: dict[str, Any], as_json: bool) -> None:
    click.echo(json.dumps(content) if as_json else text)
