"""`escrowmq pipeline reconcile`: the nightly proof, with an exit code for schedulers."""

from __future__ import annotations

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.table import Table

from escrowmq.clock import Moment, SystemClock, since_1970_ms
from escrowmq.errors import CannotReconcile
from escrowmq.pipeline.session import pipeline_session
from escrowmq.spark.session import check_pyspark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from escrowmq.pipeline.reconcile_run import Result, Wanted
    from escrowmq.pipeline.reconcile_summary import Summary

SHOWN_ROWS: Final = 20
REPORT_ROWS: Final = 500
_UNITS_MS: Final = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


class Duration(click.ParamType[int]):
    """30s, 15m, 72h, 7d."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, context: Any) -> int:
        found = re.fullmatch(r"(\d+)(ms|s|m|h|d)", str(value))
        if found is None:
            self.fail(f"{value!r} is no duration: say 30s, 15m, 72h or 7d", param, context)
        return int(found[1]) * _UNITS_MS[found[2]]


class Since(Duration):
    """A duration back from now, `all`, or a time as ISO 8601 has it. Negative: back from now."""

    name = "since"

    def convert(self, value: Any, param: click.Parameter | None, context: Any) -> int:
        if value == "all":
            return 0
        if re.match(r"\d{4}-", str(value)):
            try:
                return since_1970_ms(Moment.fromisoformat(value).astimezone())
            except ValueError as error:
                self.fail(f"{value!r}: {error}", param, context)
        return -super().convert(value, param, context)


def _consumers(_: Any, __: Any, values: tuple[str, ...]) -> dict[str, list[str]]:
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
    callback=_consumers,
    metavar="GROUP=TOPIC[,TOPIC]",
    help="Who must have an effect; else what inboxes show.",
)
@click.option(
    "--since", type=Since(), default="72h", show_default=True, help="Or `all`, or a time."
)
@click.option("--grace", type=Duration(), default="10m", show_default=True, help="Still under way.")
@click.option("--open-limit", type=Duration(), default="1h", show_default=True)
@click.option("--report", type=click.Path(path_type=Path), help="An HTML file.")
@click.option("--out", help="All differences, as Parquet and CSV, in this directory.")
@click.option("--json", "as_json", is_flag=True, help="The summary, for machines.")
@click.option("--master", help="Where Spark runs; this machine unless given.")
def reconcile(**given: Any) -> None:
    """Compare the ledger with the databases. Exit code 0: they agree, 1: they do not, 2: it could
    not be done."""
    if given["receiver_sql"] and not given["receivers"]:
        raise click.UsageError("--receiver-sql needs a --receiver to ask")
    if given["amount"] and not (given["sql"] and given["receiver_sql"]):
        raise click.UsageError("--amount compares --sql with --receiver-sql: give both")
    if given["only_sql"] and not (given["sql"] or given["receiver_sql"]):
        raise click.UsageError("--only-sql needs --sql or --receiver-sql")
    check_pyspark()
    if find_spec("sqlalchemy") is None:
        raise CannotReconcile('sqlalchemy is not installed: pip install "escrowmq[spark,sql]"')
    from pyspark.sql import SparkSession

    from escrowmq.pipeline.reconcile_run import reconcile as run

    is_ours = SparkSession.getActiveSession() is None
    spark = pipeline_session("reconcile", given["master"], local_partitions=None)
    try:
        with run(spark, _wanted(given)) as result:
            if given["amount"] and set(result.summary.sums) != {"sent", "received"}:
                raise CannotReconcile("--amount: a query has no column amount; name it with AS")
            show(result, as_json=given["as_json"])
            if given["out"]:
                write_all(result.differences, given["out"])
            if given["report"]:
                write_report(result, given["report"])
                click.echo(f"report: {given['report']}", err=True)
            agree = result.summary.agree
    finally:
        if is_ours:
            spark.stop()
    sys.exit(0 if agree else 1)


def _wanted(given: dict[str, Any]) -> Wanted:
    from escrowmq.pipeline.reconcile import Limits
    from escrowmq.pipeline.reconcile_run import Wanted

    now_ms = SystemClock().now_ms()
    since_ms = given["since"]
    return Wanted(
        ledger=given["ledger"],
        databases=given["databases"],
        sql=given["sql"],
        receivers=given["receivers"],
        receiver_sql=given["receiver_sql"],
        groups=given["groups"],
        consumers=given["consumers"],
        use_tables=not given["only_sql"],
        limits=Limits(
            now_ms,
            grace_ms=given["grace"],
            open_ms=given["open_limit"],
            since_ms=now_ms + since_ms if since_ms < 0 else since_ms,
        ),
    )


def show(result: Result, *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(result.summary.as_json()))
        return
    console = Console(highlight=False)
    console.print(summary_table(result.summary))
    if not result.summary.agree:
        table = Table("kind", "transaction", "at", "detail", title=f"The first {SHOWN_ROWS}")
        for row in result.head(SHOWN_ROWS):
            table.add_row(row["kind"], row["transaction_id"], str(row["at"]), row["detail"])
        console.print(table)
    from escrowmq.pipeline.report import verdict

    console.print(verdict(result.summary))


def summary_table(told: Summary) -> Table:
    from escrowmq.pipeline.report import numbers

    table = Table("what", "how many")
    table.columns[1].justify = "right"
    for name, value in numbers(told):
        table.add_row(name, value)
    table.add_section()
    for kind, count in told.differences.items():
        table.add_row(kind.replace("_", " "), f"[{'red' if count else 'green'}]{count:,}[/]")
    return table


def write_all(differences: DataFrame, place: str) -> None:
    """From the executors; what an earlier run left there goes."""
    differences.write.mode("overwrite").parquet(f"{place}/parquet")
    differences.write.mode("overwrite").option("header", "true").csv(f"{place}/csv")


def write_report(result: Result, path: Path, *, title: str = "Reconciliation") -> None:
    from escrowmq.pipeline.report import html

    rows = [row.asDict() for row in result.head(REPORT_ROWS)]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(html(result.summary, rows, title=title), encoding="utf-8")
    except OSError as error:
        raise CannotReconcile(f"the report cannot be written: {error}") from error
