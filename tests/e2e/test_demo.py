"""The demo: all of its first part, and its second part with the accounts of ten transfers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession
from rich.console import Console
from sqlalchemy import insert

from escrowmq.database.marker import COMMITTED
from escrowmq.sql.statements import inbox_table, marker_table
from examples.bank.__main__ import MARKER_FILE, main
from examples.bank.audit import audit, verdict_table
from examples.bank.banks import BOB, SMITH, book_transfer, compare_banks, create_bank, open_bank
from tests.support.ledgers import write_ledger
from tests.support.spark_session import IGNORED_WARNINGS, ROOT, spark  # noqa: F401

pytestmark = [pytest.mark.filterwarnings(rule) for rule in IGNORED_WARNINGS]

DEMO_S = 800


@pytest.mark.timeout(DEMO_S + 60)
def test_both_banks_agree_at_the_end_of_the_demo(tmp_path: Path) -> None:
    directory = tmp_path / "demo"
    arguments = ("--transfers", "300", "--no-spark", "--keep", str(directory))
    result = subprocess.run(
        [sys.executable, "-m", "examples.bank", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=DEMO_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Both banks agree." in result.stdout
    text = " ".join(result.stdout.split())  # without the line breaks of the console
    assert "last: checker failed: ConnectionError('the database of the branch" in text
    for command in ("explain", "resume", "commit", "rollback"):
        assert f"$ escrowmq transaction {command} " in text
    assert {"bob.db", "smith.db", "broker.log", MARKER_FILE} <= {
        path.name for path in directory.iterdir()
    }


def test_a_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("text")
    result = CliRunner().invoke(main, ["--no-spark", "--keep", str(tmp_path)])
    assert result.exit_code == 2
    assert "is not empty" in result.output
    assert (tmp_path / "thesis.txt").read_text() == "text"


@pytest.mark.parametrize(("version", "code"), [("1.8.0_2", 1), ("11.0.1", 1), ("21.0.2", 0)])
def test_an_old_java_is_refused_with_one_line(tmp_path: Path, version: str, code: int) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    java.chmod(0o755)
    result = subprocess.run(
        [ROOT / ".ci" / "java"],
        env={**os.environ, "JAVA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == code
    lines = result.stderr.splitlines()
    assert len(lines) == code
    assert all("apt-get install openjdk-17-jre-headless" in line for line in lines)


class SmallBanks:
    """The databases of both banks after ten transfers; `lost` of them did not reach Smith."""

    def __init__(self, directory: Path, *, lost: int) -> None:
        self.directory = directory
        self.urls = [f"sqlite:///{directory / bank}.db" for bank in (BOB, SMITH)]
        for bank, url in zip((BOB, SMITH), self.urls, strict=True):
            create_bank(bank, url)
        self.bob, self.smith = map(open_bank, self.urls)
        for number in range(10):
            self._pay(number, is_received=number >= lost)

    def _pay(self, number: int, *, is_received: bool) -> None:
        transaction_id, at_ms = f"escrow-{number:032x}", 1_790_000_000_000 + number
        booking: dict[str, Any] = {"transaction_id": transaction_id, "at_ms": at_ms}
        marker = {"id": transaction_id, "outcome": COMMITTED, "at_ms": at_ms}
        with self.bob.begin() as connection:
            connection.execute(
                insert(marker_table).values(**marker, producer_group="b", messages=1)
            )
            book_transfer(connection, BOB, number, -100 * number - 1, **booking)
        if is_received:
            inbox_row = {"consumer_group": "s", "message_id": f"M{number}", "at_ms": at_ms}
            with self.smith.begin() as connection:
                connection.execute(insert(inbox_table).values(**inbox_row))
                book_transfer(connection, SMITH, number, 100 * number + 1, **booking)

    def make_ledger(self, _: object, __: str, out: Path) -> None:
        """Write the ledger of these transfers, in place of the pipeline."""
        write_ledger(out, [self._row(number) for number in range(10)])

    def _row(self, number: int) -> dict[str, Any]:
        parked_at = datetime.fromtimestamp(1_790_000_000 + number, tz=UTC)
        transaction_id = f"escrow-{number:032x}"
        final = {"topic": "transfers", "broker": "a", "queue_id": 0, "queue_offset": number}
        return {
            "transaction_id": transaction_id,
            "marker_id": transaction_id,
            "group": "b",
            "topics": ["transfers"],
            "messages": 1,
            "message_ids": [f"M{number}"],
            "brokers": ["a"],
            "checks": 0,
            "parked_at": parked_at,
            "decided_at": parked_at,
            "outcome": "committed",
            "decision_ms": 7,
            "finals": [final],
            "day": parked_at.date(),
        }


@pytest.mark.timeout(DEMO_S)
@pytest.mark.parametrize("lost", [2])
def test_the_audit_finds_lost_transfers(
    spark: SparkSession,  # noqa: F811
    tmp_path: Path,
    lost: int,
) -> None:
    banks = SmallBanks(tmp_path, lost=lost)
    summary, report = audit(
        spark,
        servers="",
        bob_url=banks.urls[0],
        smith_url=banks.urls[1],
        directory=tmp_path,
        make_ledger=banks.make_ledger,
    )
    comparison = compare_banks(banks.bob, banks.smith)
    banks.bob.dispose()
    banks.smith.dispose()
    with StringIO() as output:
        Console(file=output, width=100).print(verdict_table(summary, comparison))
        table = output.getvalue()
    assert summary.transactions == 10
    assert summary.is_consistent == (lost == 0) == comparison.is_consistent
    assert summary.differences["consumed_without_effect"] == lost
    assert sum(summary.differences.values()) == lost
    assert summary.sums["sent"] == "45.100000"
    assert re.search(rf"lost +│ +{lost} ", table)
    assert re.search(rf"money conserved +│ +{'no' if lost else 'yes'} ", table)
    assert "Bob pays Smith" in report.read_text()
