"""The ledger: rows from frames, and kept up to date beside a real broker."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from escrowmq import Message, Producer, ReceivedMessage, Rollback, Verdict
from escrowmq.errors import PipelineFailed
from escrowmq.pipeline.job import ClusterSource, PipelineProgress, ignore_progress
from escrowmq.pipeline.ledger.job import (
    EVENT_SCHEMA,
    PARQUET,
    LedgerResult,
    _LedgerRun,
    read_ledger,
    run_ledger,
)
from escrowmq.pipeline.ledger.model import LEDGER_SCHEMA, ledger, to_events
from escrowmq.pipeline.parquet_table import ParquetTable
from escrowmq.spark.schema import MESSAGE_COLUMNS, TRANSACTION_COLUMNS
from tests.interop.remoting import COMMIT
from tests.support.brokers import Served
from tests.support.clients import until
from tests.support.spark_session import QUIET, patiently, spark

__all__ = ["spark"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),  # a busy machine takes minutes to start a JVM and its helpers
    *(pytest.mark.filterwarnings(rule) for rule in QUIET),
]

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
Rows = dict[str, dict[str, Any]]


def by_id(rows: DataFrame) -> Rows:
    found = [row.asDict(recursive=True) for row in rows.collect()]
    assert len({row["transaction_id"] for row in found}) == len(found)
    return {row["transaction_id"]: row for row in found}


def at(ms: int) -> datetime:
    return NOON + timedelta(milliseconds=ms)


class Told:
    """Records as brokers would have written them."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.finals: list[dict[str, Any]] = []

    def add(self, kind: str, half: int | None, ms: int, **more: Any) -> None:
        place = {"broker": "b", "log_offset": 1000 + len(self.rows), "queue_id": 0}
        self.rows.append({"kind": kind, "half_offset": half, "at": at(ms), **place, **more})

    def half(self, number: int, ms: int, name: str, **more: Any) -> int:
        self.add("half", number, ms, message_id=name, group="g", topic="orders", **more)
        return int(self.rows[-1]["log_offset"])

    def final(self, half: int, ms: int, name: str, offset: int) -> None:
        place = {"topic": "orders", "broker": "b", "queue_id": 1, "queue_offset": offset}
        which = {"message_id": name, "transaction_id": name, "prepared_offset": half}
        self.finals.append({**place, **which, "store_time": at(ms)})

    def ledger(self, spark: SparkSession) -> Rows:
        names = TRANSACTION_COLUMNS.names
        values = [tuple(row.get(name) for name in names) for row in self.rows]
        told = spark.createDataFrame(values, TRANSACTION_COLUMNS.spark_schema()).coalesce(1)
        names = MESSAGE_COLUMNS.names
        values = [tuple(row.get(name) for name in names) for row in self.finals]
        finals = spark.createDataFrame(values, MESSAGE_COLUMNS.spark_schema()).coalesce(1)
        kinds = ("half", "op", "check", "decision")
        halves, ops, checks, decisions = (told.where(f"kind = '{kind}'") for kind in kinds)
        given_up = told.where("kind = 'stranded'")
        made = ledger(halves, ops, checks, decisions, finals, given_up)
        assert [(x.name, x.dataType) for x in made.schema] == [
            (x.name, x.dataType) for x in LEDGER_SCHEMA
        ]
        return by_id(made)


def tell_ours(told: Told) -> None:
    half = told.half(1, 0, "plain")
    told.final(half, 12, "plain", 7)
    told.add("op", 1, 10, verdict="committed", who="producer", born_host="127.0.0.1:1")
    told.half(2, 20, "asked")
    told.add("check", 2, 30, step="asked", checks=1, who="127.0.0.1:2")
    told.add("check", 2, 31, step="unknown", checks=1, who="127.0.0.1:2")
    told.add("check", 2, 50, step="asked", checks=2, who="127.0.0.1:3")
    told.add("op", 2, 55, verdict="rolled_back", who="check", born_host="127.0.0.1:3")
    # A marker's transaction, decided as a whole; its ops are still to come.
    told.half(3, 60, "pair-1", marker_id="T")
    told.half(4, 61, "pair-2", marker_id="T")
    told.add("decision", None, 70, commits=[3, 4], rolls_back=[5], who="group 127.0.0.1:4")
    told.half(5, 62, "loser")
    told.half(6, 80, "resumed")
    told.add("op", 6, 90, verdict="stranded", who="broker")
    told.add("check", 6, 95, step="resumed", checks=0, who="operator")
    told.half(7, 80, "stranded")
    told.add("op", 7, 90, verdict="stranded", who="broker")
    # Appended again, at its new place committed.
    told.half(8, 100, "moved")
    told.half(9, 110, "moved", copy_of=[8])
    told.add("op", 8, 110, verdict="moved")
    told.add("op", 9, 120, verdict="committed", who="ann")
    told.add("op", 99, 120, verdict="committed", who="producer")  # its half is gone


def tell_apache(told: Told) -> None:
    half = told.half(11, 0, "a-committed")
    told.final(half, 5, "a-committed", 8)
    told.add("op", 11, 3000)
    told.half(12, 0, "a-rolled-back")
    told.add("op", 12, 3000)
    told.half(13, 0, "a-asked")  # RocketMQ appends it again to ask, and settles the old place
    told.half(14, 6000, "a-asked", checks=1)
    told.add("op", 13, 6100)
    told.half(15, 0, "a-given-up")
    told.add("op", 15, 9000)
    told.add("stranded", None, 9000, message_id="a-given-up")


def test_each_transaction_is_a_row(spark: SparkSession) -> None:
    told = Told()
    tell_ours(told)
    tell_apache(told)
    rows = told.ledger(spark)
    assert {name: row["outcome"] for name, row in rows.items()} == {
        "plain": "committed",
        "asked": "rolled_back",
        "T": "committed",
        "loser": "rolled_back",
        "resumed": "open",
        "stranded": "stranded",
        "moved": "committed",
        "a-committed": "committed",
        "a-rolled-back": "rolled_back",
        "a-asked": "open",
        "a-given-up": "stranded",
    }
    utc = {"decided_at", "parked_at", "first_check", "last_check"}
    plain = {name: value for name, value in rows["plain"].items() if name not in utc}
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
        "visible_ms": 2,
        "day": date(2024, 5, 1),
        "finals": [{"topic": "orders", "broker": "b", "queue_id": 1, "queue_offset": 7}],
    }
    asked = rows["asked"]
    assert (asked["checks"], asked["answered_by"], asked["decided_by"]) == (
        2,
        "127.0.0.1:3",
        "check",
    )
    assert asked["last_check"] - asked["first_check"] == timedelta(milliseconds=20)
    pair = rows["T"]
    assert (pair["marker_id"], pair["messages"], pair["message_ids"], pair["decision_ms"]) == (
        *("T", 2, ["pair-1", "pair-2"], 10),
    )
    assert rows["moved"]["messages"] == 1
    assert (rows["moved"]["decision_ms"], rows["moved"]["decided_by"]) == (20, "ann")
    assert rows["stranded"]["decided_at"] is None
    # RocketMQ does not say when it decided: that the message is there is the first sign.
    assert (rows["a-committed"]["decision_ms"], rows["a-committed"]["visible_ms"]) == (5, None)
    assert (rows["a-asked"]["checks"], rows["a-asked"]["messages"]) == (1, 1)


def test_days_are_those_of_utc(spark: SparkSession, tmp_path: Path) -> None:
    elsewhere = spark.newSession()
    elsewhere.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    with pytest.raises(PipelineFailed, match="days would be those of Asia/Tokyo"):
        run_ledger(elsewhere, tmp_path, paths=[tmp_path])


def test_a_half_that_is_read_late_moves_its_transaction(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Its first half came on the day before, at a broker that could not be read until now."""
    day_ms = 24 * 3600 * 1000
    midnight_ms = day_ms // 2  # NOON is where times count from
    in_time, late = Told(), Told()
    in_time.half(0, midnight_ms + 1000, "m1", marker_id="alone on its day")
    in_time.half(1, midnight_ms + day_ms + 1000, "m2", marker_id="not alone")
    in_time.half(2, midnight_ms + day_ms + 2000, "m3", marker_id="stays")
    late.half(0, midnight_ms - 1000, "m4", marker_id="alone on its day")
    late.half(1, midnight_ms - 500 + day_ms, "m5", marker_id="not alone")
    for row in late.rows:
        row["broker"] = "a"
    run = _LedgerRun(spark, tmp_path, ignore_progress, PARQUET)
    with run.table.write_lock(), run._events.write_lock(), run._finals.write_lock():
        for number, told in enumerate((in_time, late)):
            values = [
                tuple(row.get(name) for name in TRANSACTION_COLUMNS.names) for row in told.rows
            ]
            records = spark.createDataFrame(values, TRANSACTION_COLUMNS.spark_schema()).coalesce(1)
            run._events.append(number, to_events(records))
            run._merge()
    rows = by_id(read_ledger(spark, tmp_path))
    days = {name: row["day"].toordinal() - NOON.toordinal() for name, row in rows.items()}
    assert days == {"alone on its day": 0, "not alone": 1, "stays": 2}
    assert {row["messages"] for row in rows.values()} == {1, 2}
    links = {path.name for path in tmp_path.glob("day=*")}
    assert links == {f"day={row['day']}" for row in rows.values()}


# --- beside a broker -----------------------------------------------------------------------------

CONF = {"transactionTimeOut": 300, "transactionCheckInterval": 300, "transactionCheckMax": 3}


async def everything_happens(served: Served) -> dict[str, str]:
    """Transactions of all kinds; what must become of them, by id."""
    expected: dict[str, str] = {}
    asked: dict[bytes, int] = {}

    def answer(message: ReceivedMessage) -> Verdict | None:
        asked[message.body] = asked.get(message.body, 0) + 1
        return Verdict.COMMIT if message.body == b"late" else None

    async with Producer(served.namesrv_address, group="shop") as producer:
        producer.checker("*")(answer)
        async with producer.transaction(Message("orders", b"one")) as tx:
            pass
        expected[tx.id] = "committed"
        async with producer.transaction(Message("orders", b"no")) as tx:
            raise Rollback
        expected[tx.id] = "rolled_back"
        async with producer.transaction(Message("orders", b"two"), id="marker-1") as tx:
            await tx.send(Message("bills", b"two"))
        expected[tx.id] = "committed"
        for body, outcome in ((b"late", "committed"), (b"stuck", "stranded")):
            with pytest.raises(ZeroDivisionError):
                async with producer.transaction(Message("orders", body)) as tx:
                    raise ZeroDivisionError
            expected[tx.id] = outcome
        with served.client() as client:
            await until(lambda: client.max_offset("TRANS_CHECK_MAX_TIME_TOPIC", 0) == 1)
        await until(lambda: b"late" in asked)
    return expected


def run(spark: SparkSession, served: Served, out: Path, **more: Any) -> LedgerResult:
    source = ClusterSource(served.namesrv_address, batch_messages=20)
    return patiently(lambda: run_ledger(spark, out, source=source, **more))


async def test_a_ledger_follows_its_broker(spark: SparkSession, tmp_path: Path) -> None:
    out = tmp_path / "ledger"
    reports: list[PipelineProgress] = []
    with Served(tmp_path / "broker", conf=CONF) as served:
        expected = await everything_happens(served)
        with served.client() as client:
            opened = client.send_half("orders", b"open", {"UNIQ_KEY": "opened"}, group="nobody")
        run(spark, served, out, report=reports.append)
        rows = by_id(read_ledger(spark, out))
        assert {name: row["outcome"] for name, row in rows.items()} == {
            **expected,
            "opened": "open",
        }
        assert {report.step for report in reports} >= {"transactions", "messages"}
        assert reports[-1].lag in (None, 0)
        pair = rows["marker-1"]
        assert (pair["topics"], pair["messages"], pair["marker_id"]) == (
            *(["bills", "orders"], 2, "marker-1"),
        )
        assert [final["topic"] for final in pair["finals"]] == ["bills", "orders"]
        assert pair["decided_by"].startswith("group ")
        answered = [row for row in rows.values() if row["answered_by"]]
        assert [(row["decided_by"], row["outcome"]) for row in answered] == [("check", "committed")]
        assert all(row["visible_ms"] is not None for row in rows.values() if row["finals"])
        # Its end comes later, and its row with it; the others stay as they were.
        with served.client() as client:
            client.end_transaction(opened, COMMIT, topic="orders", group="nobody")
        assert run(spark, served, out).rows == len(rows)
        later = by_id(read_ledger(spark, out))
        assert later.pop("opened")["outcome"] == "committed"
        rows.pop("opened")
        assert later == rows
        assert run(spark, served, out) == LedgerResult(0, (), 0)
        # Whoever knows no manifest reads it through links.
        assert spark.read.parquet(str(out)).count() == len(rows) + 1
        _check_files(spark, served, tmp_path / "of-files", by_id(read_ledger(spark, out)))
        with pytest.raises(PipelineFailed, match="made from cluster, not from files"):
            run_ledger(spark, out, paths=[served.data])


def _check_files(spark: SparkSession, served: Served, out: Path, expected: Rows) -> None:
    run_ledger(spark, out, paths=[served.data])
    names = ("outcome", "messages", "decided_at", "checks", "message_ids", "visible_ms")
    found = {name: [row[x] for x in names] for name, row in by_id(read_ledger(spark, out)).items()}
    assert found == {name: [row[x] for x in names] for name, row in expected.items()}


def test_a_format_without_its_jar_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    for kind, package in (("delta", "io.delta:delta-spark"), ("iceberg", "org.apache.iceberg:")):
        with pytest.raises(PipelineFailed, match=f"spark.jars.packages={package}"):
            run_ledger(spark, tmp_path / "ledger", paths=[tmp_path], table_format=kind)
    with pytest.raises(PipelineFailed, match="no format 'hudi', only parquet, delta, iceberg"):
        run_ledger(spark, tmp_path / "ledger", paths=[tmp_path], table_format="hudi")


def test_a_batch_that_runs_twice_is_there_once(spark: SparkSession, tmp_path: Path) -> None:
    table = ParquetTable(tmp_path / "table", "a test")
    empty = (None,) * len(EVENT_SCHEMA)
    rows = spark.createDataFrame([empty, empty], EVENT_SCHEMA).coalesce(1)
    with table.write_lock():
        table.write(rows)  # a crash before it was named
        assert table.append(0, rows)
        again = ParquetTable(tmp_path / "table", "a test")  # after a crash: what the disk says
        assert not again.append(0, rows)
        assert again.append(1, rows)
        assert again.read(spark, EVENT_SCHEMA).count() == 4
        few = again.compact(
            spark, EVENT_SCHEMA, lambda f, _: f.coalesce(1), small_bytes=1, min_parts=2
        )
        assert few == 0
        before = again.read(spark, EVENT_SCHEMA)
        assert (
            again.compact(
                spark, EVENT_SCHEMA, lambda f, _: f.coalesce(1), small_bytes=1 << 20, min_parts=2
            )
            == 2
        )
        [part] = again.manifest.parts
        assert (part.first, part.last) == (0, 1)
        assert again.read(spark, EVENT_SCHEMA).count() == 4
        assert before.count() == 4  # who still reads the old parts finds them
