"""Archive and replay with a real broker."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from escrowmq.errors import PipelineFailed
from escrowmq.pipeline.archive import (
    ArchiveResult,
    ReplayRequest,
    open_archive,
    read_archive,
    run_archive,
    run_replay,
    save_plan,
    send_chunk,
)
from escrowmq.pipeline.archive import load_plan as load_plan
from escrowmq.pipeline.job import ClusterSource
from tests.support.brokers import COMMAND, Server
from tests.support.spark_session import (
    IGNORED_WARNINGS,
    SETTINGS,
    retry_slow_start,
    spark,
    spark_environment,
)

__all__ = ["spark"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    *(pytest.mark.filterwarnings(rule) for rule in IGNORED_WARNINGS),
]

COUNT = 60


def send(served: Server, first: int, count: int) -> None:
    with served.client() as client:
        for number in range(first, first + count):
            properties = {"UNIQ_KEY": f"m{number}", "TAGS": "ab"[number % 2], "own": f"p{number}"}
            client.send("orders", b"%d" % number, properties, queue_id=number % 2)


def bodies(served: Server, topic: str) -> list[int]:
    with served.client() as client:
        records = [record for queue in range(2) for record in client.pull_all(topic, queue)]
    return sorted(int(record.body) for record in records)


def archive(
    spark: SparkSession, served: Server, out: Path, *, compact: bool = False
) -> ArchiveResult:
    source = ClusterSource(served.namesrv_address, batch_messages=25)
    return retry_slow_start(
        lambda: run_archive(spark, out, source=source, topics=["orders"], compact=compact)
    )


def test_a_topic_is_archived_compacted_and_replayed(spark: SparkSession, tmp_path: Path) -> None:
    out = tmp_path / "archive"
    with Server(tmp_path / "broker") as served:
        with served.client() as client:
            for topic in ("orders", "replayed", "limited"):
                client.create_topic(topic, queues=2)
        send(served, 0, COUNT)
        assert archive(spark, served, out) == ArchiveResult(COUNT, 0)
        assert len(open_archive(out).manifest.parts) == 3
        send(served, COUNT, 10)
        assert archive(spark, served, out, compact=True) == ArchiveResult(10, 4)
        assert len(open_archive(out).manifest.parts) == 1
        rows = read_archive(spark, out)
        ids = Counter(row["message_id"] for row in rows.select("message_id").collect())
        assert ids == Counter(f"m{number}" for number in range(COUNT + 10))
        with pytest.raises(PipelineFailed, match="also archives orders"):
            run_archive(spark, out, source=ClusterSource(served.namesrv_address), topics=["other"])
        _assert_replay_sends_each_message_once(spark, served, out)
        _assert_replay_of_a_range_of_time(spark, served, out)
        shutil.rmtree(out / "_checkpoint")
        with pytest.raises(PipelineFailed, match="restore it, or start in a new directory"):
            archive(spark, served, out)


def _assert_replay_sends_each_message_once(spark: SparkSession, served: Server, out: Path) -> None:
    request = ReplayRequest(str(out), served.namesrv_address, "replayed", where="tags = 'a'")
    expected = list(range(0, COUNT + 10, 2))
    result = run_replay(spark, request)
    assert (result.messages, result.was_done) == (len(expected), False)
    assert bodies(served, "replayed") == expected
    with served.client() as client:
        record = client.pull_all("replayed", 0)[0]
    assert record.properties["own"] == f"p{int(record.body)}"
    # Repeating it sends nothing, even if it crashed before it stored that a chunk was done.
    assert run_replay(spark, request).was_done
    file = out / "_replays" / f"{result.name}.json"
    plan = load_plan(file)
    assert plan is not None
    rows = read_archive(spark, out).where(request.where)
    send_chunk(rows, request, plan.chunks[-1], len(plan.chunks) - 1)
    assert bodies(served, "replayed") == expected
    with pytest.raises(PipelineFailed, match="another --name"):
        run_replay(spark, replace(request, name=result.name, where=""))
    with pytest.raises(PipelineFailed, match="no_such_column"):
        run_replay(spark, replace(request, where="no_such_column = 1"))


def _assert_replay_of_a_range_of_time(spark: SparkSession, served: Server, out: Path) -> None:
    """The rate divides the replay into chunks."""
    times = [row[0] for row in read_archive(spark, out).select("store_time").collect()]
    first, last = min(times).astimezone(), max(times).astimezone()
    request = ReplayRequest(
        *(str(out), served.namesrv_address, "limited", first, last, "", "slow"), rate=1000
    )
    assert isinstance(first, datetime)
    expected = sum(time < max(times) for time in times)
    assert run_replay(spark, request).messages == expected
    assert len(bodies(served, "limited")) == expected
    file = out / "_replays" / "slow.json"
    plan = load_plan(file)
    assert plan is not None
    assert plan.done == len(plan.chunks)
    save_plan(file, plan)
    assert run_replay(spark, request).messages == 0


def test_the_command_reports_progress_as_json(tmp_path: Path) -> None:
    out = tmp_path / "archive"
    with Server(tmp_path / "broker") as served:
        with served.client() as client:
            client.create_topic("orders", queues=2)
        send(served, 0, 5)
        source = ("-n", served.namesrv_address, "--topic", "orders")
        # The settings of the shared session: this JVM must start quickly as well.
        conf = [word for item in SETTINGS.items() for word in ("--conf", "=".join(item))]
        result = subprocess.run(
            [
                *(COMMAND, "pipeline", "archive", *source, "--master", "local[2]"),
                *("--out", str(out), "--json", *conf),
            ],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **spark_environment()},
        )
    assert result.returncode == 0, result.stderr
    *steps, last = (json.loads(line) for line in result.stdout.splitlines())
    assert steps[0]["step"] == "messages"
    assert steps[0]["rows"] == 5
    assert last == {"done": "archive", "out": str(out), "messages": 5, "compacted": 0}
