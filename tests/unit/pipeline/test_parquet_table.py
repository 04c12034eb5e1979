"""What pipelines do before and beside Spark: plans, progress, directories, the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from escrowmq.cli.main import cli
from escrowmq.clock import ManualClock
from escrowmq.errors import EscrowError, NotSent, PipelineFailed, SparkMissing
from escrowmq.pipeline.archive import Chunk, Wanted, chunked
from escrowmq.pipeline.job import Progress, lag_of
from escrowmq.pipeline.parquet_table import KEPT_S, Part, Table
from tests.support.brokers import free_ports

MINUTE = 60_000


def test_minutes_are_put_together_and_cut() -> None:
    minutes = [(0, 4), (MINUTE, 5), (3 * MINUTE, 2), (4 * MINUTE, 25)]
    assert chunked(minutes, 10) == [
        Chunk(0, 3 * MINUTE, 9),
        Chunk(3 * MINUTE, 4 * MINUTE, 2),
        Chunk(4 * MINUTE, 4 * MINUTE + 20_000, 8),
        Chunk(4 * MINUTE + 20_000, 4 * MINUTE + 40_000, 8),
        Chunk(4 * MINUTE + 40_000, 5 * MINUTE, 9),
    ]
    assert chunked([], 10) == []


def test_a_replay_without_a_name_is_called_by_what_it_does() -> None:
    one = Wanted("a", "n:1", "t", where="tags = 'a'")
    assert one.full_name() == Wanted("a", "other:1", "t", where="tags = 'a'", rate=7).full_name()
    assert one.full_name() != Wanted("a", "n:1", "t").full_name()


def test_lag_and_time_left_are_told() -> None:
    ends = {"next": {"t": {"b": {"0": 5, "1": 9}}}}
    latest = {"next": {"t": {"b": {"0": 7, "1": 9, "2": 3}}}}
    assert lag_of([{"endOffset": json.dumps(ends), "latestOffset": latest}]) == 5
    assert lag_of([{"endOffset": ends, "latestOffset": None}]) is None
    progress = Progress("messages", 1000, 50.0, 500, 10.0)
    assert progress.line() == "messages: 1,000 rows, 50 a second, 500 behind, 10 s left"
    assert json.loads(progress.as_json()) == {
        "step": "messages",
        "rows": 1000,
        "rate": 50.0,
        "lag": 500,
        "left_s": 10.0,
    }


def test_a_directory_is_one_thing_and_has_one_writer(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", "a test")
    with (
        table.writing(),
        pytest.raises(PipelineFailed, match="another process"),
        Table(tmp_path / "t", "a test").writing(),
    ):
        pass
    with pytest.raises(PipelineFailed, match="holds a test, not something else"):
        Table(tmp_path / "t", "something else")
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(PipelineFailed, match="holds other files"), Table(tmp_path, "x").writing():
        pass
    with pytest.raises(PipelineFailed), Table(tmp_path / "photo.jpg", "x").writing():
        pass


def test_what_was_replaced_stays_for_those_who_read_it(tmp_path: Path) -> None:
    clock = ManualClock()
    table = Table(tmp_path, "a test", clock)
    old = table.parts_directory / "part=0"
    with table.writing():
        old.mkdir(parents=True)
        table.publish(parts=[Part("part=0", 0, 0, 1)])
        table.publish(parts=[])
        clock.advance(ms=KEPT_S * 1000 - 1)
        table.publish()
        assert old.exists()
        clock.advance(ms=1)
        table.publish()
        assert not old.exists()


def run(*arguments: str) -> BaseException | None:
    return CliRunner().invoke(cli, ["pipeline", *arguments], standalone_mode=False).exception


def test_bad_arguments_are_told_before_spark_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [port] = free_ports(1)
    nobody, out = ("-n", f"127.0.0.1:{port}"), ("--out", str(tmp_path / "out"))
    errors = {
        "no name server answers": run("ledger", *nobody, *out),
        "cluster (-n) or from files": run("ledger", *out),
        "--follow needs -n": run("ledger", "--path", "x", "--follow", *out),
        "is no time": run("replay", "--from", "x", *nobody, "--topic", "t", "--since", "noon"),
        "NAME=VALUE": run("archive", *nobody, "--topic", "t", *out, "-o", "tls"),
    }
    for text, error in errors.items():
        assert text in str(error), errors
    assert isinstance(errors["no name server answers"], NotSent)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    missing = run("archive", *nobody, "--topic", "t", *out)
    assert isinstance(missing, SparkMissing)
    assert isinstance(missing, EscrowError)
