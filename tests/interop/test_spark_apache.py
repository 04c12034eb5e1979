"""The Spark source reads messages, transactions and store files of Apache RocketMQ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from escrowmq.errors import NoRoute
from escrowmq.spark import options
from escrowmq.spark.data_source import EscrowSource
from escrowmq.spark.readers import StreamReader
from escrowmq.spark.schema import MESSAGE_COLUMNS
from tests.interop.apache import ApacheRocketMQ, wait_for_route
from tests.interop.fixtures import SHUTDOWNS, VERSIONS, Shutdown, unpack_store
from tests.interop.remoting import COMMIT, ROLLBACK, Client
from tests.support.waiting import wait_until

COUNT = 200
Rows = list[dict[str, Any]]


def read(**read_options: object) -> Rows:
    source = EscrowSource({name: str(value) for name, value in read_options.items()})
    reader: Any = source.reader(source.schema())
    tasks = reader.partitions()
    return [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]


@pytest.mark.apache
@pytest.mark.nightly
@pytest.mark.slow
def test_topics_transactions_and_streams_of_apache_are_read(version: str, tmp_path: Path) -> None:
    with ApacheRocketMQ(version, tmp_path) as rocketmq, Client(rocketmq.address) as client:
        client.create_topic("orders", queues=2)
        for number in range(COUNT):
            properties = {"UNIQ_KEY": f"m{number}", "TAGS": "ab"[number % 2]}
            client.send("orders", b"%d" % number, properties, queue_id=number % 2)
        halves = [client.send_half("orders", b"half", {"UNIQ_KEY": f"tx{n}"}) for n in range(3)]
        client.end_transaction(halves[0], COMMIT, topic="orders")
        client.end_transaction(halves[1], ROLLBACK, topic="orders")
        wait_for_route(rocketmq.namesrv_address, "orders", rocketmq.address)
        servers = rocketmq.namesrv_address
        rows = read(servers=servers, subscribe="orders", minPartitions=3)
        message_ids = [row["message_id"] for row in rows]
        assert sorted(message_ids) == sorted([*(f"m{n}" for n in range(COUNT)), "tx0"])
        assert len(read(servers=servers, subscribe="orders", tags="a")) == COUNT // 2
        source: dict[str, object] = {"servers": servers}
        if version.startswith("4"):  # it does not serve the topics of transactions
            with pytest.raises(NoRoute, match="read their files"):
                read(**source, mode="transactions")
            source = {"path": rocketmq.store}
        assert_transactions(source, halves[0].log_offset, rows)
        assert_stream(servers)


def assert_transactions(source: dict[str, object], half_log_offset: int, rows: Rows) -> None:
    transactions: Rows = []

    def both_ops_are_written() -> bool:  # 5.5.0 writes them some seconds later
        transactions[:] = read(**source, mode="transactions")
        return len(decided_offsets(transactions)) >= 2

    wait_until(both_ops_are_written, "the ops of both decided halves are written", timeout_s=60)
    halves = {row["half_offset"]: row for row in transactions if row["kind"] == "half"}
    decided = [halves[offset] for offset in decided_offsets(transactions)]
    assert {half["transaction_id"] for half in decided} == {"tx0", "tx1"}
    assert {row["topic"] for row in halves.values()} == {"orders"}
    # An op of RocketMQ has no verdict; a final shows that its half was committed.
    [final] = [row for row in rows if row["message_id"] == "tx0"]
    assert final["prepared_offset"] == half_log_offset


def decided_offsets(transactions: Rows) -> set[int]:
    return {row["half_offset"] for row in transactions if row["kind"] == "op"}


def assert_stream(servers: str) -> None:
    """Read the stream, commit, and check that a second reader starts at the committed offsets."""
    group = {"servers": servers, "subscribe": "orders", "group": "sparks", "reportOffsets": "true"}
    earliest = {**group, "startingOffsets": "earliest"}
    first = StreamReader(options.parse_read_options(earliest, is_stream=True), MESSAGE_COLUMNS)
    start = first.initialOffset()
    end = first.latestOffset(start, ReadAllAvailable())
    tasks = first.partitions(start, end)
    assert sum(batch.num_rows for task in tasks for batch in first.read(task)) == COUNT + 1
    first.commit(end)
    first.stop()
    second = StreamReader(options.parse_read_options(group, is_stream=True), MESSAGE_COLUMNS)
    assert second.initialOffset()["first"] == end["next"]
    second.stop()


@pytest.mark.parametrize("shutdown", SHUTDOWNS)
@pytest.mark.parametrize("captured", VERSIONS)
def test_store_files_of_apache_are_read(captured: str, shutdown: Shutdown, tmp_path: Path) -> None:
    store = unpack_store(captured, shutdown, tmp_path)
    rows = read(path=store)
    offsets = [row["log_offset"] for row in rows]
    assert offsets == sorted(set(offsets))
    assert len(rows) > 20
    kinds = {row["kind"] for row in read(path=store, mode="transactions")}
    assert {"half", "op"} <= kinds
