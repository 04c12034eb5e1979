"""The Spark source reads Apache RocketMQ: over the wire, its transactions, and its files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from escrowmq.errors import NoRoute
from escrowmq.spark import options
from escrowmq.spark.data_source import EscrowSource
from escrowmq.spark.readers import StreamReader
from escrowmq.spark.schema import MESSAGE_COLUMNS
from tests.interop.apache import ApacheRocketMQ
from tests.interop.fixtures import SHUTDOWNS, VERSIONS, Shutdown, unpack_store
from tests.interop.remoting import COMMIT, ROLLBACK, Client

COUNT = 200
Rows = list[dict[str, Any]]


def read(**given: object) -> Rows:
    source = EscrowSource({name: str(value) for name, value in given.items()})
    reader: Any = source.reader(source.schema())
    tasks = reader.partitions()
    return [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]


@pytest.mark.apache
@pytest.mark.nightly
@pytest.mark.slow
def test_topics_streams_and_transactions_of_apache_are_read(version: str, tmp_path: Path) -> None:
    with ApacheRocketMQ(version, tmp_path) as rocketmq, Client(rocketmq.address) as client:
        client.create_topic("orders", queues=2)
        for number in range(COUNT):
            given = {"UNIQ_KEY": f"m{number}", "TAGS": "ab"[number % 2]}
            client.send("orders", b"%d" % number, given, queue_id=number % 2)
        halves = [client.send_half("orders", b"half", {"UNIQ_KEY": f"tx{n}"}) for n in range(3)]
        client.end_transaction(halves[0], COMMIT, topic="orders")
        client.end_transaction(halves[1], ROLLBACK, topic="orders")
        _wait_until_routed(rocketmq, "orders")
        servers = rocketmq.namesrv_address
        rows = read(servers=servers, subscribe="orders", minPartitions=3)
        found = [row["message_id"] for row in rows]
        assert sorted(found) == sorted([*(f"m{n}" for n in range(COUNT)), "tx0"])
        assert len(read(servers=servers, subscribe="orders", tags="a")) == COUNT // 2
        told: dict[str, object] = {"servers": servers}
        if version.startswith("4"):
            with pytest.raises(NoRoute, match="read their files"):
                read(**told, mode="transactions")
            told = {"path": rocketmq.store}
        _check_transactions(told, halves[0].log_offset, rows)
        _check_stream(servers)


def _wait_until_routed(rocketmq: ApacheRocketMQ, topic: str) -> None:
    deadline = time.monotonic() + 60
    with Client(rocketmq.namesrv_address) as names:
        while not names.route(topic) and time.monotonic() < deadline:
            time.sleep(0.1)


def _check_transactions(where: dict[str, object], half_log_offset: int, rows: Rows) -> None:
    deadline = time.monotonic() + 60
    while True:  # 5.x gathers its ops for some seconds
        told = read(**where, mode="transactions")
        settled = {row["half_offset"] for row in told if row["kind"] == "op"}
        if len(settled) >= 2 or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    halves = {row["half_offset"]: row for row in told if row["kind"] == "half"}
    assert {halves[at]["transaction_id"] for at in settled} == {"tx0", "tx1"}
    assert {row["topic"] for row in halves.values()} == {"orders"}
    # It does not say how they ended; the final does, which names its half.
    [final] = [row for row in rows if row["message_id"] == "tx0"]
    assert final["prepared_offset"] == half_log_offset


def _check_stream(servers: str) -> None:
    given = {"servers": servers, "subscribe": "orders", "group": "sparks", "reportOffsets": "true"}
    told = {**given, "startingOffsets": "earliest"}
    first = StreamReader(options.parse_read_options(told, is_stream=True), MESSAGE_COLUMNS)
    start = first.initialOffset()
    end = first.latestOffset(start, ReadAllAvailable())
    tasks = first.partitions(start, end)
    assert sum(b.num_rows for task in tasks for b in first.read(task)) == COUNT + 1
    first.commit(end)
    first.stop()
    second = StreamReader(options.parse_read_options(given, is_stream=True), MESSAGE_COLUMNS)
    assert second.initialOffset()["first"] == end["next"]
    second.stop()


@pytest.mark.parametrize("ending", SHUTDOWNS)
@pytest.mark.parametrize("kept", VERSIONS)
def test_files_of_apache_are_read(kept: str, ending: Shutdown, tmp_path: Path) -> None:
    store = unpack_store(kept, ending, tmp_path)
    rows = read(path=store)
    offsets = [row["log_offset"] for row in rows]
    assert offsets == sorted(set(offsets))
    assert len(rows) > 20
    kinds = {row["kind"] for row in read(path=store, mode="transactions")}
    assert {"half", "op"} <= kinds
