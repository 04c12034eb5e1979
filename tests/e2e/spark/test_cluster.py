"""Every pipeline on a Spark cluster: a standalone master with two workers, each a process.

`make spark-cluster` runs it. Commands are those that people type, with `--master`.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from sqlalchemy import Column, Integer, MetaData, String, Table, create_engine, insert
from sqlalchemy.orm import Session

from escrowmq import Message, ReceivedMessage, Rollback
from escrowmq.blocking import Consumer
from escrowmq.sql import Escrow, Inbox
from tests.support.brokers import COMMAND, Server
from tests.support.spark_clusters import SPARK_HOME, SparkCluster
from tests.support.spark_session import ROOT, skip_without_java
from tests.support.speculation_program import ROWS

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

PAID, REFUSED = 40, 5
SENT = 120
QUEUES = 2
tables = MetaData()
transfers = Table(
    "transfer", tables, Column("id", String(64), primary_key=True), Column("cents", Integer)
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    skip_without_java()
    with SparkCluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made


def pipeline(cluster: SparkCluster, name: str, *arguments: str | Path) -> dict[str, Any]:
    """Its last line; it must have ended well."""
    done = run(cluster, name, *arguments)
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def run(
    cluster: SparkCluster, name: str, *arguments: str | Path
) -> subprocess.CompletedProcess[str]:
    command = [COMMAND, "pipeline", name, *arguments, "--json", "--master", cluster.url]
    return cluster.run(command)


def assert_ran_on_both(cluster: SparkCluster, application: str) -> None:
    made = cluster.executor_counts(cluster.finished_applications()[application])
    assert all(made), f"{application}: executors by worker {made}"


def parquet(files: str, columns: str) -> list[Any]:
    """Read by another program than the one that wrote it."""
    with duckdb.connect() as engine:
        return engine.execute(f"SELECT {columns} FROM read_parquet('{files}')").fetchall()


# --- transactions --------------------------------------------------------------------------------


def bank_at_work(served: Server, path: Path) -> list[str]:
    """Transfers through the binding, some of them rolled back; the other side books each. The ids
    of those that are committed."""
    engine = create_engine(f"sqlite:///{path}")
    tables.create_all(engine)
    ids = []
    with Escrow(engine, served.namesrv_address, group="bank") as escrow:
        for number in range(PAID + REFUSED):
            with escrow.transaction() as (session, tx):
                session.execute(insert(transfers).values(id=str(number), cents=number))
                tx.send(Message("transfers", b"%d" % number))
                if number >= PAID:
                    raise Rollback
            if number < PAID:
                ids.append(tx.id)
    inbox = Inbox(engine, group="other-bank")

    @inbox.effect
    def book(session: Session, message: ReceivedMessage) -> None:
        session.execute(insert(transfers).values(id=f"in {message.body.decode()}", cents=0))

    with Consumer(
        served.namesrv_address, group="other-bank", subscribe={"transfers": "*"}
    ) as consumer:
        inbox.run(consumer, book, limit=PAID)
    engine.dispose()
    return ids


def test_a_ledger_agrees_with_the_database_until_it_does_not(
    cluster: SparkCluster, tmp_path: Path
) -> None:
    path, ledger = tmp_path / "bank.db", tmp_path / "ledger"
    with Server(tmp_path / "broker") as served:
        ids = bank_at_work(served, path)
        told = pipeline(cluster, "ledger", "-n", served.namesrv_address, "--out", ledger, "--once")
        assert told["rows"] == PAID + REFUSED
    assert_ran_on_both(cluster, "escrowmq ledger")
    found = parquet(f"{ledger}/day=*/*.parquet", "transaction_id, outcome, len(finals)")
    assert len(found) == PAID + REFUSED
    committed = {row[0]: row[2] for row in found if row[1] == "committed"}
    assert committed == dict.fromkeys(ids, 1)
    assert Counter(row[1] for row in found) == {"committed": PAID, "rolled_back": REFUSED}
    asked = ("--ledger", str(ledger), "--database", f"sqlite:///{path}", "--grace", "1ms")
    report = tmp_path / "report.html"
    summary = pipeline(cluster, "reconcile", *asked, "--report", report)
    assert summary["agree"] is True
    assert summary["outcomes"] == {**summary["outcomes"], "committed": PAID}
    assert summary["consumers"] == {"other-bank": ["transfers"]}
    assert "<svg" in report.read_text()
    assert_ran_on_both(cluster, "escrowmq reconcile")
    _plant_and_find(cluster, asked, path, ids, tmp_path / "differences")


def _plant_and_find(
    cluster: SparkCluster, asked: tuple[str, ...], path: Path, ids: list[str], out: Path
) -> None:
    """A row too few, a row too many: both are named, and nothing else."""
    with sqlite3.connect(path) as bank:
        bank.execute("DELETE FROM escrowmq_marker WHERE id = ?", (ids[0],))
        bank.execute(
            "INSERT INTO escrowmq_marker (id, outcome, at_ms, producer_group, messages) "
            "SELECT 'escrow-ghost', outcome, at_ms, producer_group, messages "
            "FROM escrowmq_marker WHERE id = ?",
            (ids[1],),
        )
    bank.close()
    done = run(cluster, "reconcile", *asked, "--out", out)
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    planted = {"message_without_row": 1, "row_without_message": 1}
    assert {kind: count for kind, count in told["differences"].items() if count} == planted
    rows = parquet(f"{out}/parquet/*.parquet", "kind, transaction_id")
    assert sorted(rows) == [
        ("message_without_row", ids[0]),
        ("row_without_message", "escrow-ghost"),
    ]


# --- messages ------------------------------------------------------------------------------------


def send_orders(served: Server, *topics: str) -> None:
    with served.client() as client:
        for topic in ("orders", *topics):
            client.create_topic(topic, queues=QUEUES)
        for number in range(SENT):
            given = {"UNIQ_KEY": f"m{number}", "TAGS": "ab"[number % 2]}
            client.send("orders", b"%d" % number, given, queue_id=number % QUEUES)


def bodies(served: Server, topic: str) -> list[int]:
    with served.client() as client:
        found = [record for queue in range(QUEUES) for record in client.pull_all(topic, queue)]
    return sorted(int(record.body) for record in found)


def test_a_topic_goes_into_an_archive_and_back(cluster: SparkCluster, tmp_path: Path) -> None:
    out = tmp_path / "archive"
    with Server(tmp_path / "broker") as served:
        send_orders(served, "again")
        where = ("-n", served.namesrv_address)
        told = pipeline(cluster, "archive", *where, "--topic", "orders", "--out", out, "--once")
        assert told["messages"] == SENT
        found = parquet(f"{out}/_parts/*/*/*/*.parquet", "message_id")
        assert Counter(row[0] for row in found) == Counter(f"m{number}" for number in range(SENT))
        asked = ("--from", out, *where, "--topic", "again", "--where", "tags = 'a'")
        told = pipeline(cluster, "replay", *asked)
        assert (told["messages"], told["was_done"]) == (SENT // 2, False)
        assert bodies(served, "again") == list(range(0, SENT, 2))
    assert_ran_on_both(cluster, "escrowmq archive")
    assert_ran_on_both(cluster, "escrowmq replay")


def test_a_program_reads_and_writes_exactly_once(cluster: SparkCluster, tmp_path: Path) -> None:
    with Server(tmp_path / "broker") as served:
        send_orders(served, "streamed", "batched")
        done = cluster.run(
            [
                *(SPARK_HOME / "bin" / "spark-submit", "--master", cluster.url),
                *(ROOT / "tests" / "cluster_program.py", served.namesrv_address),
                tmp_path / "checkpoint",
            ]
        )
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout.splitlines()[-1])
        everything = list(range(SENT))
        assert sorted(map(int, told["read"])) == everything
        assert bodies(served, "streamed") == everything
        assert bodies(served, "batched") == everything
    # Tasks ran below both workers' directories, and nowhere else.
    workers = {str(Path(place).parent.parent) for place in told["places"]}
    assert workers == {str(cluster.work_directory(number)) for number in range(2)}


def test_a_task_that_runs_twice_at_once_is_written_once(
    cluster: SparkCluster, tmp_path: Path
) -> None:
    settings = {
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.minTaskRuntime": "100ms",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "5",
    }
    signs = tmp_path / "signs"
    signs.mkdir()
    with Server(tmp_path / "broker") as served:
        with served.client() as client:
            client.create_topic("speculated", queues=QUEUES)
        done = cluster.run(
            [
                *(SPARK_HOME / "bin" / "spark-submit", "--master", cluster.url),
                *(word for pair in settings.items() for word in ("--conf", "=".join(pair))),
                *(ROOT / "tests" / "speculation_program.py", served.namesrv_address, signs),
            ]
        )
        assert done.returncode == 0, done.stderr
        assert bodies(served, "speculated") == list(range(ROWS))
    counted = json.loads(done.stdout.splitlines()[-1])
    told = {(attempt, verdict): count for attempt, verdict, count in counted}
    verdicts = {verdict for _, verdict in told}
    assert verdicts == {"committed", "rolled_back"}, "the one that hung had rows parked"
    assert sum(count for (_, verdict), count in told.items() if verdict == "committed") == ROWS
    assert {path.name for path in signs.iterdir()} >= {"0-0", "0-1"}
