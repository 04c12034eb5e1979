"""Every pipeline on a Spark cluster: a standalone master with two workers, each a process.

`make spark-cluster` runs these tests. They use the commands of a user, with `--master`.
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
from tests.support import cluster_program, speculation_program
from tests.support.brokers import COMMAND, Server
from tests.support.spark_clusters import SPARK_HOME, SparkCluster
from tests.support.spark_session import skip_without_java

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

COMMITTED, ROLLED_BACK = 40, 5
MESSAGES = 120
QUEUES = 2
tables = MetaData()
transfers = Table(
    "transfer", tables, Column("id", String(64), primary_key=True), Column("cents", Integer)
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkCluster]:
    skip_without_java()
    with SparkCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def run_pipeline(cluster: SparkCluster, name: str, *arguments: str | Path) -> Any:
    """Run a pipeline that must succeed, and return the summary in the last line of its output."""
    process = start_pipeline(cluster, name, *arguments)
    assert process.returncode == 0, process.stderr
    return last_line(process)


def last_line(process: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(process.stdout.splitlines()[-1])


def start_pipeline(
    cluster: SparkCluster, name: str, *arguments: str | Path
) -> subprocess.CompletedProcess[str]:
    command = [COMMAND, "pipeline", name, *arguments, "--json", "--master", cluster.url]
    return cluster.run(command)


def assert_ran_on_both_workers(cluster: SparkCluster, application: str) -> None:
    executors = cluster.executor_counts(cluster.finished_applications()[application])
    assert all(executors), f"{application}: executors by worker {executors}"


def read_parquet(files: str, columns: str) -> list[Any]:
    """Read Parquet files with another program than the one that wrote them."""
    with duckdb.connect() as engine:
        return engine.execute(f"SELECT {columns} FROM read_parquet('{files}')").fetchall()


# --- transactions --------------------------------------------------------------------------------


def make_transfers(served: Server, path: Path) -> list[str]:
    """Make transfers through the SQL binding, some of which are rolled back, and book each of them
    at the other bank. Returns the ids of the committed transactions."""
    engine = create_engine(f"sqlite:///{path}")
    tables.create_all(engine)
    ids = []
    with Escrow(engine, served.namesrv_address, group="bank") as escrow:
        for number in range(COMMITTED + ROLLED_BACK):
            with escrow.transaction() as (session, tx):
                session.execute(insert(transfers).values(id=str(number), cents=number))
                tx.send(Message("transfers", b"%d" % number))
                if number >= COMMITTED:
                    raise Rollback
            if number < COMMITTED:
                ids.append(tx.id)
    inbox = Inbox(engine, group="other-bank")

    @inbox.effect
    def book(session: Session, message: ReceivedMessage) -> None:
        session.execute(insert(transfers).values(id=f"in {message.body.decode()}", cents=0))

    with Consumer(
        served.namesrv_address, group="other-bank", subscribe={"transfers": "*"}
    ) as consumer:
        inbox.run(consumer, book, limit=COMMITTED)
    engine.dispose()
    return ids


def test_reconcile_finds_planted_differences_between_ledger_and_database(
    cluster: SparkCluster, tmp_path: Path
) -> None:
    path, ledger = tmp_path / "bank.db", tmp_path / "ledger"
    with Server(tmp_path / "broker") as served:
        ids = make_transfers(served, path)
        servers = ("-n", served.namesrv_address)
        summary = run_pipeline(cluster, "ledger", *servers, "--out", ledger, "--once")
        assert summary["rows"] == COMMITTED + ROLLED_BACK
    assert_ran_on_both_workers(cluster, "escrowmq ledger")
    rows = read_parquet(f"{ledger}/day=*/*.parquet", "transaction_id, outcome, len(finals)")
    assert len(rows) == COMMITTED + ROLLED_BACK
    finals = {row[0]: row[2] for row in rows if row[1] == "committed"}
    assert finals == dict.fromkeys(ids, 1)
    assert Counter(row[1] for row in rows) == {"committed": COMMITTED, "rolled_back": ROLLED_BACK}
    arguments = ("--ledger", str(ledger), "--database", f"sqlite:///{path}", "--grace", "1ms")
    report = tmp_path / "report.html"
    summary = run_pipeline(cluster, "reconcile", *arguments, "--report", report)
    assert summary["agree"] is True
    assert summary["outcomes"] == {**summary["outcomes"], "committed": COMMITTED}
    assert summary["consumers"] == {"other-bank": ["transfers"]}
    assert "<svg" in report.read_text()
    assert_ran_on_both_workers(cluster, "escrowmq reconcile")
    _assert_planted_differences_are_found(cluster, arguments, path, ids, tmp_path / "differences")


def _assert_planted_differences_are_found(
    cluster: SparkCluster, arguments: tuple[str, ...], path: Path, ids: list[str], out: Path
) -> None:
    """Delete one marker row and add another. Reconcile must report these two and nothing else."""
    with sqlite3.connect(path) as bank:
        bank.execute("DELETE FROM escrowmq_marker WHERE id = ?", (ids[0],))
        bank.execute(
            "INSERT INTO escrowmq_marker (id, outcome, at_ms, producer_group, messages) "
            "SELECT 'escrow-ghost', outcome, at_ms, producer_group, messages "
            "FROM escrowmq_marker WHERE id = ?",
            (ids[1],),
        )
    bank.close()
    process = start_pipeline(cluster, "reconcile", *arguments, "--out", out)
    assert process.returncode == 1, process.stderr
    counts = last_line(process)["differences"]
    planted = {"message_without_row": 1, "row_without_message": 1}
    assert {kind: count for kind, count in counts.items() if count} == planted
    rows = read_parquet(f"{out}/parquet/*.parquet", "kind, transaction_id")
    assert sorted(rows) == [
        ("message_without_row", ids[0]),
        ("row_without_message", "escrow-ghost"),
    ]


# --- messages ------------------------------------------------------------------------------------


def send_orders(served: Server, *topics: str) -> None:
    with served.client() as client:
        for topic in ("orders", *topics):
            client.create_topic(topic, queues=QUEUES)
        for number in range(MESSAGES):
            properties = {"UNIQ_KEY": f"m{number}", "TAGS": "ab"[number % 2]}
            client.send("orders", b"%d" % number, properties, queue_id=number % QUEUES)


def bodies(served: Server, topic: str) -> list[int]:
    with served.client() as client:
        records = [record for queue in range(QUEUES) for record in client.pull_all(topic, queue)]
    return sorted(int(record.body) for record in records)


def test_a_topic_is_archived_and_partly_replayed(cluster: SparkCluster, tmp_path: Path) -> None:
    out = tmp_path / "archive"
    with Server(tmp_path / "broker") as served:
        send_orders(served, "replayed")
        servers = ("-n", served.namesrv_address)
        arguments = ("--topic", "orders", "--out", out, "--once")
        summary = run_pipeline(cluster, "archive", *servers, *arguments)
        assert summary["messages"] == MESSAGES
        rows = read_parquet(f"{out}/_parts/*/*/*/*.parquet", "message_id")
        assert Counter(row[0] for row in rows) == Counter(f"m{n}" for n in range(MESSAGES))
        selection = ("--topic", "replayed", "--where", "tags = 'a'")
        summary = run_pipeline(cluster, "replay", "--from", out, *servers, *selection)
        assert (summary["messages"], summary["was_done"]) == (MESSAGES // 2, False)
        assert bodies(served, "replayed") == list(range(0, MESSAGES, 2))
    assert_ran_on_both_workers(cluster, "escrowmq archive")
    assert_ran_on_both_workers(cluster, "escrowmq replay")


def test_a_program_reads_and_writes_exactly_once(cluster: SparkCluster, tmp_path: Path) -> None:
    with Server(tmp_path / "broker") as served:
        send_orders(served, "streamed", "batched")
        process = cluster.run(
            [
                *(SPARK_HOME / "bin" / "spark-submit", "--master", cluster.url),
                *(cluster_program.__file__, served.namesrv_address, tmp_path / "checkpoint"),
            ]
        )
        assert process.returncode == 0, process.stderr
        output = last_line(process)
        expected = list(range(MESSAGES))
        assert sorted(map(int, output["read"])) == expected
        assert bodies(served, "streamed") == expected
        assert bodies(served, "batched") == expected
    # Tasks ran in the directories of both workers, and nowhere else.
    workers = {str(Path(directory).parent.parent) for directory in output["places"]}
    assert workers == {str(cluster.work_directory(number)) for number in range(2)}


def test_a_speculative_task_does_not_write_its_rows_twice(
    cluster: SparkCluster, tmp_path: Path
) -> None:
    settings = {
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.minTaskRuntime": "100ms",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "5",
    }
    started = tmp_path / "started"  # the program creates a file for each attempt
    started.mkdir()
    with Server(tmp_path / "broker") as served:
        with served.client() as client:
            client.create_topic("speculated", queues=QUEUES)
        process = cluster.run(
            [
                *(SPARK_HOME / "bin" / "spark-submit", "--master", cluster.url),
                *(word for pair in settings.items() for word in ("--conf", "=".join(pair))),
                *(speculation_program.__file__, served.namesrv_address, started),
            ]
        )
        assert process.returncode == 0, process.stderr
        assert bodies(served, "speculated") == list(range(speculation_program.ROWS))
    counts: Counter[str] = Counter()
    for _attempt, verdict, count in last_line(process):
        counts[verdict] += count
    assert counts["committed"] == speculation_program.ROWS
    # The attempt that hung had parked rows; they are rolled back.
    assert set(counts) == {"committed", "rolled_back"}
    assert {path.name for path in started.iterdir()} >= {"0-0", "0-1"}
