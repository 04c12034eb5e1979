"""`escrowmq pipeline …`: ledgers, archives, replays and reconciliation on Spark.

Spark is imported when a pipeline runs, so that `--help` and the other commands do without it.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click
from rich.console import Console
from rich.table import Table

from escrowmq.cli.options import (
    NAMESRV_HELP,
    parse_pairs_option,
    parse_timestamp_option,
)
from escrowmq.clock import SystemClock, Timestamp, epoch_ms
from escrowmq.errors import ReconcileFailed
from escrowmq.parsing import parse_duration_ms, parse_timestamp
from escrowmq.pipeline.job import check_cluster, pipeline_session, progress_output
from escrowmq.pipeline.ledger.table_formats import FORMATS, PARQUET, format_settings
from escrowmq.spark.session import check_pyspark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from escrowmq.pipeline.job import ClusterSource, PipelineProgressCallback
    from escrowmq.pipeline.reconcile.job import ReconcileRequest, ReconcileResult, ReconcileSummary

F = TypeVar("F", bound=Callable[..., Any])


@click.group
def pipeline() -> None:
    """Ledgers, archives, replays and reconciliation on Spark."""


# --- options -------------------------------------------------------------------------------------


def _parse_consumers_option(
    context: click.Context, param: click.Parameter, values: Sequence[str]
) -> dict[str, list[str]]:
    consumers: dict[str, list[str]] = {}
    for value in values:
        group, equals, topics = value.partition("=")
        if not (group and equals and topics):
            raise click.BadParameter(f"{value!r} is not GROUP=TOPIC or GROUP=TOPIC,TOPIC")
        consumers.setdefault(group, []).extend(topics.split(","))
    return consumers


class DurationParam(click.ParamType[int]):
    """A duration such as 30s, 15m, 72h or 7d, in milliseconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, context: Any) -> int:
        try:
            return parse_duration_ms(str(value))
        except ValueError as error:
            self.fail(str(error), param, context)


class SinceParam(DurationParam):
    """A duration back from now, `all`, or a time (ISO 8601; UTC unless it has an offset).

    The value is in milliseconds since 1970. A negative value is a number of milliseconds before
    now.
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


def _duration_option(
    name: str, default: str, help_text: str, param_type: DurationParam | None = None
) -> Callable[[F], F]:
    return click.option(
        name,
        type=param_type or DurationParam(),
        default=default,
        show_default=True,
        help=help_text,
    )


def _time_option(name: str, help_text: str) -> Callable[[F], F]:
    return click.option(name, callback=parse_timestamp_option, metavar="TIME", help=help_text)


_namesrv_option = click.option("-n", "--namesrv", required=True, metavar="ADDR", help=NAMESRV_HELP)
_conf_option = click.option(
    "--conf",
    multiple=True,
    callback=parse_pairs_option,
    metavar="NAME=VALUE",
    help="A setting of Spark, such as spark.jars=driver.jar or spark.driver.memory=4g.",
)
_master_option = click.option("--master", metavar="URL", help="Master of Spark.  [local[*]]")
_json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print progress and result as lines of JSON."
)
_follow_option = click.option(
    "--once/--follow", default=True, help="Stop at the current end, or keep running.  [--once]"
)
_interval_option = click.option(
    *("--every", "interval_s"),
    type=click.FloatRange(min=0.1),
    default=30.0,
    show_default=True,
    metavar="SECONDS",
    help="With --follow: time between two rounds.",
)
_source_option = click.option(
    *("-o", "--option", "options"),
    multiple=True,
    callback=parse_pairs_option,
    metavar="NAME=VALUE",
    help="An option of the Spark source, such as accessKey, tls or failOnDataLoss.",
)


def _spark_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a command that runs on Spark: it receives `run`, a PipelineRun."""

    @_master_option
    @_conf_option
    @_json_option
    @wraps(command)
    def start(
        *args: Any, master: str | None, conf: dict[str, str], as_json: bool, **options: Any
    ) -> None:
        command(*args, run=PipelineRun(master, conf, as_json), **options)

    return start


def _stream_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of a command that reads a stream.

    It receives `interval_s`, the time between two rounds or None to stop at the current end, and
    `options` of the source.
    """

    @_follow_option
    @_interval_option
    @_source_option
    @wraps(command)
    def start(*args: Any, once: bool, interval_s: float, **options: Any) -> None:
        command(*args, interval_s=None if once else interval_s, **options)

    return start


# --- running a pipeline --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PipelineRun:
    """How to run a pipeline: the Spark session and the output."""

    master: str | None
    conf: dict[str, str]
    as_json: bool

    @contextmanager
    def session(
        self, name: str, *, is_following: bool = False
    ) -> Iterator[tuple[SparkSession, PipelineProgressCallback, threading.Event]]:
        """Provide a Spark session, a callback for progress, and an event that stops the pipeline.

        SIGINT and SIGTERM set the event, so that a pipeline that follows ends after its round.
        """
        stop = threading.Event()
        with progress_output(as_json=self.as_json) as on_progress:
            spark = pipeline_session(name, self.master, self.conf)
            for number in (signal.SIGINT, signal.SIGTERM) if is_following else ():
                signal.signal(number, lambda *_: stop.set())
            try:
                yield spark, on_progress, stop
            finally:
                spark.stop()

    def print_outcome(self, text: str, content: dict[str, Any]) -> None:
        click.echo(json.dumps(content) if self.as_json else text)


def _cluster_source(servers: str, options: dict[str, str]) -> ClusterSource:
    check_cluster(servers, options)
    from escrowmq.pipeline.job import ClusterSource

    return ClusterSource(servers, options)


# --- ledger --------------------------------------------------------------------------------------


@pipeline.command()
@click.option("-n", "--namesrv", metavar="ADDR", help=NAMESRV_HELP)
@click.option(
    *("--path", "paths"),
    multiple=True,
    metavar="DIR",
    help="Read the files of a broker in this directory instead. Repeat for several brokers.",
)
@click.option("--out", required=True, metavar="DIR", help="Directory of the ledger.")
@click.option(
    *("--format", "table_format"),
    type=click.Choice(FORMATS),
    default=PARQUET,
    show_default=True,
    help="Also write the ledger as a table of this format.",
)
@_stream_options
@_spark_options
def ledger(
    namesrv: str | None,
    paths: tuple[str, ...],
    out: str,
    table_format: str,
    interval_s: float | None,
    options: dict[str, str],
    run: PipelineRun,
) -> None:
    """Write one row for each transaction, as Parquet by day."""
    if (namesrv is None) == (not paths):
        raise click.UsageError("give a cluster with -n, or files with --path")
    if paths and interval_s is not None:
        raise click.UsageError("--follow needs -n: files are read once")
    source = None if namesrv is None else _cluster_source(namesrv, options)
    run = replace(run, conf={**format_settings(table_format), **run.conf})
    is_following = interval_s is not None
    with run.session("ledger", is_following=is_following) as (spark, on_progress, stop):
        from escrowmq.pipeline.ledger.job import run_ledger

        result = run_ledger(
            spark,
            out,
            source=source,
            paths=paths,
            interval_s=interval_s,
            stop=stop,
            on_progress=on_progress,
            table_format=table_format,
        )
    days = f"{len(result.days)} {'day' if len(result.days) == 1 else 'days'}"
    run.print_outcome(
        f"{result.records:,} records read; {days} rebuilt, {result.rows:,} transactions, in {out}",
        {"done": "ledger", "out": out, **asdict(result)},
    )


# --- archive and replay --------------------------------------------------------------------------


@pipeline.command()
@_namesrv_option
@click.option(
    "--topic", "topics", required=True, multiple=True, help="A topic. Repeat for several."
)
@click.option("--out", required=True, metavar="DIR", help="Directory of the archive.")
@click.option("--compact", is_flag=True, help="Merge small files, however few they are.")
@_stream_options
@_spark_options
def archive(
    namesrv: str,
    topics: tuple[str, ...],
    out: str,
    compact: bool,
    interval_s: float | None,
    options: dict[str, str],
    run: PipelineRun,
) -> None:
    """Write each message of topics exactly once, as Parquet by day and hour."""
    source = _cluster_source(namesrv, options)
    is_following = interval_s is not None
    with run.session("archive", is_following=is_following) as (spark, on_progress, stop):
        from escrowmq.pipeline.archive import run_archive

        result = run_archive(
            spark,
            out,
            source=source,
            topics=topics,
            interval_s=interval_s,
            compact=compact,
            stop=stop,
            on_progress=on_progress,
        )
    run.print_outcome(
        f"{result.messages:,} messages archived in {out}",
        {"done": "archive", "out": out, **asdict(result)},
    )


@pipeline.command()
@click.option(
    "--from", "archive_dir", required=True, metavar="DIR", help="Directory of an archive."
)
@_namesrv_option
@click.option("--topic", required=True, help="The topic to send to.")
@_time_option("--since", "Only messages stored at this time (UTC) or later.")
@_time_option("--until", "Only messages stored before this time (UTC).")
@click.option(
    "--where",
    default="",
    metavar="SQL",
    help="Only messages that match this Spark SQL condition, such as \"tags = 'a'\".",
)
@click.option(
    "--rate", type=click.IntRange(min=1), metavar="N", help="Send at most N messages per second."
)
@click.option(
    "--name",
    default="",
    help="Name of the replay. The same name continues it and sends nothing twice.",
)
@click.option(
    "--at-least-once",
    is_flag=True,
    help="Allow duplicates, for Apache RocketMQ, which cannot send exactly once.",
)
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
    run: PipelineRun,
) -> None:
    """Send the messages of an archive to a topic, each exactly once."""
    check_cluster(namesrv, {})
    with run.session("replay") as (spark, on_progress, _):
        from escrowmq.pipeline.archive import ReplayRequest, run_replay

        request = ReplayRequest(
            *(archive_dir, namesrv, topic, since, until, where, name),
            rate=rate or 0,
            at_least_once=at_least_once,
        )
        result = run_replay(spark, request, on_progress=on_progress)
    text = f"{result.messages:,} messages sent to {topic} by replay {result.name}"
    if result.was_done:
        text = f"replay {result.name} is already done: nothing sent; use a new --name to send again"
    run.print_outcome(text, {"done": "replay", "topic": topic, **asdict(result)})


# --- reconcile -----------------------------------------------------------------------------------

TERMINAL_ROWS: Final = 20
REPORT_ROWS: Final = 500


@pipeline.command()
@click.option(
    "--ledger", required=True, metavar="DIR", help="The directory that `pipeline ledger` wrote."
)
@click.option(
    "--database",
    "databases",
    multiple=True,
    required=True,
    metavar="URL",
    help="A database of the senders, SQLAlchemy or JDBC. Repeat for several.",
)
@click.option(
    "--sql",
    help="Query for what the senders recorded: transaction_id, and optionally amount and at_ms.",
)
@click.option(
    "--receiver",
    "receivers",
    multiple=True,
    metavar="URL",
    help="A database of the receivers. Repeat for several.",
)
@click.option(
    "--receiver-sql", help="Query for what the receivers recorded, with the same columns."
)
@click.option("--only-sql", is_flag=True, help="Ignore the marker and inbox tables.")
@click.option("--amount", is_flag=True, help="Fail unless both queries have amounts to compare.")
@click.option(
    "--group",
    "groups",
    multiple=True,
    help="A producer group. Repeat for several.  [those with markers]",
)
@click.option(
    "--consumer",
    "consumers",
    multiple=True,
    callback=_parse_consumers_option,
    metavar="GROUP=TOPIC[,TOPIC]",
    help="A consumer group that must have processed these topics.  [from the inboxes]",
)
@_duration_option(
    "--since",
    "72h",
    "A duration back from now, `all`, or a time (UTC unless it has an offset).",
    SinceParam(),
)
@_duration_option(
    "--grace",
    "10m",
    "Differences younger than this may still be in progress and do not count.",
)
@_duration_option("--open-limit", "1h", "A transaction that is open for longer is a difference.")
@click.option(
    "--report", type=click.Path(path_type=Path), help="Write an HTML report to this file."
)
@click.option(
    "--out", metavar="DIR", help="Write all differences to this directory, as Parquet and CSV."
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@_master_option
@_conf_option
def reconcile(**options: Any) -> None:
    """Compare the ledger with databases.

    Exit code 0: they agree. 1: they differ. 2: they could not be compared.
    """
    if options["receiver_sql"] and not options["receivers"]:
        raise click.UsageError("--receiver-sql needs --receiver")
    if options["amount"] and not (options["sql"] and options["receiver_sql"]):
        raise click.UsageError("--amount needs --sql and --receiver-sql")
    if options["only_sql"] and not (options["sql"] or options["receiver_sql"]):
        raise click.UsageError("--only-sql needs --sql or --receiver-sql")
    check_pyspark()
    if find_spec("sqlalchemy") is None:
        raise ReconcileFailed('sqlalchemy is not installed: pip install "escrowmq[spark,sql]"')
    from pyspark.sql import SparkSession

    from escrowmq.pipeline.reconcile.job import run_reconcile

    is_own_session = SparkSession.getActiveSession() is None
    spark = pipeline_session("reconcile", options["master"], options["conf"])
    try:
        with run_reconcile(spark, _reconcile_request(options)) as result:
            if options["amount"] and set(result.summary.sums) != {"sent", "received"}:
                raise ReconcileFailed("--amount: a query has no column named amount")
            print_result(result, as_json=options["as_json"])
            if options["out"]:
                write_differences(result.differences, options["out"])
            if options["report"]:
                write_report(result, options["report"])
                click.echo(f"report: {options['report']}", err=True)
            is_consistent = result.summary.is_consistent
    finally:
        if is_own_session:
            spark.stop()
    sys.exit(0 if is_consistent else 1)


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
    """Write the differences from the executors, and replace those of an earlier run."""
    differences.write.mode("overwrite").parquet(f"{directory}/parquet")
    differences.write.mode("overwrite").option("header", "true").csv(f"{directory}/csv")


def write_report(result: ReconcileResult, path: Path, *, title: str = "Reconciliation") -> None:
    """Write an HTML report with the first differences. Raises ReconcileFailed."""
    from escrowmq.pipeline.reconcile.report import render_html

    rows = [row.asDict() for row in result.head(REPORT_ROWS)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_html(result.summary, rows, title=title), encoding="utf-8")
    except OSError as error:
        raise ReconcileFailed(f"the report cannot be written: {error}") from error
