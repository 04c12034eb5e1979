"""The ledger: computed from records, and updated from a real broker."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from escrowmq import Message, Producer, ReceivedMessage, Rollback, Verdict
from escrowmq.errors import PipelineFailed
from escrowmq.pipeline.job import ClusterSource, PipelineProgress, ignore_progress

# Private: a broker's clock cannot be set, so a late half is merged directly.
from escrowmq.pipeline.ledger.job import LedgerResult, _LedgerRun, read_ledger, run_ledger
from escrowmq.pipeline.ledger.model import (
    EVENT_SCHEMA,
    LEDGER_SCHEMA,
    build_ledger,
    to_events,
    to_finals,
)
from escrowmq.pipeline.ledger.table_formats import PARQUET
from escrowmq.pipeline.parquet_table import ParquetTable
from escrowmq.spark.schema import MESSAGE_COLUMNS, TRANSACTION_COLUMNS
from tests.interop.remoting import COMMIT
from tests.support.brokers import Server
from tests.support.spark_session import IGNORED_WARNINGS, retry_slow_start, spark
from tests.support.waiting import wait_until_async

__all__ = ["spark"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # a busy machine takes minutes to start a JVM and its workers
    *(pytest.mark.filterwarnings(rule) for rule in IGNORED_WARNINGS),
]

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
Rows = dict[str, dict[str, Any]]


def by_id(ledger: DataFrame) -> Rows:
    rows = [row.asDict(recursive=True) for row in ledger.collect()]
    assert len({row["transaction_id"] for row in rows}) == len(rows)
    return {row["transaction_id"]: row for row in rows}


def time_at(ms: int) -> datetime:
    """Return the time this many milliseconds after noon."""
    return NOON + timedelta(milliseconds=ms)


class BrokerRecords:
    """Records as brokers would have written them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.finals: list[dict[str, Any]] = []

    def add(self, kind: str, half: int | None, ms: int, **columns: Any) -> None:
        position = {"broker": "b", "log_offset": 1000 + len(self.rows), "queue_id": 0}
        self.rows.append(
            {"kind": kind, "half_offset": half, "at": time_at(ms), **position, **columns}
        )

    def half(self, number: int, ms: int, name: str, **columns: Any) -> int:
        """Add a half message. Return its log offset."""
        self.add("half", number, ms, message_id=name, group="g", topic="orders", **columns)
        return int(self.rows[-1]["log_offset"])

    def final(self, half: int, ms: int, name: str, offset: int) -> None:
        position = {"topic": "orders", "broker": "b", "queue_id": 1, "queue_offset": offset}
        ids = {"message_id": name, "transaction_id": name, "prepared_offset": half}
        self.finals.append({**position, **ids, "store_time": time_at(ms)})

    def records(self, spark: SparkSession) -> DataFrame:
        """Return the records as mode=transactions reads them."""
        names = TRANSACTION_COLUMNS.names
        values = [tuple(row.get(name) for name in names) for row in self.rows]
        return spark.createDataFrame(values, TRANSACTION_COLUMNS.spark_schema()).coalesce(1)

    def messages(self, spark: SparkSession) -> DataFrame:
        names = MESSAGE_COLUMNS.names
        values = [tuple(row.get(name) for name in names) for row in self.finals]
        return spark.createDataFrame(values, MESSAGE_COLUMNS.spark_schema()).coalesce(1)


def add_escrowmq_records(records: BrokerRecords) -> None:
    half = records.half(1, 0, "plain")
    records.final(half, 12, "plain", 7)
    records.add("op", 1, 10, verdict="committed", who="producer", born_host="127.0.0.1:1")
    records.half(2, 20, "checked")
    records.add("check", 2, 30, step="asked", checks=1, who="127.0.0.1:2")
    records.add("check", 2, 31, step="unknown", checks=1, who="127.0.0.1:2", reason="busy")
    records.add("check", 2, 50, step="asked", checks=2, who="127.0.0.1:3")
    rolled_back = {"verdict": "rolled_back", "who": "check", "reason": "no such order"}
    records.add("op", 2, 55, born_host="127.0.0.1:3", **rolled_back)
    # Transaction T has a marker and is decided by one record; its ops are not written yet.
    records.half(3, 60, "pair-1", marker_id="T")
    records.half(4, 61, "pair-2", marker_id="T")
    records.add("decision", None, 70, commits=[3, 4], rolls_back=[5], who="group 127.0.0.1:4")
    records.half(5, 62, "loser")
    records.half(6, 80, "resumed")
    records.add("op", 6, 90, verdict="stranded", who="broker")
    records.add("check", 6, 95, step="resumed", checks=0, who="operator")
    records.half(7, 80, "stranded")
    records.add("check", 7, 85, step="unknown", checks=1, reason="database is down")
    records.add("op", 7, 90, verdict="stranded", who="broker", reason="checked 3 times")
    records.half(10, 80, "undecided")
    records.add("check", 10, 81, step="unknown_at_send", checks=0, reason="timeout")
    records.add("check", 10, 82, step="asked", checks=1)
    # A half message that was moved, and committed at its new position.
    records.half(8, 100, "moved")
    records.half(9, 110, "moved", copy_of=[8])
    records.add("op", 8, 110, verdict="moved")
    records.add("op", 9, 120, verdict="committed", who="ann")
    records.add("op", 99, 120, verdict="committed", who="producer")  # its half has expired


def add_rocketmq_records(records: BrokerRecords) -> None:
    half = records.half(11, 0, "a-committed")
    records.final(half, 5, "a-committed", 8)
    records.add("op", 11, 3000)
    records.half(12, 0, "a-rolled-back")
    records.add("op", 12, 3000)
    # For a check, RocketMQ appends the half message again and writes an op for the old one.
    records.half(13, 0, "a-checked")
    records.half(14, 6000, "a-checked", checks=1)
    records.add("op", 13, 6100)
    records.half(15, 0, "a-stranded")
    records.add("op", 15, 9000)
    records.add("stranded", None, 9000, message_id="a-stranded")


def test_a_ledger_has_one_row_for_each_transaction(spark: SparkSession) -> None:
    records = BrokerRecords()
    add_escrowmq_records(records)
    add_rocketmq_records(records)
    ledger = build_ledger(to_events(records.records(spark)), to_finals(records.messages(spark)))
    assert [(field.name, field.dataType) for field in ledger.schema] == [
        (field.name, field.dataType) for field in LEDGER_SCHEMA
    ]
    rows = by_id(ledger)
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "plain": "committed",
        "checked": "rolled_back",
        "T": "committed",
        "loser": "rolled_back",
        "resumed": "open",
        "stranded": "stranded",
        "undecided": "open",
        "moved": "committed",
        "a-committed": "committed",
        "a-rolled-back": "rolled_back",
        "a-checked": "open",
        "a-stranded": "stranded",
    }
    times = {"decided_at", "parked_at", "first_check", "last_check"}
    plain = {name: value for name, value in rows["plain"].items() if name not in times}
    assert plain == {
        "transaction_id": "plain",
        "marker_id": None,
        "group": "g",
        "topics": ["orders"],
        "messages": 1,
        "message_ids": ["plain"],
        "brokers": ["b"],
        "checks": 0,
        "answered_by": None,
        "outcome": "committed",
        "decided_by": "producer",
        "decision_ms": 10,
        "reason": None,
        "visible_ms": 2,
        "day": date(2024, 5, 1),
        "finals": [{"topic": "orders", "broker": "b", "queue_id": 1, "queue_offset": 7}],
    }
    checked = rows["checked"]
    assert (checked["checks"], checked["answered_by"], checked["decided_by"]) == (
        2,
        "127.0.0.1:3",
        "check",
    )
    assert checked["last_check"] - checked["first_check"] == timedelta(milliseconds=20)
    pair = rows["T"]
    assert (pair["marker_id"], pair["messages"], pair["message_ids"], pair["decision_ms"]) == (
        *("T", 2, ["pair-1", "pair-2"], 10),
    )
    assert rows["moved"]["messages"] == 1
    assert (rows["moved"]["decision_ms"], rows["moved"]["decided_by"]) == (20, "ann")
    assert rows["stranded"]["decided_at"] is None
    assert {name: row["reason"] for name, row in rows.items() if row["reason"]} == {
        "checked": "no such order",
        "stranded": "checked 3 times",
        "undecided": "timeout",
    }
    # RocketMQ does not record when it decided. The time of the final is the earliest sign.
    assert (rows["a-committed"]["decision_ms"], rows["a-committed"]["visible_ms"]) == (5, None)
    assert (rows["a-checked"]["checks"], rows["a-checked"]["messages"]) == (1, 1)


def test_a_session_with_another_time_zone_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    tokyo = spark.newSession()
    tokyo.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    with pytest.raises(PipelineFailed, match="time zone is Asia/Tokyo"):
        run_ledger(tokyo, tmp_path, paths=[tmp_path])


def test_a_half_that_is_read_late_moves_its_transaction_to_an_earlier_day(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Its first half was stored the day before, at a broker that could not be read until now."""
    day_ms = 24 * 3600 * 1000
    midnight_ms = day_ms // 2  # times are relative to NOON
    in_time, late = BrokerRecords(), BrokerRecords()
    in_time.half(0, midnight_ms + 1000, "m1", marker_id="alone on its day")
    in_time.half(1, midnight_ms + day_ms + 1000, "m2", marker_id="not alone")
    in_time.half(2, midnight_ms + day_ms + 2000, "m3", marker_id="stays")
    late.half(0, midnight_ms - 1000, "m4", marker_id="alone on its day")
    late.half(1, midnight_ms - 500 + day_ms, "m5", marker_id="not alone")
    for row in late.rows:
        row["broker"] = "a"
    # The private class: records are appended without a broker, one batch before the other.
    run = _LedgerRun(spark, tmp_path, ignore_progress, PARQUET)
    # Private: as above, the events of a late half.
    with run.table.write_lock(), run._events.write_lock(), run._finals.write_lock():
        for batch, records in enumerate((in_time, late)):
            # Private: as above, the events of a late half.
            run._events.append(batch, to_events(records.records(spark)))
            # Private: as above.
            run._merge()
    rows = by_id(read_ledger(spark, tmp_path))
    days = {name: row["day"].toordinal() - NOON.toordinal() for name, row in rows.items()}
    assert days == {"alone on its day": 0, "not alone": 1, "stays": 2}
    assert {row["messages"] for row in rows.values()} == {1, 2}
    links = {path.name for path in tmp_path.glob("day=*")}
    assert links == {f"day={row['day']}" for row in rows.values()}


# --- with a broker -------------------------------------------------------------------------------

CONF = {"transactionTimeOut": 300, "transactionCheckInterval": 300, "transactionCheckMax": 3}


async def run_transactions(served: Server) -> dict[str, str]:
    """Run transactions of all kinds. Return the expected outcomes by id."""
    expected: dict[str, str] = {}
    checks: dict[bytes, int] = {}

    def check(message: ReceivedMessage) -> Verdict | None:
        checks[message.body] = checks.get(message.body, 0) + 1
        return Verdict.COMMIT if message.body == b"late" else None

    async with Producer(served.namesrv_address, group="shop") as producer:
        producer.checker("*")(check)
        async with producer.transaction(Message("orders", b"single")) as tx:
            pass
        expected[tx.id] = "committed"
        async with producer.transaction(Message("orders", b"rolled back")) as tx:
            raise Rollback
        expected[tx.id] = "rolled_back"
        async with producer.transaction(Message("orders", b"pair"), id="marker-1") as tx:
            await tx.send(Message("bills", b"pair"))
        expected[tx.id] = "committed"
        for body, outcome in ((b"late", "committed"), (b"stuck", "stranded")):
            with pytest.raises(ZeroDivisionError):
                async with producer.transaction(Message("orders", body)) as tx:
                    raise ZeroDivisionError
            expected[tx.id] = outcome
        with served.client() as client:
            await wait_until_async(lambda: client.max_offset("TRANS_CHECK_MAX_TIME_TOPIC", 0) == 1)
        await wait_until_async(lambda: b"late" in checks)
    return expected


def update_ledger(spark: SparkSession, served: Server, out: Path, **options: Any) -> LedgerResult:
    source = ClusterSource(served.namesrv_address, batch_messages=20)
    return retry_slow_start(lambda: run_ledger(spark, out, source=source, **options))


async def test_a_ledger_is_updated_from_its_broker(spark: SparkSession, tmp_path: Path) -> None:
    out = tmp_path / "ledger"
    reports: list[PipelineProgress] = []
    with Server(tmp_path / "broker", conf=CONF) as served:
        expected = await run_transactions(served)
        with served.client() as client:
            half = client.send_half("orders", b"open", {"UNIQ_KEY": "open-1"}, group="no-checker")
        update_ledger(spark, served, out, on_progress=reports.append)
        rows = by_id(read_ledger(spark, out))
        assert {name: row["outcome"] for name, row in rows.items()} == {
            **expected,
            "open-1": "open",
        }
        assert {report.step for report in reports} >= {"transactions", "messages"}
        assert reports[-1].lag in (None, 0)
        pair = rows["marker-1"]
        assert (pair["topics"], pair["messages"], pair["marker_id"]) == (
            *(["bills", "orders"], 2, "marker-1"),
        )
        assert [final["topic"] for final in pair["finals"]] == ["bills", "orders"]
        assert pair["decided_by"].startswith("group ")
        checked = [row for row in rows.values() if row["answered_by"]]
        assert [(row["decided_by"], row["outcome"]) for row in checked] == [("check", "committed")]
        assert all(row["visible_ms"] is not None for row in rows.values() if row["finals"])
        # The open transaction is decided later. Its row changes, and the other rows do not.
        with served.client() as client:
            client.end_transaction(half, COMMIT, topic="orders", group="no-checker")
        assert update_ledger(spark, served, out).rows == len(rows)
        updated_rows = by_id(read_ledger(spark, out))
        assert updated_rows.pop("open-1")["outcome"] == "committed"
        rows.pop("open-1")
        assert updated_rows == rows
        assert update_ledger(spark, served, out) == LedgerResult(0, (), 0)
        # Other programs do not know the manifest; they read through the links.
        assert spark.read.parquet(str(out)).count() == len(rows) + 1
        _assert_same_from_files(
            spark, served, tmp_path / "of-files", by_id(read_ledger(spark, out))
        )
        with pytest.raises(PipelineFailed, match="made from cluster, not from files"):
            run_ledger(spark, out, paths=[served.data])


def _assert_same_from_files(spark: SparkSession, served: Server, out: Path, expected: Rows) -> None:
    run_ledger(spark, out, paths=[served.data])
    columns = ("outcome", "messages", "decided_at", "checks", "message_ids", "visible_ms")
    rows = by_id(read_ledger(spark, out))
    assert {name: [row[column] for column in columns] for name, row in rows.items()} == {
        name: [row[column] for column in columns] for name, row in expected.items()
    }


def test_a_format_without_its_jar_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    for kind, package in (("delta", "io.delta:delta-spark"), ("iceberg", "org.apache.iceberg:")):
        with pytest.raises(PipelineFailed, match=f"spark.jars.packages={package}"):
            run_ledger(spark, tmp_path / "ledger", paths=[tmp_path], table_format=kind)
    with pytest.raises(
        PipelineFailed, match="unknown format 'hudi'; use one of parquet, delta, iceberg"
    ):
        run_ledger(spark, tmp_path / "ledger", paths=[tmp_path], table_format="hudi")


def test_a_repeated_batch_is_stored_once_and_parts_are_compacted(
    spark: SparkSession, tmp_path: Path
) -> None:
    table = ParquetTable(tmp_path / "table", "a test")
    empty = (None,) * len(EVENT_SCHEMA)
    rows = spark.createDataFrame([empty, empty], EVENT_SCHEMA).coalesce(1)
    with table.write_lock():
        table.write(rows)  # written and not published, as after a crash
        assert table.append(0, rows)
        reopened = ParquetTable(tmp_path / "table", "a test")  # read from disk, as after a crash
        assert not reopened.append(0, rows)
        assert reopened.append(1, rows)
        assert reopened.read(spark, EVENT_SCHEMA).count() == 4

        def compact(small_bytes: int) -> int:
            return reopened.compact(
                spark,
                EVENT_SCHEMA,
                lambda frame, _: frame.coalesce(1),
                small_bytes=small_bytes,
                min_parts=2,
            )

        assert compact(small_bytes=1) == 0
        old_parts = reopened.read(spark, EVENT_SCHEMA)
        assert compact(small_bytes=1 << 20) == 2
        [part] = reopened.manifest.parts
        assert (part.first, part.last) == (0, 1)
        assert reopened.read(spark, EVENT_SCHEMA).count() == 4
        assert old_parts.count() == 4  # a query of the old parts still works
