"""Build and reconcile ledgers of Apache RocketMQ, whose ops do not contain the verdict."""

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
from tests.support.spark_session import QUIET, patiently, spark
from tests.support.waiting import wait_until

__all__ = ["spark"]

pytestmark = [
    pytest.mark.apache,
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    *(pytest.mark.filterwarnings(rule) for rule in QUIET),
]

TIMEOUT_S = 120.0
EXPECTED_OUTCOMES = {"tx0": "committed", "tx1": "rolled_back", "tx2": "open", "tx3": "committed"}


def run_transactions(rocketmq: ApacheRocketMQ) -> None:
    """Park four halves: two are committed, one is rolled back, one stays open."""
    with Client(rocketmq.address) as client:
        client.create_topic("orders", queues=2)
        halves = [
            client.send_half("orders", b"x", {"UNIQ_KEY": f"m{n}", "TX_ID": f"tx{n}"})
            for n in range(4)
        ]
        for index, verdict in ((0, COMMIT), (1, ROLLBACK), (3, COMMIT)):
            client.end_transaction(halves[index], verdict, topic="orders")


def build_ledger(spark: SparkSession, out: Path, run: Callable[[], object]) -> dict[str, Row]:
    """Run the job until the ledger has the expected outcomes, and return its rows.

    RocketMQ 5 writes ops some seconds later.
    """
    rows: dict[str, Row] = {}

    def has_expected_outcomes() -> bool:
        patiently(run)
        rows.clear()
        rows.update({row["transaction_id"]: row for row in read_ledger(spark, out).collect()})
        return {name: row["outcome"] for name, row in rows.items()} == EXPECTED_OUTCOMES

    wait_until(has_expected_outcomes, f"the ledger has {EXPECTED_OUTCOMES}", timeout_s=TIMEOUT_S)
    return rows


def assert_details(rows: dict[str, Row]) -> None:
    [final] = rows["tx0"]["finals"]
    assert (final["topic"], final["queue_id"]) == ("orders", 0)
    assert rows["tx0"]["decision_ms"] is not None
    assert rows["tx0"]["decided_by"] is None
    assert rows["tx0"]["message_ids"] == ["m0"]
    assert rows["tx1"]["finals"] == rows["tx2"]["finals"] == []


@pytest.mark.parametrize("version", ["5.5.0"], indirect=True)
def test_a_ledger_is_built_from_a_running_cluster(
    spark: SparkSession, version: str, tmp_path: Path
) -> None:
    out = tmp_path / "ledger"
    with ApacheRocketMQ(version, tmp_path / "apache") as rocketmq:
        run_transactions(rocketmq)
        source = ClusterSource(rocketmq.namesrv_address)
        assert_details(build_ledger(spark, out, lambda: run_ledger(spark, out, source=source)))


def test_a_ledger_is_built_from_store_files_and_reconciled(
    spark: SparkSession, version: str, tmp_path: Path
) -> None:
    out, store = tmp_path / "ledger", tmp_path / "apache" / "store"
    with ApacheRocketMQ(version, tmp_path / "apache") as rocketmq:
        run_transactions(rocketmq)
        assert_details(build_ledger(spark, out, lambda: run_ledger(spark, out, paths=[store])))
    assert differences(spark, out, tmp_path / "bank.db") == {
        ("row_without_message", "tx1"),
        ("message_without_row", "tx3"),
        ("still_open", "tx2"),
    }


def differences(spark: SparkSession, ledger: Path, bank: Path) -> set[tuple[str, str]]:
    """Reconcile the ledger with a database that has committed tx0 and tx1."""
    with sqlite3.connect(bank) as database:
        database.execute(f"CREATE TABLE escrowmq_marker ({TABLES['escrowmq_marker']})")
        for name in ("tx0", "tx1"):
            row = (name, "committed", 1, "interop-producers", 1)
            database.execute("INSERT INTO escrowmq_marker VALUES (?, ?, ?, ?, ?)", row)
    database.close()
    now_ms = int(time.time() * 1000) + 86_400_000  # tomorrow, when no transaction is recent
    request = ReconcileRequest(str(ledger), (f"sqlite:///{bank}",), ReconcileLimits(now_ms))
    with run_reconcile(spark, request) as result:
        rows = result.differences.select("kind", "transaction_id").collect()
    return {(row["kind"], row["transaction_id"]) for row in rows}
