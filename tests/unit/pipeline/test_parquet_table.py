"""Parts of pipelines that work without Spark: chunks, progress, tables, arguments."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from escrowmq.cli.main import cli
from escrowmq.clock import ManualClock
from escrowmq.errors import EscrowError, NotSent, PipelineFailed, SparkNotAvailable
from escrowmq.pipeline.archive import ReplayChunk, ReplayRequest, split_into_chunks
from escrowmq.pipeline.job import PipelineProgress, query_lag
from escrowmq.pipeline.parquet_table import REPLACED_RETENTION_S, ParquetTable, TablePart
from tests.support.ports import free_ports

MINUTE_MS = 60_000


def test_minutes_are_merged_and_split_into_chunks() -> None:
    minutes = [(0, 4), (MINUTE_MS, 5), (3 * MINUTE_MS, 2), (4 * MINUTE_MS, 25)]
    assert split_into_chunks(minutes, 10) == [
        ReplayChunk(0, 3 * MINUTE_MS, 9),
        ReplayChunk(3 * MINUTE_MS, 4 * MINUTE_MS, 2),
        ReplayChunk(4 * MINUTE_MS, 4 * MINUTE_MS + 20_000, 8),
        ReplayChunk(4 * MINUTE_MS + 20_000, 4 * MINUTE_MS + 40_000, 8),
        ReplayChunk(4 * MINUTE_MS + 40_000, 5 * MINUTE_MS, 9),
    ]
    assert split_into_chunks([], 10) == []


def test_the_default_name_of_a_replay_depends_on_what_it_sends() -> None:
    request = ReplayRequest("a", "n:1", "t", where="tags = 'a'")
    same_messages = ReplayRequest("a", "other:1", "t", where="tags = 'a'", rate=7)
    assert request.effective_name() == same_messages.effective_name()
    assert request.effective_name() != ReplayRequest("a", "n:1", "t").effective_name()


def test_progress_shows_lag_and_remaining_time() -> None:
    ends = {"next": {"t": {"b": {"0": 5, "1": 9}}}}
    latest = {"next": {"t": {"b": {"0": 7, "1": 9, "2": 3}}}}
    assert query_lag([{"endOffset": json.dumps(ends), "latestOffset": latest}]) == 5
    assert query_lag([{"endOffset": ends, "latestOffset": None}]) is None
    progress = PipelineProgress("messages", 1000, 50.0, 500, 10.0)
    assert progress.as_text() == "messages: 1,000 rows, 50 per second, 500 behind, 10 s left"
    assert json.loads(progress.as_json()) == {
        "step": "messages",
        "rows": 1000,
        "rate": 50.0,
        "lag": 500,
        "left_s": 10.0,
    }


def test_a_directory_holds_one_kind_of_table_and_has_one_writer(tmp_path: Path) -> None:
    table = ParquetTable(tmp_path / "t", "a test")
    with (
        table.write_lock(),
        pytest.raises(PipelineFailed, match="another process"),
        ParquetTable(tmp_path / "t", "a test").write_lock(),
    ):
        pass
    with pytest.raises(PipelineFailed, match="holds a test, not something else"):
        ParquetTable(tmp_path / "t", "something else")
    (tmp_path / "photo.jpg").touch()
    with (
        pytest.raises(PipelineFailed, match="holds other files"),
        ParquetTable(tmp_path, "x").write_lock(),
    ):
        pass
    with pytest.raises(PipelineFailed), ParquetTable(tmp_path / "photo.jpg", "x").write_lock():
        pass


def test_replaced_parts_are_deleted_after_the_retention(tmp_path: Path) -> None:
    clock = ManualClock()
    table = ParquetTable(tmp_path, "a test", clock)
    old = table.parts_directory / "part=0"
    with table.write_lock():
        old.mkdir(parents=True)
        table.publish(parts=[TablePart("part=0", 0, 0, 1)])
        table.publish(parts=[])
        clock.advance(ms=REPLACED_RETENTION_S * 1000 - 1)
        table.publish()
        assert old.exists()
        clock.advance(ms=1)
        table.publish()
        assert not old.exists()


def run(*arguments: str) -> BaseException | None:
    """Run a pipeline command and return its exception."""
    return CliRunner().invoke(cli, ["pipeline", *arguments], standalone_mode=False).exception


def test_invalid_arguments_are_reported_before_spark_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [port] = free_ports(1)
    unreachable, out = ("-n", f"127.0.0.1:{port}"), ("--out", str(tmp_path / "out"))
    errors = {
        "no name server answers": run("ledger", *unreachable, *out),
        "give a cluster with -n, or files with --path": run("ledger", *out),
        "--follow needs -n": run("ledger", "--path", "x", "--follow", *out),
        "is not a time": run(
            "replay", "--from", "x", *unreachable, "--topic", "t", "--since", "noon"
        ),
        "NAME=VALUE": run("archive", *unreachable, "--topic", "t", *out, "-o", "tls"),
    }
    for text, error in errors.items():
        assert text in str(error), errors
    assert isinstance(errors["no name server answers"], NotSent)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    error = run("archive", *unreachable, "--topic", "t", *out)
    assert isinstance(error, SparkNotAvailable)
    assert isinstance(error, EscrowError)
