"""The ledger of a cluster of Apache RocketMQ, whose ops do not say how a half ended."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from escrowmq.pipeline.ledger_run import read_ledger, run_ledger
from escrowmq.pipeline.sources import Source
from tests.interop.apache import ApacheRocketMQ
from tests.interop.remoting import COMMIT, ROLLBACK, Client
from tests.sparks import QUIET, patiently, spark

__all__ = ["spark"]

pytestmark = [
    pytest.mark.apache,
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    *(pytest.mark.filterwarnings(rule) for rule in QUIET),
]

WAIT_S = 120.0


@pytest.mark.parametrize("version", ["5.5.0"], indirect=True)
def test_outcomes_come_from_what_was_delivered(
    spark: SparkSession, version: str, tmp_path: Path
) -> None:
    with ApacheRocketMQ(version, tmp_path / "apache") as rocketmq:
        with Client(rocketmq.address) as client:
            client.create_topic("orders", queues=2)
            halves = [client.send_half("orders", b"x", {"UNIQ_KEY": f"tx{n}"}) for n in range(3)]
            client.end_transaction(halves[0], COMMIT, topic="orders")
            client.end_transaction(halves[1], ROLLBACK, topic="orders")
        source = Source(rocketmq.namesrv_address)
        expected = {"tx0": "committed", "tx1": "rolled_back", "tx2": "open"}
        deadline_s = time.monotonic() + WAIT_S
        while True:  # it gathers its ops for some seconds
            patiently(lambda: run_ledger(spark, tmp_path / "ledger", source=source))
            rows = {
                row["transaction_id"]: row
                for row in read_ledger(spark, tmp_path / "ledger").collect()
            }
            found = {name: row["outcome"] for name, row in rows.items()}
            if found == expected or time.monotonic() > deadline_s:
                break
        assert found == expected
        [final] = rows["tx0"]["finals"]
        assert (final["topic"], final["queue_id"]) == ("orders", 0)
        assert rows["tx0"]["decision_ms"] is not None
        assert rows["tx0"]["decided_by"] is None
