"""Ledgers of Apache RocketMQ, whose ops do not say how a half ended, and their reconciliation."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import Row, SparkSession

from escrowmq.pipeline.job import ClusterSource
from escrowmq.pipeline.ledger.job import read_ledger, run_ledger
from escrowmq.pipeline.reconcile.compare import ReconcileLimits
from escrowmq.pipeline.reconcile.job import ReconcileRequest, run_reconcile
from tests.interop.apache import ApacheRocketMQ
from tests.interop.remoting import COMMIT, ROLLBACK, Client
from tests.support.ledgers import TABLES
from tests.support.spark_session import IGNORED_WARNINGS, retry_slow_start, spark

__all__ = ["spark"]

pytestmark = [
    pytest.mark.apache,
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    *(pytest.mark.filterwarnings(rule) for rule in IGNORED_WARNINGS),
]

WAIT_S = 120.0
EXPECTED = {"tx0": "committed", "tx1": "rolled_back", "tx2": "open", "tx3": "committed"}


def decide_some(rocketmq: ApacheRocketMQ) -> None:
    with Client(rocketmq.address) as client:
        client.create_topic("orders", queues=2)
        halves = [
            client.send_half("orders", b"x", {"UNIQ_KEY": f"m{n}", "TX_ID": f"tx{n}"})
            for n in range(4)
        ]
        for half, verdict in ((0, COMMIT), (1, ROLLBACK), (3, COMMIT)):
            client.end_transaction(halves[half], verdict, topic="orders")


def ledger_of(spark: SparkSession, out: Path, run: Callable[[], object]) -> dict[str, Row]:
    """Run it until the ledger says what happened: RocketMQ 5 gathers its ops for some seconds."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        retry_slow_start(run)
        rows = {row["transaction_id"]: row for row in read_ledger(spark, out).collect()}
        found = {name: row["outcome"] for name, row in rows.items()}
        if found == EXPECTED or time.monotonic() > deadline_s:
            assert found == EXPECTED
            return rows


def check(rows: dict[str, Row]) -> None:
    [final] = rows["tx0"]["finals"]
    assert (final["topic"], final["queue_id"]) == ("orders", 0)
    assert rows["tx0"]["decision_ms"] is not None
    assert rows["tx0"]["decided_by"] is None
    assert rows["tx0"]["message_ids"] == ["m0"]
    assert rows["tx1"]["finals"] == rows["tx2"]["finals"] == []


@pytest.mark.parametrize("version", ["5.5.0"], indirect=True)
def test_outcomes_come_from_what_was_delivered(
    spark: SparkSession, version: str, tmp_path: Path
) -> None:
    out = tmp_path / "ledger"
    with ApacheRocketMQ(version, tmp_path / "apache") as rocketmq:
        decide_some(rocketmq)
        source = ClusterSource(rocketmq.namesrv_address)
        check(ledger_of(spark, out, lambda: run_ledger(spark, out, source=source)))


def test_a_ledger_is_made_from_its_files_and_reconciled(
    spark: SparkSession, version: str, tmp_path: Path
) -> None:
    out, store = tmp_path / "ledger", tmp_path / "apache" / "store"
    with ApacheRocketMQ(version, tmp_path / "apache") as rocketmq:
        decide_some(rocketmq)
        check(ledger_of(spark, out, lambda: run_ledger(spark, out, paths=[store])))
    found = differences(spark, out, tmp_path / "bank.db")
    assert found == {
        ("row_without_message", "tx1"),
        ("message_without_row", "tx3"),
        ("still_open", "tx2"),
    }


def differences(spark: SparkSession, ledger: Path, bank: Path) -> set[tuple[str, str]]:
    """With a database that committed tx0 and tx1."""
    with sqlite3.connect(bank) as database:
        database.execute(f"CREATE TABLE escrowmq_marker ({TABLES['escrowmq_marker']})")
        for name in ("tx0", "tx1"):
            row = (name, "committed", 1, "interop-producers", 1)
            database.execute("INSERT INTO escrowmq_marker VALUES (?, ?, ?, ?, ?)", row)
    database.close()
    now_ms = int(time.time() * 1000) + 86_400_000  # tomorrow nothing is under way any more
    wanted = ReconcileRequest(str(ledger), (f"sqlite:///{bank}",), ReconcileLimits(now_ms))
    with run_reconcile(spark, wanted) as result:
        rows = result.differences.select("kind", "transaction_id").collect()
    return {(row["kind"], row["transaction_id"]) for row in rows}
